# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the small engine with a radix tree. None crashes, loses a slot or changes an answer.

Each stands for bugs that were reported of real engines.
"""

from __future__ import annotations

from tests.sanitizer.engines.driver import Request
from tests.sanitizer.engines.radix import Node, Radix, common


class TellsNobodyOfTheDuplicate(Radix):
    """A duplicate is given back, and the worker's table still names it."""

    def follow(self, request: Request, end: Node) -> None:
        slots = self.slots_of(end)
        request.table[: len(slots)] = slots


class LeavesTheAdapterOut(Radix):
    """All adapters share one tree."""

    def root(self, _: Request) -> Node:
        return self.roots.setdefault("", Node([], [], None))


class SplitsInAnotherOrder(Radix):
    """A node is split, and its first half has its slots in the opposite order."""

    def split(self, node: Node, at: int) -> Node:
        if node.slots is not None:
            node.slots = [*node.slots[:at][::-1], *node.slots[at:]]
        return super().split(node, at)


class SplitsTheHostInAnotherOrder(Radix):
    """A node on the host is split, and its first half has its slots in the opposite order."""

    def split(self, node: Node, at: int) -> Node:
        node.kept = [*node.kept[:at][::-1], *node.kept[at:]]
        return super().split(node, at)


class InsertsUnderAnotherAdapter(Radix):
    """What a request computed with its adapter is inserted for those who have none."""

    def insert(self, request: Request) -> Node:
        adapter, request.adapter = request.adapter, ""
        end = super().insert(request)
        request.adapter = adapter
        return end


class ComesBackToItsOldCount(Radix):
    """A request that waits again counts as computed as far as it was."""

    def retract(self, request: Request) -> None:
        self.__dict__.setdefault("counts", {})[request] = request.computed
        super().retract(request)

    def stand(self, request: Request, end: Node) -> None:
        super().stand(request, end)
        more = self.__dict__.get("counts", {}).pop(request, 0) - request.computed
        if more > 0 and len(self.free) > more and self.grow(request, more):
            request.computed += more


class StoresLate(Radix):
    """A leaf's slots are free at once, and copied to the host behind the next step."""

    def store(self, leaf: Node) -> None:
        pairs = [*zip(leaf.slots or (), leaf.kept, strict=True)]
        self.__dict__.setdefault("late", []).append(pairs)

    def execute(self, rows: list[tuple[Request, int]]) -> None:
        super().execute(rows)
        for pairs in self.__dict__.pop("late", ()):
            self.watch.copy(pairs, source="device", target="host")


class CountsAFailedLoad(Radix):
    """A load from the host fails, and counts as loaded."""

    def bring(self, node: Node) -> None:
        pass


class LoadsInAnotherOrder(Radix):
    """A node comes back with its slots in the opposite order."""

    def bring(self, node: Node) -> None:
        pairs = zip(node.kept, [*(node.slots or ())][::-1], strict=True)
        self.watch.copy(pairs, source="host", target="device")


class FreesTheHostFirst(Radix):
    """The host's slots are free before they are read, so that room for the load overwrites them."""

    def load(self, end: Node) -> bool:
        for node in end.path():
            if node.slots is None and self.num_short(node):
                self.free_host = [*node.kept, *self.free_host]
                loaded = super().load(end)
                self.free_host = [*dict.fromkeys(self.free_host)]
                if not loaded:
                    self.free_host = [each for each in self.free_host if each not in node.kept]
                return loaded
        return super().load(end)

    def num_short(self, node: Node) -> int:
        return max(0, len(node.tokens) - len(self.free))


class ComparesTheFirstToken(Radix):
    """A child is found by its first token, and the others are not compared."""

    def match(self, request: Request, tokens: list[int]) -> Node:
        node, at = self.root(request), 0
        while at < len(tokens):
            child = next((n for n in node.children if n.tokens[0] == tokens[at]), None)
            if child is None:
                break
            same = min(len(child.tokens), len(tokens) - at)
            if same < len(child.tokens) or common(child.tokens, tokens[at:]) == 0:
                child = self.split(child, same)
            child.used = self.number
            node, at = child, at + same
        return node


class KeepsTheTreeOfOldWeights(Radix):
    """The weights change, and what the old ones wrote is still matched."""

    def empty(self) -> None:
        pass


BUGS = [
    TellsNobodyOfTheDuplicate,
    LeavesTheAdapterOut,
    SplitsInAnotherOrder,
    SplitsTheHostInAnotherOrder,
    InsertsUnderAnotherAdapter,
    ComesBackToItsOldCount,
    StoresLate,
    CountsAFailedLoad,
    LoadsInAnotherOrder,
    FreesTheHostFirst,
    ComparesTheFirstToken,
    KeepsTheTreeOfOldWeights,
]
