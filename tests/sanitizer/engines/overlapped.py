# SPDX-License-Identifier: Apache-2.0
"""A small engine that plans a step before the tokens of the last one are known.

A request goes on from its planned count, and only what is confirmed is published or leaves the
window. Drafts are verified, a step may be lost before it runs, and who is preempted goes to the
host if there is room. One step is in flight while the next is planned.
"""

from __future__ import annotations

import random
from collections import deque

import attrs

from kvcore.sanitizer import CacheGroup, Chunk, Sanitizer
from tests.sanitizer.engines.driver import Engine, Request, next_token

SIZE, BUDGET, ROWS, HOST, DRAFTS = 2, 6, 3, 4, 2
Key = tuple[object, ...]


@attrs.define(eq=False)
class Planned:
    """A request's part of a step in flight: the first position, the number of tokens, the
    drafts.
    """

    request: Request
    start: int
    count: int
    drafts: list[int]


class Overlapped(Engine):
    """The engine. It has a window, or keys and a host tier."""

    OPTIONAL = ("lose_step",)

    def __init__(self, dice: random.Random, *, backend: str | None = None) -> None:
        self.dice, self.num_blocks = dice, dice.choice((6, 7, 8))
        self.window = dice.choice((None, None, 3))
        group = CacheGroup(block_size=SIZE, window=self.window, num_null=1)
        super().__init__(Sanitizer([group], self.num_blocks + 1, backend=backend))
        self.flight: deque[tuple[int, list[Planned]]] = deque()
        self.free = deque(range(1, self.num_blocks + 1))
        self.owners = [0] * (self.num_blocks + 1)
        self.index: dict[Key, int] = {}
        self.keys: dict[int, Key] = {}
        self.free_host = list(range(HOST))
        self.kept: dict[Request, list[int]] = {}
        self.ahead: dict[Request, int] = {}

    def num_unused(self) -> int:
        return len({*self.free})

    def lose_step(self) -> None:
        """Drop the step that was issued last: all its requests do it again."""
        if self.flight:
            number, rows = self.flight.pop()
            self.found += self.watch.cancel(number)
            for row in rows:
                self.take_back(row)

    def take_back(self, row: Planned) -> None:
        if row.request in self.running:
            self.ahead[row.request] = row.start

    def step(self) -> None:
        self.number += 1
        rows = self.plan()
        if rows:
            self.issue(rows)
        if self.flight and (len(self.flight) > 1 or not rows):
            self.finish(*self.flight.popleft())

    def issue(self, rows: list[Planned]) -> None:
        reported = [Chunk(row.request.name, row.start, row.count, row.drafts) for row in rows]
        self.watch.issue(self.number, reported)
        self.flight.append((self.number, rows))

    def plan(self) -> list[Planned]:
        rows, left, served = list[Planned](), BUDGET, set[Request]()
        preempted = False
        for request in [*self.running]:
            row = self.row(request, left) if request in self.running else None
            while row is not None and not self.grow(request, row.start + row.count):
                victim = self.victim({*served, request})
                if victim is None:
                    row = None
                    break
                self.preempt(victim)
                preempted = True
            if row is not None:
                self.serve(row, rows)
                served.add(request)
                left -= row.count
        while self.waiting and left and not preempted and len(self.running) < ROWS:
            request = self.waiting[0]
            if not self.come(request):
                break
            row = self.row(request, left)
            if row is None or not self.grow(request, row.start + row.count):
                break
            self.serve(row, rows)
            left -= row.count
        return rows

    def serve(self, row: Planned, rows: list[Planned]) -> None:
        self.ahead[row.request] = row.start + row.count
        rows.append(row)

    def row(self, request: Request, left: int) -> Planned | None:
        """Return what a request computes next; None if it waits for something."""
        start, known = self.ahead[request], len(request.tokens)
        mine = [row for _, rows in self.flight for row in rows if row.request is request]
        if any(row.drafts for row in mine) or not left:
            return None
        if start < known - 1 or (start < known and mine):
            return Planned(request, start, min(left, known - start), [])
        if start == known - 1:
            guesses = min(self.dice.randrange(DRAFTS + 1), left - 1, request.num_new - 1)
            drafts = [self.guess(known + at) for at in range(guesses)]
            return Planned(request, start, 1 + len(drafts), drafts)
        to_come = sum(row.start + row.count >= known for row in mine)
        if start == known + to_come - 1 and to_come < request.num_new:
            return Planned(request, start, 1, [])
        return None

    def guess(self, position: int) -> int:
        right = next_token(position)
        return right if self.dice.random() < 0.6 else 1 - right

    def finish(self, number: int, rows: list[Planned]) -> None:
        """Take in what a step gave."""
        self.found += self.watch.complete(number)
        for row in rows:
            if row.request in self.running:
                self.confirm(row)

    def confirm(self, row: Planned) -> None:
        request, accepted = row.request, 0
        end = row.start + row.count - len(row.drafts)
        for at, draft in enumerate(row.drafts):
            if draft != next_token(end + at):
                break
            accepted += 1
        request.computed = end + accepted
        if row.drafts:
            self.ahead[request] = request.computed
        if end == len(request.tokens):
            request.tokens += [next_token(end + at) for at in range(accepted + 1)]
            request.num_new -= accepted + 1
        self.publish(request, request.computed)
        self.slide(request, request.computed)
        if not request.num_new:
            self.finished[request.name] = request
            self.leave(request)

    def publish(self, request: Request, end: int) -> None:
        for at in range(0 if self.window else end // SIZE):
            key, block = self.key(request, at), request.table[at]
            if key not in self.index and block not in self.keys:
                self.index[key], self.keys[block] = block, key

    def key(self, request: Request, at: int) -> Key:
        return (request.adapter, *request.tokens[: SIZE * (at + 1)])

    def slide(self, request: Request, computed: int) -> None:
        """Give back the blocks that no query from a count on sees."""
        first = 0 if self.window is None else max(0, computed - self.window + 1) // SIZE
        gone = [block for block in request.table[:first] if block]
        if gone:
            request.table[:first] = [0] * first
            self.give(gone)
            self.watch.drop(request.name)
            self.watch.extend(request.name, 0, [*request.table])

    def victim(self, but: set[Request]) -> Request | None:
        """Return the request to preempt: the least urgent of those without anything in flight."""
        flying = {row.request for _, rows in self.flight for row in rows}
        idle = [each for each in self.running if each not in but and each not in flying]
        return max(idle, key=lambda each: (each.urgency, each.name), default=None)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.append(request)
        used = -(-request.computed // SIZE)
        if self.window is None and used and used <= len(self.free_host):
            self.kept[request] = [self.free_host.pop(0) for _ in range(used)]
            self.store(request)
        else:
            request.computed = 0
        self.drop(request)

    def store(self, request: Request) -> None:
        pairs = zip(request.table, self.kept[request], strict=False)
        self.watch.copy(pairs, source="device", target="host")

    def come(self, request: Request) -> bool:
        """Admit a request after its hit, or with its blocks on the host, if there is room."""
        kept = self.kept.get(request)
        if kept is not None:
            if len(kept) > len(self.free):
                return False
            self.extend(request, len(kept))
            self.load(request)
            self.free_host += self.kept.pop(request)
        else:
            hit = self.look_up(request)
            for block in hit:
                self.own(block)
            request.table, request.computed = hit, SIZE * len(hit)
            self.watch.extend(request.name, 0, [*hit])
        self.ahead[request] = request.computed
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def load(self, request: Request) -> None:
        pairs = zip(self.kept[request], request.table, strict=True)
        self.watch.copy(pairs, source="host", target="device")

    def look_up(self, request: Request) -> list[int]:
        hit = []
        for at in range((len(request.tokens) - 1) // SIZE):
            block = self.index.get(self.key(request, at))
            if block is None:
                break
            hit.append(block)
        return hit

    def grow(self, request: Request, end: int) -> bool:
        fresh = max(0, -(-end // SIZE) - len(request.table))
        if fresh > len(self.free):
            return False
        self.extend(request, fresh)
        return True

    def extend(self, request: Request, fresh: int) -> None:
        blocks = [self.take() for _ in range(fresh)]
        request.table += blocks
        self.watch.extend(request.name, 0, blocks)

    def leave(self, request: Request) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.free_host += self.kept.pop(request, [])
        self.drop(request)
        self.watch.end(request.name)

    def drop(self, request: Request) -> None:
        self.watch.drop(request.name)
        self.give([block for block in request.table if block])
        request.table = []

    def take(self) -> int:
        block = self.free.popleft()
        if block in self.keys:
            del self.index[self.keys.pop(block)]
        self.owners[block] = 1
        return block

    def own(self, block: int) -> None:
        if not self.owners[block]:
            self.free.remove(block)
        self.owners[block] += 1

    def give(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)
