# SPDX-License-Identifier: Apache-2.0
"""The search: every reachable state of a model, breadth first.

Nodes are folded by their names; the first one met stands for its class, and its path is a shortest
one. A node is kept as a fingerprint of 128 bits of its name (or the whole name), and the number of
the edge that led to it; a waiting node is kept as bytes. So a run is found again by its edges. A
stopped search reports what it has found. Twin: rust/src/check/search/search.rs.
"""

from __future__ import annotations

import pickle
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from kvcore.check.names.fingerprints import Fingerprints
from kvcore.check.properties.checker import Watch
from kvcore.check.properties.registry import PROPERTIES, Property
from kvcore.check.properties.schedulers import guarded
from kvcore.check.search.ahead_model import AheadModel
from kvcore.check.search.core_model import CoreModel
from kvcore.check.search.expand import Expander, Expansion
from kvcore.check.search.far_model import FarModel
from kvcore.check.search.flight_model import FlightModel
from kvcore.check.search.frontier import bytes_of
from kvcore.check.search.parity import Parity
from kvcore.check.search.process_memory import memory_bytes
from kvcore.check.search.report import COMPLETE, INTERRUPTED, VIOLATION, Report, kept
from kvcore.check.search.scope import check_search, checked_in
from kvcore.check.search.twin_search import explore_twin
from kvcore.check.search.workers import Workers
from kvcore.check.world.model import Broken, Model, Violation
from kvcore.check.world.world import Symmetry, World

Progress = Callable[[Report], None]
Chosen = Iterable[str | Property] | None
FEW = 200
"""Fewer nodes in a level are not worth several processes."""
ALIKE = 32
"""How many nodes the dictionary for compression is learnt from."""


@attrs.frozen(kw_only=True)
class Limits:
    """The limits of a search: a distance, a number of states, seconds; None for no limit."""

    max_depth: int | None = None
    max_states: int | None = None
    max_seconds: float | None = None


