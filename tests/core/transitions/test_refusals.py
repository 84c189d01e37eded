# SPDX-License-Identifier: Apache-2.0
"""Refusals: exact in both directions, LATER distinguished from NEVER, and without effect.

Four usable blocks of two tokens unless a test says otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import Appended, Group, KVCacheBlocks, KVCacheManager, Reason, Refused, Verdict
from kvcore.pool import transitions
from tests.conftest import Backend
from tests.helpers.stories import add, blocks, drop, make, queue, serve, step, unchanged

LATER, NEVER = Reason.LATER, Reason.NEVER


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Let "a" have three computed tokens in blocks 1 and 2; 3 and 4 are free."""
    made = make(backend, 5, num_host_blocks=2)
    serve(made, "a", [0, 1, 2])
    step(made)
    return made


def ask(manager: KVCacheManager, request_id: str, count: int, **options: Any) -> Refused | None:
    """Allocate; the verdict before it must say the same, and a refusal must change nothing."""
    before = manager.encode()
    verdict = manager.can_allocate(request_id, count, **options)
    assert manager.encode() == before
    value = manager.allocate_slots(request_id, count, **options)
    if isinstance(value, Refused):
        assert manager.encode() == before
        assert verdict.value == value.reason.value
        return value
    assert verdict is Verdict.OK
    return None


@pytest.mark.seed("S000-01", "S000-18", "S001-71")
def test_what_does_not_fit_now_is_refused_by_the_numbers(manager: KVCacheManager) -> None:
    add(manager, "b", range(50, 56))
    # Five tokens are three blocks, two are free.
    assert ask(manager, "b", 5) == Refused(LATER, needed=3, available=2)
    # Four are two blocks: that fits to the last one.
    assert ask(manager, "b", 4) is None
    assert manager.num_free_blocks == 0


def test_given_back_blocks_make_a_later_call_fit(manager: KVCacheManager) -> None:
    add(manager, "b", range(50, 56))
    assert ask(manager, "b", 5) == Refused(LATER, 3, 2)
    manager.free("a")
    assert ask(manager, "b", 5) is None


def test_what_no_empty_pool_can_give_is_never(manager: KVCacheManager) -> None:
    add(manager, "b", range(50, 60))
    # Nine tokens are five blocks of a pool that has four.
    assert ask(manager, "b", 9) == Refused(NEVER, needed=5, available=2)
    # Eight are four: not now, but some time.
    assert ask(manager, "b", 8) == Refused(LATER, needed=4, available=2)


def test_never_is_judged_by_the_whole_request_not_by_what_it_lacks(
    manager: KVCacheManager,
) -> None:
    manager.add_tokens("a", range(6))
    assert ask(manager, "a", 5) is None  # eight tokens, all four blocks
    # One block more is one that no pool of four can give to a request that holds four.
    assert ask(manager, "a", 1) == Refused(NEVER, needed=1, available=0)


@pytest.mark.seed("X-14")
def test_a_refusal_is_false_and_what_fits_is_true(manager: KVCacheManager) -> None:
    add(manager, "b", range(50, 56))
    assert not manager.allocate_slots("b", 5)
    assert manager.allocate_slots("b", 4)
    # Also if no block was needed: the third token of "a" left a slot.
    manager.add_tokens("a", [3])
    grown = manager.allocate_slots("a", 1)
    assert grown == KVCacheBlocks(((),))
    assert bool(grown)


@pytest.mark.seed("S000-02", "S000-32")
def test_lookahead_needs_blocks_like_any_slot(manager: KVCacheManager) -> None:
    add(manager, "b", range(50, 56))
    assert ask(manager, "b", 4, num_lookahead_tokens=1) == Refused(LATER, 3, 2)
    assert ask(manager, "b", 3, num_lookahead_tokens=1) is None


@pytest.mark.seed("S000-02")
def test_external_tokens_need_blocks_like_any_slot(manager: KVCacheManager) -> None:
    add(manager, "b", range(50, 56))
    assert ask(manager, "b", 1, num_external_computed_tokens=4) == Refused(LATER, 3, 2)
    assert ask(manager, "b", 1, num_external_computed_tokens=3) is None


@pytest.mark.seed("S000-19")
def test_hits_that_are_in_use_cost_nothing(manager: KVCacheManager) -> None:
    serve(manager, "b", [60])
    # One block is free: a hit of block 1 and one new block fit.
    add(manager, "c", [0, 1, 5])
    assert ask(manager, "c", 1, hit=manager.get_computed_blocks("c")) is None
    assert blocks(manager, "c") == [1, 4]


@pytest.mark.seed("S000-19", "S001-72")
def test_hits_in_the_free_queue_cost_what_they_take_out_of_it(manager: KVCacheManager) -> None:
    serve(manager, "b", [60, 61, 62])
    manager.free("a")
    assert queue(manager) == [2, 1]
    # Hit 1 leaves the queue, and of the two free blocks one is left for two new ones.
    add(manager, "c", [0, 1, 5, 6, 7])
    hit = manager.get_computed_blocks("c")
    assert hit.num_tokens == 2
    assert ask(manager, "c", 3, hit=hit) == Refused(LATER, needed=3, available=2)
    assert ask(manager, "c", 2, hit=hit) is None
    assert blocks(manager, "c") == [1, 2]


@pytest.mark.seed("S000-09", "S000-10")
def test_the_whole_sequence_can_be_asked_to_fit(manager: KVCacheManager) -> None:
    add(manager, "b", range(50, 56))
    # The first chunk needs one block, all six tokens three.
    assert ask(manager, "b", 2, full_sequence_must_fit=True) == Refused(LATER, 3, 2)
    manager.truncate("b", 4)
    assert ask(manager, "b", 2, full_sequence_must_fit=True) is None
    # It is asked, not reserved.
    assert blocks(manager, "b") == [3]


