# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore trace`: generates traces, and shows the facts of a trace.

Results go to standard output, errors to standard error. A file is written completely or not at all.
Exit code 0: done; 2: bad arguments or a bad trace; 130: interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import attrs

from kvcore.cli.arguments import CommandParser, count, natural, parse, positive
from kvcore.cli.pipes import ends_cleanly
from kvcore.replay import trace_facts
from kvcore.replay.command import FINE, STOPPED, USAGE_ERROR, print_notes
from kvcore.replay.command_options import TRACES, add_rate
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.synthetic import KINDS, SESSIONS_PER_SECOND, generate, to_lines
from kvcore.replay.whole_file import check_writable, write_whole
from kvcore.types.errors import KvcoreError


@ends_cleanly
def main(arguments: Sequence[str] | None = None) -> int:
    """Generate or show one trace; return the exit code.

    arguments: those after `kvcore trace`; by default, those of the process.
    """
    parser = _make_parser()
    options = parse(parser, arguments)
    if options.what is None:
        parser.print_help()
        return FINE
    try:
        return _generate(options) if options.what == "generate" else _show(options)
    except KvcoreError as error:
        print(f"kvcore trace: {error}", file=sys.stderr)
        return USAGE_ERROR


def _generate(options: argparse.Namespace) -> int:
    """Write a generated trace. Raises CannotWrite."""
    lines = to_lines(
        generate(options.kind, options.requests, options.seed, sessions_per_second=options.rate)
    )
    try:
        if options.out == "-":
            sys.stdout.writelines(line.decode() for line in lines)
        else:
            check_writable(options.out)
            write_whole(options.out, (line.decode() for line in lines))
    except KeyboardInterrupt:
        cut = "the trace is cut off" if options.out == "-" else "nothing was written"
        print(f"kvcore trace: interrupted, {cut}", file=sys.stderr)
        return STOPPED
    return FINE


def _show(options: argparse.Namespace) -> int:
    """Show the facts of a trace. Raises TraceFileError."""
    reader = TraceReader(options.trace, skip_bad=options.skip_bad, rate=options.rate)
    counting, interrupted = trace_facts.Counting(options.block_size), False
    try:
        counting.read(reader)
    except KeyboardInterrupt:
        interrupted = True
    print_notes(reader, "kvcore trace")
    facts = counting.facts(reader.name, reader.num_skipped, interrupted=interrupted)
    print(
        json.dumps(attrs.asdict(facts)) if options.json else "\n".join(trace_facts.to_lines(facts))
    )
    return STOPPED if interrupted else FINE


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="kvcore trace",
        description="Traces of requests, as `kvcore replay` reads them.",
        epilog="Exit code: 0 done, 2 bad arguments or a bad trace, 130 interrupted.",
    )
    parts = parser.add_subparsers(dest="what", metavar="generate | show")
    made = parts.add_parser("generate", help="generate a trace from a seed")
    add = made.add_argument
    add("--kind", choices=tuple(KINDS), required=True, help="the traffic: " + ", ".join(_KINDS))
    add("--requests", type=count, metavar="N", required=True, help="how many")
    add(
        "--seed",
        type=natural,
        metavar="N",
        default=0,
        help="the seed, which decides everything (0)",
    )
    rates = ", ".join(f"{kind} {rate:g}" for kind, rate in SESSIONS_PER_SECOND.items())
    add("--rate", type=positive, metavar="N", help=f"sessions that start per second ({rates})")
    add("--out", metavar="FILE", default="-", help="the file to write (-, standard output)")
    shown = parts.add_parser("show", help="show the facts of a trace, without replaying it")
    add = shown.add_argument
    add("trace", metavar="TRACE", help=TRACES)
    add(
        "--block-size",
        type=count,
        metavar="TOKENS",
        default=16,
        help="tokens per block for the ideal (16)",
    )
    add("--skip-bad", action="store_true", help="skip bad lines, and count them")
    add_rate(shown)
    add("--json", action="store_true", help="write plain data instead of text")
    return parser


_KINDS = (
    "shared system prompts",
    "turns of conversations",
    "agents that branch",
    "repeated questions about documents",
)
