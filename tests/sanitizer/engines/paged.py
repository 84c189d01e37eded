# SPDX-License-Identifier: Apache-2.0
"""A small engine with pages: prefix caching by keys, chunked prompts, priorities, forks.

Prompts are computed in chunks behind the longest cached prefix. If a request cannot grow, the
least urgent one is preempted and computed again later. Full blocks get a key when they are written.
It reports to the sanitizer what it does, and uses nothing else of kvcore.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from kvcore.sanitizer import CacheGroup, Chunk, Sanitizer
from tests.sanitizer.engines.driver import Engine, Request, next_token

SIZE, BUDGET, ROWS = 2, 7, 4
Key = tuple[Any, ...]


class Paged(Engine):
    """The engine."""

    OPTIONAL = ("fork", "change_weights")

    def __init__(self, dice: random.Random, *, backend: str | None = None) -> None:
        self.dice, self.num_blocks = dice, dice.choice((6, 7, 8))
        super().__init__(Sanitizer([CacheGroup(block_size=SIZE)], self.num_blocks, backend=backend))
        self.planned: dict[Request, int] = {}
        self.free = deque(range(self.num_blocks))
        self.owners = [0] * self.num_blocks
        self.index: dict[Key, int] = {}
        self.keys: dict[int, Key] = {}

    def num_unused(self) -> int:
        return len({*self.free})

    def fork(self) -> Request | None:
        """Let a request that waits for a token go on twice, over the same blocks."""
        ready = [each for each in self.running if each.computed == len(each.tokens) - 1]
        if not ready or len(self.running) >= ROWS:
            return None
        parent = self.dice.choice(ready)
        child = Request(f"{parent.name}.{self.number}", [*parent.tokens], parent.num_new)
        child.adapter, child.computed = parent.adapter, parent.computed
        child.is_old, child.table = parent.is_old, [*parent.table]
        child.tokens[-1] = 1 - child.tokens[-1]
        if child.name in self.live() or child.name in self.finished:
            return None
        self.watch.begin(child.name, child.tokens, (child.adapter,), parent=parent.name)
        self.watch.extend(child.name, 0, child.table)
        for block in child.table:
            self.owners[block] += 1
        self.running.append(child)
        return child

    def change_weights(self) -> None:
        """Change the weights: nothing that was written before is hit by later requests."""
        self.watch.epoch()
        self.forget_all()
        for request in self.running:
            request.is_old = True
        for request in self.waiting:
            self.watch.renew(request.name)

    def step(self) -> None:
        self.planned, self.number, left = {}, self.number + 1, BUDGET
        preempted = False
        for request in [*self.running]:
            count = min(request.left, left)
            while count and request in self.running and not self.grow(request, count):
                self.preempt(max(self.running, key=lambda each: (each.urgency, each.name)))
                preempted = True
            if count and request in self.running:
                left -= self.plan(request, count)
        while self.waiting and left and not preempted and len(self.running) < ROWS:
            request = min(self.waiting, key=lambda each: each.urgency)
            hit = self.look_up(request)
            count = min(left, len(request.tokens) - SIZE * len(hit))
            if not self.admit(request, hit, count):
                break
            left -= self.plan(request, count)
        if self.planned:
            self.execute()

    def plan(self, request: Request, count: int) -> int:
        self.planned[request] = count
        return count

    def execute(self) -> None:
        """Run the forward pass of a step, and take in what it gave."""
        rows = [Chunk(each.name, each.computed, count) for each, count in self.planned.items()]
        self.watch.issue(self.number, rows)
        self.found += self.watch.complete(self.number)
        for request, count in self.planned.items():
            request.computed += count
            self.publish(request)
            if not request.left:
                request.tokens.append(next_token(len(request.tokens)))
                request.num_new -= 1
                if not request.num_new:
                    self.finished[request.name] = request
                    self.leave(request)

    def look_up(self, request: Request) -> list[int]:
        """Return the blocks of the longest cached prefix that leaves a token."""
        hit = []
        for at in range((len(request.tokens) - 1) // SIZE):
            block = self.index.get(self.key(request, at))
            if block is None:
                break
            hit.append(block)
        return hit

    def key(self, request: Request, at: int) -> Key:
        return (request.adapter, *request.tokens[: SIZE * (at + 1)])

    def admit(self, request: Request, hit: list[int], count: int) -> bool:
        """Give a request its hit and blocks for the tokens after it, if there is room."""
        fresh = -(-(SIZE * len(hit) + count) // SIZE) - len(hit)
        if fresh + sum(not self.owners[block] for block in hit) > len(self.free):
            return False
        for block in hit:
            self.own(block)
        request.table = [*hit, *(self.take() for _ in range(fresh))]
        request.computed = SIZE * len(hit)
        self.watch.extend(request.name, 0, request.table)
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def grow(self, request: Request, count: int) -> bool:
        """Give a request blocks of its own for its next tokens, if there is room."""
        fresh = -(-(request.computed + count) // SIZE) - len(request.table)
        shared = self.is_shared(request)
        if fresh + shared > len(self.free):
            return False
        if shared:
            self.copy_tail(request)
        blocks = [self.take() for _ in range(fresh)]
        request.table += blocks
        self.watch.extend(request.name, 0, blocks)
        return True

    def is_shared(self, request: Request) -> bool:
        """Tell whether a request is about to write into a block that others hold."""
        at = request.computed // SIZE
        return at < len(request.table) and self.owners[request.table[at]] > 1

    def copy_tail(self, request: Request) -> None:
        at = request.computed // SIZE
        old, request.table[at] = request.table[at], self.take()
        self.watch.copy([(old, request.table[at])])
        self.watch.drop(request.name)
        self.watch.extend(request.name, 0, request.table)
        self.give([old])

    def publish(self, request: Request) -> None:
        for at in range(0 if request.is_old else request.computed // SIZE):
            self.enter(request, at)

    def enter(self, request: Request, at: int) -> None:
        """Let a block be found by its key, unless one is found by it already."""
        key, block = self.key(request, at), request.table[at]
        if key not in self.index and block not in self.keys:
            self.index[key], self.keys[block] = block, key

    def preempt(self, request: Request) -> None:
        self.planned.pop(request, None)
        self.running.remove(request)
        self.waiting.append(request)
        self.drop(request)
        self.watch.renew(request.name)
        request.is_old = False

    def leave(self, request: Request) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.drop(request)
        self.watch.end(request.name)

    def drop(self, request: Request) -> None:
        self.watch.drop(request.name)
        self.give(request.table)
        request.table, request.computed = [], 0

    def take(self) -> int:
        """Take the block that is free for the longest time; it is not findable any more."""
        block = self.free.popleft()
        self.forget(block)
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

    def forget(self, block: int) -> None:
        if block in self.keys:
            del self.index[self.keys.pop(block)]

    def forget_all(self) -> None:
        self.index.clear()
        self.keys.clear()