def test_a_copy_on_write_needs_its_block(manager: KVCacheManager) -> None:
    manager.fork("a", "b")
    serve(manager, "c", [60, 61, 62])
    step(manager)
    # No request has to grow, but the first of two writers needs a copy of block 2.
    manager.add_tokens("a", [3])
    assert ask(manager, "a", 1) == Refused(LATER, needed=1, available=0)
    drop(manager, "b")
    assert ask(manager, "a", 1) is None


def test_every_group_needs_its_own_blocks(backend: Backend) -> None:
    manager = make(backend, 5, groups=(Group(2), Group(2)))
    add(manager, "b", range(6))
    assert ask(manager, "b", 5) == Refused(NEVER, needed=6, available=4)
    assert ask(manager, "b", 4) is None


def test_append_goes_as_far_as_it_can_and_no_further(manager: KVCacheManager) -> None:
    serve(manager, "b", [60, 61])
    serve(manager, "c", [70, 71])
    step(manager)
    # "a" has a slot left, "b" and "c" each need a block, and there is none.
    appended = manager.append(["a", "b", "c"], [7, 8, 9])
    assert appended == Appended(1, Refused(LATER, needed=1, available=0))
    assert not appended
    assert [manager.num_tokens(name) for name in "abc"] == [4, 2, 2]
    assert [manager.num_computed_tokens(name) for name in "abc"] == [4, 2, 2]
    manager.free("a")
    grown = manager.append(["b", "c"], [8, 9])
    assert grown == Appended(2)
    assert grown


def test_an_append_whose_first_is_refused_changes_nothing(manager: KVCacheManager) -> None:
    serve(manager, "b", [60, 61])
    serve(manager, "c", [70, 71])
    step(manager)
    with unchanged(manager):
        assert manager.append(["b", "a"], [8, 7]) == Appended(0, Refused(LATER, 1, 0))


def test_the_host_tier_refuses_by_its_own_numbers(manager: KVCacheManager) -> None:
    # The host has two blocks. Three can never go there, one of them is taken soon.
    assert serve(manager, "b", [60, 61]) == [3]
    step(manager)
    with unchanged(manager):
        assert manager.swap_out(["a", "b"]) == Refused(NEVER, needed=3, available=2)
    assert manager.swap_out(["b"])
    with unchanged(manager):
        assert manager.swap_out(["a"]) == Refused(LATER, needed=2, available=1)
    drop(manager, "b")
    assert manager.swap_out(["a"])


def test_the_way_back_is_refused_until_there_are_blocks(manager: KVCacheManager) -> None:
    manager.swap_out(["a"])
    step(manager)
    # The queue is 3, 4, 2, 1: three blocks for "b" leave block 1, which still holds tokens 0, 1.
    assert serve(manager, "b", range(60, 65)) == [3, 4, 2]
    step(manager)
    with unchanged(manager):
        # One block is to be copied, and the hit is in the free queue itself.
        assert manager.swap_in(["a"]) == Refused(LATER, needed=2, available=1)
    manager.truncate("b", 4)
    assert manager.swap_in(["a"])
    assert blocks(manager, "a") == [1, 2]


def test_requests_that_do_not_fit_together_are_never_swapped_in_together(
    backend: Backend,
) -> None:
    manager = make(backend, 5, num_host_blocks=8)
    for request_id, start in (("a", 0), ("b", 50)):
        serve(manager, request_id, range(start, start + 5))  # three blocks each
        step(manager)
        manager.swap_out([request_id])
    with unchanged(manager):
        assert manager.swap_in(["a", "b"]) == Refused(NEVER, needed=6, available=4)
    assert manager.swap_in(["a"])


def test_a_refusal_leaves_no_trace_for_runtime_mirror_and_statistics(backend: Backend) -> None:
    manager = make(backend, 3, enable_events=True)
    serve(manager, "a", [0, 1])
    step(manager)
    manager.take_events()
    manager.take_stats()
    add(manager, "b", [0, 1, 2, 3, 4])
    hit = manager.get_computed_blocks("b")
    with unchanged(manager):
        assert manager.allocate_slots("b", 3, hit) == Refused(NEVER, needed=2, available=1)
    assert step(manager) == []
    assert manager.take_events() == []
    assert manager.take_stats().requests == 0


def test_the_pool_layer_refuses_as_a_whole() -> None:
    pool = transitions.make_pool(3)
    taken = transitions.take(pool, 2)
    assert taken.value == (0, 1)
    refused = transitions.take(taken.state, 2)
    assert refused.value == Refused(LATER, needed=2, available=1)
    assert (refused.state, refused.commands) == (taken.state, ())
    assert transitions.take(taken.state, 4).value == Refused(NEVER, needed=4, available=1)


def test_a_refusal_counts_what_unfinished_operations_alone_hold(backend: Backend) -> None:
    # Of seven usable blocks "a" loads two and is freed, "b" holds three and one of them is stored.
    manager = make(backend, 8)
    add(manager, "a", range(7))
    manager.load("a", 4)
    serve(manager, "b", range(20, 25))
    step(manager)
    manager.free("a")
    manager.store([manager.get_block_ids("b")[0][0]])
    step(manager)
    add(manager, "c", range(30, 36))
    assert manager.allocate_slots("c", 6) == Refused(Reason.LATER, 3, 2, 2)
    for operation in (0, 1):
        manager.complete_operation(operation, True)
    assert manager.allocate_slots("c", 6)
