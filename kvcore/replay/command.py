# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore replay`: a recorded workload on the real manager, and what came of it.

The report goes to standard output; how far it is, skipped lines and what was wrong with the
question, to standard error. Interrupted, it reports what was done. A page is written whole or not
at all, before the report is printed. Exit code 0: replayed; 1: wrong content was read (`--apply`);
2: the call or the trace was wrong; 130: interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.cli.arguments import parse
from kvcore.cli.pipes import quiet
from kvcore.replay.command_options import Asked, asked_of, make_parser
from kvcore.replay.loop import Apply
from kvcore.replay.progress import Progress
from kvcore.replay.report_json import to_json
from kvcore.replay.report_text import to_text
from kvcore.replay.results import Options
from kvcore.replay.summary import Report
from kvcore.replay.sweep import opened, run_sizes
from kvcore.replay.trace_file import TraceReader
from kvcore.replay.whole_file import CannotWrite, write_whole
from kvcore.types.errors import InvariantViolation, KvcoreError

if TYPE_CHECKING:
    from kvcore.replay.applied import OnDevice

FINE, VIOLATED, USAGE_ERROR, STOPPED = 0, 1, 2, 130


@quiet
def main(arguments: Sequence[str] | None = None) -> int:
    """Replay one trace; returns the exit code.

    arguments: those behind `kvcore replay`, the process's by default.
    """
    given = parse(make_parser(), arguments)
    try:
        asked = asked_of(given)
        report, reader, devices = _run(asked)
    except KvcoreError as error:
        print(f"kvcore replay: {error}", file=sys.stderr)
        return USAGE_ERROR
    except InvariantViolation as error:
        print(f"kvcore replay: {error}", file=sys.stderr)
        return VIOLATED
    except KeyboardInterrupt:
        print("kvcore replay: interrupted before there was anything to report", file=sys.stderr)
        return STOPPED
    _tell_skipped(reader)
    _tell_judged(devices)
    code = STOPPED if report.interrupted else FINE
    if asked.html is not None:
        code = _write_page(asked.html, report) or code
    print(json.dumps(to_json(report)) if asked.json else to_text(report), flush=True)
    return code


def _write_page(path: str, report: Report) -> int:
    """Write the page; what kept it from being written, which does not keep the report back."""
    from kvcore.replay.page import to_html  # only who asks for a page needs matplotlib

    try:
        write_whole(path, to_html(report))
    except CannotWrite as error:
        print(f"kvcore replay: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"kvcore replay: interrupted, {path} was not written", file=sys.stderr)
        return STOPPED
    return FINE


def _run(asked: Asked) -> tuple[Report, TraceReader, list[OnDevice]]:
    """Replay on each pool; the report, the first run's reader, and the devices that judged."""
    devices: list[OnDevice] = []
    num_runs = len({asked.options.num_blocks, *asked.sizes})

    def watch(reader: TraceReader, plan: Options, place: int) -> Progress:
        what = f"pool {place + 1}/{num_runs}, {plan.num_blocks:,}: "
        return Progress(sys.stderr, reader, plan.num_requests, what if num_runs > 1 else "")

    def on_device(plan: Options) -> Apply:
        from kvcore.replay.applied import OnDevice  # with it comes the whole checker

        assert asked.device is not None
        devices.append(OnDevice(asked.device, plan))
        return devices[-1]

    with opened(asked.trace, skip_bad=asked.skip_bad, several=num_runs > 1) as trace:
        report, reader = run_sizes(
            trace,
            asked.options,
            asked.sizes,
            backend=asked.backend,
            watch=watch,
            make_apply=None if asked.device is None else on_device,
        )
    return report, reader, devices


def _tell_judged(devices: list[OnDevice]) -> None:
    """Say how much of a device's memory was read, all of it as it had been written."""
    if devices:
        count = sum(each.num_read for each in devices)
        print(f"kvcore replay: judged {count:,} reads of tokens, all right", file=sys.stderr)


def _tell_skipped(reader: TraceReader) -> None:
    """Name the first lines that were left out."""
    for error in reader.examples:
        print(f"kvcore replay: skipped: {error}", file=sys.stderr)
    if reader.num_skipped > len(reader.examples):
        more = reader.num_skipped - len(reader.examples)
        print(f"kvcore replay: skipped: {more:,} more", file=sys.stderr)
