# SPDX-License-Identifier: Apache-2.0
"""Reads the command lines of the commands: numbers, help texts, and shell completion.

For completions, a shell sets _ARGCOMPLETE and runs the command; `parse` then prints them and ends
the process (https://kislyuk.github.io/argcomplete).
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

MOST = 2**31 - 1
LEAST = 1e-09
COMPLETING = "_ARGCOMPLETE"
"""Set by the shell: the number of words before the arguments."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose help and version end as any other output if they cannot be written, which
    argparse ignores; a wrong call gets one line, above which argparse would print every option.

    source: the argument that names what is read, if any. If that is not there, the line says so,
    whatever else is wrong with the call.
    """

    source = ""
    _given: Any = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; `error` sees those that were read until then."""
        self._given = argparse.Namespace() if namespace is None else namespace
        return super().parse_known_args(args, self._given)

    def _print_message(self, message: str, file: Any = None) -> None:
        if message and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """End with one line and code 2."""
        path = getattr(self._given, self.source, None)
        if path not in (None, "-") and not os.path.lexists(path):
            reason = os.strerror(errno.ENOENT)
            self.exit(2, f"{self.prog}: {path} cannot be read: {reason}\n")
        self.exit(2, f"{self.prog}: {message}; --help shows all options\n")


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the arguments, by default those of the process; complete them for a shell."""
    if COMPLETING in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    return parser.parse_args(arguments)


def natural(text: str) -> int:
    """Read an integer of at least 0, for argparse."""
    return _integer(text, 0)


def count(text: str) -> int:
    """Read an integer of at least 1, for argparse."""
    return _integer(text, 1)


def positive(text: str) -> float:
    """Read a number above 0, for argparse; not so small that a time divided by it is infinite."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST <= value <= MOST:
        raise argparse.ArgumentTypeError(f"must be a number from {LEAST} to {MOST}, not {text!r}")
    return value


def _integer(text: str, least: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() else -1
    if not least <= value <= MOST:
        raise argparse.ArgumentTypeError(f"must be an integer from {least} to {MOST}, not {text!r}")
    return value
