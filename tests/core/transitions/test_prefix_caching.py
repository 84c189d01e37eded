# SPDX-License-Identifier: Apache-2.0
"""Hits: full blocks are found by the whole history of their tokens, as soon as they are
scheduled.

Blocks hold two tokens; block 0 is the null block, so a fresh pool gives 1, 2, 3, ...
"""

from __future__ import annotations

import pytest

from kvcore import EvictAll, Group, Hit, KVCacheBlocks, Status
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


@pytest.mark.seed("S000-08", "S000-54", "S004-08", "S004-13")
def test_a_prompt_that_was_served_before_finds_its_full_blocks(backend: Backend) -> None:
    manager = make(backend)
    assert serve(manager, "a", [0, 1, 2, 3, 4]) == [1, 2, 3]
    step(manager)
    add(manager, "b", [0, 1, 2, 3, 5])
    with unchanged(manager):
        found, num_tokens = manager.get_computed_blocks("b")
    assert (found, num_tokens) == (KVCacheBlocks(((1, 2),)), 4)
    # Only the block of the fifth token is new.
    assert admit(manager, "b") == [1, 2, 4]
    assert [owners(manager, block) for block in (1, 2, 3, 4)] == [2, 2, 1, 1]
    assert manager.num_computed_tokens("b") == 5


@pytest.mark.seed("S000-54", "S001-77", "X-06")
def test_a_full_hit_leaves_the_last_block_to_compute(backend: Backend) -> None:
    # At least one token must be computed, or there are no logits: of 4 tokens, 3 may be hits, and
    # those hold one full block.
    manager = make(backend)
    serve(manager, "a", [0, 1, 2, 3])
    step(manager)
    add(manager, "b", [0, 1, 2, 3])
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((1,),)), 2)
    assert admit(manager, "b") == [1, 3]


def test_a_block_is_found_only_under_the_whole_history_before_it(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1, 2, 3])
    for request_id, tokens in (("b", [9, 1, 2, 3, 4]), ("c", [2, 3, 4]), ("d", [1, 0, 2, 3, 4])):
        add(manager, request_id, tokens)
        assert manager.get_computed_blocks(request_id).num_tokens == 0


@pytest.mark.seed("S004-09", "X-13")
def test_a_request_hits_what_another_schedules_in_the_same_step(backend: Backend) -> None:
    manager = make(backend)
    assert serve(manager, "a", [0, 1, 2]) == [1, 2]
    assert serve(manager, "b", [0, 1, 3]) == [1, 3]


@pytest.mark.seed("S000-32")
def test_a_partial_block_and_lookahead_are_not_cached(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", [0, 1, 2, 3, 4])
    # Three tokens and two slots of lookahead lie in blocks 1, 2, 3; only block 1 is full of tokens
    # that are computed.
    manager.allocate_slots("a", 3, num_lookahead_tokens=2)
    assert blocks(manager, "a") == [1, 2, 3]
    assert keyed(manager) == [1]


@pytest.mark.seed("S000-31", "S004-05", "S004-10")
def test_blocks_are_cached_chunk_by_chunk(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", [0, 1, 2, 3, 4])
    manager.allocate_slots("a", 3)
    assert (blocks(manager, "a"), keyed(manager)) == ([1, 2], [1])
    manager.allocate_slots("a", 2)
    assert (blocks(manager, "a"), keyed(manager)) == ([1, 2, 3], [1, 2])


@pytest.mark.seed("S004-10")
def test_generated_tokens_are_cached_like_those_of_a_prompt(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0])
    step(manager)
    manager.append(["a"], [1])
    step(manager)
    add(manager, "b", [0, 1, 2])
    assert manager.get_computed_blocks("b").blocks == KVCacheBlocks(((1,),))


@pytest.mark.seed("S000-29", "S000-49")
def test_delayed_blocks_are_cached_when_the_engine_says_so(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", [0, 1, 2, 3, 4])
    manager.allocate_slots("a", 5, delay_cache_blocks=True)
    assert keyed(manager) == []
    manager.cache_blocks("a", 3)  # one full block and a half
    assert keyed(manager) == [1]
    manager.cache_blocks("a", 5)
    assert keyed(manager) == [1, 2]
    with unchanged(manager):
        manager.cache_blocks("a", 5)


@pytest.mark.seed("S000-23", "S004-01", "S004-04")
def test_a_hit_takes_its_blocks_out_of_the_middle_of_the_free_queue(backend: Backend) -> None:
    manager = make(backend, 6)
    serve(manager, "a", [0, 1, 2, 3, 4])
    step(manager)
    drop(manager, "a")
    assert queue(manager) == [4, 5, 3, 2, 1]
    # Blocks 1 and 2 are hits at the back, block 4 is the new one from the front.
    assert serve(manager, "b", [0, 1, 2, 3, 9]) == [1, 2, 4]
    assert queue(manager) == [5, 3]


def test_the_search_ends_at_the_first_block_that_is_not_found(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1, 2, 3])
    step(manager)
    manager.evict_blocks([1])
    assert keyed(manager) == [2]
    add(manager, "b", [0, 1, 2, 3, 4])
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((),)), 0)


