# SPDX-License-Identifier: Apache-2.0
"""A small engine with a radix tree over slots of one token, and a host tier.

What a request computed is inserted when its prompt is done and when it leaves; a duplicate is
given back, and the request goes on with the tree's slots. Nodes that a request stands on are
locked. Under pressure the leaf that was used least recently goes to the host, and comes back when
it is matched.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import attrs

from kvcore.sanitizer import CacheGroup, Chunk, Sanitizer
from tests.sanitizer.engines.driver import Engine, Request, next_token

BUDGET, ROWS, HOST = 5, 3, 8


@attrs.define(eq=False)
class Node:
    """The tokens after a parent's, on the device (slots) or on the host (kept)."""

    tokens: list[int]
    slots: list[int] | None
    parent: Node | None
    kept: list[int] = attrs.field(factory=list)
    children: list[Node] = attrs.field(factory=list)
    locks: int = 0
    used: int = 0

    def path(self) -> Iterator[Node]:
        """Yield the node and those above it."""
        yield self
        if self.parent is not None:
            yield from self.parent.path()

    def below(self) -> Iterator[Node]:
        """Yield the nodes under it."""
        for child in self.children:
            yield child
            yield from child.below()


class Radix(Engine):
    """The engine."""

    OPTIONAL = ("change_weights",)

    def __init__(self, dice: random.Random, *, backend: str | None = None) -> None:
        self.num_blocks = dice.choice((14, 16, 18))
        super().__init__(Sanitizer([CacheGroup(block_size=1)], self.num_blocks, backend=backend))
        self.roots: dict[str, Node] = {}
        self.ends: dict[Request, Node] = {}
        self.free = list(range(self.num_blocks))
        self.free_host = list(range(HOST))

    def num_unused(self) -> int:
        return len({*self.free}) + sum(len(node.slots or ()) for node in self.nodes())

    def nodes(self) -> list[Node]:
        return [node for root in self.roots.values() for node in root.below()]

    def root(self, request: Request) -> Node:
        return self.roots.setdefault(request.adapter, Node([], [], None))

    def change_weights(self) -> None:
        """Change the weights: running requests are computed again, and the tree is empty."""
        self.watch.epoch()
        for request in [*self.running]:
            self.retract(request)
        self.empty()
        for request in self.waiting:
            self.watch.renew(request.name)

    def empty(self) -> None:
        for node in self.nodes():
            self.free += node.slots or []
            self.free_host += node.kept
        self.roots.clear()

    def step(self) -> None:
        rows, left = list[tuple[Request, int]](), BUDGET
        self.number += 1
        for request in [*self.running]:
            count = min(request.left, left)
            while request in self.running and not self.grow(request, count):
                self.retract(max(self.running, key=lambda each: (each.urgency, each.name)))
            if request in self.running and count:
                rows.append((request, count))
                left -= count
        while self.waiting and left and len(self.running) < ROWS and not self.crowded():
            request = self.waiting[0]
            if not self.admit(request):
                break
            count = min(request.left, left)
            if not self.grow(request, count):
                self.retract(request)
                break
            rows.append((request, count))
            left -= count
        rows = [row for row in rows if row[0] in self.running]
        if rows:
            self.execute(rows)

    def crowded(self) -> bool:
        """Tell whether running requests would soon take each other's slots."""
        return sum(each.left + 1 for each in self.running) > len(self.free)

    def execute(self, rows: list[tuple[Request, int]]) -> None:
        self.watch.issue(self.number, [Chunk(each.name, each.computed, n) for each, n in rows])
        self.found += self.watch.complete(self.number)
        for request, count in rows:
            request.computed += count
            if not request.left:
                if count > 1:
                    self.keep(request)
                request.tokens.append(next_token(len(request.tokens)))
                request.num_new -= 1
                if not request.num_new:
                    self.finished[request.name] = request
                    self.leave(request)

    def admit(self, request: Request) -> bool:
        """Let a request stand on the longest prefix in the tree that leaves a token."""
        end = self.match(request, request.tokens[: len(request.tokens) - 1])
        self.lock(end, 1)
        if not self.load(end):
            self.lock(end, -1)
            return False
        self.ends[request] = end
        self.waiting.remove(request)
        self.running.append(request)
        self.stand(request, end)
        return True

    def stand(self, request: Request, end: Node) -> None:
        """Give a request the slots of a path."""
        slots = self.slots_of(end)
        request.table, request.computed = slots, len(slots)
        self.watch.extend(request.name, 0, slots)

    def slots_of(self, end: Node) -> list[int]:
        return [slot for node in [*end.path()][::-1] for slot in node.slots or ()]

    def match(self, request: Request, tokens: list[int]) -> Node:
        """Return the node at the end of the longest prefix, split off where it ends inside one."""
        node, at = self.root(request), 0
        while at < len(tokens):
            child = next((n for n in node.children if n.tokens[0] == tokens[at]), None)
            if child is None:
                break
            same = common(child.tokens, tokens[at:])
            if same < len(child.tokens):
                child = self.split(child, same)
            child.used = self.number
            node, at = child, at + same
        return node

    def split(self, node: Node, at: int) -> Node:
        """Split the first tokens off a node, which keeps the others; return the new node."""
        upper = Node(node.tokens[:at], None, node.parent, used=node.used, locks=node.locks)
        if node.slots is not None:
            upper.slots, node.slots = node.slots[:at], node.slots[at:]
        upper.kept, node.kept = node.kept[:at], node.kept[at:]
        siblings = upper.parent.children if upper.parent else []
        siblings[siblings.index(node)] = upper
        upper.children, node.parent, node.tokens = [node], upper, node.tokens[at:]
        return upper

    def lock(self, end: Node, by: int) -> None:
        for node in end.path():
            node.locks += by

    def load(self, end: Node) -> bool:
        """Bring a path back to the device, if there is room."""
        for node in [*end.path()][::-1]:
            if node.slots is None:
                if not self.room(len(node.tokens)):
                    return False
                node.slots = [self.free.pop(0) for _ in node.tokens]
                self.bring(node)
                self.free_host += node.kept
                node.kept = []
        return True

    def bring(self, node: Node) -> None:
        pairs = zip(node.kept, node.slots or (), strict=True)
        self.watch.copy(pairs, source="host", target="device")

    def grow(self, request: Request, count: int) -> bool:
        """Give a request slots for its next tokens, if there is room."""
        if not self.room(count):
            return False
        slots = [self.free.pop(0) for _ in range(count)]
        request.table += slots
        self.watch.extend(request.name, 0, slots)
        return True

    def room(self, count: int) -> bool:
        """Tell whether this many slots are free, after evicting leaves if necessary."""
        while len(self.free) < count:
            leaf = self.victim()
            if leaf is None:
                return False
            self.evict(leaf)
        return True

    def victim(self) -> Node | None:
        """Return the least recently used leaf on the device on which no request stands."""
        leaves = [
            node
            for node in self.nodes()
            if node.slots and not node.locks and all(n.slots is None for n in node.children)
        ]
        return min(leaves, key=lambda node: node.used, default=None)

    def evict(self, leaf: Node) -> None:
        """Move a leaf to the host, or forget it and what is below it."""
        if len(self.free_host) >= len(leaf.tokens):
            leaf.kept = [self.free_host.pop(0) for _ in leaf.tokens]
            self.store(leaf)
        else:
            self.prune(leaf)
        self.free += leaf.slots or []
        leaf.slots = None

    def store(self, leaf: Node) -> None:
        pairs = zip(leaf.slots or (), leaf.kept, strict=True)
        self.watch.copy(pairs, source="device", target="host")

    def prune(self, leaf: Node) -> None:
        for node in (leaf, *leaf.below()):
            self.free_host += node.kept
        if leaf.parent is not None:
            leaf.parent.children.remove(leaf)

    def keep(self, request: Request) -> None:
        """Insert what is computed, and go on with the slots of the tree."""
        end = self.insert(request)
        self.lock(end, 1)
        self.lock(self.ends[request], -1)
        self.ends[request] = end
        self.follow(request, end)

    def follow(self, request: Request, end: Node) -> None:
        """Let a request's table name the slots of the tree."""
        slots = self.slots_of(end)
        request.table[: len(slots)] = slots
        self.watch.drop(request.name)
        self.watch.extend(request.name, 0, request.table)

    def insert(self, request: Request) -> Node:
        """Insert what a request computed, and free its own duplicates; return the last node."""
        tokens, slots = request.tokens[: request.computed], request.table
        end = self.match(request, tokens)
        have = sum(len(node.tokens) for node in end.path())
        self.adopt(end, slots)
        if have < len(tokens):
            node = Node(tokens[have:], slots[have : len(tokens)], end, used=self.number)
            end.children.append(node)
            return node
        return end

    def adopt(self, end: Node, slots: list[int]) -> None:
        """Give back a request's slots where a path has others, and lend it those that it lacks."""
        at = 0
        for node in [*end.path()][::-1]:
            own, at = slots[at : at + len(node.tokens)], at + len(node.tokens)
            if node.slots is None:
                node.slots = own
                self.free_host += node.kept
                node.kept = []
            else:
                self.free += [slot for slot in own if slot not in node.slots]

    def retract(self, request: Request) -> None:
        """Let a request wait again; what it computed stays in the tree."""
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.part(request)
        self.watch.renew(request.name)

    def leave(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
            self.part(request)
        else:
            self.waiting.remove(request)
        self.watch.end(request.name)

    def part(self, request: Request) -> None:
        """Insert what a request computed, and take its locks and tables away."""
        self.insert(request)
        self.free += request.table[request.computed :]
        self.lock(self.ends.pop(request), -1)
        self.watch.drop(request.name)
        request.table, request.computed = [], 0


def common(left: list[int], right: list[int]) -> int:
    """Return the length of the common prefix of two lists."""
    for at, pair in enumerate(zip(left, right, strict=False)):
        if pair[0] != pair[1]:
            return at
    return min(len(left), len(right))
