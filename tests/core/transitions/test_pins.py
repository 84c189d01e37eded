# SPDX-License-Identifier: Apache-2.0
"""Pins: a pinned block keeps its content, whichever request frees it."""

from __future__ import annotations

import pytest

from kvcore import Allocate, Free, Group, KVCacheManager, SetTable, Touch, Zero
from tests.conformance.pools import make_pool
from tests.conftest import Backend
from tests.helpers.stories import (
    add,
    blocks,
    drop,
    keyed,
    make,
    owners,
    queue,
    serve,
    step,
)


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager of five usable blocks; "a" has three tokens in 1 and 2; 1 is cached."""
    made = make(backend, 6)
    serve(made, "a", [0, 1, 2])
    step(made)
    return made


def test_a_pinned_block_is_not_freed_with_its_request(manager: KVCacheManager) -> None:
    manager.pin([1])
    drop(manager, "a")
    assert queue(manager) == [3, 4, 5, 2]
    assert (owners(manager, 1), keyed(manager)) == (1, [1])
    # However much is allocated, the prefix stays.
    serve(manager, "b", range(50, 58))
    assert manager.num_free_blocks == 0
    drop(manager, "b")
    assert serve(manager, "c", [0, 1, 9])[0] == 1


def test_a_block_needs_as_many_unpins_as_it_was_pinned(manager: KVCacheManager) -> None:
    manager.pin([1, 1])
    manager.pin([1])
    drop(manager, "a")
    manager.unpin([1])
    manager.unpin([1])
    assert owners(manager, 1) == 1
    step(manager)
    manager.unpin([1])
    assert step(manager) == [Free(1, True)]
    assert queue(manager) == [3, 4, 5, 2, 1]


def test_a_cached_block_is_pinned_out_of_the_free_queue(manager: KVCacheManager) -> None:
    drop(manager, "a")
    assert queue(manager) == [3, 4, 5, 2, 1]
    step(manager)
    manager.pin([1])
    assert step(manager) == [Touch(1)]
    assert queue(manager) == [3, 4, 5, 2]
    # Unpinned it is the most recently used.
    manager.unpin([1])
    assert queue(manager) == [3, 4, 5, 2, 1]


def test_pinning_a_block_in_use_emits_nothing(manager: KVCacheManager) -> None:
    manager.pin([1, 2])
    manager.unpin([1, 2])
    assert step(manager) == []


def test_a_pinned_block_is_not_written_by_its_request(manager: KVCacheManager) -> None:
    # A pin is an owner: the half full block 2 is copied before the next token is written.
    manager.pin([2])
    manager.append(["a"], [3])
    assert blocks(manager, "a") == [1, 3]
    manager.unpin([2])
    assert queue(manager) == [4, 5, 2]


def test_a_pinned_block_of_which_nothing_is_to_be_kept_is_replaced_without_a_copy(
    backend: Backend,
) -> None:
    for zero in (False, True):
        manager = make(backend, groups=(Group(2, zero_new_blocks=zero),))
        add(manager, "a", [0, 1])
        manager.allocate_slots("a", 2, num_lookahead_tokens=1)
        step(manager)
        assert blocks(manager, "a") == [1, 2]
        manager.pin([2])
        # The next token is the first of block 2, so the fresh block is new like any other.
        manager.append(["a"], [2])
        zeroed = [Zero(3)] if zero else []
        assert step(manager) == [Allocate(3), *zeroed, SetTable(0, 0, 1, 3)]


def test_pins_hold_back_a_reset(manager: KVCacheManager) -> None:
    manager.pin([1])
    drop(manager, "a")
    assert not manager.reset_prefix_cache()
    manager.unpin([1])
    assert manager.reset_prefix_cache()


def test_pins_count_as_use_but_not_as_sharing(manager: KVCacheManager) -> None:
    manager.pin([1])
    assert manager.get_num_common_prefix_blocks("a") == [2]
    drop(manager, "a")
    assert manager.usage == pytest.approx(1 / 5)


def test_a_pinned_block_may_lose_its_key_and_is_then_freed_as_uncached(
    manager: KVCacheManager,
) -> None:
    manager.pin([1])
    drop(manager, "a")
    manager.evict_blocks([1])
    step(manager)
    manager.unpin([1])
    assert step(manager) == [Free(1, False)]


def test_a_pool_alone_counts_the_pins_of_a_block(backend: Backend) -> None:
    pool = make_pool(backend, 2)
    pool.call("take", 1)
    pool.call("pin", [0])
    pool.call("pin", [0])
    assert pool.dump()[3] == [2, 0]
    pool.call("unpin", [0])
    assert pool.dump()[3] == [1, 0]
    pool.call("unpin", [0])
    assert pool.dump()[3] == [0, 0]
