# SPDX-License-Identifier: Apache-2.0
"""The hunter finds each bug of small engines, cuts it down, and says nothing of a healthy one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from kvcore.sanitizer import CacheGroup, Chunk, Sanitizer
from kvcore.sanitizer.hunter.hunt import FULL_EVERY, MUTED_AFTER, Hunt
from kvcore.sanitizer.hunter.isolated import outcome_of
from kvcore.sanitizer.hunter.run import RunOutcome, run
from kvcore.sanitizer.hunter.shrink import shrink, signature
from kvcore.sanitizer.hunter.systematic import small_worlds
from kvcore.sanitizer.hunter.template import Adapter
from kvcore.sanitizer.hunter.template_engine import Scheduler
from kvcore.sanitizer.hunter.watch import GOALS, Watch
from kvcore.sanitizer.hunter.world import Abort, Arrive, Generator, HuntWorld, world_from_json
from tests.sanitizer import broken

BUGS = {
    broken.HitsFreeBlocks: "wrong-kv",
    broken.HitsTheLastToken: "empty-step",
    broken.LosesBlocks: "leak",
    broken.WaitsForEver: "stuck",
    broken.Crashes: "crash",
}


def findings(hunt: Hunt, num_runs: int) -> Iterator[dict[str, Any]]:
    """Yield the findings of this many runs."""
    return (event for event in hunt.events(0, num_runs) if event["event"] == "found")


def first(scheduler: type[Scheduler], name: str) -> dict[str, Any]:
    """Return the first finding of a name in 200 runs."""
    for event in findings(Hunt(broken.adapter_of(scheduler), 1), 200):
        if event["name"] == name:
            return event
    raise AssertionError(f"{name} was not found")


@pytest.mark.parametrize(("scheduler", "name"), BUGS.items())
def test_each_bug_is_found_and_cut_down(scheduler: type[Scheduler], name: str) -> None:
    found = first(scheduler, name)
    world = world_from_json(found["world"])
    assert len(world.moves) <= 6
    again = run(broken.adapter_of(scheduler), world).found
    assert again is not None
    assert again.name == name
    assert run(Adapter, world).found is None


def test_a_block_published_before_it_is_written_is_found() -> None:
    found = first(broken.PublishesTooEarly, "unwritten-read")
    assert "reads token" in str(found["text"])


def test_a_healthy_engine_is_clean_and_its_goals_are_reached() -> None:
    hunt = Hunt(Adapter, 3)
    assert list(findings(hunt, 400)) == []
    assert hunt.tally.steps > 500
    reached = {"hit", "partial-chunk", "resumed-by-a-hit", "evicted-keyed-block", "full-pool"}
    assert reached <= set(hunt.tally.reached)
    assert "offload" in hunt.tally.missing()


def test_only_lets_a_hunt_look_behind_another_finding() -> None:
    class Both(broken.LosesBlocks, broken.HitsFreeBlocks):
        """Reads wrong KV most of the time, and loses blocks."""

    hunt = Hunt(broken.adapter_of(Both), 1, only="leak")
    assert {event["name"] for event in findings(hunt, 100)} == {"leak"}


def test_only_harness_passes_nothing_else() -> None:
    assert list(findings(Hunt(broken.Crashing, 1, only="harness"), 100)) == []


def test_a_hunt_looks_behind_a_wrong_event() -> None:
    adapter: type[Adapter] = broken.TellsRemoved
    plain = [event["name"] for event in findings(Hunt(adapter, 1), 60)]
    assert plain[0] == "wrong-event"
    assert "leak" in plain
    events = findings(Hunt(adapter, 1, only="leak"), 100)
    assert {event["name"] for event in events} == {"leak"}


def test_the_same_seed_draws_the_same_worlds() -> None:
    one, other = (Generator(Adapter.AXES, 5) for _ in range(2))
    worlds = [one.next() for _ in range(50)]
    assert worlds == [other.next() for _ in range(50)]
    assert len({world.num_blocks for world in worlds}) > 5
    assert Generator(Adapter.AXES, 6).next() != worlds[0]


def test_a_world_draws_requests_that_fit_and_lengths_at_the_edge_of_blocks() -> None:
    generator = Generator(Adapter.AXES, 1)
    edges = num_requests = repeated = 0
    for _ in range(100):
        world = generator.next()
        arrivals = [move for move in world.moves if isinstance(move, Arrive)]
        prompts = [each.prompt for each in arrivals]
        num_requests += len(arrivals)
        repeated += len(prompts) - len(set(prompts))
        for each in arrivals:
            assert len(each.prompt) >= 1
            assert len(each.prompt) + each.new <= world.max_tokens
            edges += (len(each.prompt) + 1) % world.block_size < 3
    assert edges > 0.4 * num_requests
    assert repeated > 0.1 * num_requests


def test_worlds_are_drawn_in_which_much_comes_together() -> None:
    axes = {"block_size": (4, 2), **dict.fromkeys("abcd", (False, True))}
    generator = Generator(axes, 1)
    worlds = [generator.next() for _ in range(400)]
    assert sum(all(world.axes[name] for name in "abcd") for world in worlds) > 8
    short = 0  # worlds with too few blocks for two requests, of which the later is more urgent
    for world in worlds:
        first, *rest = (move for move in world.moves if isinstance(move, Arrive))
        for second in rest[:1]:
            tokens = sum(len(each.prompt) + each.new for each in (first, second))
            is_short = tokens > world.num_blocks * world.block_size
            short += is_short and first.priority > second.priority
    assert short > 45


def test_a_rare_world_is_varied() -> None:
    generator = Generator(Adapter.AXES, 1)
    rare = generator.next()
    generator.keep(rare)
    near = [world for world in (generator.next() for _ in range(40)) if world.axes == rare.axes]
    shared = max(len({*map(repr, rare.moves)} & {*map(repr, each.moves)}) for each in near)
    assert shared > len({*map(repr, rare.moves)}) // 2


def test_options_and_sizes_of_a_rare_world_are_varied_too() -> None:
    axes = {"block_size": (4, 2), "mode": ("plain", "odd"), "fixed": (0, 1)}
    generator = Generator(axes, 1, {"fixed": 1})
    moves = (Arrive("r0", (1,) * 20, 1), "step")
    rare = HuntWorld({"block_size": 4, "mode": "plain", "fixed": 1}, 9, 5, 3, moves)
    near = [generator._near(rare) for _ in range(300)]
    assert {world.axes["mode"] for world in near} == {"plain", "odd"}
    assert {(world.axes["block_size"], world.axes["fixed"]) for world in near} == {(4, 1)}
    assert {4, 5, 8, 13, 32} <= {world.token_budget for world in near}
    assert {world.max_rows for world in near} == {2, 3, 4, 8}
    firsts = [world.moves[0] for world in near if world.moves]
    lengths = {len(each.prompt) for each in firsts if isinstance(each, Arrive)}
    assert {16, 24} <= lengths


def test_a_drawn_world_that_reaches_a_rare_goal_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[HuntWorld] = []
    hunt = Hunt(Adapter, 1)
    monkeypatch.setattr(hunt, "before", seen.append)
    hunt.tally.reached.update(dict.fromkeys(GOALS, 1000))
    goals = iter(("chunk-preempted-in-its-step", "hit"))
    monkeypatch.setattr(
        "kvcore.sanitizer.hunter.hunt.run",
        lambda *_, **__: RunOutcome(None, frozenset({next(goals)})),
    )
    for _ in range(2):
        list(hunt._one())
    assert hunt.generator.rare == seen[:1]


def test_full_mode_checks_runs_that_look_behind_findings_and_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hunt, ran = Hunt(Adapter, 1), set()

    def noted(*_: object, full: bool, muted: frozenset[str]) -> RunOutcome:
        ran.add((full, "wrong-kv" in muted))
        return RunOutcome()

    monkeypatch.setattr("kvcore.sanitizer.hunter.hunt.run", noted)
    hunt.cut["wrong-kv", ""] = MUTED_AFTER
    for _ in range(2 * FULL_EVERY):
        list(hunt._one())
    assert ran == {(full, muted) for full in (False, True) for muted in (False, True)}


def test_a_request_that_ends_in_flight_was_not_preempted_there() -> None:
    for comes_back in (False, True):
        watch = Watch(Sanitizer([CacheGroup(block_size=4)], num_blocks=2))
        watch.begin("r0", [1, 2])
        watch.extend("r0", 0, [0])
        watch.issue(1, [Chunk("r0", 0, 2)])
        watch.drop("r0")
        if comes_back:
            watch.extend("r0", 0, [1])
        watch.complete(1)
        watch.end("r0")
        assert ("preempted-in-flight" in watch.reached) == comes_back


def test_an_adapter_may_replace_blocks_of_a_table_in_a_hunt() -> None:
    sanitizer = Sanitizer([CacheGroup(block_size=4), CacheGroup(block_size=4)], num_blocks=6)
    watch = Watch(sanitizer)
    watch.begin("r0", [1] * 12)
    watch.extend("r0", 0, [0, 1])
    watch.extend("r0", 1, [2, 3])
    before = watch.progress()
    watch.extend("r0", 1, [4, 5], 1)  # 4 in place of 3, and 5 behind it
    assert watch.progress() != before
    assert watch.tables["r0"] == [(0, 0), (0, 1), (1, 2), (1, 4), (1, 5)]
    watch.extend("r0", 0, [3], position=2)
    watch.issue(1, [Chunk("r0", 0, 12)])
    assert watch.complete(1) == []  # so the sanitizer has all blocks, and no read is wrong


def test_a_world_is_the_same_after_json() -> None:
    for world in (Generator(Adapter.AXES, 2).next(), HuntWorld({"block_size": 4}, 3, 8, 2)):
        assert world_from_json(world.to_json()) == world


def test_fixed_options_do_not_vary() -> None:
    generator = Generator(Adapter.AXES, 2, {"block_size": 2})
    assert {generator.next().block_size for _ in range(20)} == {2}


def test_the_smallest_world_is_kept_and_what_it_needs_is_named() -> None:
    axes = {"block_size": (4,), "mode": ("plain", "odd"), "other": (0, 1)}
    noise = Arrive("r1", (1,) * 9, 3, priority=2, samples=2)
    moves = (noise, "step", Arrive("r0", (5, 6, 7), 2), "epoch", Abort("r0"), "step")
    world = HuntWorld({"block_size": 4, "mode": "odd", "other": 1}, 20, 8, 8, moves)

    def same(candidate: HuntWorld) -> bool:
        names = {move.name for move in candidate.moves if isinstance(move, Abort)}
        prompts = [move.prompt for move in candidate.moves if isinstance(move, Arrive)]
        return (
            "r0" in names and candidate.axes["mode"] == "odd" and max(map(len, prompts or [()])) > 1
        )

    small = shrink(world, same, axes)
    assert len(small.moves) == 2
    assert small.axes == {"block_size": 4, "mode": "odd", "other": 0}
    assert small.num_blocks < 20
    assert signature(small, axes) == ("abort", "mode=odd")
    assert same(small)


def test_small_worlds_come_in_order_of_length_and_hold_what_they_may() -> None:
    worlds = small_worlds(Adapter.AXES, {"abort"}, {})
    first_ones = [next(worlds) for _ in range(2000)]
    lengths = [len(world.moves) for world in first_ones]
    assert lengths == sorted(lengths)
    assert {world.block_size for world in first_ones} == {2}
    for world in first_ones[:300]:
        arrivals = [move for move in world.moves if isinstance(move, Arrive)]
        assert all(len(each.prompt) + each.new <= world.max_tokens for each in arrivals)
        outcome = run(Adapter, world)
        assert outcome.found is None
        assert outcome.num_steps > 0 or any(isinstance(move, Abort) for move in world.moves)
    without = small_worlds(Adapter.AXES, set(), {})
    assert not any(isinstance(m, Abort) for _ in range(500) for m in next(without).moves)


def test_a_move_that_names_nobody_is_skipped() -> None:
    world = HuntWorld(
        {"block_size": 4}, 4, 8, 2, (Abort("r9"), "step", Arrive("r0", (1,), 1), "step")
    )
    assert run(Adapter, world).found is None
    too_long = attrs.evolve(world, moves=(Arrive("r0", (1,) * 99, 1), "step"))
    assert run(Adapter, too_long).num_steps == 0


def test_a_run_that_does_not_end_is_a_hang_with_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcore.sanitizer.hunter.run.HUNG_SECONDS", 0.2)
    moves = tuple(Arrive(f"r{number}", (1, 2), 2) for number in range(3))
    world = HuntWorld({"block_size": 4}, 8, 16, 4, (*moves, "step"))
    found = run(broken.adapter_of(broken.Spins), world).found
    assert found is not None
    assert (found.name, found.where) == ("hang", "update")


def test_a_token_that_is_made_again_is_no_progress() -> None:
    world = HuntWorld({"block_size": 4}, 8, 16, 4, (Arrive("r0", (1,), 3), "step"))
    found = run(broken.adapter_of(broken.TakesTokensBack), world).found
    assert found is not None
    assert found.name == "stuck"


def test_what_an_idle_step_takes_is_a_leak() -> None:
    world = HuntWorld({"block_size": 4}, 8, 16, 4, (Arrive("r0", (1,), 1), "step"))
    found = run(broken.adapter_of(broken.LosesBlocksWhenIdle), world).found
    assert found is not None
    assert found.text == "leak: all have left, 7 of 8 blocks can be used (8 before)"


def test_what_an_adapter_raises_is_no_crash_of_its_engine() -> None:
    moves = tuple(Arrive(f"r{number}", (1, 2), 2) for number in range(3))
    world = HuntWorld({"block_size": 4}, 8, 16, 4, (*moves, "step"))
    names = [run(each, world).found for each in (broken.Misspells, broken.Crashing)]
    assert [found.name for found in names if found] == ["harness", "crash"]


@pytest.mark.parametrize(
    ("scheduler", "name"),
    [
        *((broken.Dies, "died"), (broken.Floods, "flood"), (broken.Sleeps, "hang")),
        *((broken.Spins, "hang"), (broken.Stops, None), (Scheduler, None)),
    ],
)
def test_an_engine_that_takes_its_process_along(
    scheduler: type[Scheduler], name: str | None
) -> None:
    moves = tuple(Arrive(f"r{number}", (1, 2), 2) for number in range(3))
    world = HuntWorld({"block_size": 4}, 8, 16, 4, (*moves, "step"))
    assert outcome_of(broken.adapter_of(scheduler), world, seconds=3.0)[0] == name
