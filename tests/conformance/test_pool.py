# SPDX-License-Identifier: Apache-2.0
"""Blocks and their pool: owners, keys, and what taking, hitting and freeing do to both."""

from __future__ import annotations

import pytest

from kvcore import Allocate, Evict, Free, Touch
from kvcore.pool import transitions
from kvcore.types.errors import AlreadyPublished, DoubleFree, UnknownBlock
from tests.conformance.pools import KEYS, cached, keys, make_pool, owners, queue
from tests.conftest import Backend
from tests.helpers.stories import drop, make, serve, step


@pytest.mark.seed("S001-06")
def test_a_fresh_block_has_no_owner_and_no_key_and_lies_in_the_queue(backend: Backend) -> None:
    pool = make_pool(backend, 3)
    assert pool.dump() == ([0, 0, 0], [None, None, None], [0, 1, 2], [0, 0, 0])


@pytest.mark.seed("S001-07", "S004-11")
def test_owners_come_and_go_by_one_and_never_below_none(backend: Backend) -> None:
    pool = make_pool(backend, 2)
    pool.call("take", 1)
    assert owners(pool) == [1, 0]
    pool.call("touch", [0])
    assert owners(pool) == [2, 0]
    pool.call("release", [0])
    assert (owners(pool), queue(pool)) == ([1, 0], [1])
    pool.call("release", [0])
    assert (owners(pool), queue(pool)) == ([0, 0], [1, 0])
    with pytest.raises(DoubleFree):
        pool.call("release", [0])
    assert (owners(pool), queue(pool)) == ([0, 0], [1, 0])


@pytest.mark.seed("S001-08")
def test_a_block_gets_another_key_only_after_it_lost_its_own(backend: Backend) -> None:
    pool = make_pool(backend, 2)
    pool.call("take", 1)
    pool.call("publish", 0, KEYS[0])
    for key in (KEYS[0], KEYS[1]):
        with pytest.raises(AlreadyPublished):
            pool.call("publish", 0, key)
    assert keys(pool) == [KEYS[0], None]
    pool.call("unpublish", 0)
    assert (keys(pool), pool.call("lookup", KEYS[0])) == ([None, None], None)
    pool.call("publish", 0, KEYS[1])
    assert pool.call("lookup", KEYS[1]) == 0


@pytest.mark.seed("S001-09")
def test_a_pool_prints_its_blocks_by_number(backend: Backend) -> None:
    # A chain of blocks that printed each other would not end within a few hundred of them.
    manager = make(backend, 5_000, 2)
    serve(manager, "a", range(40))
    printed = repr(manager.state().device.queue)
    assert "4999" in printed
    assert printed.count("FreeQueue(") == 1
    assert len(repr(transitions.make_pool(5_000))) < 40 * 5_000


@pytest.mark.seed("S000-34", "S000-35", "S004-08")
def test_taken_blocks_come_from_the_head_and_forget_what_they_held(backend: Backend) -> None:
    pool = cached(backend, 4, [2, 0, 3, 1])
    assert pool.call("take", 2) == (2, 0)
    assert pool.commands() == [Evict(2, KEYS[2]), Allocate(2), Evict(0, KEYS[0]), Allocate(0)]
    assert keys(pool) == [None, KEYS[1], None, KEYS[3]]
    found = [pool.call("lookup", key) for key in KEYS]
    assert found == [None, 1, None, 3]
    assert (owners(pool), queue(pool)) == ([1, 0, 1, 0], [3, 1])


@pytest.mark.seed("S000-38", "S004-11")
def test_all_owners_are_dropped_before_the_first_block_joins_the_queue(backend: Backend) -> None:
    pool = make_pool(backend, 4)
    pool.call("take", 4)
    pool.call("touch", [1, 2])
    pool.commands()
    # Block 2 has two owners, of which this drops both; block 1 keeps one.
    pool.call("release", [2, 1, 0, 2])
    assert owners(pool) == [0, 1, 0, 1]
    # It joins once, after both were dropped, so behind 0.
    assert queue(pool) == [0, 2]
    assert pool.commands() == [Free(0, False), Free(2, False)]


