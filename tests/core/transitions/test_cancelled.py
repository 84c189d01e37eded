# SPDX-License-Identifier: Apache-2.0
"""Batches that are cancelled: what is taken back, and what stays gone.

Expected values follow from docs/engines.md, with blocks of two tokens and the null block 0.
"""

from __future__ import annotations

import pytest

from kvcore import CutTable, Evict, Free, Refused, SetTable, Status
from tests.conftest import Backend
from tests.helpers.flying import WINDOW, fly, land, take
from tests.helpers.stories import add, admit, blocks, drop, keyed, owners, queue, serve


def test_cancel_takes_back_counts_keys_and_blocks_of_all_later_batches(backend: Backend) -> None:
    manager = fly(backend)
    serve(manager, "a", range(3))
    land(manager)
    manager.append(["a"], [3])  # fills block 2
    first = take(manager)
    serve(manager, "b", [0, 1, 2, 3, 4])  # hits blocks 1 and 2
    take(manager)
    manager.append(["a", "b"], [4, 5])
    assert keyed(manager) == [1, 2, 3]
    manager.cancel(first)
    assert manager.in_flight == ()
    assert keyed(manager) == [1]
    assert [manager.num_computed_tokens(each) for each in "ab"] == [3, 0]
    assert (blocks(manager, "a"), manager.status("b")) == ([1, 2], Status.WAITING)
    assert owners(manager, 1) == 1
    land(manager)


def test_a_cancel_sets_every_named_row_anew(backend: Backend) -> None:
    manager = fly(backend)
    serve(manager, "a", range(4))
    serve(manager, "b", range(20, 22))
    land(manager)
    serve(manager, "c", range(30, 32))
    number = take(manager)
    manager.append(["a"], [4])
    key = manager.get_block_keys("c")[0][0]
    drop(manager, "c")
    manager.cancel(number)
    batch = manager.take_batch()
    assert batch.number == number + 2  # that of the open batch is not used again
    assert list(batch) == [
        *(Evict(4, key), Free(5, False), CutTable(0, 0, 2)),
        *(CutTable(0, 0, 0), SetTable(0, 0, 0, 1), SetTable(0, 0, 1, 2), CutTable(2, 0, 0)),
    ]


def test_a_cancel_brings_nothing_back_that_was_freed_or_evicted(backend: Backend) -> None:
    manager = fly(backend, num_blocks=4)
    serve(manager, "a", range(4))
    land(manager)
    drop(manager, "a")
    serve(manager, "b", range(20, 26))  # evicts both blocks
    number = take(manager)
    manager.cancel(number)
    assert keyed(manager) == []
    assert manager.num_free_blocks == 3


def test_a_cancel_keeps_a_key_that_another_batch_gave(backend: Backend) -> None:
    manager = fly(backend)
    serve(manager, "a", range(2))
    take(manager)
    serve(manager, "b", range(20, 22))
    second = take(manager)
    manager.cancel(second)
    assert keyed(manager) == blocks(manager, "a")


def test_a_request_falls_behind_a_block_that_was_copied_on_write(backend: Backend) -> None:
    manager = fly(backend)
    serve(manager, "a", range(4))
    land(manager)
    manager.fork("a", "b")
    manager.truncate("b", 3)
    land(manager)
    manager.append(["b"], [9])  # block 2 holds token 2 too, and is copied
    number = take(manager)
    manager.cancel(number)
    assert manager.num_computed_tokens("b") == 2
    assert blocks(manager, "b") == [1]


def test_a_swap_that_is_cancelled_starts_the_request_anew(backend: Backend) -> None:
    manager = fly(backend, num_host_blocks=4)
    serve(manager, "a", range(3))
    serve(manager, "b", range(20, 23))
    land(manager)
    manager.swap_out(["b"])
    land(manager)
    manager.swap_out(["a"])
    manager.swap_in(["b"])
    number = take(manager)
    manager.cancel(number)
    for name in "ab":
        assert manager.num_computed_tokens(name) == 0
        assert manager.status(name) is Status.WAITING
    assert manager.num_free_host_blocks == 4


