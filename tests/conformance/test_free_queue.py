# SPDX-License-Identifier: Apache-2.0
"""The free queue: the order in which blocks leave; head, tail and middle cost the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Reason, Refused
from kvcore.pool import free_queue
from kvcore.types.errors import DoubleFree, UnusedBlock
from tests.conformance.pools import KEYS, cached, make_pool, owners, queue
from tests.conftest import Backend


@pytest.mark.seed("S001-11")
def test_a_fresh_queue_is_in_the_order_of_ids(backend: Backend) -> None:
    assert queue(make_pool(backend, 4)) == [0, 1, 2, 3]
    assert queue(make_pool(backend, 4, null_block=True)) == [1, 2, 3]


@pytest.mark.seed("S001-11")
@given(order=st.permutations(range(5)))
def test_a_queue_is_in_the_order_that_it_is_given(order: list[int]) -> None:
    assert list(free_queue.make_free_queue(5, order)) == order


def test_rings_leave_one_after_the_other_and_join_each_other_whole() -> None:
    older, current = free_queue.OLDER, free_queue.CURRENT
    value = free_queue.make_free_queue(5, [3, 1, 0, 4], num_older=2)
    queue = free_queue.FreeQueueTransaction(value)
    queue.append(2, older)
    queue.remove(1)  # from the middle of its ring
    assert list(queue.freeze()) == [3, 2, 0, 4]
    queue.splice(current, behind=older)
    queue.splice(current, behind=older)  # of a ring without blocks: no change
    queue.append(1)
    left: list[int] = []
    while len(left) < 5:
        left.append(queue.front())
        queue.remove(left[-1])
    assert left == [3, 2, 0, 4, 1]
    assert (len(queue.freeze()), queue.front()) == (0, queue.sentinel(current))
    queue.prepend(4)  # no ring has a block: that of this epoch
    assert (queue.first_ring(), list(queue.freeze())) == (current, [4])


@pytest.mark.seed("S001-12", "S004-12")
def test_the_queue_keeps_the_order_of_freeing_and_reverses_nothing(backend: Backend) -> None:
    pool = make_pool(backend, 5)
    pool.call("take", 5)
    pool.call("release", [3])
    pool.call("release", [0, 4])  # who wants the tail first names it first
    pool.call("release", [2, 1])
    assert queue(pool) == [3, 0, 4, 2, 1]
    assert pool.call("take", 2) == (3, 0)


@pytest.mark.seed("S001-13", "S001-20", "S000-34")
def test_taking_leaves_from_the_head_in_order_and_is_refused_as_a_whole(backend: Backend) -> None:
    pool = make_pool(backend, 4)
    assert pool.call("take", 1) == (0,)
    assert pool.call("take", 2) == (1, 2)
    before = pool.dump()
    assert pool.call("take", 2) == Refused(Reason.LATER, needed=2, available=1)
    assert pool.call("take", 0) == ()
    assert pool.dump() == before
    assert pool.call("take", 1) == (3,)
    assert pool.call("take", 1) == Refused(Reason.LATER, needed=1, available=0)


@pytest.mark.seed("S001-14", "S004-01", "S004-04")
@pytest.mark.parametrize(
    ("block", "left"), [(2, [3, 1, 0]), (3, [2, 1, 0]), (1, [2, 3, 0]), (0, [2, 3, 1])]
)
def test_a_block_leaves_from_anywhere_and_its_neighbours_meet(
    backend: Backend, block: int, left: list[int]
) -> None:
    pool = cached(backend, 4, [2, 3, 1, 0])
    pool.call("touch", [block])
    assert queue(pool) == left
    pool.call("release", [block])
    assert queue(pool) == [*left, block]
    # Links in both directions hold: all leave once, in this order.
    assert pool.call("take", 4) == (*left, block)


@pytest.mark.seed("S001-15", "S001-07")
def test_a_block_in_use_is_not_taken_out_of_the_queue_twice(backend: Backend) -> None:
    pool = cached(backend, 3, [0, 1, 2])
    pool.call("touch", [1])
    pool.call("touch", [1])  # a second owner; it is not in the queue any more
    assert (queue(pool), owners(pool)) == ([0, 2], [0, 2, 0])
    pool.call("release", [1])
    assert (queue(pool), owners(pool)) == ([0, 2], [0, 1, 0])


@pytest.mark.seed("S001-15")
def test_what_no_queue_would_notice_is_misuse(backend: Backend) -> None:
    pool = make_pool(backend, 3)
    pool.call("take", 1)
    with pytest.raises(UnusedBlock):
        pool.call("touch", [1])  # free, and nothing in it to be hit
    pool.call("release", [0])
    with pytest.raises(DoubleFree):
        pool.call("release", [0])
    assert (queue(pool), owners(pool)) == ([1, 2, 0], [0, 0, 0])


@pytest.mark.seed("S001-16", "S001-19", "S001-18")
def test_one_block_is_head_and_tail_and_an_empty_queue_fills_again(backend: Backend) -> None:
    pool = make_pool(backend, 1)
    for _ in range(2):
        assert queue(pool) == [0]
        assert pool.call("take", 1) == (0,)
        assert queue(pool) == []
        pool.call("release", [0])
    both = make_pool(backend, 2)
    both.call("take", 2)
    both.call("release", [1])
    both.call("release", [0])
    assert queue(both) == [1, 0]
    assert both.call("take", 2) == (1, 0)


@pytest.mark.seed("S001-18")
def test_a_queue_of_no_blocks_is_empty(backend: Backend) -> None:
    # The one block of this pool is the null block, so there is nothing to hand out.
    pool = make_pool(backend, 1, null_block=True)
    assert queue(pool) == []
    assert pool.call("take", 1) == Refused(Reason.NEVER, needed=1, available=0)
    assert list(free_queue.make_free_queue(0, [])) == []


@pytest.mark.seed("S001-17")
def test_the_queue_is_read_without_taking_from_it(backend: Backend) -> None:
    pool = cached(backend, 4, [3, 0, 2, 1])
    assert queue(pool) == queue(pool) == [3, 0, 2, 1]
    assert pool.call("take", 4) == (3, 0, 2, 1)


def test_a_block_placed_by_priority_passes_all_that_were_used_before_it(backend: Backend) -> None:
    pool = make_pool(backend, 4, eviction="priority")
    pool.call("take", 4)
    for block in range(4):
        pool.call("publish", block, KEYS[block])
        pool.call("set_priority", [block], float(block), None)
    for block in (3, 1, 0):
        pool.call("release", [block])
    pool.call("release", [2])  # between 1 and 3; the look begins at 3 and at 0, the last that came
    assert queue(pool) == [0, 1, 2, 3]


@pytest.mark.seed("S001-20", "S001-16")
def test_several_blocks_join_in_the_order_given_and_none_is_no_change(backend: Backend) -> None:
    pool = make_pool(backend, 5)
    pool.call("take", 4)
    pool.call("release", [2, 0, 3])
    assert queue(pool) == [4, 2, 0, 3]
    before = pool.dump()
    pool.call("release", [])
    pool.call("touch", [])
    assert pool.dump() == before


@pytest.mark.seed("S001-10", "S004-01")
def test_a_block_leaves_from_the_middle_by_its_own_links_alone() -> None:
    queue = free_queue.FreeQueueTransaction(free_queue.make_free_queue(9, range(9)))
    queue.remove(8)  # a value is not changed in place
    for block in {*range(11)} - {3, 4, 5}:
        queue.following[block] = queue.preceding[block] = block  # a walk would end here
    queue.remove(4)
    links = [(queue.preceding[block], queue.following[block]) for block in (3, 5)]
    assert links == [(2, 5), (3, 6)]
    assert (4 in queue, queue.length) == (False, 7)
