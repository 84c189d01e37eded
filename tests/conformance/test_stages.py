# SPDX-License-Identifier: Apache-2.0
"""The stages of an allocation: what it needs, what it attaches, what it takes, what it publishes.

Blocks hold two tokens; a fresh pool gives 1, 2, 3, ...
"""

from __future__ import annotations

import pytest

from kvcore import BlockStored, Group, KVCacheBlocks, Reason, Refused, Request
from kvcore.types.errors import NoEncoderGroup
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

CROSS = Group(2, kind="cross_attention")


@pytest.mark.seed("S000-18", "S000-10")
@pytest.mark.parametrize("num_free", [0, 1, 2, 3])
def test_refused_is_exactly_what_needs_more_than_is_free(backend: Backend, num_free: int) -> None:
    manager = make(backend, 6)
    add(manager, "a", range(10))
    manager.allocate_slots("a", 2 * (5 - num_free))
    step(manager)
    add(manager, "b", range(50, 60))
    with unchanged(manager):
        refused = manager.allocate_slots("b", 2 * num_free + 1)
        assert refused == Refused(Reason.LATER, needed=num_free + 1, available=num_free)
    if num_free:
        assert manager.allocate_slots("b", 2 * num_free)
        assert manager.num_free_blocks == 0


@pytest.mark.seed("S000-19", "S001-72")
def test_a_first_call_pays_for_new_blocks_and_for_hits_that_nobody_holds(backend: Backend) -> None:
    manager = make(backend, 5)
    serve(manager, "a", [0, 1, 2, 3, 4])
    step(manager)
    manager.free("a")
    add(manager, "held", [0, 1, 7])
    manager.allocate_slots("held", 1, manager.get_computed_blocks("held"))
    step(manager)
    # Block 1 is held, 2 is cached and free, and there is one free block more: "held" took one.
    assert (queue(manager), owners(manager, 1)) == ([3, 2], 1)
    add(manager, "b", [0, 1, 2, 3, 5, 6, 8])
    hit = manager.get_computed_blocks("b")
    assert hit.blocks == KVCacheBlocks(((1, 2),))
    # Seven tokens are four blocks, of which two are hits; and hit 2 leaves the queue itself.
    with unchanged(manager):
        assert manager.allocate_slots("b", 3, hit) == Refused(Reason.LATER, needed=3, available=2)
    assert manager.allocate_slots("b", 2, hit) == KVCacheBlocks(((3,),))
    assert (blocks(manager, "b"), queue(manager)) == ([1, 2, 3], [])


@pytest.mark.seed("S000-20")
def test_a_running_request_pays_for_what_its_table_lacks(backend: Backend) -> None:
    manager = make(backend, 5)
    add(manager, "a", range(8))
    manager.allocate_slots("a", 3, num_lookahead_tokens=2)
    step(manager)
    serve(manager, "b", [90])
    # Five slots are three blocks: up to token 6 there is nothing to pay, with nothing free.
    assert (blocks(manager, "a"), manager.num_free_blocks) == ([1, 2, 3], 0)
    assert manager.allocate_slots("a", 3) == KVCacheBlocks(((),))
    with unchanged(manager):
        assert manager.allocate_slots("a", 1) == Refused(Reason.LATER, needed=1, available=0)


@pytest.mark.seed("S000-20")
def test_blocks_to_spare_in_one_group_do_not_pay_for_another(backend: Backend) -> None:
    manager = make(backend, 6, groups=(Group(2), Group(8)))
    serve(manager, "a", [0])
    step(manager)
    serve(manager, "b", [50, 51])
    step(manager)
    # The second group has seven slots to spare, the first has one; one block is free.
    assert manager.num_free_blocks == 1
    manager.add_tokens("a", [1, 2, 3, 4])
    with unchanged(manager):
        assert manager.allocate_slots("a", 4) == Refused(Reason.LATER, needed=2, available=1)
    assert manager.allocate_slots("a", 3) == KVCacheBlocks(((5,), ()))