def test_a_window_that_was_given_back_starts_the_request_anew(backend: Backend) -> None:
    manager = fly(backend, groups=(WINDOW,))
    serve(manager, "a", range(4))
    land(manager)
    manager.append(["a"], [4])
    number = take(manager)
    manager.cancel(number)
    assert manager.num_computed_tokens("a") == 0
    assert manager.num_free_blocks == 9


def test_a_forked_child_falls_with_its_parent(backend: Backend) -> None:
    manager = fly(backend)
    serve(manager, "a", range(2))
    land(manager)
    manager.append(["a"], [2])
    number = take(manager)
    manager.fork("a", "b")
    assert manager.num_computed_tokens("b") == 3
    manager.cancel(number)
    assert manager.num_computed_tokens("b") == 2
    assert blocks(manager, "b") == [1]


def test_leaving_the_open_batch_leaves_what_it_remembers(backend: Backend) -> None:
    manager = fly(backend)
    serve(manager, "a", range(4))
    land(manager)
    manager.fork("a", "b")
    manager.truncate("b", 3)
    number = take(manager)
    manager.append(["b"], [9])  # copies block 2
    manager.truncate("b", 3)  # leaves the batch; the copy stays in it
    manager.cancel(number)
    assert manager.num_computed_tokens("b") == 2


def test_a_removed_request_is_forgotten_though_its_name_comes_again(backend: Backend) -> None:
    manager = fly(backend)
    serve(manager, "a", range(2))
    number = take(manager)
    drop(manager, "a")
    add(manager, "a", range(40, 44))
    manager.cancel(number)
    assert manager.num_tokens("a") == 4
    assert manager.status("a") is Status.WAITING


def test_the_loads_of_a_cancelled_batch_are_abandoned_and_hold_their_blocks(
    backend: Backend,
) -> None:
    manager = fly(backend, num_blocks=5)
    add(manager, "a", range(5))
    started = manager.load("a", 4)
    assert isinstance(started, tuple)
    first, second = started
    number = take(manager)
    manager.cancel(number)
    assert manager.status("a") is Status.WAITING
    assert queue(manager) == [3, 4]
    refused = manager.allocate_slots("a", 5)
    assert isinstance(refused, Refused)
    assert (refused.available, refused.pending) == (2, 2)
    manager.complete_operation(first, False)
    manager.complete_operation(second, True)
    assert keyed(manager) == []
    assert admit(manager, "a") == [3, 4, 1]


def test_a_request_falls_behind_a_block_that_was_merged(backend: Backend) -> None:
    manager = fly(backend, duplicates="merge")
    for name, tokens in (("a", range(2)), ("b", range(4))):
        add(manager, name, tokens)
    manager.allocate_slots("b", 3)
    land(manager)
    admit(manager, "a")  # its own block 3: nothing was findable, b is not hashed so far
    manager.add_tokens("a", [2, 3])
    manager.allocate_slots("a", manager.num_tokens("a") - manager.num_computed_tokens("a"))
    manager.allocate_slots("b", 1)  # fills block 2 with what a's second block holds
    number = take(manager)
    assert blocks(manager, "b") == blocks(manager, "a")
    manager.cancel(number)
    assert manager.num_computed_tokens("b") == 2  # its token 2 was in the block that it let go


def test_a_cancel_withdraws_what_the_end_of_a_load_published(backend: Backend) -> None:
    manager = fly(backend)
    add(manager, "a", range(7))
    manager.allocate_slots("a", 2, delay_cache_blocks=True)  # block 1 is in flight
    first = take(manager)
    operations = manager.load("a", 4)
    assert isinstance(operations, tuple)
    take(manager)
    for operation in operations:
        manager.complete_operation(operation, True)
    assert keyed(manager) == [1, 2, 3]
    manager.cancel(first)
    assert keyed(manager) == []


@pytest.mark.parametrize("publish", ["scheduled", "completed"])
def test_a_cancelled_step_can_be_made_again(publish: str, backend: Backend) -> None:
    manager = fly(backend, publish=publish)
    serve(manager, "a", range(5))
    manager.cancel(take(manager))
    assert admit(manager, "a") == blocks(manager, "a")
    land(manager)
    assert len(keyed(manager)) == 2
