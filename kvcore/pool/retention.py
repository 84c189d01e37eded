# SPDX-License-Identifier: Apache-2.0
"""A pool whose free blocks leave by level: the policy "retention".

Invariants: free blocks without a key leave first, the one freed last before the others; behind them
stand those of older epochs, then those with a key, level by level. A block joins the back of its
level when it is freed, and when time lowers it, before all that is freed later; nothing raises it
while it is free. A block has what the requests wished that released it since it was taken, joined
part by part; a free one without a key has nothing.
Why: each level is a ring of the free queue, so joining and leaving need no search.
Twin: rust/src/pool/retention.rs.
"""

from __future__ import annotations

from msgspec.structs import replace

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
        """The pool as a value."""
        old, new = self.pool.retention, super().freeze()
        assert old is not None
        if self.now == old.now and self.kept is old.kept:
            return new if new is self.pool else replace(new, retention=old)
        return replace(new, retention=RetentionState(self.now, self.kept))

    def note_wish(self, block: int, wish: Wish) -> None:
        """Join the wish of a request that is about to release a block."""
        base, level, until = self.kept.get(block, NOTHING)
        ends = self.now + wish[2] if wish[2] else 0
        joined = (max(base, wish[0]), max(level, wish[1]), max(until, ends))
        if joined != NOTHING:
            self.kept = self.kept.set(block, joined)

    def tick(self, now: int) -> None:
        """Let time pass: free blocks whose time is over go to their base, in that order."""
        over = []
        for place, block in enumerate(self.queue):
            base, level, until = self.kept.get(block, NOTHING)
            if level > base and self.now < until <= now:
                over.append((until, level, place, block))
        self.now = now
        for _, _, _, block in sorted(over):
            self.queue.remove(block)
            self.queue.append(block, CURRENT + self.kept[block][0])

    def take(self, count: int) -> list[int]:
        """Give `count` blocks from the front one owner each; evicts those that have a key."""
        blocks = super().take(count)
        for block in blocks:
            self._forget(block)
        return blocks

    def unpublish(self, block: int) -> None:
        """Forget the key of a block, if it has one; a free one goes to the front."""
        has_key = self.keys[block] is not None
        super().unpublish(block)
        if has_key and block in self.queue:
            self.queue.remove(block)
            self._enqueue(block)

    def clear_index(self) -> None:
        """Forget every key; the free blocks stay in their order."""
        super().clear_index()
        self._lower_all()

    def start_epoch(self) -> None:
        """Forget every key; what is free leaves before all that is freed later."""
        super().start_epoch()
        self._lower_all()

    def _lower_all(self) -> None:
        """Put all levels behind what has no key."""
        for ring in range(CURRENT, NUM_RINGS):
            self.queue.splice(ring, behind=OLDER)
        for block in self.queue:
            self._forget(block)

    def _enqueue(self, block: int) -> None:
        """Put a block without owner at the back of its level; without a key, at the front of all;
        of an older epoch, behind those without content.
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
    """The pool with its free blocks in the rings of their levels; those of a ring stay in their
    order.
    """
    state = pool.retention or RetentionState()
    queue = FreeQueueTransaction(make_free_queue(pool.num_blocks, (), num_rings=NUM_RINGS))
    for block in pool.queue:
        level = level_of(state.kept.get(block, NOTHING), state.now)
        queue.append(block, OLDER if pool.keys[block] is None else CURRENT + level)
    return replace(pool, queue=queue.freeze(), retention=state)
