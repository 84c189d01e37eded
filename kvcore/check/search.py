# SPDX-License-Identifier: Apache-2.0
"""Every reachable state of a model, breadth first.

Rules: nodes are folded by their names; the first one met stands for its class, and its path is a
shortest one. What is kept of a node is a fingerprint of 128 bits of its name (or the whole name),
and the number of the edge that led to it; a waiting node waits as bytes. So a run is found again by
its edges. A search that is stopped says what it has. Twin: rust/src/check/search.rs.
"""

from __future__ import annotations

import resource
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from kvcore.check.canonical import FINGERPRINT_BYTES, fingerprint
from kvcore.check.core_model import CoreModel
from kvcore.check.flight_model import FlightModel
from kvcore.check.judge import Watch, broken
from kvcore.check.model import Broken, Edge, Model, Step, Violation
from kvcore.check.outcomes import OUTCOME_PROPERTIES
from kvcore.check.prefixes import PREFIX_PROPERTIES
from kvcore.check.properties import Property
from kvcore.check.report import COMPLETE, INTERRUPTED, VIOLATION, Report
from kvcore.check.world import Symmetry, World

__all__ = ["EDGE_PROPERTIES", "Broken", "Explorer", "Report", "Search", "Violation", "check"]

EDGE_PROPERTIES = {
    "KV-READ": "what a query sees is read from slots that hold its own prefix, in every group",
    "CACHE-KV": "a block under a key holds exactly the prefix that the key stands for",
    "TABLE-MIRROR": "block tables made from the commands alone are the state's",
    "OWNER-MIRROR": "owners, and which ownerless blocks are cached, follow from the commands alone",
    "COMPUTED-RULE": "computed counts are those that the sentences of the design give",
    "ZEROED": "a new block of a group that asks for it is zeroed or filled before it is read",
    "CAP": "a request that one step extends holds no more of a windowed group than its cap",
    "NOCRASH": "no call fails in another way than by a typed error",
    **PREFIX_PROPERTIES,
    **OUTCOME_PROPERTIES,
}
Progress = Callable[[Report], None]


@attrs.frozen(kw_only=True)
class Limits:
    """Where a search stops: at this distance, at so many states or seconds; None for no limit."""

    max_depth: int | None = None
    max_states: int | None = None
    max_seconds: float | None = None


