# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore explain`: replays a workload, and says why tokens were computed again.

The report goes to standard output. Exit code 0: explained; 2: the call or the trace was wrong; 130:
interrupted, with a report of what was done.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from kvcore.cli.arguments import parse
from kvcore.cli.pipes import ends_cleanly
from kvcore.explain.explanation import Explanation
from kvcore.replay.command import FINE, STOPPED, USAGE_ERROR
from kvcore.replay.command_options import (
    Arguments,
    BadOptions,
    add_loop,
    add_pool,
    read_arguments,
)
from kvcore.replay.explain.explained import Explained, Remembered, split_evicted
from kvcore.replay.explain.report import to_data, to_lines
from kvcore.replay.loop import replay
from kvcore.replay.progress import Progress
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import Result, Sample
from kvcore.types.errors import KvcoreError


@ends_cleanly
def main(arguments: Sequence[str] | None = None) -> int:
    """Explain one trace; returns the exit code.

    arguments: those behind `kvcore explain`, the process's by default.
    """
    given = parse(make_parser(), arguments)
    try:
        call = _read(given)
        explained = Explained(_keep(given))
        result, split = _run(call, explained, given.optimum)
    except KvcoreError as error:
        print(f"kvcore explain: {error}", file=sys.stderr)
        return USAGE_ERROR
    if given.request is not None:
        explained.kept = [each for each in explained.kept if each.request == given.request]
        if not explained.kept:
            print(f"kvcore explain: no request {given.request!r} was admitted", file=sys.stderr)
            return USAGE_ERROR
    if call.json:
        print(json.dumps(to_data(result, explained, split, given.by)))
    else:
        print("\n".join(to_lines(result, explained, split, given.by)), flush=True)
    return STOPPED if result.interrupted else FINE


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog="kvcore explain",
        description="Replay a workload, and say why tokens were computed that a cache without "
        "limit would have had.",
        epilog="Exit code: 0 explained, 2 the call or the trace was wrong, 130 interrupted.",
    )
    parser.add_argument("trace", metavar="TRACE", help="Mooncake JSONL; - for standard input")
    add_pool(parser.add_argument_group("the pool"))
    add_loop(parser.add_argument_group("the loop"))
    add = parser.add_argument_group("what comes out").add_argument
    add("--request", metavar="ID", help="one request: its place in the trace, from 0")
    add(
        "--by",
        choices=("cause", "evictor", "request"),
        default="cause",
        help="what missed tokens are summed up by (cause)",
    )
    add("--optimum", action="store_true", help="split evicted tokens: policy or capacity")
    add("--json", action="store_true", help="plain data instead of text")
    parser.set_defaults(html=None, no_bounds=True, explain=True)
    return parser


def _read(given: argparse.Namespace) -> Arguments:
    """The options, without those that only `kvcore replay` has. Raises what they raise."""
    for name in ("sweep", "apply"):
        if getattr(given, name):
            raise BadOptions(reason=f"--{name} is of `kvcore replay`: leave it out")
    if given.optimum and given.preempt == "swap":
        raise BadOptions(reason="--optimum needs --preempt recompute: it follows no swaps")
    return read_arguments(given)


def _keep(given: argparse.Namespace) -> Callable[[Explanation], bool]:
    """Which explanations are needed whole."""
    everything = given.optimum or given.by == "request"
    return lambda each: everything or each.request == given.request


def _run(call: Arguments, explained: Explained, optimum: bool) -> tuple[Result, Counter[str]]:
    """Replay with an observer; and evicted tokens by policy and capacity, if requested."""
    reader = (Remembered if optimum else TraceReader)(call.trace, skip_bad=call.skip_bad)
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
        )
    finally:
        progress.end()
    split = Counter[str]()
    if isinstance(reader, Remembered):
        usable = call.options.num_blocks - 1
        split = split_evicted(explained.kept, reader.read, call.options.block_size, usable)
    return result, split
