# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore explain`: explains why tokens were computed again.

It replays a workload, or makes the calls of a record again. The report goes to standard output.
Exit code 0: explained; 2: bad arguments or a bad trace; 130: interrupted, with a report of what was
done.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from kvcore import _twin
from kvcore.cli.arguments import CommandParser, parse
from kvcore.cli.pipes import ends_cleanly
from kvcore.explain.explanation import Explanation
from kvcore.record.reader import is_record
from kvcore.replay.command import FINE, STOPPED, USAGE_ERROR, print_notes
from kvcore.replay.command_options import (
    OR_RECORD,
    TRACES,
    Arguments,
    BadOptions,
    add_loop,
    add_pool,
    read_arguments,
)
from kvcore.replay.explain.explained import Explained, Remembered, split_evicted
from kvcore.replay.explain.records import explain_record
from kvcore.replay.explain.report import head_data, head_lines, to_data, to_lines
from kvcore.replay.loop import replay
from kvcore.replay.progress import Progress
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import Result, Sample
from kvcore.types.errors import KvcoreError


@ends_cleanly
def main(arguments: Sequence[str] | None = None) -> int:
    """Explain one trace or record; returns the exit code.

    arguments: those after `kvcore explain`; by default, those of the process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    of_record = any(is_record(word) for word in words)
    parser = make_record_parser() if of_record else make_parser()
    given = parse(parser, arguments)
    if given.request is not None and (given.by != "cause" or given.optimum):
        parser.error("--request shows one request whole: omit --by and --optimum")
    explained, split, stopped = Explained(_keep(given)), Counter[str](), False
    try:
        if of_record:
            again = explain_record(given.trace, explained, given.backend)
            lines, data = again.lines(), again.data()
        else:
            result, split = _run(_read(given), explained, given.optimum)
            lines, data, stopped = head_lines(result), head_data(result), result.interrupted
    except (KvcoreError, OSError) as error:
        print(f"kvcore explain: {error}", file=sys.stderr)
        return USAGE_ERROR
    if given.request is not None:
        explained.kept = [each for each in explained.kept if each.request == given.request]
        if not explained.kept:
            print(f"kvcore explain: no request {given.request!r} was admitted", file=sys.stderr)
            return USAGE_ERROR
    if given.json:
        print(json.dumps(to_data(data, explained, split, given.by)))
    else:
        by = given.by if given.request is None else None
        print("\n".join(to_lines(lines, explained, split, by)), flush=True)
    return STOPPED if stopped else FINE


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="kvcore explain",
        description="Replay a workload, and explain why tokens were computed that an unlimited "
        "cache would have had.",
        epilog="Exit code: 0 explained, 2 bad arguments or a bad trace, 130 interrupted.",
    )
    parser.source = "trace"
    parser.add_argument("trace", metavar="TRACE", help=TRACES + OR_RECORD)
    add_pool(parser.add_argument_group("the pool"))
    add_loop(parser.add_argument_group("the loop"))
    group = parser.add_argument_group("output")
    _add_report(group, "explain one request: its place in the trace, from 0")
    group.add_argument(
        "--optimum", action="store_true", help="split evicted tokens into policy and capacity"
    )
    parser.set_defaults(html=None, no_bounds=True, explain=True, sweep=(), policies=(), apply=None)
    return parser


def make_record_parser() -> argparse.ArgumentParser:
    """Build the parser of the command for a record, which contains its pool's configuration."""
    parser = CommandParser(
        prog="kvcore explain",
        description="Make the calls of a record again, and explain why tokens were computed that "
        "an unlimited cache would have had.",
        epilog="Exit code: 0 explained, 2 bad arguments or a bad record.",
    )
    parser.add_argument("trace", metavar="RECORD", help="a folder of a record, or one of its files")
    backend = "rust" if _twin.available() else "python"
    parser.add_argument("--backend", choices=("rust", "python"), default=backend)
    _add_report(parser.add_argument_group("output"), "explain one request: its id")
    parser.set_defaults(optimum=False)
    return parser


def _add_report(group: argparse._ArgumentGroup, what: str) -> None:
    group.add_argument("--request", metavar="ID", help=what)
    group.add_argument(
        "--by",
        choices=("cause", "evictor", "request"),
        default="cause",
        help="how to sum up missed tokens (cause)",
    )
    group.add_argument("--json", action="store_true", help="write plain data instead of text")


def _read(given: argparse.Namespace) -> Arguments:
    """Read the options. Raises what reading them raises."""
    if given.optimum and given.preempt == "swap":
        raise BadOptions(reason="--optimum needs --preempt recompute: it does not follow swaps")
    return read_arguments(given)


def _keep(given: argparse.Namespace) -> Callable[[Explanation], bool]:
    """Return the predicate for explanations to keep whole."""
    everything = given.optimum or given.by == "request"
    return lambda each: everything or each.request == given.request


def _run(call: Arguments, explained: Explained, optimum: bool) -> tuple[Result, Counter[str]]:
    """Replay with an observer; split evicted tokens by policy and capacity if requested."""
    reader = (Remembered if optimum else TraceReader)(
        call.trace, skip_bad=call.skip_bad, rate=call.rate
    )
    progress = Progress(sys.stderr, reader, call.options.num_requests)

    def watch(sample: Sample) -> None:
        explained.watch(sample)
        progress(sample)

    try:
        result = replay(
            reader,
            call.options,
            backend=call.backend,
            watch=watch,
            observe=explained.observe,
            costs=False,
        )
    finally:
        progress.end()
    print_notes(reader, "kvcore explain")
    split = Counter[str]()
    if isinstance(reader, Remembered):
        usable = call.options.num_blocks - 1
        split = split_evicted(explained.kept, reader.read, call.options.block_size, usable)
    return result, split
