# SPDX-License-Identifier: Apache-2.0
"""The policy "retention": a pool whose free blocks leave by level.

Invariants: free blocks without a key leave first, the one freed last before the others; then come
those of older epochs, then those with a key, level by level. A block joins the back of its level
when it is freed; when time lowers its level, it joins the back of the lower one. Nothing raises it
while it is free. A block's wish joins, part by part, the wishes of the requests that released it
since it was taken; a free block without a key has none.
Why: each level is a ring of the free queue, so joining and leaving need no search.
Twin: rust/src/pool/retention.rs.
"""

from __future__ import annotations

import attrs

from kvcore.pool.block_pool import BlockPool, PoolTransaction
from kvcore.pool.free_queue import CURRENT, OLDER, FreeQueueTransaction, make_free_queue
from kvcore.pool.retention_state import NOTHING, NUM_RINGS, RetentionState, level_of
from kvcore.types.effects import Effects
from kvcore.types.policies import Wish


class RetentionTransaction(PoolTransaction):
    """A transaction on a pool whose free blocks leave by level."""

    __slots__ = ("kept", "now")

    def __init__(self, pool: BlockPool, effects: Effects) -> None:
        super().__init__(pool, effects)
        assert pool.retention is not None
        self.now = pool.retention.now
        self.kept = pool.retention.kept

    def freeze(self) -> BlockPool:
        """Return the pool as an immutable value."""
        old, new = self.pool.retention, super().freeze()
        assert old is not None
        if self.now == old.now and self.kept is old.kept:
            return new if new is self.pool else attrs.evolve(new, retention=old)
        return attrs.evolve(new, retention=RetentionState(self.now, self.kept))

    def note_wish(self, block: int, wish: Wish) -> None:
        """Add the wish of a request that is about to release a block."""
        base, level, until = self.kept.get(block, NOTHING)
        ends = self.now + wish[2] if wish[2] else 0
        joined = (max(base, wish[0]), max(level, wish[1]), max(until, ends))
        if joined != NOTHING:
            self.kept = self.kept.set(block, joined)

    def tick(self, now: int) -> None:
        """Advance the time: free blocks whose duration has ended move to their base level, in the
        order of ending.
        """
        over = []
        for place, block in enumerate(self.queue):
            base, level, until = self.kept.get(block, NOTHING)
            if level > base and self.now < until <= now:
                over.append((until, level, place, block))
        self.now = now
        for _, _, _, block in sorted(over):
            self.queue.remove(block)
            self.queue.append(block, CURRENT + self.kept[block][0])

    def take(self, count: int, tenant: int = 0) -> list[int]:
        """Take `count` blocks from the front for a tenant and give each one owner; blocks with a
        key are evicted.
        """
        blocks = super().take(count, tenant)
        for block in blocks:
            self._forget(block)
        return blocks

    def unpublish(self, block: int) -> None:
        """Forget the key of a block, if any; a free block moves to the front."""
        has_key = self.keys[block] is not None
        super().unpublish(block)
        if has_key and block in self.queue:
            self.queue.remove(block)
            self._enqueue(block)

    def clear_index(self) -> None:
        """Forget every key; free blocks keep their order."""
        super().clear_index()
        self._lower_all()

    def start_epoch(self) -> None:
        """Forget every key; free blocks leave before all those freed later."""
        super().start_epoch()
        self._lower_all()

    def _lower_all(self) -> None:
        """Move the blocks of all levels after those without a key."""
        for ring in range(CURRENT, NUM_RINGS):
            self.queue.splice(ring, behind=OLDER)
        for block in self.queue:
            self._forget(block)

    def _enqueue(self, block: int) -> None:
        """Put a block without owner at the back of its level; if it has no key, at the front of the
        queue; if it is of an older epoch, after the blocks without content.
        """
        if self.keys[block] is not None:
            self.queue.append(block, CURRENT + level_of(self.kept.get(block, NOTHING), self.now))
            return
        self._forget(block)
        if block in self.older:
            super()._enqueue(block)
        else:
            self.queue.insert(self.queue.sentinel(OLDER), block)

    def _forget(self, block: int) -> None:
        if block in self.kept:
            self.kept = self.kept.delete(block)


def with_levels(pool: BlockPool) -> BlockPool:
    """Return the pool with each free block in the ring of its level; blocks of a ring keep their
    order.
    """
    state = pool.retention or RetentionState()
    queue = FreeQueueTransaction(make_free_queue(pool.num_blocks, (), num_rings=NUM_RINGS))
    for block in pool.queue:
        level = level_of(state.kept.get(block, NOTHING), state.now)
        queue.append(block, OLDER if pool.keys[block] is None else CURRENT + level)
    return attrs.evolve(pool, queue=queue.freeze(), retention=state)
