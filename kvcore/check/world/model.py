# SPDX-License-Identifier: Apache-2.0
"""A model to explore: a start, the edges of a node, a name for each class of nodes, a checker.

A search (`search.py`) knows nothing else of what it explores. Edges come in a fixed order that
depends on the node alone, so that a run can be found again by the numbers of its edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import attrs

from kvcore.trace.calls import Call
from kvcore.types.values import Outcome

Node = TypeVar("Node")


@attrs.frozen
class CheckedCall:
    """A call that was made, with the state before it and its outcome."""

    before: Any
    call: Call
    outcome: Outcome[Any, Any]


@attrs.frozen
class Edge:
    """The steps that lead from one node to the next. name: what an engine calls them."""

    name: str
    steps: tuple[CheckedCall, ...]
    node: Any


class Model(Protocol[Node]):
    """The interface of what a search explores.

    notes: how often each thing happened, by kind ("move", "call", "goal", "command") and name.
    """

    notes: Counter[tuple[str, str]]

    def start(self) -> Node:
        """Return the first node."""

    def edges(self, node: Node) -> Iterator[Edge]:
        """Yield the edges of a node. Raises Broken, with the steps of the edge, if one is wrong."""

    def name(self, node: Node) -> bytes:
        """Return the same bytes for all nodes of a class, and for no other."""

    def check(self, node: Node) -> None:
        """Check a new node. Raises InvariantViolation."""

    def pack(self, node: Node) -> bytes:
        """Return the node as bytes, to wait in memory and to travel between processes."""

    def unpack(self, data: bytes) -> Node:
        """Return the node that was packed."""


@attrs.frozen
class Violation:
    """A property that fails, and the shortest steps that show it.

    own: the property, if it is the user's own. policy: the user's own that was installed.
    """

    name: str
    detail: str
    steps: tuple[CheckedCall, ...]
    own: Any = None
    policy: Any = None

    @property
    def calls(self) -> tuple[Call, ...]:
        """Return the calls of the steps, without `take_batch`."""
        return calls_of(self.steps)


class Broken(AssertionError):
    """A violation, raised when it is found; its steps begin at the node that was explored."""

    def __init__(self, name: str, detail: str, steps: tuple[CheckedCall, ...]) -> None:
        self.name = name
        self.detail = detail
        self.steps = steps
        super().__init__(f"{name}: {detail}" + "".join(f"\n  {call}" for call in calls_of(steps)))


def calls_of(steps: tuple[CheckedCall, ...]) -> tuple[Call, ...]:
    """Return the calls of some steps, without `take_batch`."""
    return tuple(step.call for step in steps if step.call.name != "take_batch")
