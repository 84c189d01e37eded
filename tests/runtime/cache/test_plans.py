# SPDX-License-Identifier: Apache-2.0
"""Plans of the scheduler at their edges: queues, drafts, loads, cancels, waits."""

from collections.abc import Sequence as Row

from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.engine.scheduler import ScheduledChunk
from kvcore_runtime.engine.sequence import Sequence

from kvcore import Hit, Status
from kvcore.scheduler import Preemptions
from tests.conftest import Backend
from tests.runtime.cache.plans import World


class Guess:
    """Proposes always the same tokens, as many as there is room for."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens
        self.rooms: list[int] = []

    def propose(self, tokens: Row[int], num_drafts_max: int) -> Row[int]:
        del tokens
        self.rooms.append(num_drafts_max)
        return self._tokens[:num_drafts_max]


class Loading(Exchange):
    """Loads the first four tokens of every request, and reports them without touching the
    manager.
    """

    def begin(self, sequence: Sequence, hit: Hit) -> int:
        del sequence, hit
        return 4


def names(sequences: Row[Sequence]) -> list[str]:
    return [each.sequence_id for each in sequences]


def test_only_a_chunk_that_reaches_the_end_is_sampled_from(backend: Backend) -> None:
    sequence = World(backend, num_blocks=9).sequence("a", 5)
    assert ScheduledChunk(sequence=sequence, start=0, end=4).num_wanted == 0
    assert ScheduledChunk(sequence=sequence, start=0, end=5).num_wanted == 1
    drafted = ScheduledChunk(sequence=sequence, start=4, end=7, drafts=(8, 9))
    assert drafted.num_wanted == 3
    assert drafted.tokens() == [1004, 8, 9]


def test_a_sequence_that_loads_is_queued_apart_until_it_is_loaded(backend: Backend) -> None:
    world = World(backend, num_blocks=9, exchange=Loading())
    scheduler, sequence = world.scheduler, world.sequence("a", 9)
    scheduler.add(sequence)
    assert scheduler.schedule() == []
    assert scheduler.has_moved, "its batch is to be taken, though nothing is computed"
    assert names(scheduler.loading) == ["a"]
    assert scheduler.waiting == []
    assert scheduler.unfinished() == [sequence]
    assert scheduler.schedule() == []
    assert not scheduler.has_moved
    assert world.manager.allocate_slots("a", 4)
    scheduler.loaded(sequence)
    assert (names(scheduler.loading), names(scheduler.running)) == ([], ["a"])


def test_a_sequence_is_forgotten_whatever_it_waits_for(backend: Backend) -> None:
    world = World(backend, num_blocks=9)
    scheduler = world.scheduler
    queues = (scheduler.running, scheduler.loading, scheduler.swapped, scheduler.waiting)
    for number, queue in enumerate(queues):
        queue.append(world.sequence(f"r{number}", 4))
    assert names(scheduler.unfinished()) == ["r0", "r1", "r2", "r3"]
    for queue in queues:
        scheduler.remove(queue[0])
        assert queue == []
    assert scheduler.unfinished() == []


def test_after_a_cancel_everybody_is_where_the_manager_says(backend: Backend) -> None:
    """A new token goes to the manager if it is computed again, and otherwise stays."""
    world = World(backend, num_blocks=9, num_host_blocks=3)
    scheduler, manager = world.scheduler, world.manager
    decoding = world.running("decoding", 3, computed=3)
    behind = world.running("behind", 6, computed=6)
    swapped = world.running("swapped", 3, computed=3)
    lost = world.running("lost", 3, computed=3)
    lost_load, loading = world.sequence("lost load", 9), world.sequence("loading", 9)
    scheduler.loading += [lost_load, loading]
    # As if the batches that computed these had been cancelled.
    manager.truncate("behind", 4)
    manager.add_tokens("behind", [1, 2])
    assert manager.swap_out(["swapped"])
    manager.free("lost")
    scheduler.taken_back([lost_load])
    assert names(scheduler.running) == ["decoding", "behind"]
    assert scheduler.swapped == [swapped]
    assert names(scheduler.waiting) == ["lost", "lost load"]
    assert scheduler.loading == [loading]
    assert [each.has_new_token for each in (decoding, behind, swapped, lost)] == [
        True,
        False,
        True,
        False,
    ]
    assert (manager.num_tokens("behind"), manager.num_tokens("lost")) == (7, 4)
    assert (manager.num_tokens("decoding"), manager.num_tokens("swapped")) == (3, 3)


def test_a_swap_in_moves_blocks_and_the_next_plan_does_not(backend: Backend) -> None:
    """A lone sequence comes back even if it cannot grow then; others need a spare block."""
    world = World(backend, num_blocks=2, num_host_blocks=2)
    world.running("a", 7, computed=7)
    assert world.manager.swap_out(["a"])
    world.take_batch()
    world.manager.evict_blocks(range(2))
    world.scheduler.swapped.append(world.scheduler.running.pop())
    assert world.step() == [("a", 7, 8)]
    assert world.scheduler.has_moved
    world.scheduler.schedule()
    assert not world.scheduler.has_moved


def test_a_swapped_sequence_comes_back_if_each_can_still_grow_by_a_block(backend: Backend) -> None:
    """Of three free blocks one is copied into, and one is left for each of the two sequences."""
    world = World(backend, num_blocks=4, num_host_blocks=1)
    world.running("old", 2, computed=2)
    world.running("young", 2, computed=2)
    assert world.manager.swap_out(["young"])
    world.take_batch()
    world.scheduler.swapped.append(world.scheduler.running.pop())
    assert world.manager.num_free_blocks == 3
    assert world.step() == [("old", 2, 3), ("young", 2, 3)]


def test_nobody_new_comes_in_a_step_that_preempted(backend: Backend) -> None:
    """The victim's second block would have been enough for the new one."""
    world = World(backend, num_blocks=3, preemption="recompute")
    world.running("old", 4, computed=4)
    world.scheduler.add(world.sequence("new", 1))
    world.running("young", 8, computed=8)
    assert world.step() == [("old", 4, 5)]
    assert names(world.scheduler.waiting) == ["new", "young"]


