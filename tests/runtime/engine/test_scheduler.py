# SPDX-License-Identifier: Apache-2.0
"""Stories of the scheduler with a handful of blocks of four tokens, to be followed on paper."""

import pytest
from kvcore_runtime.engine.scheduler import Preemption
from kvcore_runtime.engine.sequence import Sequence

from kvcore import Status
from kvcore.scheduler import Preemptions
from tests.conftest import Backend
from tests.runtime.cache.plans import World


def test_decoding_comes_first_then_chunks_then_new_ones(backend: Backend) -> None:
    world = World(backend, num_blocks=10, token_budget=6)
    world.running("prompt", 10, computed=4)
    world.running("decoding", 3, computed=3)
    world.scheduler.add(world.sequence("new", 3))
    # One token decodes, five of the six left of the prompt fill the budget.
    assert world.step() == [("decoding", 3, 4), ("prompt", 4, 9)]
    # The prompt's last token, then all three of the new one.
    assert world.step() == [("prompt", 9, 10), ("new", 0, 3)]


def test_the_youngest_is_swapped_for_an_older_one(backend: Backend) -> None:
    world = World(backend, num_blocks=3, num_host_blocks=1)
    world.running("old", 4, computed=4)
    world.running("middle", 3, computed=3)
    young = world.running("young", 3, computed=3)
    assert world.step() == [("old", 4, 5), ("middle", 3, 4)]
    assert world.scheduler.preemptions == Preemptions(by_swap=1)
    assert world.manager.status("young") is Status.SWAPPED
    assert world.scheduler.swapped == [young]
    assert young.has_new_token, "its newest token waits with it"


@pytest.mark.parametrize(("num_host_blocks", "preemption"), [(0, "swap"), (1, "recompute")])
def test_without_room_or_wish_to_swap_it_is_recomputed(
    backend: Backend, num_host_blocks: int, preemption: Preemption
) -> None:
    world = World(backend, num_blocks=2, num_host_blocks=num_host_blocks, preemption=preemption)
    world.running("old", 4, computed=4)
    young = world.running("young", 3, computed=3)
    assert world.step() == [("old", 4, 5)]
    assert world.scheduler.preemptions == Preemptions(by_recompute=1)
    assert world.manager.status("young") is Status.WAITING
    assert world.manager.num_tokens("young") == 4, "its newest token is to be computed too"
    assert not young.has_new_token
    assert world.scheduler.waiting == [young]


def test_who_is_scheduled_already_is_no_victim(backend: Backend) -> None:
    world = World(backend, num_blocks=3)
    world.running("old", 12, computed=4)
    world.running("young", 4, computed=4)
    # "young" decodes first and takes the last block; "old" finds none and keeps its own.
    assert world.step() == [("young", 4, 5)]
    assert world.scheduler.preemptions == Preemptions()
    assert world.manager.num_computed_tokens("old") == 4


def test_the_oldest_gets_on_when_all_are_full(backend: Backend) -> None:
    world = World(backend, num_blocks=3)
    for name in ("old", "middle", "young"):
        world.running(name, 4, computed=4)
    # "young" gives way for "old"; then "middle" finds no younger one, and waits with its block.
    assert world.step() == [("old", 4, 5)]
    assert [each.sequence_id for each in world.scheduler.running] == ["old", "middle"]


def test_who_was_swapped_comes_back_only_where_all_can_grow(backend: Backend) -> None:
    world = World(backend, num_blocks=5, num_host_blocks=2)
    old = world.running("old", 8, computed=8)
    middle = world.running("middle", 3, computed=3)
    young = world.running("young", 5, computed=5)
    assert world.step() == [("old", 8, 9), ("middle", 3, 4)]
    assert world.scheduler.swapped == [young]
    world.leave(middle)
    old.has_new_token = False  # it computes nothing for a while
    # Two blocks are free and would take "young" in, with nothing left for either to grow.
    world.scheduler.add(world.sequence("new", 1))
    assert world.step() == []
    world.leave(old)
    assert world.step() == [("young", 5, 6), ("new", 0, 1)]


def test_a_step_computes_no_more_than_its_budget(backend: Backend) -> None:
    world = World(backend, num_blocks=9, token_budget=2)
    for name in ("old", "middle", "young"):
        world.running(name, 4, computed=4)
    world.scheduler.add(world.sequence("new", 1))
    assert world.step() == [("old", 4, 5), ("middle", 4, 5)]


def test_a_new_one_is_admitted_only_if_all_of_it_fits(backend: Backend) -> None:
    world = World(backend, num_blocks=3, token_budget=4)
    world.running("old", 3, computed=3)
    world.scheduler.add(world.sequence("long", 9))
    world.scheduler.add(world.sequence("short", 1))
    # The first chunk of "long" would fit, all of it does not; "short" does not overtake it.
    assert world.step() == [("old", 3, 4)]


