# SPDX-License-Identifier: Apache-2.0
"""Batches in flight: what is quarantined, and what a completion publishes.

Expected values follow from docs/engines.md, with blocks of two tokens and the null block 0.
"""

from __future__ import annotations

from kvcore import Config, Free, Group, Refused, Request, SetTable
from tests.conftest import Backend, need_twin
from tests.helpers.flying import WINDOW, fly, land, take, waiting
from tests.helpers.lockstep import Lockstep
from tests.helpers.stories import add, admit, blocks, drop, keyed, queue, serve


def test_a_taken_batch_is_unfinished_until_it_is_completed(backend: Backend) -> None:
    manager = fly(backend)
    assert [take(manager), take(manager)] == [0, 1]
    assert list(manager.in_flight) == [0, 1]
    manager.complete(0)
    assert list(manager.in_flight) == [1]


def test_a_released_block_waits_for_the_forward_pass_that_uses_it(backend: Backend) -> None:
    manager = fly(backend)
    serve(manager, "a", range(5))
    first = take(manager)
    manager.free("a")
    assert waiting(manager) == [3, 2, 1]
    assert queue(manager) == [4, 5, 6, 7, 8, 9]
    manager.complete(first)
    assert waiting(manager) == []
    assert queue(manager) == [4, 5, 6, 7, 8, 9, 3, 2, 1]


def test_a_block_that_was_shared_waits_for_a_batch_of_the_one_who_left_first(
    backend: Backend,
) -> None:
    manager = fly(backend)
    serve(manager, "a", range(4))
    land(manager)
    manager.fork("a", "b")
    manager.append(["a"], [7])
    number = take(manager)  # schedules a alone: blocks 1, 2, 3
    manager.free("a")
    assert waiting(manager) == [3]
    manager.free("b")  # never scheduled, but a's pass reads these
    assert waiting(manager) == [3, 2, 1]
    manager.complete(number)
    assert waiting(manager) == []


def test_a_block_that_the_batch_did_not_see_is_free_at_once(backend: Backend) -> None:
    manager = fly(backend)
    serve(manager, "a", range(4))
    take(manager)
    manager.append(["a"], [4])  # block 3, in the open batch
    manager.free("a")
    assert waiting(manager) == [2, 1]
    assert queue(manager)[-1] == 3


def test_a_block_behind_a_cut_is_judged_anew(backend: Backend) -> None:
    manager = fly(backend)
    serve(manager, "a", range(6))
    number = take(manager)
    manager.truncate("a", 3)
    assert waiting(manager) == [3]
    manager.add_tokens("a", [8, 9])
    manager.allocate_slots("a", 2)  # position 2 of the table is block 4 now
    assert blocks(manager, "a") == [1, 2, 4]
    manager.free("a")
    assert waiting(manager) == [3, 2, 1]
    assert manager.quarantined_blocks == (3, 2, 1)
    assert queue(manager)[-1] == 4
    manager.complete(number)
    assert queue(manager)[-4:] == [4, 3, 2, 1]


def test_a_quarantined_block_can_be_hit_and_costs_no_free_block(backend: Backend) -> None:
    manager = fly(backend, num_blocks=5)
    serve(manager, "a", range(4))
    take(manager)
    manager.free("a")
    add(manager, "b", range(6))
    hit = manager.get_computed_blocks("b")
    assert hit.num_tokens == 4
    manager.allocate_slots("b", 2, hit, reserved_blocks=1)  # one of the two free blocks
    assert blocks(manager, "b") == [1, 2, 3]
    assert (waiting(manager), queue(manager)) == ([], [4])


def test_a_refusal_counts_what_comes_back_with_batches(backend: Backend) -> None:
    manager = fly(backend, num_blocks=5)
    serve(manager, "a", range(5))
    number = take(manager)
    manager.free("a")
    add(manager, "b", range(20, 25))
    refused = manager.allocate_slots("b", 5)
    assert isinstance(refused, Refused)
    assert (refused.needed, refused.available, refused.pending) == (3, 1, 3)
    manager.complete(number)
    assert admit(manager, "b") == [4, 3, 2]


