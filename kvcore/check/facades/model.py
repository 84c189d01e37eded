# SPDX-License-Identifier: Apache-2.0
"""The model of a facade in a small world: all runs of an engine around it.

A node is the list of calls that led to it; they are made again when its edges are tried, since a
facade changes in place, and each edge begins with a copy. Nodes are folded if tables, owners, keys,
priorities, the order of free blocks and all contents are equal, after renaming blocks if the facade
does not depend on their ids. A refused call is checked, but is not an edge.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import attrs

from kvcore.check.facades.engine import FacadeEngine
from kvcore.check.properties.registry import Property
from kvcore.check.stories.scenes import Scene
from kvcore.check.world.model import Broken, CheckedCall, Edge
from kvcore.oracle.contents import TierBlock
from kvcore.pool.block_pool import BlockPool
from kvcore.pool.priority_eviction import NO_PRIORITY
from kvcore.trace.calls import Call
from kvcore.types.commands import Tier
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Outcome

Path = tuple[Call, ...]


@attrs.frozen
class FacadeNode:
    """The scene after some calls; the calls are made again when it is shown."""

    make: Callable[[], FacadeEngine]
    path: Path

    @property
    def scene(self) -> Scene:
        """Return the sequences and the blocks."""
        engine = self.make()
        for call in self.path:
            with suppress(InvariantViolation):
                engine.make(call)
        return engine.scene


class FacadeModel:
    """All runs of an engine, for `check`. make: returns an engine with an empty facade. known: the
    properties to check.
    """

    config = None

    def __init__(self, make: Callable[[], FacadeEngine], known: dict[str, Property]) -> None:
        self.notes: Counter[tuple[str, str]] = Counter()
        self.known = known
        self._make = make
        self._engine: tuple[Path, FacadeEngine] | None = None
        self._copied: tuple[Path, bytes] | None = None

    def start(self) -> Path:
        """Return the node without calls."""
        return ()

    def edges(self, node: Path) -> Iterator[Edge]:
        """Yield each call that an engine may make next, unless it is refused."""
        first = self._at(node)
        self._copy(node, first)
        for call in list(first.moves()):
            engine = self._at(node)
            try:
                done = engine.make(call)
            except InvariantViolation as error:
                raise Broken(error.name, error.detail, (self._step(node, call, engine),)) from error
            self.notes["call", f"{call.name}: {'done' if done else 'refused'}"] += 1
            if not done:
                continue
            for command in engine.emitted:
                self.notes["command", type(command).__name__] += 1
            path = (*node, call)
            self._engine = (path, engine)
            yield Edge(call.name, (self._step(node, call, engine),), path)

    def name(self, node: Path) -> bytes:
        """Return all that decides the future of an engine and its facade."""
        engine = self._at(node)
        name = repr(_renamed(engine)).encode()
        self._engine = (node, engine)
        return name

    def check(self, node: Path) -> None:
        """Do nothing: each call is checked when it is made."""

    def pack(self, node: Path) -> bytes:
        """Return the calls as bytes."""
        return pickle.dumps([(call.name, call.args, call.options) for call in node])

    def unpack(self, data: bytes) -> Path:
        """Return the calls of these bytes."""
        return tuple(Call(*each) for each in pickle.loads(data))

    def _step(self, node: Path, call: Call, engine: FacadeEngine) -> CheckedCall:
        after = FacadeNode(self._make, (*node, call))
        return CheckedCall(FacadeNode(self._make, node), call, Outcome(after, engine.emitted, None))

    def _at(self, node: Path) -> FacadeEngine:
        """Return an engine that made these calls, for the caller to change."""
        if self._engine is not None and self._engine[0] == node:
            engine = self._engine[1]
            self._engine = None
            return engine
        if self._copied is not None and self._copied[0] is node:
            copied: FacadeEngine = pickle.loads(self._copied[1])
            return copied
        engine = self._make()
        for call in node:
            engine.repeat(call)
        return engine

    def _copy(self, node: Path, engine: FacadeEngine) -> None:
        """Keep a copy of the engine at a node, unless it has compiled blocks."""
        try:
            self._copied = (node, pickle.dumps(engine, pickle.HIGHEST_PROTOCOL))
        except TypeError:
            self._copied = None


def _renamed(engine: FacadeEngine) -> object:
    """Return all that decides an engine's future, with blocks named by first use if allowed."""
    tiers, sequences = engine.blocks(), engine.sequences()
    pools: list[tuple[Tier, BlockPool]] = [("device", tiers.device)]
    pools += [] if tiers.host is None else [("host", tiers.host)]
    names: dict[TierBlock, int] = {}
    if engine.renames_blocks:
        used = [place for *_, table in sequences for place in table]
        used += [(tier, block) for tier, pool in pools for block in pool.queue]
        names = {place: at for at, place in enumerate(dict.fromkeys(used))}
    times = {time for _, pool in pools for time, _ in pool.priorities.values()}
    order = {time: at for at, time in enumerate(sorted(times.union(engine.times())))}
    rows = []
    for tier, pool in pools:
        queue = {block: at for at, block in enumerate(pool.queue)}
        for block, count in enumerate(pool.ref_counts):
            place = (tier, block)
            slots = engine.memory.contents.get(place)
            time, length = pool.priorities.get(block, NO_PRIORITY)
            where = (names.get(place, block), tier, queue.get(block))
            rows.append((*where, count, pool.keys[block], order.get(time), length, slots))
    tables = [(*seq[:3], [names.get(place, place) for place in seq[3]]) for seq in sequences]
    rows.sort(key=lambda row: (row[1], row[0]))
    return tables, rows, engine.key(names, order)