@pytest.mark.seed("S000-20")
def test_blocks_to_spare_do_not_pay_for_a_copy(backend: Backend) -> None:
    manager = make(backend, 5)
    add(manager, "a", [0])
    manager.allocate_slots("a", 1, num_lookahead_tokens=4)
    step(manager)
    manager.fork("a", "b")
    serve(manager, "c", [90])
    assert (blocks(manager, "a"), manager.num_free_blocks) == ([1, 2, 3], 0)
    # Two blocks are more than the second token needs, but the one that it lies in is shared.
    manager.add_tokens("a", [1])
    with unchanged(manager):
        assert manager.allocate_slots("a", 1) == Refused(Reason.LATER, needed=1, available=0)


@pytest.mark.seed("S000-23")
def test_every_group_takes_its_hits_before_any_takes_new_blocks(backend: Backend) -> None:
    manager = make(backend, 5, groups=(Group(2), Group(2)))
    add(manager, "a", [0, 1, 2, 3])
    admit(manager, "a")
    assert manager.get_block_ids("a") == ([1, 2], [3, 4])
    step(manager)
    manager.free("a")
    for block in (1, 2, 4):  # used again one after the other, they go to the back
        manager.pin([block])
        manager.unpin([block])
    assert queue(manager) == [3, 1, 2, 4]
    add(manager, "b", [0, 1, 9])
    # The first group's hit is 1 and the second's is 3, at the head: the first group's new block
    # must not be that one.
    hit = manager.get_computed_blocks("b")
    assert hit.blocks == KVCacheBlocks(((1,), (3,)))
    assert manager.allocate_slots("b", 1, hit) == KVCacheBlocks(((2,), (4,)))
    assert manager.get_block_ids("b") == ([1, 2], [3, 4])


@pytest.mark.seed("S000-27", "S000-31")
def test_what_was_hit_is_neither_cached_nor_announced_again(backend: Backend) -> None:
    manager = make(backend, enable_events=True)
    serve(manager, "a", [0, 1, 2, 3, 4])
    step(manager)
    drop(manager, "a")
    manager.take_events()
    serve(manager, "b", [0, 1, 2, 3, 5, 6, 7])
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    # Of its three full blocks two were hits.
    assert (stored.tokens, len(stored.block_hashes)) == ((5, 6), 1)
    step(manager)
    manager.append(["b"], [8])
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.tokens == (7, 8)
    step(manager)


@pytest.mark.seed("S000-27")
def test_a_hit_that_lost_its_content_is_not_cached_again_by_who_hit_it(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1, 2, 3, 4])
    step(manager)
    add(manager, "b", [0, 1, 2, 3, 5, 6])
    hit = manager.get_computed_blocks("b")
    manager.allocate_slots("b", 2, hit, delay_cache_blocks=True)
    step(manager)
    manager.evict_blocks([1])
    # Of three full blocks the first two were cached when they were hit; one is left to cache.
    manager.cache_blocks("b", 6)
    assert keyed(manager) == [2, 4]


@pytest.mark.seed("S000-31")
def test_a_block_is_cached_under_its_group(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2), Group(2)))
    add(manager, "a", [0, 1, 2])
    admit(manager, "a")
    first, second = (manager.state().device.keys[block] for block in (1, 3))
    assert first is not None
    assert second is not None
    assert first[:32] == second[:32]
    assert (first[32:], second[32:]) == (bytes(4), (1).to_bytes(4, "big"))


@pytest.mark.seed("S000-30", "S001-74")
def test_drafts_are_given_slots_and_are_not_cached(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    manager.add_tokens("a", [3])
    manager.add_drafts("a", [4, 5, 6])
    # One token and three drafts: slots 3 to 6, of which two blocks are new.
    assert manager.allocate_slots("a", 4) == KVCacheBlocks(((3, 4),))
    assert manager.num_computed_tokens("a") == 7
    # Tokens 2 and 3 are the request's; what is behind them may be wrong.
    assert keyed(manager) == [1, 2]
    step(manager)
    manager.accept("a", 2)
    assert (manager.num_computed_tokens("a"), manager.num_tokens("a")) == (6, 6)
    # Accepted drafts are tokens, and their block is cached with the next call; 6 was rejected.
    manager.add_tokens("a", [7])
    assert manager.allocate_slots("a", 1) == KVCacheBlocks(((),))
    assert keyed(manager) == [1, 2, 3]
    assert blocks(manager, "a") == [1, 2, 3, 4]


@pytest.mark.seed("S000-20")
def test_blocks_of_rejected_drafts_are_used_before_others(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0])
    step(manager)
    manager.add_drafts("a", [1, 2, 3, 4])
    manager.allocate_slots("a", 4)
    step(manager)
    manager.accept("a", 0)
    # Three blocks for one token: the next call needs less than it holds, and that is no credit.
    assert (blocks(manager, "a"), manager.num_computed_tokens("a")) == ([1, 2, 3], 1)
    serve(manager, "b", range(50, 62))
    assert manager.num_free_blocks == 0
    manager.add_tokens("a", [7])
    assert manager.allocate_slots("a", 1) == KVCacheBlocks(((),))


