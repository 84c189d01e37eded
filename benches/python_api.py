# SPDX-License-Identifier: Apache-2.0
"""Measure what a call of the manager costs from Python, and whether the pool's size matters.

Run: python benches/python_api.py [--rounds 5]. Cases alternate inside each round and the least of
the rounds is kept, in CPU time of this thread, because machines are noisy; only the ratios mean
something.
"""

from __future__ import annotations

import argparse
import array
import gc
import time
from collections.abc import Callable
from typing import Literal

from kvcore import Config, KVCacheManager, Request

BLOCK_SIZE = 16
SMALL_POOL, LARGE_POOL = 16_384, 1_048_576
RUNNING = 1024
PROMPT_BLOCKS = 64
BACKENDS: tuple[Literal["rust", "python"], ...] = ("rust", "python")


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread that one call takes."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def prompt(number: int) -> array.array[int]:
    """Return the tokens of one request, PROMPT_BLOCKS blocks; no two requests share a block."""
    return array.array("I", [number + 1] * (PROMPT_BLOCKS * BLOCK_SIZE))


def measure_prompts(manager: KVCacheManager, count: int) -> dict[str, float]:
    """Measure seconds per block of adding, looking up, allocating and freeing requests."""
    requests = [Request(f"r{number}", prompt(number)) for number in range(count)]
    tokens = PROMPT_BLOCKS * BLOCK_SIZE

    def allocate() -> None:
        for request in requests:
            hit = manager.get_computed_blocks(request.request_id)
            if not manager.allocate_slots(request.request_id, tokens - hit.num_tokens, hit):
                raise RuntimeError(f"{request.request_id} was refused")

    def free() -> None:
        for request in requests:
            manager.free(request.request_id)

    blocks = count * PROMPT_BLOCKS
    result = {
        "add_request, a block": seconds(lambda: [manager.add_request(r) for r in requests])
        / blocks,
        "look up and allocate, a block": seconds(allocate) / blocks,
        "take_batch, a block": seconds(manager.take_batch) / blocks,
        "free, a block": seconds(free) / blocks,
    }
    manager.take_batch()
    for request in requests:
        manager.remove_request(request.request_id)
    return result


def measure_decode(manager: KVCacheManager, running: int, steps: int) -> dict[str, float]:
    """Measure seconds per request of a decode step: one batched call, and one call per request."""
    rows = array.array("i")
    for number in range(running):
        rows.append(manager.add_request(Request(f"d{number}", [number, 1, 2])))
        manager.allocate_slots(f"d{number}", 3)
    manager.take_batch()
    tokens = array.array("I", [7] * running)
    ids = [f"d{number}" for number in range(running)]

    def batched() -> None:
        for _ in range(steps):
            manager.append(rows, tokens)
            manager.take_batch()

    def one_by_one() -> None:
        for _ in range(steps):
            for request_id in ids:
                manager.append([request_id], [7])
            manager.take_batch()

    result = {
        "append, one call per step, a request": seconds(batched) / (steps * running),
        "append, one call per request": seconds(one_by_one) / (steps * running),
    }
    for request_id in ids:
        manager.free(request_id)
        manager.remove_request(request_id)
    manager.take_batch()
    return result


def main() -> None:
    """Print the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    managers = {
        (backend, pool): KVCacheManager(Config(pool, BLOCK_SIZE), backend)
        for backend in BACKENDS
        for pool in (SMALL_POOL, LARGE_POOL)
    }
    gc.disable()  # else collections walk the Python core's million blocks: see docs/decisions.md
    best: dict[tuple[str, int], dict[str, float]] = {case: {} for case in managers}
    for _ in range(rounds):
        for case, manager in managers.items():
            large = case[0] == "rust"
            found = measure_prompts(manager, 200 if large else 20)
            found |= measure_decode(manager, RUNNING if large else RUNNING // 16, 32)
            for name, value in found.items():
                best[case][name] = min(value, best[case].get(name, value))
    print(f"{'nanoseconds':38}" + "".join(f"{b + ' ' + str(p):>18}" for b, p in managers))
    for name in best["rust", SMALL_POOL]:
        cells = "".join(f"{best[case][name] * 1e9:18.0f}" for case in managers)
        growth = best["rust", LARGE_POOL][name] / best["rust", SMALL_POOL][name]
        faster = best["python", SMALL_POOL][name] / best["rust", SMALL_POOL][name]
        print(f"{name:38}{cells}   1M over 16k: {growth:.2f}   rust over python: {faster:.0f}x")


if __name__ == "__main__":
    main()