def check(
    what: World | Model[Any],
    *,
    max_depth: int | None = None,
    max_states: int | None = None,
    max_seconds: float | None = None,
    properties: Iterable[str | Property] | None = None,
    symmetry: Symmetry | None = None,
    full_keys: bool = False,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Report:
    """Explore a world, or a model of your own; the report has the verdict, and a violation if there
    is one.

    properties: names of those that count, or some of your own; all unless given. symmetry: what is
    renamed, all unless given. full_keys: keep whole names, not fingerprints. progress: is told how
    far it is, now and then. watch: sees each call.
    """
    model: Model[Any] = make_model(what, properties, symmetry, watch, full_keys=full_keys)
    limits = Limits(max_depth=max_depth, max_states=max_states, max_seconds=max_seconds)
    return Search(model, limits, full_keys=full_keys, progress=progress).run()


def make_model(
    what: World | Model[Any],
    properties: Iterable[str | Property] | None = None,
    symmetry: Symmetry | None = None,
    watch: Watch | None = None,
    *,
    full_keys: bool = False,
) -> Model[Any]:
    """The model of a world; a model is one already."""
    if not isinstance(what, World):
        return what
    kind = FlightModel if what.config.max_in_flight else CoreModel
    return kind(what, symmetry=symmetry, properties=properties, watch=watch, full_keys=full_keys)


class Search:
    """One exploration of a model."""

    def __init__(
        self,
        model: Model[Any],
        limits: Limits | None = None,
        *,
        full_keys: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.limits = limits or Limits()
        self.report = Report(keys="full keys" if full_keys else "fingerprints of 128 bits")
        self._full_keys = full_keys
        self._progress = progress
        self._seen: set[bytes] = set()
        self._parents = array("Q")
        self._edges = array("L")
        self._began = 0.0

    def run(self) -> Report:
        """Explore everything, or until a limit or Ctrl-C."""
        self._began = time.perf_counter()
        memory = memory_bytes()
        report = self.report
        try:
            report.verdict = self._run()
        except KeyboardInterrupt:
            report.verdict = INTERRUPTED
        report.num_states = len(self._parents)
        report.notes = self.model.notes
        report.seconds = time.perf_counter() - self._began
        report.memory_bytes = max(0, memory_bytes() - memory)
        return report

    def _run(self) -> str:
        start = self.model.start()
        report, limits = self.report, self.limits
        first = self._add(start, 0, 0, ())
        broken = None if first is None else self._violated(0, first)
        level: list[tuple[int, bytes]] = [(0, self.model.pack(start))]
        report.depths = [1]
        while level and broken is None:
            if limits.max_depth is not None and report.depth >= limits.max_depth:
                report.num_waiting = len(level)
                return "bounded by depth"
            following: list[tuple[int, bytes]] = []
            for place, (number, packed) in enumerate(level):
                bound = self._bound()
                if bound is not None:
                    report.num_waiting = len(level) - place + len(following)
                    _add_level(report, following)
                    return bound
                broken = self._expand(number, self.model.unpack(packed), following)
                if broken is not None:
                    break
                self._tell(len(level) - place, len(following))
            _add_level(report, following)
            level = following
        return COMPLETE if broken is None else VIOLATION

    def _expand(
        self, number: int, node: Any, following: list[tuple[int, bytes]]
    ) -> Violation | None:
        """Try all edges of a node. A violation is put into the report."""
        model, edges = self.model, model_edges(self.model, node)
        place = 0
        try:
            for place, edge in enumerate(edges):
                self.report.num_edges += 1
                model.notes["move", edge.name] += 1
                count = len(self._parents)
                broken = self._add(edge.node, number, place, edge.steps)
                if broken is not None:
                    return self._violated(number, broken)
                if len(self._parents) > count:
                    following.append((count, model.pack(edge.node)))
        except Broken as broken:
            return self._violated(number, broken)
        return None

    def _add(self, node: Any, parent: int, edge: int, steps: tuple[Step, ...]) -> Broken | None:
        """Take in a node, and judge it if it is new."""
        try:
            name = self.model.name(node)
            if not self._full_keys and len(name) > FINGERPRINT_BYTES:
                name = fingerprint(name)
            if name in self._seen:
                return None
            self.model.check(node)
        except Exception as error:
            return broken(error, steps)
        self._seen.add(name)
        self._parents.append(parent)
        self._edges.append(edge)
        return None

    def _violated(self, number: int, broken: Broken) -> Violation:
        steps = (*self._story(number), *broken.steps)
        self.report.violation = Violation(broken.name, broken.detail, steps)
        return self.report.violation

    def _story(self, number: int) -> tuple[Step, ...]:
        """The steps that lead to a node, made again."""
        places: list[int] = []
        while number:
            places.append(self._edges[number])
            number = self._parents[number]
        notes = self.model.notes.copy()
        node = self.model.start()
        steps: list[Step] = []
        for place in reversed(places):
            edge = nth(model_edges(self.model, node), place)
            node = self.model.unpack(self.model.pack(edge.node))
            steps += edge.steps
        self.model.notes.clear()
        self.model.notes.update(notes)
        return tuple(steps)

    def _bound(self) -> str | None:
        """The limit that is reached."""
        limits = self.limits
        if limits.max_states is not None and len(self._parents) >= limits.max_states:
            return "bounded by states"
        seconds = time.perf_counter() - self._began
        if limits.max_seconds is not None and seconds >= limits.max_seconds:
            return "bounded by time"
        return None

    def _tell(self, num_left: int, num_following: int) -> None:
        if self._progress is not None:
            report = self.report
            report.num_states = len(self._parents)
            report.num_waiting = num_left + num_following
            report.seconds = time.perf_counter() - self._began
            self._progress(report)


class Explorer:
    """A search that raises what it finds."""

    def __init__(
        self, world: World, watch: Watch | None = None, judges: frozenset[str] | None = None
    ) -> None:
        self._model = make_model(world, judges, None, watch)
        self.report = Report()

    def run(self, *, max_states: int | None = None) -> Report:
        """Explore everything, or until so many states are known. Raises Broken."""
        self.report = Search(self._model, Limits(max_states=max_states)).run()
        found = self.report.violation
        if found is not None:
            raise Broken(found.name, found.detail, found.steps)
        return self.report


def model_edges(model: Model[Any], node: Any) -> Iterable[Edge]:
    """The edges of a node."""
    return model.edges(node)


def nth(edges: Iterable[Edge], place: int) -> Edge:
    """The edge at a place."""
    for at, edge in enumerate(edges):
        if at == place:
            return edge
    raise AssertionError(f"no edge {place}: the model gives others the second time")


def _add_level(report: Report, following: list[tuple[int, bytes]]) -> None:
    if following:
        report.depths.append(len(following))


def memory_bytes() -> int:
    """The most memory that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
