# SPDX-License-Identifier: Apache-2.0
"""Measure what `kvcore explain` costs: the loop of `kvcore replay` with an observer and without.

Run: python -m benches.explain [TRACE] [--requests 60] [--rounds 5]. Without a TRACE the workload
are made up documents. Each pool is replayed with and without an observer in turn; the least of the
rounds is kept, in processor time of this thread, because machines are noisy: only the ratios mean
something. The last line is the time of one `explain_miss` of 100,000 tokens, all of them evicted by
other requests.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path
from typing import Any

from kvcore import Config, KVCacheManager, Request
from kvcore.replay.configuration import make_config, read_groups
from kvcore.replay.explain.explained import Explained
from kvcore.replay.loop import Loop
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import Options
from kvcore.replay.synthetic import generate

SEED = 7
MODELS = Path(__file__).parents[1] / "examples" / "configs"
POOLS: dict[str, dict[str, Any]] = {
    "blocks of 16": {"num_blocks": 16_384},
    "hits inside blocks of 64": {"num_blocks": 4_096, "block_size": 64, "hash_block_size": 16},
    "gpt-oss-20b, windows": {"num_blocks": 40_000, "groups": "gpt-oss-20b"},
    "gemma-3-27b, windows": {"num_blocks": 40_000, "groups": "gemma-3-27b"},
    "qwen3-next-80b-a3b, states": {"num_blocks": 20_000, "groups": "qwen3-next-80b-a3b"},
}


def seconds(trace: str | None, num_requests: int, options: Options, *, explains: bool) -> float:
    """Return the CPU seconds of a replay."""
    manager = KVCacheManager(make_config(options), "rust")
    requests = TraceReader(trace) if trace else generate("documents", num_requests, SEED)
    start = time.thread_time()
    if explains:
        manager = Explained().observe(manager)
    loop = Loop(islice(requests, num_requests), options, manager)
    while loop.step() is not None:
        pass
    return time.thread_time() - start


def miss_seconds(rounds: int) -> float:
    """Return the least CPU seconds in which a live manager explains a long miss."""
    length, size, takers = 100_000, 16, 100
    num_blocks = length // size + 1
    manager = KVCacheManager(Config(num_blocks, size), "rust", explain_entries=2 * num_blocks)
    one = length // takers
    other = [list(range(length + each * one, length + (each + 1) * one)) for each in range(takers)]
    for number, tokens in enumerate([list(range(length)), *other]):
        manager.add_request(Request(str(number), tokens))
        manager.allocate_slots(str(number), len(tokens))
        manager.take_batch()
        manager.free(str(number))
    manager.add_request(Request("again", list(range(length))))
    least = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        missed = manager.explain_miss("again")
        least = min(least, time.thread_time() - start)
    assert missed is not None
    assert {each.cause for each in missed.spans} == {"evicted"}
    return least


def main() -> None:
    """Print a ratio for each pool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(f"{'pool':<28}{'replay':>10}{'explain / replay':>18}")
    for name, values in POOLS.items():
        model = values.get("groups")
        groups = read_groups(MODELS / f"{model}.json", 16) if model else ()
        options = Options(bounds=False, **(values | {"groups": groups}))
        least = dict.fromkeys((False, True), float("inf"))
        for _ in range(given.rounds):
            for explains in least:
                spent = seconds(given.trace, given.requests, options, explains=explains)
                least[explains] = min(least[explains], spent)
        print(f"{name:<28}{least[False]:>8.2f} s{least[True] / least[False]:>18.2f}", flush=True)
    print(f"explain_miss of 100,000 tokens: {1e3 * miss_seconds(given.rounds):.2f} ms")


if __name__ == "__main__":
    main()
