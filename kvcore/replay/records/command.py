# SPDX-License-Identifier: Apache-2.0
"""`kvcore replay RECORD`: makes a record's calls again up to the first difference, or tries other
configurations.

Exit code 0: every outcome equals the recorded one, or every variant was run; 1: one differs; 2: bad
arguments, or the record cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

import attrs

from kvcore import _twin
from kvcore.cli.arguments import CommandParser, natural, parse
from kvcore.cli.page_parts import end, head, paragraph, to_rows
from kvcore.codec.decode import decode
from kvcore.record.reader import segment_files
from kvcore.record.segment import read_segment
from kvcore.replay.records.counterpart import Tally
from kvcore.replay.records.rerun import Backend, Rerun, rerun
from kvcore.replay.records.what_if import WhatIf, changed, what_if
from kvcore.replay.report_text import counted, table
from kvcore.replay.whole_file import check_writable, write_whole
from kvcore.types.errors import KvcoreError

EQUAL, DIFFERENT, USAGE_ERROR = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Make the calls of a record again; return the exit code."""
    parser = _parser()
    given = parse(parser, arguments)
    if given.what_if and (given.first or given.last is not None or given.backend == "both"):
        parser.error("--what-if runs the whole record, on one backend")
    if given.json and not given.what_if:
        parser.error("--json is for --what-if")
    if given.html is not None and not given.what_if:
        parser.error("--html is for --what-if; `kvcore view` makes a page of a record")
    if given.what_if:
        return _run_variants(given)
    backends: list[Backend] = ["rust", "python"] if given.backend == "both" else [given.backend]
    try:
        done = rerun(given.record, backends, first=given.first, last=given.last)
    except (KvcoreError, OSError) as error:
        print(f"kvcore replay: {error}", file=sys.stderr)
        return USAGE_ERROR
    none = not (done.num_compared or done.died_in or done.difference)
    if none and (given.first or given.last is not None):
        print(f"kvcore replay: no call of {given.record} is in this range", file=sys.stderr)
        return USAGE_ERROR
    print(to_text(done))
    return EQUAL if done.difference is None else DIFFERENT


def _run_variants(given: argparse.Namespace) -> int:
    """Run each variant; return the exit code."""
    try:
        files = segment_files(given.record)
        config = decode(read_segment(files[0]).state).config
        variants = {words: changed(config, words) for words in given.what_if}
        if given.html is not None:
            check_writable(given.html, files)
        done = what_if(given.record, variants, given.backend)
        if given.html is not None:
            write_whole(given.html, to_html(done, str(given.record)))
    except (KvcoreError, OSError) as error:
        print(f"kvcore replay: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(json.dumps(attrs.asdict(done)) if given.json else to_table(done))
    return EQUAL


def to_table(done: WhatIf) -> str:
    """Format the recorded run and the variants, one row each."""
    return "\n".join([f"{done.num_calls:,} calls", *table(rows_of(done)), *_left_out(done)])


def to_html(done: WhatIf, record: str) -> Iterator[str]:
    """Yield the parts of a page with the recorded run and the variants."""
    yield head(f"What if: {record}")
    yield paragraph(f"{done.num_calls:,} calls, with other configurations", "faint")
    yield to_rows(rows_of(done))
    for line in _left_out(done):
        yield paragraph(line)
    yield end()


def rows_of(done: WhatIf) -> list[tuple[str, ...]]:
    """Return a row of headings, then one row for the recorded run and for each variant."""
    columns = [["", "recorded", *(each.name for each in done.variants)]]
    for field in attrs.fields(Tally):
        if field.name != "in_place":
            tallies = [done.recorded, *(each.tally for each in done.variants)]
            figures = [f"{getattr(each, field.name):,}" for each in tallies]
            columns.append([field.name.replace("_", " "), *figures])
    columns.append(["fidelity", "", *(f"{each.fidelity:.2%}" for each in done.variants)])
    places = [
        "never" if each.parted_at is None else f"{each.parted_at:,}" for each in done.variants
    ]
    columns.append(["differs from call", "", *places])
    return list(zip(*columns, strict=True))


def _left_out(done: WhatIf) -> list[str]:
    """Return sentences about what the variants begin without."""
    if not done.num_left_out and not done.num_cold:
        return []
    left_out, cold = f"{done.num_left_out:,}", f"{done.num_cold:,}"
    line = (
        "variants begin empty: without the requests that were there when the record began "
        f"({left_out}), and without the blocks cached then ({cold})"
    )
    return [line]


def to_text(done: Rerun) -> str:
    """Format the result as text."""
    lines = [f"{counted(done.num_calls, 'call')} in {counted(done.num_segments, 'file')}"]
    if done.has_tail:
        lines.append("the last step was not closed: its calls have no checksum")
    if done.died_in is not None:
        lines.append(f"the process died in {done.died_in}")
    if done.dropped_bytes:
        lines.append(f"{done.dropped_bytes:,} bytes after damage were left out")
    if done.missing_calls:
        lines.append(f"{counted(done.missing_calls, 'call')} missing before a later file")
    parting = done.difference
    if parting is None:
        return "\n".join([*lines, "every outcome equals the recorded one"])
    lines += [
        f"call {parting.number:,} differs on the {parting.backend} backend: {parting.call}",
        f"  recorded: {parting.recorded}",
        f"  replayed: {parting.found}",
        *(f"  {state}" for state in parting.states),
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="kvcore replay",
        description="Make the calls of a record again, and compare every outcome.",
    )
    parser.add_argument(
        "record", metavar="RECORD", help="a folder of a record, or one of its files"
    )
    backend = "rust" if _twin.available() else "python"
    parser.add_argument("--backend", choices=("rust", "python", "both"), default=backend)
    parser.add_argument("--from", dest="first", metavar="CALL", type=natural)
    parser.add_argument("--to", dest="last", metavar="CALL", type=natural)
    parser.add_argument(
        "--what-if",
        action="append",
        metavar="FIELD=VALUE,...",
        help="also run the calls with these fields of Config changed; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (--what-if)")
    parser.add_argument("--html", metavar="FILE", help="write the table as a page (--what-if)")
    return parser
