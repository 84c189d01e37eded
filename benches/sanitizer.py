# SPDX-License-Identifier: Apache-2.0
"""Measure a sanitizer's bytes per slot, and its CPU time for a decode step of 256 requests.

Run: python -m benches.sanitizer. `python -m benches.engines --engines vllm-sanitizer` measures it
with a real scheduler.
"""

from __future__ import annotations

import statistics
import time

from kvcore.sanitizer import CacheGroup, Sanitizer
from kvcore.sanitizer.twin import TwinSlotChecker

NUM_BLOCKS = 65_536
NUM_REQUESTS, CONTEXT, STEPS = 256, 2048, 512


def bytes_per_slot(block_size: int) -> float:
    """Return the bytes of contents, events and claims per slot of a full pool."""
    checker = TwinSlotChecker([CacheGroup(block_size=block_size)], NUM_BLOCKS, full=False)
    return checker.num_bytes() / (NUM_BLOCKS * block_size)


def decode_step() -> float:
    """Return the median CPU seconds of a step that gives each request a token."""
    sanitizer = Sanitizer([CacheGroup(block_size=16)], NUM_BLOCKS, backend="rust")
    tokens = [list(range(CONTEXT)) for _ in range(NUM_REQUESTS)]
    names = [f"r{number}" for number in range(NUM_REQUESTS)]
    num_blocks = (CONTEXT + STEPS) // 16
    for number, name in enumerate(names):
        sanitizer.begin(name, tokens[number])
        first = number * num_blocks
        sanitizer.extend(name, 0, list(range(first, first + num_blocks)))
    sanitizer.step(0, names, [0] * NUM_REQUESTS, [CONTEXT] * NUM_REQUESTS)
    seconds = []
    for step in range(1, STEPS):
        for each in tokens:
            each.append(step)
        columns = names, [CONTEXT + step - 1] * NUM_REQUESTS, [1] * NUM_REQUESTS
        start = time.thread_time()
        sanitizer.step(step, *columns)
        seconds.append(time.thread_time() - start)
    if sanitizer.findings:
        raise RuntimeError(f"a false alarm: {sanitizer.findings[0]}")
    return statistics.median(seconds)


def main() -> None:
    """Print bytes per slot and time per step."""
    for block_size in (8, 16, 32, 64):
        print(f"{bytes_per_slot(block_size):6.1f} bytes per slot, {block_size} slots per block")
    print(f"{decode_step() * 1e6:6.0f} us per decode step of {NUM_REQUESTS} requests")


if __name__ == "__main__":
    main()