def test_a_victim_s_prompt_is_not_continued_in_the_same_step(backend: Backend) -> None:
    world = World(backend, num_blocks=4, preemption="recompute", token_budget=12)
    world.running("old", 12, computed=4)
    world.running("young", 16, computed=12)
    # Two blocks are taken, and one is left, which a first chunk of "young" would fit.
    assert world.step() == [("old", 4, 12)]
    assert names(world.scheduler.waiting) == ["young"]


def test_a_victim_decodes_no_drafts_in_the_same_step(backend: Backend) -> None:
    world = World(backend, num_blocks=2, preemption="recompute", drafter=Guess())
    world.running("old", 4, computed=4)
    world.running("young", 3, computed=3)
    assert world.step() == [("old", 4, 5)]
    assert world.manager.num_tokens("young") == 4, "its token was given once"


def test_what_a_sequence_reused_is_what_it_found_at_first(backend: Backend) -> None:
    world = World(backend, num_blocks=9)
    first, again = world.sequence("first", 9), world.sequence("again", 9)
    again.generated.append(7)
    world.manager.add_tokens("again", [7])
    again.num_reused = 3
    for each in (first, again):
        world.scheduler.add(each)
    first.num_reused = 3
    world.step()
    assert (first.num_reused, again.num_reused) == (0, 3)


def test_drafts_fill_what_budget_and_answer_leave(backend: Backend) -> None:
    drafter = Guess(8, 9, 8, 9)
    world = World(backend, num_blocks=9, token_budget=4, drafter=drafter)
    world.running("a", 3, computed=3)
    world.running("b", 3, computed=3)
    (chunk,) = world.scheduler.schedule()
    assert (chunk.start, chunk.end, chunk.drafts) == (3, 7, (8, 9, 8))
    assert drafter.rooms == [3], "one of the budget's four is the token itself"
    rooms: dict[int, list[int]] = {2: [], 4: [2]}
    for max_tokens, room in rooms.items():
        drafter = Guess(8, 9, 8, 9)
        world = World(backend, num_blocks=9, drafter=drafter)
        sequence = world.running("a", 3, computed=3)
        world.leave(sequence)
        short = world.sequence("short", 3, max_tokens)
        assert world.manager.allocate_slots("short", 3)
        world.take_batch()
        short.generated.append(7)
        short.has_new_token = True
        world.scheduler.add_fork(short)
        world.scheduler.schedule()
        assert drafter.rooms == room


