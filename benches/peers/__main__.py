# SPDX-License-Identifier: Apache-2.0
"""Compare block managers side by side on recorded lists of operations.

Run: python -m benches.peers [--quick] [--cases 16k,d1024] [--peers vllm033,kvcore-rust]. Installs
what is missing first (benches/peers/install.py). Without --peers, all peers run if the pool has
16,384 blocks, and the main ones otherwise. The exit status is 1 if hit tokens differ that must be
equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benches.peers import install, numbers, work
from benches.peers.cases import CASES, PEERS, SAME_HITS, recorded
from benches.peers.measure import Side, compare
from benches.peers.table import print_table

BASE = "vllm033"
GENERATED = """
These are figures of a generated workload, in which most prompts repeat. The requirements hold for
the Mooncake conversation trace: name it with --trace FILE or KVCORE_TRACE to compare with them."""
QUICK_CASES = ("16k",)
QUICK_PEERS = (BASE, "kvcore-rust", "kvcore-calls", "kvcore-batched")
NULLS = ("null", "null-rust")
EVERY_PEER = tuple(name for name in PEERS if name not in NULLS)
MAIN_PEERS = (BASE, "vllm085", "sglang", "kvbm", "kvcore-rust", "kvcore-rust-lru",
              "kvcore-rust-sha", "kvcore-rust-xxh3", "kvcore-calls", "kvcore-batched")  # fmt: skip
MORE_PEERS = {"16k": EVERY_PEER, "d1024": (*MAIN_PEERS, "kvcore-python", "kvcore-python-batched")}


def read_names(text: str) -> list[str]:
    """Read names separated by commas."""
    return text.split(",")


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            ["cases:"]
            + [f"  {name:<23}{case.title}" for name, case in CASES.items()]
            + ["peers:"]
            + [f"  {name:<23}{peer.title}" for name, peer in PEERS.items() if name not in NULLS]
        ),
    )
    parser.add_argument("--cases", type=read_names, default=list(CASES), metavar="NAME,...")
    parser.add_argument("--peers", type=read_names, metavar="NAME,...")
    parser.add_argument(
        "--base", default=BASE, metavar="NAME", help="the peer that ratios compare with"
    )
    parser.add_argument("--quick", action="store_true", help="one case, four peers, two rounds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300, help="requests of the trace")
    parser.add_argument(
        "--trace",
        type=Path,
        default=os.environ.get("KVCORE_TRACE"),
        metavar="FILE",
        help="a trace in Mooncake's JSONL ($KVCORE_TRACE; without one, a generated workload)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every step's times")
    parser.add_argument(
        "--markdown", action="store_true", help="print Markdown, as in docs/performance.md"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.cases, options.peers, options.rounds = list(QUICK_CASES), list(QUICK_PEERS), 2
    names = (
        ("cases", CASES, options.cases),
        ("peers", PEERS, [*(options.peers or ()), options.base]),
    )
    for kind, known, given in names:
        unknown = set(given) - set(known)
        if unknown:
            parser.error(f"no {kind} are called {', '.join(sorted(unknown))}")
    if options.trace is not None and not options.trace.is_file():
        parser.error(f"there is no trace {options.trace}")
    return options


def peers_of(case: str, chosen: Sequence[str] | None) -> Sequence[str]:
    """Return the peers that run a case: the requested ones, or all, or the main ones."""
    return chosen or MORE_PEERS.get(case, MAIN_PEERS)


def case_row(side: Side, peer: str, base: str, *, is_decode: bool) -> list[str]:
    """Return the row of one peer: its cost, and its speed relative to the base."""
    runs = side.runs[peer]
    against = spread = "-"
    if base in side.runs:
        least, low, high = side.ratio(base, peer)
        against, spread = f"{least:.2f}x", f"{low:.2f} to {high:.2f}"
    decode = f"{1e6 * side.decode_step(peer):.0f}" if is_decode else "-"
    made, end = runs.memory
    return [
        PEERS[peer].title,
        f"{1e3 * side.cost(peer):.1f}",
        against,
        spread,
        f"{1e9 * side.a_block(peer):.0f}",
        decode,
        f"{1e3 * side.step(peer, 0.999):.2f}",
        str(sum(runs.hits)),
        f"{made:.0f}, {end:.0f}",
    ]


def print_case(
    name: str, side: Side, peers: Sequence[str], base: str = BASE, *, markdown: bool
) -> None:
    """Print one case as a table."""
    drivers = ", ".join(
        f"{1e3 * sum(side.runs[null].least):.1f} ms ({PEERS[null].title})"
        for null in NULLS
        if null in side.runs
    )
    print(
        f"\n{CASES[name].title}: {len(side.work.prompts)} requests, {len(side.work.steps)} steps, "
        f"{side.work.num_decoded} decoded tokens; net of {drivers}"
    )
    is_decode = CASES[name].decode > 0
    against = PEERS[base].title.partition(",")[0].removesuffix(".0")
    heads = ["", "ms", against, "over rounds", "ns per block", "us per decode step",
             "p99.9 ms", "hit tokens", "MB made, end"]  # fmt: skip
    if markdown:
        print()
    print_table(
        heads,
        [case_row(side, peer, base, is_decode=is_decode) for peer in peers],
        markdown=markdown,
    )


def differing_hits(name: str, side: Side) -> list[str]:
    """Return complaints about hit tokens of a case that differ but must be equal."""
    found = []
    for group in SAME_HITS:
        hits = {peer: side.runs[peer].hits for peer in group if peer in side.runs}
        if len(set(hits.values())) > 1:
            sums = {peer: sum(each) for peer, each in hits.items()}
            found.append(f"{name}: look-ups differ; in all, they hit {sums}")
    return found


def show(line: str) -> None:
    """Show the progress of the run in one line, which the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, compare, print."""
    options = read_options(arguments)
    every = {name for case in options.cases for name in peers_of(case, options.peers)}
    show(f"installing what is missing into {install.home()}, some minutes the first time")
    install.install({PEERS[name].family for name in every})
    sides: dict[str, Side] = {}
    differing = []
    for name in options.cases:
        file = recorded(name, options.trace, options.requests)
        peers = peers_of(name, options.peers)
        side = compare(peers, file, work.read(file), options.rounds, show)
        show("")
        print_case(name, side, peers, options.base, markdown=options.markdown)
        sys.stdout.flush()
        differing += differing_hits(name, side)
        sides[name] = side
    found = list(numbers.rows(sides))
    if options.trace is None:
        print(GENERATED)
    elif found:
        print()
        print_table(["", "required", "aim", "measured"], found, markdown=options.markdown)
    print("\nhit tokens: " + ("\n".join(differing) or "each look-up hits what it is to hit"))
    if options.json:
        runs = {
            name: {peer: runs.least for peer, runs in side.runs.items()}
            for name, side in sides.items()
        }
        options.json.write_text(json.dumps(runs))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
