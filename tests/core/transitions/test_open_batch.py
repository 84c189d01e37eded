# SPDX-License-Identifier: Apache-2.0
"""Leaving the open batch: what is not computed after all is neither counted nor findable.

The open batch is what was called since the last `take_batch`.
"""

from __future__ import annotations

import pytest

from kvcore import Allocate, CutTable, Evict, Free, KVCacheManager, SetTable, Status
from kvcore.types.errors import HitInOpenBatch
from tests.conftest import Backend
from tests.helpers.stories import (
    add,
    admit,
    blocks,
    drop,
    keyed,
    make,
    owners,
    queue,
    serve,
    step,
    unchanged,
)


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager of nine usable blocks of two tokens and four host blocks."""
    return make(backend, num_host_blocks=4)


def test_freed_in_its_first_step_a_request_leaves_no_key(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2, 3])
    first, second = (manager.state().device.keys[block] for block in (1, 2))
    assert first is not None
    assert second is not None
    manager.free("a")
    assert step(manager) == [
        Allocate(1),
        Allocate(2),
        SetTable(0, 0, 0, 1),
        SetTable(0, 0, 1, 2),
        Evict(1, first),
        Evict(2, second),
        Free(2, False),
        Free(1, False),
        CutTable(0, 0, 0),
    ]
    add(manager, "b", [0, 1, 2, 3])
    assert manager.get_computed_blocks("b").num_tokens == 0


def test_freed_after_its_step_a_request_leaves_its_keys(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2, 3])
    step(manager)
    manager.free("a")
    assert keyed(manager) == [1, 2]


def test_only_the_keys_of_the_open_batch_are_withdrawn(manager: KVCacheManager) -> None:
    add(manager, "a", [0, 1, 2, 3])
    manager.allocate_slots("a", 2)
    step(manager)
    manager.allocate_slots("a", 2)
    assert keyed(manager) == [1, 2]
    manager.free("a")
    assert keyed(manager) == [1]


def test_hits_of_earlier_batches_keep_their_keys(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2])
    step(manager)
    assert serve(manager, "b", [0, 1, 7, 8, 9]) == [1, 3, 4]
    assert keyed(manager) == [1, 3]
    manager.free("b")
    # Block 3 was to be written in this batch, block 1 was written in the one before.
    assert keyed(manager) == [1]
    assert owners(manager, 1) == 1


def test_a_cut_request_falls_back_to_what_was_computed_before(manager: KVCacheManager) -> None:
    add(manager, "a", [0, 1, 2, 3, 4])
    manager.allocate_slots("a", 2)
    step(manager)
    manager.allocate_slots("a", 3)
    assert (manager.num_computed_tokens("a"), keyed(manager)) == (5, [1, 2])
    manager.truncate("a", 4)
    # Two tokens were computed, four are left: the engine schedules the other two again.
    assert (manager.num_computed_tokens("a"), manager.num_tokens("a")) == (2, 4)
    assert (blocks(manager, "a"), keyed(manager)) == ([1], [1])
    manager.allocate_slots("a", 2)
    assert manager.num_computed_tokens("a") == 4


def test_a_cut_below_what_was_computed_counts_the_cut(manager: KVCacheManager) -> None:
    add(manager, "a", [0, 1, 2, 3, 4])
    manager.allocate_slots("a", 4)
    step(manager)
    manager.allocate_slots("a", 1)
    manager.truncate("a", 1)
    assert (manager.num_computed_tokens("a"), blocks(manager, "a")) == (1, [1])


def test_scheduled_twice_in_a_batch_a_request_falls_back_to_before_the_first(
    manager: KVCacheManager,
) -> None:
    add(manager, "a", [0, 1, 2, 3, 4])
    manager.allocate_slots("a", 2)
    manager.allocate_slots("a", 2)
    manager.truncate("a", 3)
    assert (manager.status("a"), manager.num_computed_tokens("a")) == (Status.WAITING, 0)
    assert keyed(manager) == []


def test_falling_back_means_before_the_hits(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2])
    step(manager)
    serve(manager, "b", [0, 1, 3])
    manager.truncate("b", 3)
    # Its hit is given back as well; the look-up is made again with the next try.
    assert (manager.status("b"), manager.num_computed_tokens("b")) == (Status.WAITING, 0)
    assert owners(manager, 1) == 1
    assert admit(manager, "b")[0] == 1


def test_an_append_that_leaves_the_batch_gives_back_its_block(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1])
    step(manager)
    manager.append(["a"], [2])
    assert blocks(manager, "a") == [1, 2]
    manager.truncate("a", 3)
    assert (blocks(manager, "a"), manager.num_computed_tokens("a")) == ([1], 2)
    assert queue(manager) == [3, 4, 5, 6, 7, 8, 9, 2]


def test_who_counts_on_a_block_of_the_batch_must_leave_first(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2])
    assert serve(manager, "b", [0, 1, 3]) == [1, 3]
    with unchanged(manager), pytest.raises(HitInOpenBatch) as caught:
        manager.free("a")
    assert caught.value.fields == {"blocks": [1], "requests": ["b"]}
    manager.free("b")
    manager.free("a")
    assert (keyed(manager), manager.num_free_blocks) == ([], 9)


def test_the_batch_taken_its_blocks_are_written_and_anybody_may_leave(
    manager: KVCacheManager,
) -> None:
    serve(manager, "a", [0, 1, 2])
    serve(manager, "b", [0, 1, 3])
    step(manager)
    drop(manager, "a")
    assert (keyed(manager), blocks(manager, "b")) == ([1], [1, 3])


def test_writer_and_reader_may_leave_together(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2])
    serve(manager, "b", [0, 1, 3])
    assert manager.swap_out(["a", "b"])
    # Nothing of either was computed, so there is nothing to copy and both wait.
    assert [manager.status(name) for name in "ab"] == [Status.WAITING, Status.WAITING]
    assert (keyed(manager), manager.num_free_host_blocks) == ([], 4)


def test_a_reader_that_counts_only_older_blocks_is_no_hindrance(manager: KVCacheManager) -> None:
    add(manager, "a", [0, 1, 2, 3, 4])
    manager.allocate_slots("a", 2)
    step(manager)
    manager.allocate_slots("a", 3)
    assert serve(manager, "b", [0, 1, 9]) == [1, 4]
    manager.free("a")
    assert keyed(manager) == [1]


def test_with_delayed_caching_nothing_has_to_be_withdrawn(manager: KVCacheManager) -> None:
    add(manager, "a", [0, 1, 2])
    manager.allocate_slots("a", 3, delay_cache_blocks=True)
    manager.free("a")
    assert not any(isinstance(each, Evict) for each in step(manager))


def test_caching_completed_later_is_not_withdrawn(manager: KVCacheManager) -> None:
    add(manager, "a", [0, 1, 2])
    manager.allocate_slots("a", 2, delay_cache_blocks=True)
    step(manager)
    manager.allocate_slots("a", 1, delay_cache_blocks=True)
    manager.cache_blocks("a", 2)  # written by the batch before
    manager.free("a")
    assert keyed(manager) == [1]
