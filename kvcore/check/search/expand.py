# SPDX-License-Identifier: Apache-2.0
"""The expansion of nodes, by one process or several: tries their edges.

Nodes come packed and go packed. An expander returns each node once, checked; whoever merges the
results of several keeps the first in the order of the nodes. So the counts of states and edges do
not depend on the number of processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs

from kvcore.check.names.canonical import FINGERPRINT_BYTES, fingerprint
from kvcore.check.names.fingerprints import Fingerprints
from kvcore.check.properties.checker import broken
from kvcore.check.search.frontier import Squeezer
from kvcore.check.world.model import Broken, CheckedCall, Edge, Model, Violation

Found = tuple[bytes, int, bytes, Counter[tuple[str, str]]]
"""A new node's name, the number of the edge that leads there, the node as bytes, and what it shows.
Only the process that keeps the node notes what it shows, so no node is counted twice.
"""


@attrs.define
class Expansion:
    """One node's expansion: where its edges lead. broken: what the first wrong edge breaks."""

    num_edges: int = 0
    found: list[Found] = attrs.field(factory=list)
    broken: Broken | Violation | None = None


class Expander:
    """Tries edges, and remembers which nodes it returned."""

    def __init__(self, model: Model[Any], *, full_keys: bool = False) -> None:
        self.model = model
        self.seen = Fingerprints()
        self.squeezer = Squeezer()
        self.full_keys = full_keys

    def first(self) -> tuple[Found | None, Broken | None]:
        """Return the start, checked."""
        start = self.model.start()
        name, shown, wrong = self._take_in(start, ())
        return (None if name is None else (name, 0, self._pack(start), shown)), wrong

    def expand(self, packed: bytes) -> Expansion:
        """Try all edges of a node, up to the first wrong one."""
        model, result = self.model, Expansion()
        try:
            for place, edge in enumerate(model.edges(self._unpack(packed))):
                result.num_edges += 1
                model.notes["move", edge.name] += 1
                name, shown, result.broken = self._take_in(edge.node, edge.steps)
                if result.broken is not None:
                    return result
                if name is not None:
                    result.found.append((name, place, self._pack(edge.node), shown))
        except Broken as wrong:
            result.broken = wrong
        except Exception as error:
            result.broken = broken(error, ())
        return result

    def story(self, places: Iterable[int]) -> tuple[tuple[CheckedCall, ...], bytes]:
        """Make the steps along these edges again; return them, and the node at their end."""
        notes = self.model.notes.copy()
        node = self.model.start()
        steps: list[CheckedCall] = []
        for place in places:
            edge = nth(self.model.edges(node), place)
            node = self.model.unpack(self.model.pack(edge.node))
            steps += edge.steps
        self.model.notes.clear()
        self.model.notes.update(notes)
        return tuple(steps), self._pack(node)

    def _pack(self, node: Any) -> bytes:
        packed: bytes = self.squeezer.squeeze(self.model.pack(node))
        return packed

    def _unpack(self, packed: bytes) -> Any:
        return self.model.unpack(self.squeezer.open(packed))

    def _take_in(
        self, node: Any, steps: tuple[CheckedCall, ...]
    ) -> tuple[bytes | None, Counter[tuple[str, str]], Broken | None]:
        """Return the name of a new, correct node, and what it shows; or what it breaks."""
        noted, shown = self.model.notes, Counter[tuple[str, str]]()
        try:
            name = self.model.name(node)
            if not self.full_keys and len(name) > FINGERPRINT_BYTES:
                name = fingerprint(name)
            if name in self.seen:
                return None, shown, None
            before = noted.copy()
            self.model.check(node)
            shown = noted - before
            noted.subtract(shown)
        except Exception as error:
            return None, shown, broken(error, steps)
        self.seen.add(name)
        return name, shown, None


def nth(edges: Iterable[Edge], place: int) -> Edge:
    """Return the edge at a position."""
    for at, edge in enumerate(edges):
        if at == place:
            return edge
    raise AssertionError(f"no edge {place}: the model gives others the second time")


def taken_notes(model: Model[Any]) -> Counter[tuple[str, str]]:
    """Return the notes of a model since the last call."""
    notes = model.notes.copy()
    model.notes.clear()
    return notes
