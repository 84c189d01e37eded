# SPDX-License-Identifier: Apache-2.0
"""Fork and copy-on-write: blocks are shared until a request writes; none sees another's tokens."""

from __future__ import annotations

from kvcore import (
    Allocate,
    Appended,
    CopyOnWrite,
    Evict,
    Free,
    KVCacheManager,
    Reason,
    Refused,
    SetTable,
    Status,
    Zero,
)
from kvcore.types.groups import Group
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


def parent(backend: Backend, num_blocks: int = 10) -> KVCacheManager:
    """Let "a" (row 0) have five computed tokens in blocks 1, 2 and 3; the last is half full."""
    manager = make(backend, num_blocks)
    serve(manager, "a", [0, 1, 2, 3, 4])
    step(manager)
    return manager


def test_a_child_shares_all_computed_blocks_and_the_half_full_one(backend: Backend) -> None:
    manager = parent(backend)
    assert manager.fork("a", "b") == 1
    assert blocks(manager, "b") == [1, 2, 3]
    assert (manager.num_tokens("b"), manager.num_computed_tokens("b")) == (5, 5)
    assert [owners(manager, block) for block in (1, 2, 3)] == [2, 2, 2]
    assert step(manager) == [SetTable(1, 0, position, position + 1) for position in range(3)]


def test_the_first_to_write_a_shared_block_writes_a_copy(backend: Backend) -> None:
    manager = parent(backend)
    manager.fork("a", "b")
    step(manager)
    assert manager.append(["b"], [9]) == Appended(1)
    assert step(manager) == [Allocate(4), CopyOnWrite(3, 4), SetTable(1, 0, 2, 4)]
    assert (blocks(manager, "a"), blocks(manager, "b")) == ([1, 2, 3], [1, 2, 4])
    # The other one is alone with block 3 by now and writes in place.
    manager.append(["a"], [8])
    assert step(manager) == []
    assert blocks(manager, "a") == [1, 2, 3]


def test_of_three_owners_two_copy_and_the_last_writes_in_place(backend: Backend) -> None:
    manager = parent(backend)
    manager.fork("a", "b")
    manager.fork("a", "c")
    step(manager)
    manager.append(["a", "b", "c"], [7, 8, 9])
    assert [blocks(manager, name) for name in "abc"] == [[1, 2, 4], [1, 2, 5], [1, 2, 3]]
    # All three are full now, each with its own content.
    assert keyed(manager) == [1, 2, 3, 4, 5]


def test_a_full_tail_is_not_copied(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1, 2, 3])
    step(manager)
    manager.fork("a", "b")
    step(manager)
    manager.append(["b", "a"], [8, 9])
    assert step(manager) == [
        Allocate(3),
        SetTable(1, 0, 2, 3),
        Allocate(4),
        SetTable(0, 0, 2, 4),
    ]


def test_a_child_does_not_share_what_the_open_batch_schedules(backend: Backend) -> None:
    # A copy would run before the forward pass that writes the block.
    manager = make(backend)
    serve(manager, "a", [0, 1, 2, 3])
    step(manager)
    manager.append(["a"], [4])  # in block 3, not yet computed
    manager.fork("a", "b")
    assert (blocks(manager, "a"), blocks(manager, "b")) == ([1, 2, 3], [1, 2])
    assert (manager.num_tokens("b"), manager.num_computed_tokens("b")) == (5, 4)


def test_a_child_publishes_what_it_computes_itself(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    manager.append(["a"], [3])  # fills block 2, which is published with this batch
    manager.fork("a", "b")
    step(manager)
    assert (blocks(manager, "b"), manager.num_computed_tokens("b")) == ([1, 2], 3)
    # The child has the fourth token to compute too: in a copy, of the same content in the end.
    manager.allocate_slots("b", 1)
    assert (blocks(manager, "b"), keyed(manager)) == ([1, 3], [1, 2, 3])


def test_the_child_of_a_parent_that_computed_nothing_waits(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1, 2])
    manager.fork("a", "b")
    assert (manager.status("b"), blocks(manager, "b")) == (Status.WAITING, [])
    assert (manager.num_tokens("b"), manager.num_computed_tokens("b")) == (3, 0)
    # It has the parent's tokens, so it finds what the parent publishes.
    assert manager.get_computed_blocks("b").num_tokens == 2


def test_a_child_gets_no_lookahead(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", [0, 1, 2])
    manager.allocate_slots("a", 3, num_lookahead_tokens=3)  # six slots are three blocks
    step(manager)
    manager.fork("a", "b")
    assert (blocks(manager, "a"), blocks(manager, "b")) == ([1, 2, 3], [1, 2])


def test_a_child_outlives_its_parent(backend: Backend) -> None:
    manager = parent(backend, 5)
    manager.fork("a", "b")
    step(manager)
    drop(manager, "a")
    assert queue(manager) == [4]
    assert [owners(manager, block) for block in (1, 2, 3)] == [1, 1, 1]
    # Alone with block 3, the child writes in place.
    manager.append(["b"], [9])
    assert blocks(manager, "b") == [1, 2, 3]
    step(manager)
    assert manager.fork("b", "c") == 0  # the row that the parent gave back


def test_a_copy_needs_a_free_block(backend: Backend) -> None:
    manager = parent(backend, 4)
    manager.fork("a", "b")
    step(manager)
    refused = Refused(Reason.LATER, 1, 0)
    assert manager.append(["b", "a"], [9, 9]) == Appended(0, refused)
    assert (manager.num_tokens("a"), manager.num_tokens("b")) == (5, 5)


def test_a_copy_fills_the_block_so_it_is_not_zeroed(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2, zero_new_blocks=True),))
    serve(manager, "a", [0, 1, 2])
    assert [each for each in step(manager) if isinstance(each, Zero)] == [Zero(1), Zero(2)]
    manager.fork("a", "b")
    step(manager)
    manager.append(["b"], [9])
    assert step(manager) == [Allocate(3), CopyOnWrite(2, 3), SetTable(1, 0, 1, 3)]


def test_a_keyed_block_with_one_owner_is_written_in_place_without_its_key(
    backend: Backend,
) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1])
    step(manager)
    key = manager.state().device.keys[1]
    assert key is not None
    manager.truncate("a", 1)
    manager.append(["a"], [5])
    # No block is freed or taken: only the old content is no longer findable, the new one is.
    assert step(manager) == [Evict(1, key)]
    assert (blocks(manager, "a"), keyed(manager)) == ([1], [1])


def test_a_family_that_is_gone_leaves_every_block_free(backend: Backend) -> None:
    manager = parent(backend, 8)
    manager.fork("a", "b")
    manager.fork("b", "c")
    step(manager)
    manager.append(["a", "b", "c"], [7, 8, 9])
    step(manager)
    for name in "abc":
        drop(manager, name)
    # a: 4 goes; b: 5 goes; c: 3 (its own), then 2 and 1, which all three shared.
    assert queue(manager) == [6, 7, 4, 5, 3, 2, 1]
    freed = [each.block for each in step(manager) if isinstance(each, Free)]
    assert freed == [4, 5, 3, 2, 1]
