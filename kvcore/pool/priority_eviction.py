# SPDX-License-Identifier: Apache-2.0
"""The ranked policy of a pool: cached blocks leave in the order of what was said of their use.

Rules: free blocks without key stand in front, the last one freed first; behind them those with a
key, in the order of their rank: least recent time, then longest chain, then lowest id. A block that
is taken loses its rank. A block looks for its place from the back and from the one that found its
place last, in turn: so it costs a few steps where time rises, and where a chain is freed one by
one. Source: S002-16, 19, 23, 48. Twin: rust/src/pool/priority_eviction.rs.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvcore.pool.block_pool import BlockPool, PoolTransaction
from kvcore.types.commands import Free
from kvcore.types.effects import Effects

NEVER = -1.0
"""Access time assumed for a block that was never given one."""
NO_RANK = (NEVER, 0)
"""Time and length of a block of which nothing was said: it goes before all that were used."""


def make_transaction(pool: BlockPool, effects: Effects) -> PoolTransaction:
    """A transaction on a pool that keeps its policy."""
    return (
        PriorityPoolTransaction(pool, effects)
        if pool.eviction == "ranked"
        else PoolTransaction(pool, effects)
    )


class PriorityPoolTransaction(PoolTransaction):
    """A pool whose free queue is ordered by rank, inside a transition."""

    __slots__ = ("last_placed", "ranks")

    def __init__(self, pool: BlockPool, effects: Effects) -> None:
        super().__init__(pool, effects)
        self.ranks = pool.ranks
        self.last_placed = pool.last_placed

    def freeze(self) -> BlockPool:
        """The pool as a value."""
        old, new = self.pool, super().freeze()
        if new is old and self.ranks is old.ranks:
            return old
        return replace(new, ranks=self.ranks, last_placed=self.last_placed)

    def place(self, block: int) -> tuple[float, int, int]:
        """What cached blocks are ordered by, the first to be evicted first."""
        time, length = self.ranks.get(block, NO_RANK)
        return (time, -length, block)

    def take(self, count: int) -> list[int]:
        """Give so many blocks from the front one owner each, and no rank."""
        blocks = super().take(count)
        for block in blocks:
            if block in self.ranks:
                self.ranks = self.ranks.delete(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Take one owner from each; those left without join the free queue."""
        cached = []
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] > 0:
                continue
            has_key = self.keys[block] is not None
            if has_key:
                cached.append(block)
            else:
                self.queue.prepend(block)
            self.effects.commands.append(Free(block, has_key))
        self.insert_ranked(cached)

    def insert_ranked(self, blocks: Sequence[int]) -> None:
        """Put cached blocks into their places: one search, then one walk towards the front."""
        if not blocks:
            return
        queue, places = self.queue, sorted(map(self.place, blocks), reverse=True)
        before = self.find_before(places[0])
        for place in places:
            while not self.leaves_before(before, place):
                before = queue.preceding[before]
            queue.insert(before, place[-1])
            self.last_placed = place[-1]

    def find_before(self, place: tuple[float, int, int]) -> int:
        """What a place is behind: from the back, and from the last one placed, in turn."""
        queue, back, near = self.queue, self.queue.preceding[self.queue.sentinel], self.last_placed
        if near is None or near not in queue or self.keys[near] is None:
            near = back
        rises = self.leaves_before(near, place)
        for _ in range(queue.length + 1):
            if self.leaves_before(back, place):
                return back
            back = queue.preceding[back]
            after = queue.following[near]
            if rises and (after == queue.sentinel or not self.leaves_before(after, place)):
                return near
            if not rises and self.leaves_before(near, place):
                return near
            near = after if rises else queue.preceding[near]
        return queue.sentinel

    def leaves_before(self, block: int, place: tuple[float, int, int]) -> bool:
        """Whether a place is behind a free block, or the sentinel."""
        is_cached = block != self.queue.sentinel and self.keys[block] is not None
        return not is_cached or self.place(block) < place

    def unpublish(self, block: int) -> None:
        """Forget the key of a block, if it has one; a free one goes to the front."""
        moves = self.keys[block] is not None and block in self.queue
        super().unpublish(block)
        if moves:
            self.move_to_front(block)

    def clear_index(self) -> None:
        """Forget every key; cached blocks go to the front in the order of their eviction."""
        cached = [block for block in self.queue if self.keys[block] is not None]
        super().clear_index()
        for block in cached:
            self.move_to_front(block)

    def move_to_front(self, block: int) -> None:
        """Let a free block leave next."""
        self.queue.remove(block)
        self.queue.prepend(block)

    def note(self, block: int, time: float | None, length: int | None) -> None:
        """Say when a block was used and how long its chain is; it stays in its place."""
        old_time, old_length = self.ranks.get(block, NO_RANK)
        new_time = old_time if time is None else time
        new_length = old_length if length is None else length
        if (new_time, new_length) != NO_RANK:
            self.ranks = self.ranks.set(block, (new_time, new_length))
        elif block in self.ranks:
            self.ranks = self.ranks.delete(block)

    def rank(self, blocks: Sequence[int], time: float | None, length: int | None) -> None:
        """Say when blocks were used and how long their chain is; cached ones change places."""
        for block in blocks:
            self.note(block, time, length)
        distinct = dict.fromkeys(blocks)
        moved = [each for each in distinct if self.keys[each] is not None and each in self.queue]
        for block in moved:
            self.queue.remove(block)
        self.insert_ranked(moved)
