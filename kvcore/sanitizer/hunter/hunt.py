# SPDX-License-Identifier: Apache-2.0
"""A hunt: runs world after world on one engine, and shrinks and reports each new finding at once.

It runs in the process that has the engine. It reports plain values, one per line, so that the
parent process can end this one and go on.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.run import MUTABLE, Found, RunOutcome, run
from kvcore.sanitizer.hunter.shrink import SECONDS, shrink, signature
from kvcore.sanitizer.hunter.systematic import small_worlds
from kvcore.sanitizer.hunter.watch import GOALS, RARE
from kvcore.sanitizer.hunter.world import Abort, Arrive, Generator, HuntWorld

FULL_EVERY = 7
"""One run in this many checks in full mode; odd, since every second run looks beyond findings."""
SHRINK_SHARE = 0.4
"""Shrinking takes at most this share of the time, not counting the first finding of each kind."""
MUTED_AFTER = 4
"""After this many findings about contents are shrunk, every second run goes on beyond them."""
SKIPPED_SHARE_MAX = 0.2
"""If the engine refuses more of its worlds at the start, the hunt is useless."""

Key = tuple[str, str, tuple[str, ...]]
Event = dict[str, Any]


@attrs.define
class Tally:
    """The counts of a hunt. seconds: of CPU. found: runs by the name of their finding."""

    runs: int = 0
    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0
    reached: Counter[str] = attrs.Factory(Counter)
    values: Counter[str] = attrs.Factory(Counter)
    moves: Counter[str] = attrs.Factory(Counter)
    found: Counter[str] = attrs.Factory(Counter)

    def add(self, world: HuntWorld, outcome: RunOutcome) -> None:
        """Count one run."""
        self.runs += 1
        self.steps += outcome.num_steps
        self.skipped += outcome.skipped
        self.reached.update(outcome.reached)
        self.values.update(f"{name}={value}" for name, value in world.axes.items())
        self.moves.update(_kind(move) for move in world.moves)
        if outcome.found is not None:
            self.found[outcome.found.name] += 1

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add what another hunt counted, as plain data."""
        for name, value in other.items():
            if isinstance(value, Mapping):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def missing(self) -> list[str]:
        """Return the goals that no run reached."""
        return [goal for goal in GOALS if not self.reached[goal]]


class Hunt:
    """The worlds of one seed on one engine.

    fixed: options that do not vary. only: name of the findings that end a run. before: called
    with each world before it runs.
    """

    def __init__(
        self,
        adapter: type[EngineAdapter],
        seed: int,
        *,
        fixed: Mapping[str, Any] | None = None,
        only: str | None = None,
        before: Callable[[HuntWorld], None] = lambda _: None,
    ) -> None:
        self.adapter, self.only, self.before = adapter, only, before
        self.generator = Generator(adapter.AXES, seed, fixed)
        self.systematic = small_worlds(adapter.AXES, adapter.MOVES, fixed or {})
        self.tally = Tally()
        self.known: dict[Key, int] = {}
        self.cut: Counter[tuple[str, str]] = Counter()
        self.shrinking = 0.0
        self.share_max, self.shrink_seconds = SHRINK_SHARE, SECONDS

    def events(self, seconds: float, runs: int | None = None) -> Iterator[Event]:
        """Hunt for this many CPU seconds, or for this many runs and whatever time their findings
        take to shrink: then a seed gives the same events each time. Each event is a finding, or the
        tally of a second. The first one reports that the engine's imports are done.
        """
        if runs is not None:
            seconds = self.share_max = self.shrink_seconds = math.inf
        warm_up(self.adapter, self.generator.next())
        yield {"event": "warm"}
        started = time.process_time()
        reported_at = 0.0
        while self.tally.seconds < seconds and self.tally.runs != runs:
            yield from self._one()
            self.tally.seconds = round(time.process_time() - started, 2)
            if self.tally.seconds >= reported_at + 1:
                reported_at = self.tally.seconds
                yield {"event": "tally", **attrs.asdict(self.tally)}
        yield {"event": "tally", **attrs.asdict(self.tally)}

    def _one(self) -> Iterator[Event]:
        world = next(self.systematic, None) if self.tally.runs % 4 == 3 else None
        world = world or self.generator.next()
        full, muted = self.tally.runs % FULL_EVERY == 0, self._muted()
        outcome = self._run(world, full, muted)
        self.tally.add(world, outcome)
        seldom = 1 + self.tally.runs // 50
        if RARE & outcome.reached or any(
            self.tally.reached[goal] <= seldom for goal in outcome.reached
        ):
            self.generator.keep(world)
        if outcome.found is not None:
            yield from self._found(world, outcome.found, full, muted)

    def _run(self, world: HuntWorld, full: bool, muted: frozenset[str]) -> RunOutcome:
        self.before(world)
        return run(self.adapter, world, full=full, muted=muted)

    def _muted(self) -> frozenset[str]:
        if self.only is not None:
            return MUTABLE - {self.only}
        if self.tally.runs % 2:
            return frozenset()
        often = {name for (name, _), times in self.cut.items() if times >= MUTED_AFTER}
        return MUTABLE & often

    def _found(
        self, world: HuntWorld, found: Found, full: bool, muted: frozenset[str]
    ) -> Iterator[Event]:
        if found.name not in (self.only or found.name, "harness"):
            return
        share = self.shrinking / max(1.0, self.tally.seconds)
        if self.cut[found.key] and share > self.share_max:
            return
        self.cut[found.key] += 1

        def same(candidate: HuntWorld) -> bool:
            other = self._run(candidate, full, muted).found
            return other is not None and other.key == found.key

        started = time.process_time()
        small = shrink(world, same, self.adapter.AXES, self.shrink_seconds)
        self.shrinking += time.process_time() - started
        again = self._run(small, full, muted).found
        if again is None or again.key != found.key:
            again = attrs.evolve(found, name="harness", text=f"not found again: {found.text}")
        key = (*again.key, signature(small, self.adapter.AXES))
        if self.known.get(key, len(small.moves) + 1) > len(small.moves):
            self.known[key] = len(small.moves)
            yield self._event(world, small, again, key, muted)

    def _event(
        self, world: HuntWorld, small: HuntWorld, found: Found, key: Key, muted: frozenset[str]
    ) -> Event:
        return {
            "event": "found",
            "name": found.name,
            "where": found.where,
            "needs": list(key[2]),
            "text": found.text,
            "world": small.to_json(),
            "muted": sorted(muted),
            "moves_before": len(world.moves),
            "runs": self.tally.runs,
            "seconds": self.tally.seconds,
            "engine": self.adapter.NAME,
        }


def warm_up(adapter: type[EngineAdapter], world: HuntWorld) -> None:
    """Let the engine do the imports of its first run, which take longer than a run may."""
    try:
        adapter.Engine(world).close()
    except Exception as error:
        del error  # the first runs will raise it again, and report it


def _kind(move: object) -> str:
    return (
        "arrive" if isinstance(move, Arrive) else "abort" if isinstance(move, Abort) else str(move)
    )
