# SPDX-License-Identifier: Apache-2.0
"""What a step of vLLM's scheduler costs over its own manager and over kvcore's, in CPU time.

Runs in vLLM's environment: `python -m benches.vllm --cost` makes that and calls this. 256 requests
run, with blocks of 16 tokens; a step is `schedule` and `update_from_output`. The sides take turns,
round by round, and the median round counts. In the mixed load four requests end in each step and
four come, which hit a prefix of 1,024 tokens.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benches.vllm.compare import IN_FLIGHT, KINDS, MODEL, Side, World, make_config
from benches.vllm.traffic import Arrival

# isort: split
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

NUM_REQUESTS = 256
NUM_ROUNDS = 7
STEPS = 100
PREFIX = tuple(range(1024))
SIZES = {
    "max_num_seqs": NUM_REQUESTS,
    "max_num_batched_tokens": 16384,
    "max_model_len": 2048,
    "long_prefill_token_threshold": 0,
}


class Load:
    """A side under a load; `seconds` is the CPU time of its steps since it was set to 0."""

    def __init__(self, kind: Any, world: World, config: Any, *, is_mixed: bool) -> None:
        self.side = Side(kind, world, config, 0)
        self.is_mixed = is_mixed
        self.num_added = 0
        self.seconds = 0.0
        for number in range(NUM_REQUESTS):
            self.add(1 + number // 4 if is_mixed else 900)

    def add(self, max_tokens: int) -> None:
        """A request comes, with 64 tokens of its own behind the prefix."""
        self.num_added += 1
        own = tuple(self.num_added * 64 + token for token in range(64))
        prompt = [*PREFIX[: 1024 if self.is_mixed else 64], *(token % 500 for token in own)]
        self.side.add(Arrival(str(self.num_added), prompt, max_tokens, 0))

    def step(self, number: int) -> None:
        """Schedule, and answer the oldest step in flight with one token for each request."""
        scheduler, in_flight = self.side.scheduler, self.side.in_flight
        start = time.process_time()
        planned = scheduler.schedule()
        self.seconds += time.process_time() - start
        in_flight.append((number, planned, self.side.answers(number, planned)))
        if len(in_flight) < IN_FLIGHT[self.side.world.is_async]:
            return
        before = len(scheduler.requests)
        start = time.process_time()
        self.side.take_output(*in_flight.popleft())
        self.seconds += time.process_time() - start
        for _ in range(before - len(scheduler.requests)):
            self.add(NUM_REQUESTS // 4)


def measure(mode: str, model: str, *, is_mixed: bool) -> tuple[float, float]:
    """Microseconds of a step over vLLM's manager and over kvcore's."""
    world = World(mode, 16, 40_000, "fcfs")
    config = make_config(world, model, **SIZES)
    loads = [Load(kind, world, config, is_mixed=is_mixed) for kind in KINDS[world.is_async]]
    rounds: list[list[float]] = [[], []]
    for turn in range(NUM_ROUNDS + 1):
        for load, seconds in zip(loads, rounds, strict=True):
            load.seconds = 0.0
            for number in range(STEPS):
                load.step(turn * STEPS + number)
            if turn:  # the first round fills the batch
                seconds.append(load.seconds / STEPS * 1e6)
    vllm, kvcore = map(statistics.median, rounds)
    return vllm, kvcore


def main() -> None:
    """Print a row for each load."""
    init_none_hash(sha256)
    print("| load | vLLM, µs a step | kvcore | ratio |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        for mode in ("sync", "async"):
            for is_mixed in (False, True):
                vllm, kvcore = measure(mode, model, is_mixed=is_mixed)
                name = f"{'mixed' if is_mixed else 'decode'}, {mode}"
                print(f"| {name} | {vllm:.0f} | {kvcore:.0f} | {kvcore / vllm:.2f} |", flush=True)


if __name__ == "__main__":
    main()
