# SPDX-License-Identifier: Apache-2.0
"""Windows give back what no query sees, and never what one may still see."""

from __future__ import annotations

import pytest

from kvcore import Group, Hit, KVCacheBlocks, KVCacheManager
from kvcore.types.errors import BeyondComputed
from tests.conftest import Backend
from tests.helpers.stories import add, make, queue, serve, step, unchanged

FULL = Group(2)
WINDOW = Group(2, kind="sliding_window", window=3)


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager of full attention and a window of three tokens, 19 usable blocks of two."""
    return make(backend, 20, groups=(FULL, WINDOW), num_host_blocks=20)


def window(manager: KVCacheManager, request_id: str) -> list[int]:
    """Return the request's table in the windowed group."""
    return manager.get_block_ids(request_id)[1]


def test_what_the_open_batch_still_reads_is_not_given_back(manager: KVCacheManager) -> None:
    # In one step the positions 0 to 3 and then 4 to 7 are scheduled: the forward pass of that step
    # computes token 0 and sees it, so nothing of the window goes before the batch is taken.
    add(manager, "a", range(9))
    manager.allocate_slots("a", 4)
    manager.allocate_slots("a", 4)
    assert window(manager, "a") == [3, 4, 7, 8]
    step(manager)
    # At 8 the next query sees 6 and 7.
    manager.allocate_slots("a", 1)
    assert window(manager, "a") == [0, 0, 0, 8, 10]


def test_a_cut_behind_the_window_starts_the_request_anew(manager: KVCacheManager) -> None:
    add(manager, "a", range(9))
    manager.allocate_slots("a", 8)
    step(manager)
    manager.allocate_slots("a", 1)
    step(manager)
    # The query at 7 would see 5 and 6, in a block that is given back; at 8 nothing is missing.
    manager.truncate("a", 8)
    assert (manager.num_computed_tokens("a"), window(manager, "a")) == (8, [0, 0, 0, 8])
    manager.truncate("a", 7)
    assert (manager.num_computed_tokens("a"), window(manager, "a")) == (0, [])
    assert manager.num_free_blocks == 19


def test_a_child_shares_the_window_and_its_null_blocks(manager: KVCacheManager) -> None:
    add(manager, "a", range(9))
    manager.allocate_slots("a", 8)
    step(manager)
    manager.allocate_slots("a", 1)
    step(manager)
    manager.fork("a", "b")
    assert window(manager, "b") == window(manager, "a") == [0, 0, 0, 8, 10]
    manager.free("a")
    assert manager.num_free_blocks == 19 - 5 - 2
    manager.free("b")
    assert manager.num_free_blocks == 19


def test_swap_moves_what_the_window_still_holds(manager: KVCacheManager) -> None:
    add(manager, "a", range(9))
    manager.allocate_slots("a", 8)
    step(manager)
    manager.allocate_slots("a", 1)
    step(manager)
    assert manager.swap_out(["a"])
    assert manager.num_free_host_blocks == 20 - 5 - 2
    step(manager)
    manager.evict_blocks(range(1, 20))
    assert manager.swap_in(["a"])
    full, kept = manager.get_block_ids("a")
    assert (len(full), kept[:3], len(set(kept[3:]))) == (5, [0, 0, 0], 2)
    step(manager)


def test_blocks_given_back_can_still_be_hit(manager: KVCacheManager) -> None:
    add(manager, "a", range(9))
    manager.allocate_slots("a", 8)
    step(manager)
    manager.remove_skipped_blocks("a", 8)
    assert queue(manager)[-3:] == [7, 6, 5]
    add(manager, "b", range(5))
    hit = manager.get_computed_blocks("b")
    # At 4 the window sees 2 and 3: of the first block nothing.
    assert hit == Hit(KVCacheBlocks(((1, 2), (0, 6))), 4)


def test_drafts_do_not_move_the_window(manager: KVCacheManager) -> None:
    serve(manager, "a", range(5))
    step(manager)
    manager.add_drafts("a", [7, 8, 9])
    manager.allocate_slots("a", 3)
    step(manager)
    with unchanged(manager), pytest.raises(BeyondComputed):
        manager.remove_skipped_blocks("a", 8)
    manager.accept("a", 0)
    step(manager)
    assert manager.num_computed_tokens("a") == 5
    manager.append(["a"], [5])
    step(manager)


def test_external_tokens_behind_the_window_take_no_blocks(manager: KVCacheManager) -> None:
    add(manager, "a", range(10))
    free = manager.num_free_blocks
    got = manager.allocate_slots("a", 1, num_external_computed_tokens=8, delay_cache_blocks=True)
    # At 8 the window sees 6 and 7: one block of four; the ninth token takes one in each group.
    assert got == KVCacheBlocks(((6,), (7,)))
    assert manager.get_blocks("a").blocks == ((1, 2, 3, 4, 6), (0, 0, 0, 5, 7))
    assert free - manager.num_free_blocks == 4 + 1 + 2
