# SPDX-License-Identifier: Apache-2.0
"""What a call costs does not grow with the pool, and what is kept does not grow with time.

Costs are counted in function calls, not in time. A persistent vector is a tree of 32 ways, and a
step in it may be a level deeper in a larger pool: that is inside one call of pyrsistent's C code.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from types import FrameType
from typing import Any

import pytest

from kvcore import Config, Hit, KVCacheManager, Request
from kvcore.calls import Call, perform
from kvcore.queries import get_computed_blocks
from kvcore.state import State, make_state
from tests.conftest import Backend, need_twin

POOLS = (64, 65_536)
PROMPT = list(range(40))


def count_calls(state: State, call: Call) -> tuple[State, int]:
    """The state after a call, and how many Python and C functions it called."""
    count = 0

    def see(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection calls those who asked to be told of it
    sys.setprofile(see)
    try:
        outcome = perform(state, call)
    finally:
        sys.setprofile(None)
        gc.enable()
    return outcome.state, count


def costs(num_blocks: int) -> dict[str, int]:
    """Function calls of one call of every transition but reset, on a pool of so many blocks."""
    state = make_state(Config(num_blocks, 4, num_host_blocks=num_blocks, enable_events=True))
    found: dict[str, int] = {}

    def do(name: str, *args: Any, **options: Any) -> None:
        nonlocal state
        state, count = count_calls(state, Call(name, args, options))
        found[f"{len(found)} {name}"] = count

    do("add_request", Request("a", PROMPT))
    do("allocate_slots", "a", len(PROMPT) - 2, None, delay_cache_blocks=True)
    do("cache_blocks", "a", 8)
    do("allocate_slots", "a", 2, num_lookahead_tokens=8)
    do("take_batch")
    do("fork", "a", "b")
    do("append", ["a", "b"], [1, 2])
    do("add_tokens", "a", [3])
    do("take_batch")
    do("pin", [1])
    do("unpin", [1])
    do("swap_out", ["a", "b"])
    do("swap_in", ["a", "b"])
    do("truncate", "a", 9)
    do("evict_blocks", [1])
    do("free", "a")
    do("free", "b")
    hit: Hit = get_computed_blocks(state, "a")
    do("allocate_slots", "a", 1, hit)
    do("free", "a")
    do("remove_request", "a")
    do("take_batch")
    do("take_events")
    do("take_stats")
    return found


def test_no_transition_does_more_in_a_larger_pool() -> None:
    costs(POOLS[0])  # what the interpreter looks up once and keeps
    small, large = (costs(num_blocks) for num_blocks in POOLS)
    assert small == large


def serve(manager: KVCacheManager, numbers: range) -> None:
    """Requests come, share a prefix, are answered and go."""
    for number in numbers:
        name = f"request {number}"
        manager.add_request(Request(name, [*range(8), number % 997, 1, 2, 3]))
        hit = manager.get_computed_blocks(name)
        assert manager.allocate_slots(name, 12 - hit.num_tokens, hit)
        manager.append([name], [7])
        manager.take_batch()
        manager.take_events()
        manager.free(name)
        manager.remove_request(name)
    manager.take_batch()
    manager.take_stats()


def check_size(backend: Backend, num_requests: int) -> None:
    """The state is as large after many requests as after enough of them to fill the pool."""
    config = Config(64, 4, enable_events=True, hash_seed=b"cost")
    manager = KVCacheManager(config, backend=backend)
    serve(manager, range(1000))
    size = len(manager.encode())
    gc.collect()
    tracemalloc.start()
    serve(manager, range(1000, 1400))
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    serve(manager, range(1400, num_requests))
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(manager.encode()) == size
    assert after - before < 64 * 1024
    manager.check()


def test_nothing_is_kept_of_requests_that_have_gone(backend: Backend) -> None:
    check_size(backend, 3_000 if backend == "python" else 20_000)


@pytest.mark.slow
def test_nothing_is_kept_of_a_million_requests_that_have_gone() -> None:
    need_twin()
    check_size("rust", 1_000_000)
