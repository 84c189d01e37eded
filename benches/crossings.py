# SPDX-License-Identifier: Apache-2.0
"""Measure what one call into the twin costs, depending on its arguments and result.

Run: python -m benches.crossings [options of pytest, e.g. -k append]. pytest-benchmark in CPU time
of the thread, since machines are shared; compare rows of one run with each other, but not rows of
different runs. `tests/core/test_crossings.py` counts how many calls a step makes.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Callable
from typing import Any, Protocol

import pytest

from kvcore import Config, KVCacheManager, Request

BLOCK_SIZE = 16
NUM_REQUESTS = 64
NUM_TOKENS = 4096
FIRST_TOKEN = 100_000  # above the ints that Python caches

ROUNDS = 20
STEPS = 100  # per round; the steps of all rounds fit the pool
CALLS = 500  # per round


class Bench(Protocol):
    """The part of pytest-benchmark's fixture that is used here."""

    def pedantic(self, target: Callable[[], object], *, rounds: int, iterations: int) -> object:
        """Time a call in this many rounds of this many calls."""


@pytest.fixture
def manager() -> KVCacheManager:
    """Make a pool of 16,384 blocks with one prompt and NUM_REQUESTS requests of three tokens."""
    made = KVCacheManager(Config(16_384, BLOCK_SIZE), "rust")
    made.add_request(Request("long", range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS)))
    made.allocate_slots("long", NUM_TOKENS)
    for name in names():
        made.add_request(Request(name, [1, 2, 3]))
        made.allocate_slots(name, 3)
    made.take_batch()
    return made


def names() -> list[str]:
    """Return the ids of the short requests."""
    return [f"request-{number}" for number in range(NUM_REQUESTS)]


def rows() -> array.array[int]:
    """Return the rows of the short requests."""
    return array.array("i", range(1, 1 + NUM_REQUESTS))


def test_a_call_without_arguments(benchmark: Bench, manager: KVCacheManager) -> None:
    benchmark.pedantic(manager.take_stats, rounds=ROUNDS, iterations=CALLS)


def test_a_question_about_a_request(benchmark: Bench, manager: KVCacheManager) -> None:
    benchmark.pedantic(lambda: manager.num_tokens("long"), rounds=ROUNDS, iterations=CALLS)


def test_a_batch_without_commands(benchmark: Bench, manager: KVCacheManager) -> None:
    benchmark.pedantic(manager.take_batch, rounds=ROUNDS, iterations=CALLS)


@pytest.mark.parametrize("kind", ["list", "array"])
def test_tokens(benchmark: Bench, manager: KVCacheManager, kind: str) -> None:
    tokens: Any = list(range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS))
    if kind == "array":
        tokens = array.array("I", tokens)
    manager.add_request(Request("drafting", [1]))
    benchmark.pedantic(
        lambda: manager.add_drafts("drafting", tokens), rounds=ROUNDS, iterations=CALLS
    )


def test_append_one_request(benchmark: Bench, manager: KVCacheManager) -> None:
    benchmark.pedantic(
        lambda: step(manager, ["request-0"], [FIRST_TOKEN]), rounds=ROUNDS, iterations=CALLS
    )


@pytest.mark.parametrize("kind", ["ids", "rows"])
def test_append_64_requests(benchmark: Bench, manager: KVCacheManager, kind: str) -> None:
    requests: Any = names() if kind == "ids" else rows()
    tokens: Any = [FIRST_TOKEN] * NUM_REQUESTS
    if kind == "rows":
        tokens = array.array("I", tokens)
    benchmark.pedantic(lambda: step(manager, requests, tokens), rounds=ROUNDS, iterations=STEPS)


@pytest.mark.parametrize("num_requests", [256, 1024])
@pytest.mark.parametrize("kind", ["known", "ahead"])
def test_append_rows(benchmark: Bench, num_requests: int, kind: str) -> None:
    """Measure a decode step from buffers; ahead: each token fills a placeholder position."""
    manager = KVCacheManager(Config(40 * num_requests, BLOCK_SIZE), "rust")
    rows = array.array("i")
    for number in range(num_requests):
        rows.append(manager.add_request(Request(str(number), [1, 2, 3])))
        manager.allocate_slots(str(number), 3)
    manager.take_batch()
    if kind == "ahead":
        manager.append(rows)
        manager.take_batch()
    tokens = array.array("I", [FIRST_TOKEN] * num_requests)
    benchmark.pedantic(lambda: step(manager, rows, tokens), rounds=ROUNDS, iterations=20)


def step(manager: KVCacheManager, requests: Any, tokens: Any) -> None:
    """Append a token to each request and take the batch."""
    if manager.append(requests, tokens).refused is not None:
        raise RuntimeError("the pool is full")
    manager.take_batch()


def test_look_up_of_255_blocks(benchmark: Bench, manager: KVCacheManager) -> None:
    manager.add_request(Request("again", range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS)))
    benchmark.pedantic(
        lambda: manager.get_computed_blocks("again"), rounds=ROUNDS, iterations=CALLS
    )


def test_the_ids_of_256_blocks(benchmark: Bench, manager: KVCacheManager) -> None:
    benchmark.pedantic(lambda: manager.get_blocks("long"), rounds=ROUNDS, iterations=CALLS)


def main() -> int:
    """Run all benches of this file under pytest."""
    columns = "--benchmark-columns=min,median,stddev,rounds"
    timer = "--benchmark-timer=time.thread_time"
    quiet = ["-q", "-p", "no:cacheprovider", "--benchmark-sort=name", columns, timer]
    return int(pytest.main([__file__, *quiet, *sys.argv[1:]]))


if __name__ == "__main__":
    raise SystemExit(main())
