# SPDX-License-Identifier: Apache-2.0
"""Ends a command cleanly if its reader has gone (`| head`), its output is full, or it is
interrupted.

It ends without a traceback. If the reader has gone, it prints nothing and exits like a process that
the pipe ended; if output cannot be written, it prints one sentence; at an interrupt that the
command does not report, one word. Files are written before.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec, TextIO

READER_GONE = 141
"""128 plus the number of SIGPIPE."""
INTERRUPTED = 130
"""128 plus the number of SIGINT."""
CANNOT_WRITE = 2

P = ParamSpec("P")


def ends_cleanly(command: Callable[P, int]) -> Callable[P, int]:
    """Decorate a command, so that it ends as described above."""

    @wraps(command)
    def ended(*args: P.args, **options: P.kwargs) -> int:
        try:
            try:
                return command(*args, **options)
            finally:  # also if argparse ends the process
                sys.stdout.flush()
        except BrokenPipeError:
            code = READER_GONE
        except KeyboardInterrupt:
            _print_error("interrupted")
            code = INTERRUPTED
        except OSError as error:
            of_file = f"{error.filename}: " if error.filename else "the output: "
            _print_error(f"{of_file}{error.strerror or error}")
            code = CANNOT_WRITE
        for stream in (sys.stdout, sys.stderr):
            _let_go(stream)
        return code

    return ended


@contextmanager
def holding_interrupts() -> Iterator[None]:
    """Delay an interrupt to the end of the block: torch aborts if one arrives during its import."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets interrupts, or may change their handler
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt


def _print_error(sentence: str) -> None:
    with suppress(OSError):
        print(f"kvcore: {sentence}", file=sys.stderr, flush=True)


def _let_go(stream: TextIO) -> None:
    """Drop what a stream cannot flush, since the interpreter would try again at exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
