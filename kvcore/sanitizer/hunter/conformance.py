# SPDX-License-Identifier: Apache-2.0
"""The conformance test of an adapter, which must pass before findings of its hunts are trusted.

`problems` drives an engine through runs whose observations are known in advance. It does not show
that an engine is right, only that its adapter reports what the hunter and the sanitizer need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.engine_source import engine_source
from kvcore.sanitizer.hunter.run import RunOutcome, run
from kvcore.sanitizer.hunter.watch import Watch
from kvcore.sanitizer.hunter.world import STEP, Abort, Arrive, Generator, HuntWorld, Move
from kvcore.sanitizer.sanitizer import Sanitizer

MOVES = frozenset({"abort", "epoch", "reset", "samples", "priority", "tenants"})
METHODS = (
    *("arrive", "step", "finish_batches", "close", "live", "free"),
    *("target", "num_blocks"),
)
STEPS_MAX = 500


def problems(adapter: type[EngineAdapter], num_runs: int = 200) -> list[str]:
    """Return the problems of an adapter, one sentence each; none if it conforms.

    num_runs: random worlds with the engine's default options, which must not cause a harness error.
    """
    found = list(_shape(adapter))
    if found:
        return found
    for check in (_one_request, _abort_is_taken, _same_again, _stands_alone):
        try:
            found += check(adapter)
        except Exception as error:
            found.append(f"{check.__name__[1:].replace('_', ' ')}: {type(error).__name__}: {error}")
    return found or list(_random_runs(adapter, num_runs))


def _shape(adapter: type[EngineAdapter]) -> Iterator[str]:
    if not list(adapter.AXES.get("block_size", ())):
        yield "AXES has no values of block_size"
        return
    if any(not list(values) for values in adapter.AXES.values()):
        yield "an axis has no value"
    if unknown := set(adapter.MOVES) - MOVES:
        yield f"MOVES names {', '.join(sorted(unknown))}; known are {', '.join(sorted(MOVES))}"
    engine = adapter.Engine(_world(adapter, ()))
    needs = [*METHODS, *(move for move in ("abort", "epoch", "reset") if move in adapter.MOVES)]
    yield from (f"Engine has no {name}" for name in needs if not hasattr(engine, name))


def _world(adapter: type[EngineAdapter], moves: tuple[Move, ...]) -> HuntWorld:
    axes = {name: values[0] for name, values in adapter.AXES.items()}
    size = int(axes["block_size"])
    return HuntWorld(axes, 12, 3 * size + 1, 4, moves)


def _one_request(adapter: type[EngineAdapter]) -> Iterator[str]:
    """Check a prompt of three full blocks and a tail, and five answers: each position is written
    once.
    """
    world = _world(adapter, ())
    length, new = 3 * world.block_size + 1, 5
    prompt = tuple(1 + place % 7 for place in range(length))
    watched = _PositionsNoted(adapter, world)
    fresh = watched.engine.free()
    watched.engine.arrive(Arrive("r0", prompt, new))
    for _ in range(STEPS_MAX):
        if not list(watched.engine.live):
            break
        watched.engine.step()
    else:
        yield f"a request that fits is still live after {STEPS_MAX} steps"
    watched.engine.finish_batches()
    wanted = set(range(length + new - 1))
    missing = sorted(wanted - watched.positions)
    if missing:
        yield f"no step reported that positions {missing[:5]} of the only request were computed"
    if extra := sorted(watched.positions - wanted)[:5]:
        yield f"steps reported positions {extra}, which the only request does not have"
    if watched.engine.free() != fresh:
        yield f"{watched.engine.free()} blocks are free when all have left, {fresh} before"


class _PositionsNoted:
    """An engine with a sanitizer that notes the positions of all chunks."""

    def __init__(self, adapter: type[EngineAdapter], world: HuntWorld) -> None:
        self.engine = adapter.Engine(world)
        groups, blocks = adapter.groups(self.engine), self.engine.num_blocks
        self.positions: set[int] = set()
        watched = self

        class Noting(Watch):
            def _see(self, name: Any, start: int, count: int) -> None:
                watched.positions.update(range(start, start + count))
                super()._see(name, start, count)

        self.watch = Noting(Sanitizer(groups, blocks, full=True))
        adapter.attach(self.engine.target, self.watch)


def _abort_is_taken(adapter: type[EngineAdapter]) -> Iterator[str]:
    if "abort" not in adapter.MOVES:
        return
    engine = adapter.Engine(_world(adapter, ()))
    engine.arrive(Arrive("r0", (1,) * 9, 5))
    engine.step()
    engine.abort("r0")
    if "r0" in set(engine.live):
        yield "a request is live after its abort"


def _same_again(adapter: type[EngineAdapter]) -> Iterator[str]:
    """Check that a run depends only on its world, since otherwise shrinking is impossible."""
    generator = Generator({name: values[:1] for name, values in adapter.AXES.items()}, 7)
    for _ in range(5):
        world = generator.next()
        one, other = _brief(run(adapter, world)), _brief(run(adapter, world))
        if one != other:
            yield f"one world gave two runs: {one} and {other}"
            return


def _brief(outcome: RunOutcome) -> tuple[Any, ...]:
    found = outcome.found
    return outcome.num_steps, sorted(outcome.reached), found.key if found else None


def _stands_alone(adapter: type[EngineAdapter]) -> Iterator[str]:
    """Check that the engine part of the file works without kvcore, as generated tests need it."""
    source = engine_source(adapter.Engine.__module__)
    if "kvcore.sanitizer" in source:
        yield "Engine or what it uses names kvcore.sanitizer"
    compile(source, "engine", "exec")


def _random_runs(adapter: type[EngineAdapter], num_runs: int) -> Iterator[str]:
    """Check random runs: no harness errors, and the sanitizer checks steps. A request that aborts
    itself is not an error.
    """
    generator = Generator({name: values[:1] for name, values in adapter.AXES.items()}, 1)
    num_steps = 0
    for _ in range(num_runs):
        world = generator.next()
        outcome = run(adapter, attrs.evolve(world, moves=(*world.moves, STEP, Abort("nobody"))))
        num_steps += outcome.num_steps
        if outcome.found is not None and outcome.found.name == "harness":
            yield f"the harness is wrong: {outcome.found.text}"
            return
    if not num_steps:
        yield f"no step was checked in {num_runs} runs"