def test_the_source_of_an_open_copy_waits(backend: Backend) -> None:
    manager = fly(backend)
    serve(manager, "a", range(3))
    land(manager)
    manager.fork("a", "b")
    manager.append(["b"], [9])  # block 2 is copied to block 3
    assert blocks(manager, "b") == [1, 3]
    drop(manager, "a")
    assert waiting(manager) == [2]
    number = take(manager)
    manager.complete(number)
    assert waiting(manager) == []


def test_swapped_blocks_wait_on_both_sides(backend: Backend) -> None:
    manager = fly(backend, num_host_blocks=2)
    serve(manager, "a", range(3))
    land(manager)
    assert manager.swap_out(["a"])
    assert waiting(manager) == [2, 1]
    assert manager.num_free_host_blocks == 0
    land(manager)
    assert waiting(manager) == []
    manager.swap_in(["a"])  # block 1 is a hit, host block 1 is copied
    host = manager.state().host
    assert host is not None
    assert list(host.quarantine or ()) == [1]
    assert manager.num_free_host_blocks == 1
    refused = manager.swap_out(["a"])
    assert isinstance(refused, Refused)
    assert (refused.needed, refused.available, refused.pending) == (2, 1, 1)
    land(manager)
    assert manager.num_free_host_blocks == 2


def test_what_falls_behind_a_window_waits_and_is_not_counted_as_free(backend: Backend) -> None:
    manager = fly(backend, num_blocks=4, groups=(WINDOW,))
    serve(manager, "a", range(4))
    take(manager)
    manager.append(["a"], [4])  # position 0 is behind the window: block 1 goes, 3 comes
    assert blocks(manager, "a") == [0, 2, 3]
    assert waiting(manager) == [1]
    take(manager)
    manager.append(["a"], [5])  # block 2 goes
    assert waiting(manager) == [1, 2]
    take(manager)
    refused = manager.append(["a"], [6]).refused  # every block is there, none is free
    assert refused is not None
    assert (refused.available, refused.pending) == (0, 2)


def test_completion_publishes_what_no_later_batch_had_begun(backend: Backend) -> None:
    manager = fly(backend, publish="completed")
    add(manager, "a", range(7))
    manager.allocate_slots("a", 3)
    first = take(manager)
    manager.allocate_slots("a", 2)
    second = take(manager)
    manager.allocate_slots("a", 2)  # from token 5 on, in the open batch
    assert keyed(manager) == []
    manager.complete(first)
    assert keyed(manager) == [1]
    manager.complete(second)
    assert keyed(manager) == [1, 2]
    land(manager)
    assert keyed(manager) == [1, 2, 3]


def test_completion_publishes_nothing_of_who_left(backend: Backend) -> None:
    manager = fly(backend, publish="completed", num_host_blocks=4)
    for name, start in (("freed", 0), ("swapped", 20), ("cut", 40), ("stays", 60)):
        add(manager, name, range(start, start + 4))
        manager.allocate_slots(name, 4)
    number = take(manager)
    manager.free("freed")
    manager.swap_out(["swapped"])
    manager.truncate("cut", 3)
    manager.complete(number)
    (first, second), (kept, _) = blocks(manager, "stays"), blocks(manager, "cut")
    assert keyed(manager) == sorted([first, second, kept])


def test_completion_publishes_through_a_forked_child(backend: Backend) -> None:
    manager = fly(backend, publish="completed")
    serve(manager, "a", range(4))
    number = take(manager)
    manager.fork("a", "b")
    drop(manager, "a")
    manager.complete(number)
    assert keyed(manager) == blocks(manager, "b") == [1, 2]


def test_completion_publishes_at_once_where_batches_are_never_in_flight(backend: Backend) -> None:
    manager = fly(backend, publish="completed", max_in_flight=0)
    serve(manager, "a", range(4))
    assert keyed(manager) == []
    manager.take_batch()
    assert keyed(manager) == [1, 2]


