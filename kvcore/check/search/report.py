# SPDX-License-Identifier: Apache-2.0
"""The report of an exploration: its findings, and what it never reached.

A verdict says exactly how far it reaches: complete, bounded by what, interrupted, or a violation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs

from kvcore.check.properties.registry import PROPERTIES, Property
from kvcore.check.search.scope import plain_property, plain_world
from kvcore.check.world.model import Violation
from kvcore.check.world.world import Symmetry, World

COMPLETE, INTERRUPTED, VIOLATION = "complete", "interrupted", "violation"


def kept(full_keys: bool) -> str:
    """Return the form in which states are kept, in a report's words."""
    return "full keys" if full_keys else "fingerprints of 128 bits"


@attrs.define
class Report:
    """The figures of one exploration.

    verdict: "complete", "bounded by depth", "bounded by states", "bounded by time", "interrupted"
    or "violation". keys: "fingerprints of 128 bits" or "full keys", the form of kept names. depths:
    new states at each distance from the start. notes: how often each thing happened, by kind
    ("move", "call", "command", "goal") and name. never: what the world could show and never did.
    missed: what a named world must show and did not. num_waiting: states whose edges were not all
    tried and kept. memory_bytes: peak memory of states in all processes: names, links, waiting
    states. grown_bytes: growth of the processes, including all that they load and remember. world:
    what was explored. symmetry: what was renamed. checked: the selected properties, by name;
    left_out: those that could have been selected and were not.
    """

    backend: str = "python"
    verdict: str = COMPLETE
    keys: str = kept(full_keys=False)
    num_states: int = 0
    num_edges: int = 0
    num_waiting: int = 0
    depths: list[int] = attrs.field(factory=list)
    notes: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    never: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    seconds: float = 0.0
    memory_bytes: int = 0
    grown_bytes: int = 0
    violation: Violation | None = None
    world: Any = None
    symmetry: Symmetry = attrs.field(factory=Symmetry)
    checked: Mapping[str, Property] = attrs.field(factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def depth(self) -> int:
        """Return the largest distance from the start at which there is a state."""
        return max(0, len(self.depths) - 1)

    @property
    def goals(self) -> Counter[str]:
        """Count how often each goal was reached."""
        found: Counter[str] = Counter()
        for (kind, name), count in self.notes.items():
            if kind == "call":
                call, _, outcome = name.partition(": ")
                found[call if outcome == "done" else outcome] += count
            elif kind in ("command", "goal"):
                found[name] += count
        return found

    @property
    def enabled(self) -> dict[str, int]:
        """Count how often each call of the world was enabled, and so was tried: the rarest last."""
        known = self.world.calls if isinstance(self.world, World) else ()
        found: Counter[str] = Counter(dict.fromkeys(sorted(known), 0))
        for name, count in self.of_kind("call").items():
            found[name.partition(": ")[0]] += count
        return dict(found.most_common())

    def of_kind(self, kind: str) -> dict[str, int]:
        """Return the notes of one kind, most frequent first."""
        chosen = {name: count for (each, name), count in self.notes.items() if each == kind}
        return dict(sorted(chosen.items(), key=lambda item: (-item[1], item[0])))

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "backend": self.backend,
            "verdict": self.verdict,
            "world": plain_world(self.world),
            "symmetry": attrs.asdict(self.symmetry),
            "properties": [plain_property(each) for each in self.checked.values()],
            "left_out": list(self.left_out),
            "keys": self.keys,
            "states": self.num_states,
            "edges": self.num_edges,
            "waiting": self.num_waiting,
            "depth": self.depth,
            "depths": self.depths,
            **{f"{kind}s": self.of_kind(kind) for kind in ("move", "call", "command", "goal")},
            "enabled": self.enabled,
            "never": list(self.never),
            "missed": list(self.missed),
            "seconds": round(self.seconds, 3),
            "memory_bytes": self.memory_bytes,
            "grown_bytes": self.grown_bytes,
            "violation": None if self.violation is None else self._violation(self.violation),
        }

    def _violation(self, violation: Violation) -> dict[str, Any]:
        known = self.checked.get(violation.name) or PROPERTIES.get(violation.name)
        return {
            "property": violation.name,
            "severity": None if known is None else known.severity,
            "sentence": None if known is None else known.sentence,
            "detail": violation.detail,
            "calls": [str(step.call) for step in violation.steps],
        }
