# SPDX-License-Identifier: Apache-2.0
"""The policy "priority" of a pool: cached blocks leave by last access, chain length and id.

Invariants: free blocks without a key are in front, the one freed last first; then come those with a
key: least recent time first, then longest chain, then lowest id. A block that is taken loses its
priority.
Why: the place of a block is searched alternately from the back and from the block placed last. This
takes few steps if times rise, or if a chain is freed block by block.
Source: S002-16, 19, 23, 48. Twin: rust/src/pool/priority_eviction.rs.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvcore.pool.block_pool import BlockPool, PoolTransaction
from kvcore.types.commands import Free
from kvcore.types.effects import Effects

NEVER = -1.0
"""Access time assumed for a block that was never given one."""
NO_PRIORITY = (NEVER, 0)
"""Priority of a block that was never given one: it leaves before all others."""


def make_transaction(pool: BlockPool, effects: Effects) -> PoolTransaction:
    """Begin a transaction on a pool that keeps its policy."""
    return (
        PriorityPoolTransaction(pool, effects)
        if pool.eviction == "priority"
        else PoolTransaction(pool, effects)
    )


class PriorityPoolTransaction(PoolTransaction):
    """A transaction on a pool whose free queue is ordered by priority."""

    __slots__ = ("last_placed", "priorities")

    def __init__(self, pool: BlockPool, effects: Effects) -> None:
        super().__init__(pool, effects)
        self.priorities = pool.priorities
        self.last_placed = pool.last_placed

    def freeze(self) -> BlockPool:
        """Return the pool as an immutable value."""
        old, new = self.pool, super().freeze()
        if new is old and self.priorities is old.priorities:
            return old
        return attrs.evolve(new, priorities=self.priorities, last_placed=self.last_placed)

    def sort_key(self, block: int) -> tuple[float, int, int]:
        """Sort key of a cached block: the lowest is evicted first."""
        time, length = self.priorities.get(block, NO_PRIORITY)
        return (time, -length, block)

    def take(self, count: int, tenant: int = 0) -> list[int]:
        """Take `count` blocks from the front; each gets one owner and no priority."""
        blocks = super().take(count, tenant)
        for block in blocks:
            if block in self.priorities:
                self.priorities = self.priorities.delete(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block; those without owners join the free queue."""
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
        self.insert_by_priority(cached)

    def insert_by_priority(self, blocks: Sequence[int]) -> None:
        """Put cached blocks into their places: one search, then one walk towards the front."""
        if not blocks:
            return
        queue, sort_keys = self.queue, sorted(map(self.sort_key, blocks), reverse=True)
        before = self.find_before(sort_keys[0])
        for sort_key in sort_keys:
            while not self.leaves_before(before, sort_key):
                before = queue.preceding[before]
            queue.insert(before, sort_key[-1])
            self.last_placed = sort_key[-1]

    def find_before(self, sort_key: tuple[float, int, int]) -> int:
        """Return the free block, or sentinel, right before a sort key, searched alternately from
        both starts.
        """
        queue, near = self.queue, self.last_placed
        back: int = queue.preceding[queue.sentinel()]
        if near is None or near not in queue or self.keys[near] is None:
            near = back
        rises = self.leaves_before(near, sort_key)
        for _ in range(queue.length + 1):
            if self.leaves_before(back, sort_key):
                return back
            back = queue.preceding[back]
            after = queue.following[near]
            if rises and (after == queue.sentinel() or not self.leaves_before(after, sort_key)):
                return near
            if not rises and self.leaves_before(near, sort_key):
                return near
            near = after if rises else queue.preceding[near]
        return queue.sentinel()

    def leaves_before(self, block: int, sort_key: tuple[float, int, int]) -> bool:
        """Return whether a free block, or the sentinel, comes before a sort key."""
        is_cached = block != self.queue.sentinel() and self.keys[block] is not None
        return not is_cached or self.sort_key(block) < sort_key

    def unpublish(self, block: int) -> None:
        """Forget the key of a block, if any; a free block moves to the front."""
        moves = self.keys[block] is not None and block in self.queue
        super().unpublish(block)
        if moves:
            self.move_to_front(block)

    def clear_index(self) -> None:
        """Forget every key; cached blocks move to the front in their order of eviction."""
        cached = [block for block in self.queue if self.keys[block] is not None]
        super().clear_index()
        for block in cached:
            self.move_to_front(block)

    def move_to_front(self, block: int) -> None:
        """Move a free block to the front."""
        self.queue.remove(block)
        self.queue.prepend(block)

    def set_priority(self, blocks: Sequence[int], time: float | None, length: int | None) -> None:
        """Set the access time and chain length of blocks; free cached blocks move accordingly."""
        for block in blocks:
            old_time, old_length = self.priorities.get(block, NO_PRIORITY)
            new_time = old_time if time is None else time
            new_length = old_length if length is None else length
            if (new_time, new_length) != NO_PRIORITY:
                self.priorities = self.priorities.set(block, (new_time, new_length))
            elif block in self.priorities:
                self.priorities = self.priorities.delete(block)
        distinct = dict.fromkeys(blocks)
        moved = [each for each in distinct if self.keys[each] is not None and each in self.queue]
        for block in moved:
            self.queue.remove(block)
        self.insert_by_priority(moved)
