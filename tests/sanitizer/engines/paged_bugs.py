# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the small engine with pages. None crashes, loses a block or changes what is answered.

Each stands for bugs that were reported of real engines.
"""

from __future__ import annotations

from tests.sanitizer.engines.driver import Request
from tests.sanitizer.engines.paged import SIZE, Key, Paged


class KeepsTheKeyOfWhatIsTakenAgain(Paged):
    """A block that is handed out again is still found by its old key."""

    def take(self) -> int:
        kept = self.keys.get(self.free[0])
        block = super().take()
        if kept is not None:
            self.index[kept], self.keys[block] = block, kept
        return block


class TakesFreshBlocksBeforeItsHit(Paged):
    """Blocks behind a hit are taken before the hit has an owner, so they may be the hit."""

    def admit(self, request: Request, hit: list[int], count: int) -> bool:
        fresh = -(-(SIZE * len(hit) + count) // SIZE) - len(hit)
        if fresh + sum(not self.owners[block] for block in hit) > len(self.free):
            return False
        blocks = [self.take() for _ in range(fresh)]
        for block in hit:
            self.own(block)
        request.table, request.computed = [*hit, *blocks], SIZE * len(hit)
        self.watch.extend(request.name, 0, request.table)
        self.waiting.remove(request)
        self.running.append(request)
        return True


class PublishesTheWholePrompt(Paged):
    """A chunk of a prompt is computed, and all blocks of the request are found."""

    def publish(self, request: Request) -> None:
        for at in range(min(len(request.table), len(request.tokens) // SIZE)):
            self.enter(request, at)

    def plan(self, request: Request, count: int) -> int:
        if not request.is_old and not request.computed:
            whole = -(-len(request.tokens) // SIZE) - len(request.table)
            if whole <= len(self.free):
                blocks = [self.take() for _ in range(whole)]
                request.table += blocks
                self.watch.extend(request.name, 0, blocks)
        return super().plan(request, count)


class WritesIntoSharedBlocks(Paged):
    """A fork writes into the block that its parent reads."""

    def is_shared(self, _: Request) -> bool:
        return False


class ForgetsToCopy(Paged):
    """A fork gets a block of its own, and nothing is copied into it."""

    def copy_tail(self, request: Request) -> None:
        at = request.computed // SIZE
        old, request.table[at] = request.table[at], self.take()
        self.watch.drop(request.name)
        self.watch.extend(request.name, 0, request.table)
        self.give([old])


class CopiesTheWrongWay(Paged):
    """The copy of a shared block overwrites the shared block."""

    def copy_tail(self, request: Request) -> None:
        at = request.computed // SIZE
        old, request.table[at] = request.table[at], self.take()
        self.watch.copy([(request.table[at], old)])
        self.watch.drop(request.name)
        self.watch.extend(request.name, 0, request.table)
        self.give([old])


class LeavesTheAdapterOut(Paged):
    """Keys leave out the adapter that a prompt is for."""

    def key(self, request: Request, at: int) -> Key:
        return tuple(request.tokens[: SIZE * (at + 1)])


class LeavesTheParentOut(Paged):
    """A key is made of a block's own tokens and its place, not of those before it."""

    def key(self, request: Request, at: int) -> Key:
        return (request.adapter, at, *request.tokens[SIZE * at : SIZE * (at + 1)])


class HashesWeakly(Paged):
    """Keys are short hashes, and the tokens are not compared."""

    def key(self, request: Request, at: int) -> Key:
        weights = (1, 3, 2, 6, 4, 5, 1, 3, 2, 6, 4, 5, 1, 3, 2, 6)
        tokens = request.tokens[: SIZE * (at + 1)]
        return (request.adapter, at, sum(map(int.__mul__, tokens, weights)) % 3)


class PublishesWhatIsPlanned(Paged):
    """Blocks are found when their tokens are planned, and stay so if the request is preempted."""

    def plan(self, request: Request, count: int) -> int:
        request.computed += count
        self.publish(request)
        request.computed -= count
        return super().plan(request, count)


class KeepsTheIndexOfOldWeights(Paged):
    """The weights change, and what the old ones wrote is still found."""

    def forget_all(self) -> None:
        pass


class PublishesOldChains(Paged):
    """What a request goes on to write behind keys and values of old weights is published."""

    def publish(self, request: Request) -> None:
        for at in range(request.computed // SIZE):
            self.enter(request, at)


BUGS = [
    KeepsTheKeyOfWhatIsTakenAgain,
    TakesFreshBlocksBeforeItsHit,
    PublishesTheWholePrompt,
    WritesIntoSharedBlocks,
    ForgetsToCopy,
    CopiesTheWrongWay,
    LeavesTheAdapterOut,
    LeavesTheParentOut,
    HashesWeakly,
    PublishesWhatIsPlanned,
    KeepsTheIndexOfOldWeights,
    PublishesOldChains,
]