@pytest.mark.seed("S000-28", "S000-36")
def test_cross_attention_grows_by_the_encoders_tokens_alone(backend: Backend) -> None:
    manager = make(backend, enable_caching=False, groups=(Group(2), CROSS))
    add(manager, "a", range(6))
    # Five encoder tokens are three blocks, two tokens of the request are one.
    grown = manager.allocate_slots("a", 2, num_encoder_tokens=5)
    assert grown == KVCacheBlocks(((1,), (2, 3, 4)))
    step(manager)
    assert manager.allocate_slots("a", 4) == KVCacheBlocks(((5, 6), ()))
    assert [len(ids) for ids in manager.get_block_ids("a")] == [3, 3]


@pytest.mark.seed("S000-36")
def test_encoder_tokens_are_no_matter_of_other_groups(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", range(6))
    with unchanged(manager), pytest.raises(NoEncoderGroup):
        manager.allocate_slots("a", 2, num_encoder_tokens=5)
    assert manager.allocate_slots("a", 2, num_encoder_tokens=0) == KVCacheBlocks(((1,),))


@pytest.mark.seed("S000-29", "S000-49")
def test_delayed_caching_is_finished_once_and_up_to_where_it_is_told(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", [0, 1, 2, 3, 4])
    manager.allocate_slots("a", 1, num_external_computed_tokens=4, delay_cache_blocks=True)
    assert keyed(manager) == []
    step(manager)
    manager.cache_blocks("a", 3)
    assert keyed(manager) == [1]
    manager.cache_blocks("a", 4)
    assert keyed(manager) == [1, 2]
    add(manager, "b", [0, 1, 2, 3, 9])
    assert manager.get_computed_blocks("b").blocks == KVCacheBlocks(((1, 2),))


@pytest.mark.seed("S000-49")
def test_without_caching_there_is_nothing_to_finish(backend: Backend) -> None:
    manager = make(backend, enable_caching=False)
    # Not even if the engine brings hashes of its own.
    manager.add_request(Request("a", [0, 1, 2, 3], block_hashes=[bytes(32), b"1" * 32]))
    manager.allocate_slots("a", 3)
    assert keyed(manager) == []
    manager.allocate_slots("a", 1, delay_cache_blocks=True)
    with unchanged(manager):
        manager.cache_blocks("a", 4)
    assert keyed(manager) == []


@pytest.mark.seed("S000-38", "S000-37")
def test_what_two_requests_hold_stays_and_what_only_one_held_joins_tail_first(
    backend: Backend,
) -> None:
    manager = make(backend, 8)
    serve(manager, "a", [0, 1, 2, 3, 4])
    serve(manager, "b", [0, 1, 5, 6, 7])
    step(manager)
    assert (blocks(manager, "a"), blocks(manager, "b")) == ([1, 2, 3], [1, 4, 5])
    manager.free("b")
    assert (queue(manager), owners(manager, 1)) == ([6, 7, 5, 4], 1)
    manager.free("a")
    assert queue(manager) == [6, 7, 5, 4, 3, 2, 1]


@pytest.mark.seed("S000-60", "S000-56")
def test_an_idle_pool_of_n_has_one_block_less_to_give(backend: Backend) -> None:
    manager = make(backend, 3)
    assert (manager.num_free_blocks, manager.usage) == (2, 0.0)
    serve(manager, "a", [0])
    assert manager.usage == 0.5
    add(manager, "b", range(6))
    # Three blocks are more than such a pool ever gives.
    assert manager.allocate_slots("b", 6) == Refused(Reason.NEVER, needed=3, available=1)