@pytest.mark.seed("S001-82", "S004-14", "S004-15")
def test_of_two_blocks_with_one_content_the_older_answers_until_it_is_gone(
    backend: Backend,
) -> None:
    manager = make(backend)
    assert serve(manager, "a", [0, 1, 2, 3]) == [1, 2]
    assert serve(manager, "b", [0, 1, 2, 3]) == [1, 3]  # tables are append-only: 3 stays
    step(manager)
    assert keyed(manager) == [1, 2, 3]
    add(manager, "c", [0, 1, 2, 3, 4])
    assert manager.get_computed_blocks("c").blocks == KVCacheBlocks(((1, 2),))
    manager.evict_blocks([2])
    assert manager.get_computed_blocks("c").blocks == KVCacheBlocks(((1, 3),))
    manager.evict_blocks([3])
    assert manager.get_computed_blocks("c").blocks == KVCacheBlocks(((1,),))


@pytest.mark.seed("S000-58")
def test_a_hit_needs_the_block_of_every_group(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2), Group(2)))
    add(manager, "a", [0, 1, 2])
    admit(manager, "a")
    # Each group grows by its two blocks, the first group first.
    assert manager.get_block_ids("a") == ([1, 2], [3, 4])
    add(manager, "b", [0, 1, 2])
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((1,), (3,))), 2)
    manager.evict_blocks([3])
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((), ())), 0)


@pytest.mark.seed("S000-29", "S000-49", "S000-54")
def test_without_caching_nothing_is_found_and_nothing_has_a_key(backend: Backend) -> None:
    manager = make(backend, enable_caching=False)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    manager.cache_blocks("a", 3)
    assert keyed(manager) == []
    assert serve(manager, "b", [0, 1, 2]) == [3, 4]


@pytest.mark.seed("S001-75")
def test_a_preempted_request_finds_its_own_blocks_again(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1, 2, 3, 4])
    step(manager)
    manager.free("a")
    assert (manager.status("a"), manager.num_computed_tokens("a")) == (Status.WAITING, 0)
    assert manager.get_computed_blocks("a") == Hit(KVCacheBlocks(((1, 2),)), 4)


@pytest.mark.seed("S000-42", "S001-84")
def test_reset_forgets_every_key_once_nothing_is_used(backend: Backend) -> None:
    manager = make(backend, 6)
    serve(manager, "a", [0, 1, 2, 3, 4])
    step(manager)
    with unchanged(manager):
        assert not manager.reset_prefix_cache()
    manager.free("a")
    step(manager)
    assert manager.reset_prefix_cache()
    assert step(manager) == [EvictAll()]
    assert keyed(manager) == []
    assert queue(manager) == [4, 5, 3, 2, 1]  # where the free left them
    assert manager.get_computed_blocks("a").num_tokens == 0


@pytest.mark.seed("S000-42")
def test_reset_is_refused_while_the_host_tier_is_used(backend: Backend) -> None:
    manager = make(backend, num_host_blocks=2)
    serve(manager, "a", [0, 1])
    step(manager)
    manager.swap_out(["a"])
    with unchanged(manager):
        assert not manager.reset_prefix_cache()
    manager.free("a")
    assert manager.reset_prefix_cache()
