# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore view RECORD --html FILE`: writes a record as one page.

Exit code 0: the page was written; 1: a call's outcome differs from the recorded one, and the page
ends there; 2: bad arguments, or the record cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcore import _twin
from kvcore.cli.arguments import CommandParser, natural, parse
from kvcore.cli.pipes import ends_cleanly
from kvcore.record.reader import segment_files
from kvcore.replay.records.command import DIFFERENT, EQUAL, USAGE_ERROR, to_text
from kvcore.replay.report_text import counted
from kvcore.replay.whole_file import check_writable, write_whole
from kvcore.types.errors import KvcoreError
from kvcore.view.page import to_html
from kvcore.view.recording import watch


@ends_cleanly
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page of a record; returns the exit code.

    arguments: those after `kvcore view`; by default, those of the process.
    """
    given = parse(make_parser(), arguments)
    try:
        check_writable(given.html, segment_files(given.record))
        viewed = watch(given.record, given.backend, given.first, given.last)
        lines = to_text(viewed.done).splitlines()
        name = f"Record {Path(given.record).resolve().name}"
        write_whole(given.html, to_html(name, viewed, lines))
    except (KvcoreError, OSError) as error:
        print(f"kvcore view: {error}", file=sys.stderr)
        return USAGE_ERROR
    steps, size = counted(viewed.history.num_steps - 1, "step"), Path(given.html).stat().st_size
    print(*lines, f"{given.html}: {steps}, {size / 1e6:.1f} MB", sep="\n")
    return EQUAL if viewed.done.difference is None else DIFFERENT


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="kvcore view",
        description="Write a record as one page, which shows the pool after any step and the life "
        "of each request and block. The page needs no network.",
        epilog="Exit code: 0 written, 1 a call's outcome differs from the recorded one, and the "
        "page ends there, 2 bad arguments or an unreadable record.",
    )
    parser.source = "record"
    parser.add_argument(
        "record", metavar="RECORD", help="a folder of a record, or one of its files"
    )
    parser.add_argument("--html", metavar="FILE", required=True, help="the page")
    backend = "rust" if _twin.available() else "python"
    parser.add_argument(
        "--backend",
        choices=("rust", "python"),
        default=backend,
        help="the core that makes the calls (%(default)s)",
    )
    parser.add_argument(
        "--from", dest="first", metavar="CALL", type=natural, help="the first call to show"
    )
    parser.add_argument(
        "--to", dest="last", metavar="CALL", type=natural, help="the last call to show"
    )
    return parser
