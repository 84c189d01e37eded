# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore`: finds its subcommands among the installed distributions.

Rules: a subcommand is an entry point of the group `kvcore.commands`: a function that takes the
arguments behind its name and returns an exit code. This file runs none by itself; it only knows
which distribution brings which, so that a missing one is named in one sentence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

GROUP = "kvcore.commands"
ELSEWHERE = {"generate": "kvcore-runtime"}
"""Subcommand to the distribution that brings it."""

USAGE_ERROR = 2

Command = Callable[[list[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; 2 for a call that was wrong.

    arguments: those behind the program's name, `sys.argv[1:]` by default.
    """
    commands = {point.name: point for point in metadata.entry_points(group=GROUP)}
    parser = _make_parser(sorted(commands))
    options = parser.parse_args(arguments)
    name: str | None = options.command
    if name is None:
        parser.print_help()
        return 0
    if name not in commands:
        print(f"kvcore: {_missing(name, sorted(commands))}", file=sys.stderr)
        return USAGE_ERROR
    command: Command = commands[name].load()
    return command(options.arguments)


def _make_parser(names: list[str]) -> argparse.ArgumentParser:
    known = ", ".join(names) if names else "none is installed"
    parser = argparse.ArgumentParser(
        prog="kvcore",
        description="Block manager for the key-value cache of LLM engines.",
        epilog="`kvcore COMMAND --help` says what a command takes.",
    )
    parser.add_argument("--version", action="version", version=f"kvcore {_version()}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=known)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def _missing(name: str, names: list[str]) -> str:
    home = ELSEWHERE.get(name)
    if home is not None:
        return f"the command {name!r} is part of {home}, which is not installed"
    known = ", ".join(names) if names else "none"
    return f"there is no command {name!r}; installed are: {known}"


def _version() -> str:
    try:
        return metadata.version("kvcore")
    except metadata.PackageNotFoundError:
        return "(not installed)"