def test_delayed_caching_waits_for_its_call_though_the_batch_is_completed(
    backend: Backend,
) -> None:
    manager = fly(backend, publish="completed")
    add(manager, "a", range(5))
    manager.allocate_slots("a", 1, None, num_external_computed_tokens=4, delay_cache_blocks=True)
    land(manager)
    assert keyed(manager) == []
    manager.cache_blocks("a", 4)
    assert keyed(manager) == [1, 2]


def test_cache_blocks_waits_for_what_is_in_flight(backend: Backend) -> None:
    manager = fly(backend, publish="completed")
    add(manager, "a", range(4))
    manager.allocate_slots("a", 2)
    land(manager)
    manager.allocate_slots("a", 2)
    number = take(manager)
    manager.cache_blocks("a", 4)
    assert keyed(manager) == [1]
    manager.complete(number)
    assert keyed(manager) == [1, 2]


def test_merging_waits_for_the_completion(backend: Backend) -> None:
    manager = fly(backend, publish="completed", duplicates="merge")
    for name in ("a", "b"):
        add(manager, name, range(2))
        manager.allocate_slots(name, 2)
    number = take(manager)
    assert (blocks(manager, "a"), blocks(manager, "b")) == ([1], [2])
    manager.complete(number)
    assert (blocks(manager, "a"), blocks(manager, "b")) == ([1], [1])
    row = manager.get_row("b")
    commands = list(manager.take_batch())
    assert commands == [SetTable(row, 0, 0, 1), Free(2, False)]


def test_completion_leaves_a_load_that_follows_in_the_same_batch_alone(backend: Backend) -> None:
    manager = fly(backend, publish="completed")
    serve(manager, "a", range(5))
    manager.free("a")
    operations = manager.load("a", 4)
    assert isinstance(operations, tuple)
    land(manager)
    assert keyed(manager) == []
    for operation in operations:
        manager.complete_operation(operation, True)
    assert len(keyed(manager)) == 2


def test_what_a_load_brings_waits_for_its_batch_where_completion_publishes(
    backend: Backend,
) -> None:
    manager = fly(backend, publish="completed")
    add(manager, "a", range(5))
    operations = manager.load("a", 4)
    assert isinstance(operations, tuple)
    number = take(manager)
    for operation in operations:
        manager.complete_operation(operation, True)
    assert keyed(manager) == []
    manager.complete(number)
    assert keyed(manager) == [1, 2]


def test_delayed_tokens_of_a_batch_wait_though_earlier_ones_of_it_did_not(
    backend: Backend,
) -> None:
    manager = fly(backend, publish="completed")
    add(manager, "a", range(4))
    manager.allocate_slots("a", 2)
    manager.allocate_slots("a", 2, delay_cache_blocks=True)
    land(manager)
    assert keyed(manager) == []
    manager.cache_blocks("a", 4)
    assert keyed(manager) == [1, 2]


def test_places_that_a_table_lost_do_not_pass_to_the_next_owner_of_its_row() -> None:
    need_twin()
    window = Group(1, kind="sliding_window", window=2)
    run = Lockstep(Config(9, groups=(window,), hash_seed=b"", max_in_flight=1))
    for name in "ab":
        run.call("add_request", Request(name, [1, 2, 3]))
        run.call("allocate_slots", name, 2)
    run.call("take_batch")
    run.call("allocate_slots", "a", 1)  # a query at 2 sees 1 and 2: place 0 is lost
    assert run.state.in_flight[0].entries["a"].replaced == {(0, 0)}
    run.call("free", "a")
    assert run.state.in_flight[0].entries["a"].replaced == set()
    run.call("remove_request", "a")
    assert run.call("fork", "b", "c") == 2  # the row of a is held back
    assert run.state.in_flight[0].entries["c"].replaced == set()
    run.call("complete", 0)
    run.call("take_batch")
    run.call("complete", 1)
    assert run.call("fork", "b", "d") == 0  # the row of a; each call compares the bytes
