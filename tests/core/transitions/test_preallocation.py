# SPDX-License-Identifier: Apache-2.0
"""Preallocation: blocks for the growth of a request, as far as blocks are spare.

Source: S004-06, 07, 18.
"""

from __future__ import annotations

import pytest

from kvcore import Group, KVCacheBlocks, Reason, Refused
from tests.conftest import Backend
from tests.helpers.stories import add, admit, blocks, drop, make, queue, serve, step


@pytest.mark.seed("S004-06", "S004-07")
def test_a_request_that_grows_takes_its_spare_room_with_it(backend: Backend) -> None:
    manager = make(backend, num_preallocate_tokens=3)  # two blocks of two tokens
    add(manager, "a", [0])
    assert manager.allocate_slots("a", 1) == KVCacheBlocks(((1, 2, 3),))
    step(manager)
    # Five more tokens need no block; the seventh needs one, and takes two more.
    for token in range(1, 6):
        manager.append(["a"], [token])
        manager.take_batch()
    assert blocks(manager, "a") == [1, 2, 3]
    manager.append(["a"], [6])
    assert blocks(manager, "a") == [1, 2, 3, 4, 5, 6]


@pytest.mark.seed("S004-07")
def test_spare_room_is_only_what_is_free(backend: Backend) -> None:
    manager = make(backend, 4, num_preallocate_tokens=8)
    # One block is needed, four would be spare, two are there.
    assert serve(manager, "a", [0]) == [1, 2, 3]
    assert manager.num_free_blocks == 0


@pytest.mark.seed("S004-07")
def test_a_request_is_never_refused_for_its_spare_room(backend: Backend) -> None:
    manager = make(backend, 3, num_preallocate_tokens=8)
    assert serve(manager, "a", [0, 1, 2]) == [1, 2]
    add(manager, "b", [5])
    # But spare room is held: another request must wait for it.
    assert manager.allocate_slots("b", 1) == Refused(Reason.LATER, needed=1, available=0)


@pytest.mark.seed("S004-07")
def test_spare_room_ends_at_the_model_length(backend: Backend) -> None:
    manager = make(backend, num_preallocate_tokens=100, max_model_len=5)
    # Five tokens are three blocks; none needs a fourth.
    assert serve(manager, "a", [0]) == [1, 2, 3]


@pytest.mark.seed("S004-07")
def test_a_request_that_finds_room_takes_no_more(backend: Backend) -> None:
    manager = make(backend, num_preallocate_tokens=2)
    serve(manager, "a", [0])
    step(manager)
    manager.append(["a"], [1])
    assert blocks(manager, "a") == [1, 2]


def test_short_room_is_what_all_groups_need_up_to_one_token(backend: Backend) -> None:
    groups = (Group(2), Group(1, kind="sliding_window", window=3))
    manager = make(backend, 6, groups=groups, num_preallocate_tokens=2)
    add(manager, "a", [0])
    # Five usable blocks: for three tokens the groups need two and three. The first one has its two
    # at once, since two more tokens are a block of two.
    assert manager.allocate_slots("a", 1) == KVCacheBlocks(((1, 2), (3, 4, 5)))
    step(manager)
    manager.fork("a", "b")
    manager.free("a")
    step(manager)
    # The window's group could have two more; but then the other one could not begin a block.
    manager.append(["b"], [1])
    assert [list(table) for table in manager.state().requests["b"].tables] == [[1], [3, 2, 5]]
    step(manager)
    manager.append(["b"], [2])
    assert [list(table) for table in manager.state().requests["b"].tables] == [[1, 4], [3, 2, 5]]


def test_spare_room_is_given_back_with_a_cut(backend: Backend) -> None:
    manager = make(backend, num_preallocate_tokens=4)
    assert serve(manager, "a", [0, 1]) == [1, 2, 3]
    step(manager)
    manager.truncate("a", 2)
    assert blocks(manager, "a") == [1]
    assert queue(manager) == [4, 5, 6, 7, 8, 9, 3, 2]


def test_a_child_shares_no_spare_room(backend: Backend) -> None:
    manager = make(backend, num_preallocate_tokens=4)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    assert blocks(manager, "a") == [1, 2, 3, 4]
    manager.fork("a", "b")
    assert blocks(manager, "b") == [1, 2]


@pytest.mark.seed("S004-18")
def test_the_sequence_that_the_first_manager_with_preallocation_was_tested_by(
    backend: Backend,
) -> None:
    """There are ten blocks of 16 tokens, 16 preallocated, no null block. Source: S004-18."""
    manager = make(backend, 10, 16, null_block=False, num_preallocate_tokens=16)
    common = list(range(48))
    assert serve(manager, "0", [*common, *range(100, 107)]) == [0, 1, 2, 3, 4]
    step(manager)
    add(manager, "1", [*common, *range(200, 207)])
    assert manager.get_computed_blocks("1").blocks.get_block_ids() == ([0, 1, 2],)
    assert admit(manager, "1") == [0, 1, 2, 5, 6]
    step(manager)
    drop(manager, "0")
    drop(manager, "1")
    assert queue(manager) == [7, 8, 9, 4, 3, 6, 5, 2, 1, 0]
    assert serve(manager, "2", [*common, *range(300, 306)]) == [0, 1, 2, 7, 8]
    step(manager)
    drop(manager, "2")
    # 144 tokens are nine blocks, and one spare.
    assert serve(manager, "3", range(1000, 1144)) == [9, 4, 3, 6, 5, 8, 7, 2, 1, 0]
