# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore replay`: replays a recorded workload on the real manager, and reports.

The report goes to standard output; progress, skipped lines and errors go to standard error. If
interrupted, it reports what was done. A page is written completely or not at all, before the report
is printed. Exit code 0: replayed; 1: wrong content was read (`--apply`); 2: bad arguments or a bad
trace; 130: interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvcore.cli.arguments import parse
from kvcore.cli.pipes import ends_cleanly
from kvcore.record.reader import is_record
from kvcore.replay.command_options import Arguments, make_parser, read_arguments
from kvcore.replay.explain.explained import Explained
from kvcore.replay.loop import Apply
from kvcore.replay.progress import Progress
from kvcore.replay.records.command import main as make_again
from kvcore.replay.report_json import to_json
from kvcore.replay.report_text import percent, to_text
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import Options, Result
from kvcore.replay.summary import Report, rates_of
from kvcore.replay.sweep import opened, run_sizes
from kvcore.replay.variants import run_variants
from kvcore.replay.whole_file import CannotWrite, write_whole
from kvcore.types.errors import InvariantViolation, KvcoreError

if TYPE_CHECKING:
    from kvcore.replay.applied import OnDevice

FINE, VIOLATED, USAGE_ERROR, STOPPED = 0, 1, 2, 130


@ends_cleanly
def main(arguments: Sequence[str] | None = None) -> int:
    """Replay one trace; returns the exit code.

    arguments: those after `kvcore replay`; by default, those of the process. The calls of a record
    are made again.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if any(is_record(word) for word in words):
        return make_again(words)
    given = parse(make_parser(), arguments)
    try:
        call = read_arguments(given)
        report, reader, devices = _run(call)
    except KvcoreError as error:
        print(f"kvcore replay: {error}", file=sys.stderr)
        return USAGE_ERROR
    except InvariantViolation as error:
        print(f"kvcore replay: {error}", file=sys.stderr)
        return VIOLATED
    except KeyboardInterrupt:
        print("kvcore replay: interrupted before anything could be reported", file=sys.stderr)
        return STOPPED
    print_notes(reader, "kvcore replay")
    _print_checked(devices)
    code = STOPPED if report.interrupted else FINE
    if call.html is not None:
        code = _write_page(call.html, report) or code
    print(json.dumps(to_json(report)) if call.json else to_text(report), flush=True)
    return code


def print_notes(reader: TraceReader, command: str) -> None:
    """Print a note on the trace's form, and the first skipped lines."""
    if reader.note is not None:
        print(f"{command}: {reader.note}", file=sys.stderr)
    for error in reader.examples:
        print(f"{command}: skipped: {error}", file=sys.stderr)
    if reader.num_skipped > len(reader.examples):
        more = reader.num_skipped - len(reader.examples)
        print(f"{command}: skipped: {more:,} more", file=sys.stderr)


def _write_page(path: str, report: Report) -> int:
    """Write the page; return the error that prevented it, which does not prevent the report."""
    from kvcore.replay.page import to_html  # only a page needs matplotlib

    try:
        write_whole(path, to_html(report))
    except CannotWrite as error:
        print(f"kvcore replay: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"kvcore replay: interrupted, {path} was not written", file=sys.stderr)
        return STOPPED
    return FINE


def _run(call: Arguments) -> tuple[Report, TraceReader, list[OnDevice]]:
    """Replay on each pool; return the report, the first run's reader, and the devices that
    checked.
    """
    devices: list[OnDevice] = []
    num_runs = len({call.options.num_blocks, *call.sizes})

    def watch(reader: TraceReader, plan: Options, place: int) -> Progress:
        what = f"pool {place + 1}/{num_runs}, {plan.num_blocks:,}: "
        return Progress(sys.stderr, reader, plan.num_requests, what if num_runs > 1 else "")

    def on_device(plan: Options) -> Apply:
        from kvcore.replay.applied import OnDevice  # this imports the whole checker

        assert call.device is not None
        devices.append(OnDevice(call.device, plan))
        return devices[-1]

    if call.policies:
        reader = TraceReader(call.trace, skip_bad=call.skip_bad, rate=call.rate)
        return _run_variants(call, reader), reader, []
    several = num_runs > 1
    with opened(call.trace, skip_bad=call.skip_bad, several=several, rate=call.rate) as trace:
        report, reader = run_sizes(
            trace,
            call.options,
            call.sizes,
            backend=call.backend,
            watch=watch,
            make_apply=None if call.device is None else on_device,
            explained=Explained() if call.explain else None,
        )
    return report, reader, devices


def _run_variants(call: Arguments, reader: TraceReader) -> Report:
    """Replay under each policy on each pool."""
    first = call.options.policy
    names = (first, *(name for name in call.policies if name != first))
    sizes = sorted(
        {call.options.num_blocks, *call.sizes}, key=lambda size: size != call.options.num_blocks
    )
    plans = [
        attrs.evolve(call.options, num_blocks=size, policy=name) for size in sizes for name in names
    ]

    def done(result: Result) -> None:
        options, rate = result.options, percent(rates_of(result).run)
        line = f"{options.num_blocks:,} blocks, {options.policy}: {rate} hit"
        print(line, file=sys.stderr, flush=True)

    return run_variants(reader, plans, backend=call.backend, done=done)


def _print_checked(devices: list[OnDevice]) -> None:
    """Print how many reads of a device's memory were checked, all of them right."""
    if devices:
        count = sum(each.num_read for each in devices)
        print(f"kvcore replay: checked {count:,} reads of tokens, all right", file=sys.stderr)