def test_who_is_refused_pending_blocks_waits_and_preempts_nobody(backend: Backend) -> None:
    """Blocks that a batch in flight still reads come back by themselves (catalogue, row 68)."""
    world = World(backend, num_blocks=6, max_in_flight=1)
    world.running("old", 8, computed=8)
    world.running("young", 8, computed=8)
    gone = world.running("gone", 7, computed=7)
    world.manager.append(["gone"], [7])
    flight = world.manager.take_batch().number
    world.leave(gone)  # aborted in flight: its two blocks are pending
    scheduler = world.scheduler
    assert scheduler.schedule(in_flight=True) == []
    assert (scheduler.num_waits, scheduler.preemptions.total) == (1, 0)
    world.manager.complete(flight)
    assert [each.sequence.sequence_id for each in scheduler.schedule()] == ["old", "young"]
    assert (scheduler.num_waits, scheduler.preemptions.total) == (1, 0)


def test_who_is_in_flight_gives_way_and_its_blocks_come_with_the_batch(backend: Backend) -> None:
    world = World(backend, num_blocks=5, preemption="recompute", max_in_flight=1)
    world.running("old", 8, computed=8)
    world.running("middle", 4, computed=4)
    youngest = world.running("youngest", 7, computed=7)
    scheduler, manager = world.scheduler, world.manager
    manager.append(["youngest"], [7])
    youngest.give()
    youngest.num_to_come = 1
    flight = manager.take_batch().number
    # "old" finds no block, and then two that the batch in flight still writes.
    assert scheduler.schedule(in_flight=True) == []
    assert scheduler.waiting == [youngest]
    assert (scheduler.preemptions.total, scheduler.num_waits) == (1, 1)
    assert (youngest.num_to_come, youngest.num_drops) == (0, 1), "it is sampled again"
    manager.complete(flight)
    assert [each.sequence.sequence_id for each in scheduler.schedule()] == ["old", "middle"]
    manager.check()


def test_a_swapped_sequence_takes_the_output_that_was_on_its_way(backend: Backend) -> None:
    """All its tokens stay computed, so nothing else would sample the next one."""
    world = World(backend, num_blocks=3, num_host_blocks=1, max_in_flight=1)
    world.running("old", 7, computed=7)
    young = world.running("young", 2, computed=2)
    scheduler, manager = world.scheduler, world.manager
    assert len(scheduler.schedule()) == 2
    flight = manager.take_batch().number
    # "old" wants a third block for a token to come.
    assert scheduler.schedule(in_flight=True) == []
    assert scheduler.swapped == [young]
    assert (young.num_to_come, young.num_drops) == (1, 0)
    manager.complete(flight)
    manager.take_batch()
    young.generated.append(9)
    young.has_new_token, young.sampled_by = True, flight
    scheduler.give_new_token(young)
    assert (manager.num_tokens("young"), manager.num_computed_tokens("young")) == (4, 3)
    manager.check()


def test_all_that_decode_run_ahead_in_every_step(backend: Backend) -> None:
    world = World(backend, num_blocks=20, max_in_flight=1)
    for name in "abcde":
        world.running(name, 3, computed=3)
    steps = []
    in_flight: list[Sequence] = []
    before = None
    for _ in range(4):
        chunks = world.scheduler.schedule(in_flight=bool(in_flight))
        number = world.take_batch()
        for each in in_flight:  # the tokens of the step before come now
            each.generated.append(7)
            each.has_new_token, each.sampled_by = True, before
            each.num_to_come -= 1
        in_flight, before = [each.sequence for each in chunks], number
        steps.append(
            ["".join(each.sequence_id for each in in_flight), {each.is_ahead for each in chunks}]
        )
    assert steps == [["abcde", {False}], *[["abcde", {True}]] * 3]
    assert {world.manager.num_output_placeholders(each) for each in "abcde"} == {1}
    world.manager.check()


def test_an_answer_gets_no_position_behind_its_last_token(backend: Backend) -> None:
    world = World(backend, num_blocks=20, max_in_flight=1)
    sequence = world.running("a", 3, computed=3)
    sequence.generated += [7] * (sequence.sampling.max_tokens - 2)
    world.manager.add_tokens("a", [7] * (sequence.sampling.max_tokens - 2))
    assert world.manager.allocate_slots("a", sequence.sampling.max_tokens - 2)
    world.take_batch()
    assert [each.is_ahead for each in world.scheduler.schedule()] == [False]
    world.take_batch()
    assert world.scheduler.schedule(in_flight=True) == [], "the last token is on its way"
