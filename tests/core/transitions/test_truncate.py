# SPDX-License-Identifier: Apache-2.0
"""Truncate: rejected drafts and rewritten history; what is past the cut can still be hit."""

from __future__ import annotations

from kvcore import Allocate, CopyOnWrite, CutTable, Evict, Free, KVCacheManager, SetTable, Status
from tests.conftest import Backend
from tests.helpers.stories import add, blocks, keyed, make, owners, queue, serve, step


def seven(backend: Backend) -> KVCacheManager:
    """Let "a" have seven computed tokens in blocks 1 to 4; 5 to 9 are free."""
    manager = make(backend)
    serve(manager, "a", range(7))
    step(manager)
    return manager


def test_blocks_past_the_cut_are_freed_tail_first_with_their_keys(backend: Backend) -> None:
    manager = seven(backend)
    manager.truncate("a", 3)
    assert blocks(manager, "a") == [1, 2]
    assert (manager.num_tokens("a"), manager.num_computed_tokens("a")) == (3, 3)
    assert queue(manager) == [5, 6, 7, 8, 9, 4, 3]
    assert keyed(manager) == [1, 2, 3]
    assert step(manager) == [Free(4, False), Free(3, True), CutTable(0, 0, 2)]


def test_a_block_that_is_cut_through_keeps_its_key_until_it_is_written(backend: Backend) -> None:
    manager = seven(backend)
    key = manager.state().device.keys[2]
    assert key is not None
    manager.truncate("a", 3)
    step(manager)
    # Block 2 still holds tokens 2 and 3: another request may hit it.
    add(manager, "b", [0, 1, 2, 3, 9])
    assert manager.get_computed_blocks("b").blocks.get_block_ids() == ([1, 2],)
    manager.append(["a"], [30])
    assert step(manager) == [Evict(2, key)]
    assert manager.get_computed_blocks("b").blocks.get_block_ids() == ([1],)


def test_a_shared_block_that_is_cut_through_is_copied_before_it_is_written(
    backend: Backend,
) -> None:
    manager = seven(backend)
    assert serve(manager, "b", [0, 1, 2, 3, 9]) == [1, 2, 5]
    step(manager)
    manager.truncate("a", 3)
    step(manager)
    manager.append(["a"], [30])
    assert step(manager) == [Allocate(6), CopyOnWrite(2, 6), SetTable(0, 0, 1, 6)]
    assert (blocks(manager, "a"), blocks(manager, "b")) == ([1, 6], [1, 2, 5])
    assert owners(manager, 2) == 1


def test_the_slots_of_rejected_drafts_are_given_back(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", range(3))
    manager.allocate_slots("a", 3, num_lookahead_tokens=3)
    step(manager)
    # Three drafts of which the engine keeps one.
    manager.add_tokens("a", [70, 71, 72])
    manager.allocate_slots("a", 3)
    step(manager)
    assert (blocks(manager, "a"), keyed(manager)) == ([1, 2, 3], [1, 2, 3])
    manager.truncate("a", 4)
    assert (blocks(manager, "a"), manager.num_computed_tokens("a")) == ([1, 2], 4)


def test_cutting_nothing_still_gives_back_lookahead(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", range(3))
    manager.allocate_slots("a", 3, num_lookahead_tokens=2)
    step(manager)
    assert blocks(manager, "a") == [1, 2, 3]
    manager.truncate("a", 3)
    assert blocks(manager, "a") == [1, 2]
    assert (manager.num_tokens("a"), manager.num_computed_tokens("a")) == (3, 3)


def test_tokens_that_were_not_computed_are_cut_from_the_request_alone(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", range(7))
    manager.allocate_slots("a", 3)
    step(manager)
    manager.truncate("a", 5)
    assert (manager.num_tokens("a"), manager.num_computed_tokens("a")) == (5, 3)
    assert blocks(manager, "a") == [1, 2]
    assert step(manager) == []


def test_a_waiting_request_is_cut_without_a_command(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", range(7))
    manager.truncate("a", 1)
    assert (manager.num_tokens("a"), manager.status("a")) == (1, Status.WAITING)
    assert step(manager) == []
    # The rest of the chain is forgotten with the tokens: another continuation, other keys.
    manager.add_tokens("a", [50, 51])
    serve(manager, "b", range(7))
    assert manager.get_computed_blocks("a").num_tokens == 0


def test_a_rewritten_history_has_the_keys_of_its_new_tokens(backend: Backend) -> None:
    manager = seven(backend)
    manager.truncate("a", 3)
    manager.add_tokens("a", [30, 31])
    manager.allocate_slots("a", 2)
    step(manager)
    add(manager, "new", [0, 1, 2, 30, 9])
    add(manager, "old", [0, 1, 2, 3, 9])
    assert manager.get_computed_blocks("new").blocks.get_block_ids() == ([1, 2],)
    assert manager.get_computed_blocks("old").blocks.get_block_ids() == ([1],)