@pytest.mark.seed("S000-38", "S000-60", "S001-83")
def test_the_null_block_has_no_owners_to_drop_or_to_add(backend: Backend) -> None:
    pool = make_pool(backend, 3, null_block=True)
    assert pool.call("take", 2) == (1, 2)
    for name in ("release", "touch", "pin"):
        with pytest.raises(UnknownBlock):
            pool.call(name, [1, 0])
    assert (owners(pool), queue(pool)) == ([0, 1, 1], [])


@pytest.mark.seed("S000-60")
def test_of_n_blocks_one_is_null_and_is_never_given(backend: Backend) -> None:
    manager = make(backend, 4)
    assert manager.num_free_blocks == 3
    assert serve(manager, "a", range(6)) == [1, 2, 3]
    assert (manager.num_free_blocks, manager.usage) == (0, 1.0)
    step(manager)
    drop(manager, "a")
    assert sorted(manager.state().device.queue) == [1, 2, 3]


@pytest.mark.seed("S001-82", "S004-14")
def test_of_two_blocks_with_one_key_the_first_published_answers_then_the_next(
    backend: Backend,
) -> None:
    pool = make_pool(backend, 3)
    pool.call("take", 3)
    for block in (2, 0, 1):  # not the order of their ids
        pool.call("publish", block, KEYS[0])
    found = []
    for _ in range(3):
        found.append(pool.call("lookup", KEYS[0]))
        pool.call("unpublish", found[-1])
    assert found == [2, 0, 1]
    assert pool.call("lookup", KEYS[0]) is None


@pytest.mark.seed("S001-82")
def test_evicting_the_first_of_two_leaves_the_second_to_answer(backend: Backend) -> None:
    pool = make_pool(backend, 2)
    pool.call("take", 2)
    pool.call("publish", 1, KEYS[0])
    pool.call("publish", 0, KEYS[0])
    pool.call("release", [1])
    assert pool.call("lookup", KEYS[0]) == 1
    pool.call("take", 1)
    assert pool.call("lookup", KEYS[0]) == 0


@pytest.mark.seed("S001-83", "S004-08", "S004-04")
def test_a_hit_adds_an_owner_and_leaves_the_queue_at_once(backend: Backend) -> None:
    pool = cached(backend, 3, [0, 1, 2])
    pool.call("touch", [1])
    assert (owners(pool), queue(pool)) == ([0, 1, 0], [0, 2])
    assert pool.commands() == [Touch(1)]
    pool.call("touch", [1])  # in use: one owner more, and nothing else
    assert (owners(pool), queue(pool)) == ([0, 2, 0], [0, 2])
    assert pool.commands() == []
    assert keys(pool)[1] == KEYS[1]


@pytest.mark.seed("S000-41")
def test_a_forgotten_block_stays_where_it_is(backend: Backend) -> None:
    pool = cached(backend, 3, [2, 0, 1])
    pool.call("touch", [2])
    pool.call("unpublish", 2)
    pool.call("unpublish", 0)
    assert pool.dump() == ([0, 0, 1], [None, KEYS[1], None], [0, 1], [0, 0, 0])
    pool.commands()
    pool.call("unpublish", 0)  # it has none any more
    assert pool.commands() == []


@pytest.mark.seed("S004-03")
def test_the_pool_never_grows_nor_shrinks(backend: Backend) -> None:
    pool = make_pool(backend, 4)
    for turn in range(40):
        taken = pool.call("take", 1 + turn % 4)
        pool.call("publish", taken[0], KEYS[turn % 4])
        assert sorted([*queue(pool), *taken]) == [0, 1, 2, 3]
        pool.call("release", taken)
    assert sorted(queue(pool)) == [0, 1, 2, 3]
    # A free block can still be hit: that is what the queue and the index have in common.
    free_and_keyed = [block for block in queue(pool) if keys(pool)[block] is not None]
    assert free_and_keyed
    assert all(pool.call("lookup", keys(pool)[block]) is not None for block in free_and_keyed)
