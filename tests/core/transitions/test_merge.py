# SPDX-License-Identifier: Apache-2.0
"""Duplicates: kept, or merged into the older block when the batch that wrote them is taken."""

from __future__ import annotations

import pytest

from kvcore import Free, KVCacheManager, SetTable
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
)


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Merge duplicates; "a" has computed 0, 1, 2, 3 in blocks 1 and 2, both cached."""
    made = make(backend, 8, duplicates="merge")
    serve(made, "a", [0, 1, 2, 3])
    step(made)
    return made


@pytest.mark.seed("X-02")
def test_by_default_both_blocks_of_one_content_stay(backend: Backend) -> None:
    manager = make(backend, 8)
    serve(manager, "a", [0, 1, 2, 3])
    step(manager)
    assert serve(manager, "b", [0, 1, 2, 3]) == [1, 3]
    step(manager)
    assert step(manager) == []
    assert (blocks(manager, "b"), keyed(manager)) == ([1, 3], [1, 2, 3])


@pytest.mark.seed("X-02")
def test_the_younger_block_is_given_up_after_the_step_that_writes_it(
    manager: KVCacheManager,
) -> None:
    assert serve(manager, "b", [0, 1, 2, 3]) == [1, 3]
    # In this step block 3 is written, so the table must name it.
    assert keyed(manager) == [1, 2]
    step(manager)
    assert blocks(manager, "b") == [1, 2]
    assert step(manager) == [SetTable(1, 0, 1, 2), Free(3, False)]
    assert [owners(manager, block) for block in (1, 2, 3)] == [2, 2, 0]
    assert queue(manager) == [4, 5, 6, 7, 3]


def test_a_block_filled_by_decoding_is_merged_too(manager: KVCacheManager) -> None:
    serve(manager, "b", [0, 1, 2])
    step(manager)
    manager.append(["b"], [3])
    assert blocks(manager, "b") == [1, 3]
    step(manager)
    assert blocks(manager, "b") == [1, 2]


def test_where_the_older_block_lost_its_key_the_younger_takes_its_place(
    manager: KVCacheManager,
) -> None:
    serve(manager, "b", [0, 1, 2, 3])
    manager.evict_blocks([2])
    step(manager)
    assert (blocks(manager, "b"), keyed(manager)) == ([1, 3], [1, 3])
    assert step(manager) == []


def test_a_request_that_left_the_batch_is_not_merged(manager: KVCacheManager) -> None:
    serve(manager, "b", [0, 1, 2, 3])
    manager.free("b")
    step(manager)
    assert step(manager) == []
    assert (blocks(manager, "b"), owners(manager, 2)) == ([], 1)
    drop(manager, "b")


def test_a_block_whose_last_token_was_not_computed_after_all_is_not_merged(
    manager: KVCacheManager,
) -> None:
    serve(manager, "b", [0, 1, 2])
    step(manager)
    manager.append(["b"], [3])
    manager.truncate("b", 4)  # leaves the batch: three tokens are computed, the fourth is not
    step(manager)
    assert (blocks(manager, "b"), manager.num_computed_tokens("b")) == ([1, 3], 3)
    # Computed in the next batch, it is merged by that.
    manager.allocate_slots("b", 1)
    step(manager)
    assert blocks(manager, "b") == [1, 2]


def test_a_delayed_block_is_not_merged_before_it_is_cached(manager: KVCacheManager) -> None:
    serve(manager, "b", [0, 1, 2])
    step(manager)
    manager.append(["b"], [3])  # would be merged by this batch
    manager.truncate("b", 4)
    manager.allocate_slots("b", 1, delay_cache_blocks=True)
    step(manager)
    assert blocks(manager, "b") == [1, 3]
    manager.cache_blocks("b", 4)
    step(manager)
    assert blocks(manager, "b") == [1, 2]


def test_a_request_of_the_same_name_has_nothing_to_do_with_it(manager: KVCacheManager) -> None:
    serve(manager, "b", [0, 1, 2, 3])
    drop(manager, "b")
    assert serve(manager, "b", [0, 1, 5, 6]) == [1, 4]
    step(manager)
    assert (blocks(manager, "b"), keyed(manager)) == ([1, 4], [1, 2, 4])


def test_two_duplicates_of_one_step_are_both_given_up(manager: KVCacheManager) -> None:
    add(manager, "b", [0, 1, 2, 3])
    add(manager, "c", [0, 1, 2, 3])
    assert (admit(manager, "b"), admit(manager, "c")) == ([1, 3], [1, 4])
    step(manager)
    assert (blocks(manager, "b"), blocks(manager, "c")) == ([1, 2], [1, 2])
    assert owners(manager, 2) == 3
    assert queue(manager) == [5, 6, 7, 3, 4]


def test_of_two_equal_prompts_in_one_step_the_second_is_merged_into_the_first(
    backend: Backend,
) -> None:
    manager = make(backend, 8, duplicates="merge")
    # One token must be computed by each: the second writes its own copy of the second block.
    assert serve(manager, "a", [0, 1, 2, 3]) == [1, 2]
    assert serve(manager, "b", [0, 1, 2, 3]) == [1, 3]
    step(manager)
    assert blocks(manager, "b") == [1, 2]
