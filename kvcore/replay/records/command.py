# SPDX-License-Identifier: Apache-2.0
"""`kvcore replay RECORD`: a record made again, and the first call that differs.

Exit code 0: every outcome is the recorded one; 1: one differs; 2: the call was wrong, or the record
cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvcore import _twin
from kvcore.cli.arguments import natural, parse
from kvcore.replay.records.rerun import Backend, Rerun, rerun
from kvcore.replay.report_text import counted
from kvcore.types.errors import KvcoreError

EQUAL, DIFFERENT, USAGE_ERROR = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Make a record again; returns the exit code."""
    given = parse(_parser(), arguments)
    backends: list[Backend] = ["rust", "python"] if given.backend == "both" else [given.backend]
    try:
        done = rerun(given.record, backends, first=given.first, last=given.last)
    except (KvcoreError, OSError) as error:
        print(f"kvcore replay: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(to_text(done))
    return EQUAL if done.difference is None else DIFFERENT


def to_text(done: Rerun) -> str:
    """What came of it, in lines."""
    lines = [f"{done.num_calls:,} calls in {done.num_segments:,} files"]
    if done.has_tail:
        lines.append("the last step was never closed: its calls have no checksum")
    if done.died_in is not None:
        lines.append(f"the process died in {done.died_in}")
    if done.dropped_bytes:
        lines.append(f"{done.dropped_bytes:,} bytes behind damage were left out")
    if done.missing_calls:
        lines.append(f"{counted(done.missing_calls, 'call')} missing before a later file")
    parting = done.difference
    if parting is None:
        return "\n".join([*lines, "every outcome is the recorded one"])
    lines += [
        f"call {parting.number:,} differs on the {parting.backend} backend: {parting.call}",
        f"  recorded: {parting.recorded}",
        f"  replayed: {parting.found}",
        *(f"  {state}" for state in parting.states),
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcore replay",
        description="Make the calls of a record again, and compare every outcome.",
    )
    parser.add_argument("record", metavar="RECORD", help="a folder, or one of its files")
    backend = "rust" if _twin.available() else "python"
    parser.add_argument("--backend", choices=("rust", "python", "both"), default=backend)
    parser.add_argument("--from", dest="first", metavar="CALL", type=natural, default=0)
    parser.add_argument("--to", dest="last", metavar="CALL", type=natural)
    return parser
