# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore route`: replays a recorded workload behind a router, by several rules.

The report goes to standard output and is the same for the same seed; progress goes to standard
error. Exit code 0: replayed; 2: bad arguments or a bad trace; 130: interrupted, with a report of
the finished runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from kvcore.cli.arguments import parse
from kvcore.cli.pipes import ends_cleanly
from kvcore.replay.command import FINE, STOPPED, USAGE_ERROR, print_notes
from kvcore.replay.report_text import percent
from kvcore.replay.request_trace import TraceReader
from kvcore.route.command_options import Arguments, make_parser, read_arguments
from kvcore.route.fleet import Fleet
from kvcore.route.jobs import Workload, read_jobs
from kvcore.route.report import to_json, to_text
from kvcore.route.results import Report, Result
from kvcore.types.errors import KvcoreError


@ends_cleanly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one trace on each fleet; returns the exit code.

    arguments: those after `kvcore route`; by default, those of the process.
    """
    given = parse(make_parser(), arguments)
    try:
        call = read_arguments(given)
        reader = TraceReader(call.trace, skip_bad=call.skip_bad, rate=call.rate)
        workload = read_jobs(reader, call.num_requests, call.speed)
        print_notes(reader, "kvcore route")
        report = _run(call, reader, workload)
    except KvcoreError as error:
        print(f"kvcore route: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("kvcore route: interrupted before the first run was finished", file=sys.stderr)
        return STOPPED
    if call.json:
        print(json.dumps(to_json(report, timing=call.timing)))
    else:
        print(to_text(report, timing=call.timing), flush=True)
    return STOPPED if report.interrupted else FINE


def _run(call: Arguments, reader: TraceReader, workload: Workload) -> Report:
    runs: list[Result] = []
    interrupted = False
    for options in call.runs:
        try:
            runs.append(Fleet(workload, options, call.backend).run())
        except KeyboardInterrupt:
            if not runs:
                raise
            interrupted = True
            break
        if len(call.runs) > 1:
            done = f"{len(runs)}/{len(call.runs)}: {options.num_replicas:,} replicas"
            line = f"{done}, {options.rule}, {percent(runs[-1].hit_rate)} hit"
            print(line, file=sys.stderr, flush=True)
    return Report(
        trace=reader.name,
        requests=len(workload.jobs),
        blocks=workload.num_blocks,
        block_size=workload.unit,
        ideal_hit_blocks=workload.num_blocks - workload.num_distinct,
        speed=call.speed,
        runs=tuple(runs),
        interrupted=interrupted,
    )