def test_drafts_without_room_are_dropped_and_the_token_is_computed(backend: Backend) -> None:
    world = World(backend, num_blocks=1, drafter=Guess(8, 9))
    world.running("a", 3, computed=3)
    (chunk,) = world.scheduler.schedule()
    assert (chunk.start, chunk.end, chunk.drafts) == (3, 4, ())
    assert world.manager.num_draft_tokens("a") == 0
    assert world.scheduler.preemptions == Preemptions()


def test_blocks_of_the_plan_itself_are_waited_for(backend: Backend) -> None:
    """Blocks that the plan swaps out are free after its batch, so the next one keeps its own."""
    world = World(backend, num_blocks=3, num_host_blocks=3, max_in_flight=1)
    for name in ("old", "middle", "young"):
        world.running(name, 4, computed=4)
    assert world.scheduler.schedule() == []
    assert world.scheduler.has_moved
    assert names(world.scheduler.running) == ["old", "middle"]
    assert names(world.scheduler.swapped) == ["young"]
    assert world.scheduler.num_waits == 1
    assert world.scheduler.preemptions == Preemptions(by_swap=1)


def test_a_preemption_is_a_move(backend: Backend) -> None:
    world = World(backend, num_blocks=2, preemption="recompute")
    world.running("old", 4, computed=4)
    world.running("young", 4, computed=4)
    assert world.step() == [("old", 4, 5)]
    assert world.scheduler.has_moved
    assert world.manager.status("young") is Status.WAITING


def test_runners_come_first_and_who_is_refused_keeps_all_others_out(backend: Backend) -> None:
    """A plan that refuses a running sequence neither resumes nor admits another."""
    world = World(backend, num_blocks=7, num_host_blocks=2, max_in_flight=1)
    scheduler, manager = world.scheduler, world.manager
    busy = world.running("busy", 3, computed=3)
    old = world.running("old", 28, computed=4)
    swapped = world.running("swapped", 3, computed=3)
    assert manager.swap_out(["swapped"])
    world.take_batch()
    manager.append(["busy"], [7])
    busy.give()
    flight = manager.take_batch().number
    scheduler.running.remove(swapped)
    new = world.sequence("new", 1)
    scheduler.add(new)
    # "old" wants six blocks of the five that are free.
    assert scheduler.schedule(in_flight=True) == []
    assert (scheduler.num_waits, names(scheduler.waiting)) == (1, ["new"])
    manager.complete(flight)
    world.leave(new)
    scheduler.swapped.append(swapped)
    assert scheduler.schedule() == []
    assert (scheduler.num_waits, names(scheduler.swapped)) == (1, ["swapped"])
    world.leave(busy)
    assert [each.sequence for each in scheduler.schedule()] == [old]
    assert names(scheduler.swapped) == ["swapped"], "there is no block left"
    world.take_batch()
    world.leave(old)
    assert scheduler.schedule() == []
    assert scheduler.has_moved, "it comes back behind those that run, and is computed next"
    world.take_batch()
    assert [each.sequence for each in scheduler.schedule()] == [swapped]


def test_who_has_drafts_in_flight_keeps_its_blocks_until_they_are_accepted(
    backend: Backend,
) -> None:
    world = World(
        backend,
        num_blocks=3,
        token_budget=3,
        preemption="recompute",
        max_in_flight=1,
        drafter=Guess(8, 9),
    )
    old = world.running("old", 8, computed=4)
    young = world.running("young", 3, computed=3)
    scheduler, manager = world.scheduler, world.manager
    assert [each.drafts for each in scheduler.schedule()] == [(8, 9)]
    manager.complete(manager.take_batch().number)
    # "old" finds no block for the rest of its prompt; the tokens of "young" are not read yet.
    assert scheduler.schedule(in_flight=True) == []
    assert (scheduler.num_waits, scheduler.preemptions.total) == (1, 0)
    manager.accept("young", 0)
    young.num_to_come = 0
    assert [each.sequence for each in scheduler.schedule()] == [old]
    assert scheduler.preemptions.by_recompute == 1
