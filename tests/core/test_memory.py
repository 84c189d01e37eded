# SPDX-License-Identifier: Apache-2.0
"""Requests that have come and gone leave nothing: memory and state are as before.

Requests come in waves of four that share a prefix, and go through hits, decoding, fork, swap and
preemption; the pool is too small to keep what they leave in the cache.
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path

import pytest

from kvcore import KVCacheManager, Refused
from tests.conftest import Backend
from tests.helpers.stories import add, drop, make

RUST = pytest.mark.parametrize("backend", ["rust"], indirect=True)
PYTHON = pytest.mark.parametrize("backend", ["python"], indirect=True)
STATM = Path("/proc/self/statm")
NEEDS_STATM = pytest.mark.skipif(not STATM.exists(), reason="this system has no /proc/self/statm")
WAVE = 5  # requests per wave, including the forked one


def small(backend: Backend) -> KVCacheManager:
    """Make a manager of 15 usable blocks, so that each wave evicts what the last one left."""
    return make(backend, 16, num_host_blocks=8, duplicates="merge", enable_events=True)


def wave(manager: KVCacheManager, number: int) -> None:
    """Let four requests and a child of one come and go; leaves nothing but cached blocks."""
    names = [f"request {number}.{index}" for index in range(4)]
    for index, name in enumerate(names):
        add(manager, name, [number % 1000, 1, 2, 3, index])
        hit = manager.get_computed_blocks(name)
        assert manager.allocate_slots(name, 5 - hit.num_tokens, hit)
    child = f"{names[0]} child"
    manager.take_batch()
    manager.fork(names[0], child)
    manager.append([*names, child], [9, 9, 9, 9, 8])
    manager.take_batch()
    assert not isinstance(manager.swap_out([names[1], child]), Refused)
    manager.free(names[2])
    assert not isinstance(manager.swap_in([names[1]]), Refused)
    manager.take_batch()
    for name in (*names, child):
        drop(manager, name)
    manager.take_batch()
    manager.take_events()
    manager.take_stats()


def waves(manager: KVCacheManager, first: int, num_requests: int) -> int:
    """Serve this many requests from this wave on; return the number of the next wave."""
    end = first + num_requests // WAVE
    for number in range(first, end):
        wave(manager, number)
    return end


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def drained(manager: KVCacheManager) -> bytes:
    """Return the bytes of the state after the cache is cleared, too."""
    assert manager.reset_prefix_cache()
    manager.take_batch()
    manager.take_events()
    return manager.encode()


def growth(backend: Backend, num_requests: int) -> int:
    """Measure the resident bytes that this many requests add, after a tenth of them."""
    manager = small(backend)
    done = waves(manager, 0, num_requests // 10)
    before = resident_bytes()
    waves(manager, done, num_requests)
    return resident_bytes() - before


@pytest.mark.seed("S004-02", "S004-03")
def test_the_state_of_a_drained_manager_does_not_remember_how_many_came(backend: Backend) -> None:
    manager = small(backend)
    done = waves(manager, 0, 50)
    once = drained(manager)
    done = waves(manager, done, 1000)
    again = drained(manager)
    # Order of the free queue and the number of the batch differ; nothing has been added.
    assert len(again) == len(once)
    assert manager.num_free_blocks == 15
    assert manager.num_free_host_blocks == 8
    state = manager.state()
    assert (len(state.requests), len(state.device.index), any(state.batch.scheduled)) == (0, 0, 0)
    assert (list(state.rows), sorted(state.free_rows)) == ([None] * WAVE, list(range(WAVE)))


@pytest.mark.seed("S004-02")
@PYTHON
def test_python_objects_of_gone_requests_are_gone(backend: Backend) -> None:
    manager = small(backend)
    done = waves(manager, 0, 200)
    tracemalloc.start()
    try:
        done = waves(manager, done, 100)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        waves(manager, done, 500)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # One object of 48 bytes per request would be 24,000.
    assert after - before < 10_000


@pytest.mark.seed("S004-02")
@RUST
@NEEDS_STATM
def test_twenty_thousand_requests_leave_no_memory_behind_in_rust(backend: Backend) -> None:
    # 60 bytes per request, less than its name and an entry of a map, would be 1.2 million.
    assert growth(backend, 20_000) < 1_000_000


@RUST
@NEEDS_STATM
@pytest.mark.slow
def test_a_million_requests_leave_no_memory_behind_in_rust(backend: Backend) -> None:
    # Four bytes per request would be four million.
    assert growth(backend, 1_000_000) < 2_000_000