def check(
    what: World | Model[Any],
    *,
    backend: str = "python",
    max_depth: int | None = None,
    max_states: int | None = None,
    max_seconds: float | None = None,
    properties: Chosen = None,
    symmetry: Symmetry | None = None,
    full_keys: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Report:
    """Explore a world, or a user's own model; return the report with the verdict, and a violation
    if there is one.

    backend: "python"; "rust" explores the compiled twin; "both" compares them on every call.
    properties: names of those to check, or a user's own; default: all. symmetry: what is renamed;
    default: everything, except requests if a user's own scheduler may depend on them. full_keys:
    keep whole names, not fingerprints. workers: number of processes, which does not change the
    counts. progress: called with the report so far, from time to time. watch: called with each
    call. Raises BackendMissing, ValueError.
    """
    limits = Limits(max_depth=max_depth, max_states=max_states, max_seconds=max_seconds)
    check_search(backend, workers, attrs.asdict(limits))
    chosen = None if properties is None else list(properties)
    if isinstance(what, World) and callable(what.moves):
        if backend == "rust":
            raise ValueError("a scheduler of your own is Python's alone: leave backend out")
        what = attrs.evolve(what, moves=guarded(what.moves))
        symmetry = symmetry or Symmetry(requests=False)
    if isinstance(what, World) and flies(what) and crosses(what):
        raise ValueError("groups of encoders are not explored with batches in flight")
    both = backend == "both"
    if isinstance(what, World) and what.far is not None and backend != "python":
        raise ValueError("the client of a far tier is Python's alone: leave backend out")
    checked, left_out = checked_in(what, chosen, parity=both)
    if backend == "rust":
        where = world_for_twin(what, chosen)
        report = explore_twin(
            where,
            names=None if chosen is None else [str(each) for each in chosen],
            symmetry=symmetry or Symmetry(),
            full_keys=full_keys,
            limits=attrs.asdict(limits),
            workers=workers,
            progress=progress,
        )
    else:
        make = partial(make_expander, what, chosen, symmetry, full_keys, both, watch=watch)
        report = Search(make, limits, workers=workers, progress=progress, backend=backend).run()
    report.world, report.symmetry = what, symmetry or Symmetry()
    report.checked, report.left_out = checked, left_out
    found = report.violation
    if found is not None and checked.get(found.name) is not PROPERTIES.get(found.name):
        report.violation = attrs.evolve(found, own=checked.get(found.name))
    return report


def flies(world: World) -> bool:
    """Return whether the batches of a world are in flight, or its engine runs ahead."""
    return world.config.max_in_flight > 0 or world.num_output_placeholders > 0


def crosses(world: World) -> bool:
    """Return whether a world has a group of encoder tokens."""
    return any(group.is_cross for group in world.config.groups)


def world_for_twin(what: World | Model[Any], chosen: list[str | Property] | None) -> World:
    """Return the world to explore, if the twin can check these properties. Raises ValueError."""
    if not isinstance(what, World):
        raise ValueError("the twin explores worlds, not models of your own")
    own = [each.name for each in chosen or () if isinstance(each, Property)]
    if own:
        raise ValueError(f"the twin knows no property of your own ({own[0]}): use Python")
    return what


def make_expander(
    what: World | Model[Any],
    properties: Chosen,
    symmetry: Symmetry | None,
    full_keys: bool,
    both: bool,
    watch: Watch | None = None,
) -> Expander:
    """Return the function that tries the edges of a world's states, or of a model's nodes."""
    if not isinstance(what, World):
        return Expander(what, full_keys=full_keys)
    kind = FlightModel if what.config.max_in_flight else CoreModel
    kind = AheadModel if what.num_output_placeholders else kind
    kind = FarModel if what.far is not None else kind
    seen = Parity(what.config) if both else watch
    model = kind(what, symmetry=symmetry, properties=properties, watch=seen, full_keys=full_keys)
    return Expander(model, full_keys=full_keys)


class Search:
    """One exploration. make: returns an expander, here and in other processes."""

    def __init__(
        self,
        make: Callable[[], Expander],
        limits: Limits | None = None,
        *,
        workers: int = 1,
        progress: Progress | None = None,
        backend: str = "python",
    ) -> None:
        self.limits = limits or Limits()
        self._make = make
        self._expander = make()
        self.report = Report(backend=backend, keys=kept(self._expander.full_keys))
        self._progress = progress
        self._num_workers = workers if _travels(make) else 1
        self._workers: Workers | None = None
        self._seen = self._expander.seen
        self._parents = array("I")
        self._edges = array("I")
        self._levels: tuple[list[bytes], ...] = ()
        self._began = 0.0

    def run(self) -> Report:
        """Explore everything, or until a limit or Ctrl-C."""
        self._began = time.perf_counter()
        memory, report = memory_bytes(), self.report
        try:
            report.verdict = self._run()
        except KeyboardInterrupt:
            report.verdict = INTERRUPTED
        finally:
            self._weigh()
            report.grown_bytes = max(0, memory_bytes() - memory)
            if self._workers is not None:
                report.grown_bytes += self._workers.grown_bytes
                self._workers.close()
        self._note(self._expander.model.notes)
        self._count()
        return report

    def _run(self) -> str:
        report, limits = self.report, self.limits
        first, wrong = self._expander.first()
        if first is None:
            return self._violated((), wrong)
        self._parents.append(0)
        self._edges.append(0)
        level: list[bytes] = [first[2]]
        self._note(first[3])
        report.depths, begins = [1], 0
        while level:
            if limits.max_depth is not None and report.depth >= limits.max_depth:
                report.num_waiting = len(level)
                return "bounded by depth"
            if len(level) >= ALIKE:
                level = self._expander.squeezer.learn(level)
            following: list[bytes] = []
            self._levels = (level, following)
            for place, expansion in enumerate(self._expanded(level)):
                cut = self._merge(begins + place, expansion, following)
                report.num_waiting = len(level) - place - 1 + len(following) + cut
                if expansion.broken is not None:
                    report.depths += [len(following)] if following else []
                    return self._violated(self._path(begins + place), expansion.broken)
                bound = self._bound() if report.num_waiting else None
                if bound is not None:
                    report.depths += [len(following)] if following else []
                    return bound
                self._report_progress()
            begins += len(level)
            report.depths += [len(following)] if following else []
            self._weigh()
            level = following
        return COMPLETE

    def _expanded(self, level: Sequence[bytes]) -> Iterator[Expansion]:
        """Yield the expansions of the nodes of a level, in their order."""
        if self._num_workers > 1 and self._workers is None and len(level) >= FEW:
            self._workers = Workers(self._make, self._expander.squeezer, self._num_workers)
            self._workers.learn(self._expander)
        if self._workers is None:
            yield from map(self._expander.expand, level)
            return
        for result in self._workers.expand(level):
            self._note(result.notes)
            yield from result.expansions

    def _merge(self, number: int, expansion: Expansion, following: list[bytes]) -> bool:
        """Count a node's edges and keep the new nodes; return whether some did not fit."""
        most = self.limits.max_states
        self.report.num_edges += expansion.num_edges
        for name, place, packed, shown in expansion.found:
            if self._workers is not None and not self._seen.add(name):
                continue
            if most is not None and len(self._parents) >= most:
                return True
            self._parents.append(number)
            self._edges.append(place)
            following.append(packed)
            self.report.notes.update(shown)
        return False

    def _path(self, number: int) -> tuple[int, ...]:
        """Return the edges that lead to a node."""
        places: list[int] = []
        while number:
            places.append(self._edges[number])
            number = self._parents[number]
        return tuple(reversed(places))

    def _violated(self, path: Sequence[int], found: Broken | Violation | None) -> str:
        """Put a violation into the report, with its steps made again if they are missing."""
        assert found is not None
        expander = self._expander
        if not path and not found.steps:
            steps = found.steps
        else:
            steps, node = expander.story(path)
            if not found.steps:
                expander.seen = Fingerprints()
                found = expander.expand(node).broken or found
            steps = (*steps, *found.steps)
        self.report.violation = Violation(found.name, found.detail, steps)
        return VIOLATION

    def _bound(self) -> str | None:
        """Return the limit that is reached."""
        limits = self.limits
        if limits.max_states is not None and len(self._parents) >= limits.max_states:
            return "bounded by states"
        seconds = time.perf_counter() - self._began
        if limits.max_seconds is not None and seconds >= limits.max_seconds:
            return "bounded by time"
        return None

    def _note(self, notes: Counter[tuple[str, str]]) -> None:
        self.report.notes += notes

    def _count(self) -> None:
        self.report.num_states = len(self._parents)
        self.report.seconds = time.perf_counter() - self._began

    def _weigh(self) -> None:
        """Note the memory of all nodes, if it is a new maximum."""
        kept = self._seen.num_bytes + sum(map(bytes_of, self._levels))
        kept += sys.getsizeof(self._parents) + sys.getsizeof(self._edges)
        kept += 0 if self._workers is None else self._workers.kept_bytes
        self.report.memory_bytes = max(self.report.memory_bytes, kept)

    def _report_progress(self) -> None:
        if self._progress is not None:
            self._count()
            self._progress(self.report)


def _travels(make: Callable[[], Expander]) -> bool:
    """Return whether the explored model can be sent to other processes."""
    try:
        pickle.dumps(make)
    except (AttributeError, TypeError, pickle.PicklingError):
        return False
    return True
