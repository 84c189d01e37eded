# SPDX-License-Identifier: Apache-2.0
"""The block pool: owners, keys and the free queue of all blocks of one tier.

Invariants: a block with reference count 0 is in the free queue, with or without a key; a block with
owners is not. Taking a block with a key evicts it. Released blocks join the queue in the given
order, at the end that the eviction policy names, or by priority (`priority_eviction.py`). When an
epoch ends, no key is findable any more: free blocks leave before those freed later, and a block
with owners that had a key joins them when it is released. The transitions of the pool layer are in
pool/transitions.py; the request layer works on a `PoolTransaction`.
Source: S000-34, 35, 38, 41, S001-82, 83. Twin: rust/src/pool/block_pool.rs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import attrs
from immutables import Map
from pyrsistent import PVector, pvector

from kvcore.pool.free_queue import (
    CURRENT,
    OLDER,
    FreeQueue,
    FreeQueueTransaction,
    make_free_queue,
)
from kvcore.pool.hash_index import HashIndex, HashIndexTransaction
from kvcore.pool.policy_state import PolicyState, make_policy_state
from kvcore.pool.quarantine import Quarantine, QuarantineTransaction, make_quarantine
from kvcore.pool.tails import KeyedTransaction, Tails, has_key
from kvcore.types.commands import Allocate, EvictAll, Free, Touch
from kvcore.types.config import Eviction
from kvcore.types.effects import Effects
from kvcore.types.errors import NotPinned, UnknownBlock, UnusedBlock
from kvcore.types.policies import policy_of

if TYPE_CHECKING:
    from kvcore.pool.floors import Floors, Spare
    from kvcore.pool.retention_state import RetentionState

PoolEviction = Literal["lru", "uncached_first", "priority"]
"""The policies of the pool layer; "priority" is for managers that set the access times of
blocks.
"""


@attrs.frozen
class BlockPool:
    """All blocks of one tier as a value.

    first_block: 1 if block 0 is the null block, else 0. ref_counts: owners of each block, pins
    included. keys: the key of each block. pins: block id -> its number of pins. quarantine:
    None if batches are never in flight. priorities: block id -> its eviction priority.
    last_placed: the block most recently placed by priority. older: blocks outside the free queue
    whose key was of an older epoch. policy: the records of a policy that orders the queue, or None.
    retention: the records of the levels, or None. floors: what tenants keep cached, or None.
    silent: the blocks whose keys no event names; none without events. tails: the keys of content
    that ends inside blocks; None if no hit may.
    """

    first_block: int
    eviction: PoolEviction | Eviction
    ref_counts: PVector[int]
    keys: PVector[bytes | None]
    queue: FreeQueue
    index: HashIndex
    pins: Map[int, int]
    quarantine: Quarantine | None = None
    priorities: Map[int, tuple[float, int]] = Map()
    last_placed: int | None = None
    older: frozenset[int] = frozenset()
    policy: PolicyState | None = None
    retention: RetentionState | None = None
    floors: Floors | None = None
    silent: frozenset[int] = frozenset()
    tails: Tails | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return len(self.ref_counts)

    @property
    def num_usable(self) -> int:
        """Blocks that can have an owner."""
        return self.num_blocks - self.first_block

    @property
    def num_free(self) -> int:
        """Blocks in the free queue."""
        return self.queue.length

    @property
    def num_quarantined(self) -> int:
        """Blocks without owner that join the free queue when batches finish."""
        return 0 if self.quarantine is None else len(self.quarantine)

    def has_key(self, block: int) -> bool:
        """Return whether a block has a key or a tail key."""
        return has_key(self, block)


def make_pool(
    num_blocks: int,
    *,
    null_block: bool = False,
    eviction: PoolEviction | Eviction = "lru",
    order: Sequence[int] | None = None,
    quarantine: bool = False,
) -> BlockPool:
    """Make an empty pool.

    order: ids in the order in which they are first taken; default: lowest first. quarantine:
    whether blocks can be released while a batch uses them.
    """
    first = int(null_block)
    ids = list(range(first, num_blocks)) if order is None else list(order)
    policy = policy_of(eviction)
    return BlockPool(
        first,
        eviction,
        pvector([0] * num_blocks),
        pvector([None] * num_blocks),
        make_free_queue(num_blocks, ids),
        HashIndex(),
        Map(),
        make_quarantine(num_blocks) if quarantine else None,
        policy=None if policy is None else make_policy_state(policy, num_blocks, ids),
    )


class PoolTransaction(KeyedTransaction):
    """A pool inside a transition: changed in place, unchecked, frozen at the end.

    If it was not changed, it freezes to the original value.
    """

    __slots__ = (
        *("effects", "eviction", "first_block", "floors", "index", "keys", "older", "pins"),
        *("pool", "quarantine", "queue", "ref_counts"),
    )

    def __init__(self, pool: BlockPool, effects: Effects) -> None:
        self.pool = pool
        self.first_block = pool.first_block
        self.eviction = pool.eviction
        self.ref_counts = pool.ref_counts.evolver()
        self.keys = pool.keys.evolver()
        self.queue = FreeQueueTransaction(pool.queue)
        self.index = HashIndexTransaction(pool.index)
        self.pins = pool.pins
        self.older = pool.older
        self.floors = pool.floors
        self.silent = pool.silent
        self.tails = pool.tails
        self.quarantine = (
            None if pool.quarantine is None else QuarantineTransaction(pool.quarantine)
        )
        self.effects = effects

    def freeze(self) -> BlockPool:
        """Return the pool as an immutable value."""
        old, quarantine = self.pool, None if self.quarantine is None else self.quarantine.freeze()
        ref_counts, keys = self.ref_counts.persistent(), self.keys.persistent()
        queue, index = self.queue.freeze(), self.index.freeze()
        if (
            (ref_counts is old.ref_counts and keys is old.keys)
            and (queue is old.queue and index is old.index)
            and (self.pins is old.pins and quarantine is old.quarantine)
            and (self.older == old.older and self.tails is old.tails)
        ):
            return old
        return BlockPool(
            self.first_block,
            self.eviction,
            ref_counts,
            keys,
            queue,
            index,
            self.pins,
            quarantine,
            older=self.older,
            floors=self.floors,
            silent=self.silent,
            tails=self.tails,
        )

    @property
    def num_usable(self) -> int:
        """Blocks that can have an owner."""
        return len(self.ref_counts) - self.first_block

    @property
    def num_free(self) -> int:
        """Blocks in the free queue."""
        return self.queue.length

    @property
    def num_quarantined(self) -> int:
        """Blocks without owner that join the free queue when batches finish."""
        return 0 if self.quarantine is None else self.quarantine.queue.length

    def is_queued(self, block: int) -> bool:
        """Return whether a block is in the free queue."""
        waits = self.quarantine is not None and block in self.quarantine.queue
        return not self.ref_counts[block] and not waits

    def is_busy(self, block: int) -> bool:
        """Return whether a block would be quarantined on its release."""
        return self.quarantine is not None and block in self.quarantine.busy

    def take(self, count: int, tenant: int = 0) -> list[int]:
        """Take `count` blocks from the front for a tenant and give each one owner; blocks with a
        key are evicted.
        """
        blocks = self._take_front(count) if self.floors is None else self._take(count, tenant)
        for block in blocks:
            if self.keys[block] is not None or self.tails is not None:
                self.unpublish(block)
            self.ref_counts[block] = 1
            self.effects.commands.append(Allocate(block))
        return blocks

    def publish(self, block: int, key: bytes, depth: int = 0) -> None:
        """Make a block findable under a key. depth: its place in its request's table."""
        del depth
        self.keys[block] = key
        self.index.insert(key, block)

    def note_takers(self, blocks: Sequence[int], tenants: Sequence[int]) -> None:
        """Note for which tenant each block was taken."""
        if self.floors is not None:
            self.floors = self.floors.taken(blocks, tenants)

    def spare(
        self, tenant: int, touched: Collection[int] = (), freed: Collection[int] = ()
    ) -> Spare | None:
        """Return what a tenant may take after these blocks got an owner, or lost their last one;
        None without floors.
        """
        if self.floors is None:
            return None
        from kvcore.pool.floors import Spare  # few pools have floors

        owners = {block for block in range(len(self.ref_counts)) if self.ref_counts[block]}
        owned = owners.union(touched).difference(freed)
        free = set(self.queue).union(freed).difference(touched)
        return Spare(self.floors, tenant, self.keys, owned, free)

    def num_kept(
        self, tenant: int, touched: Collection[int] = (), freed: Collection[int] = ()
    ) -> int:
        """Return how many free blocks the floors of others keep from a tenant."""
        spare = self.spare(tenant, touched, freed)
        return 0 if spare is None else spare.num_kept

    def touch(self, block: int) -> None:
        """Add an owner; a block that had none leaves the free queue or the quarantine, and keeps
        its content.
        """
        if self.ref_counts[block] == 0:
            if self.quarantine is not None and block in self.quarantine.queue:
                self.quarantine.queue.remove(block)
            else:
                self._dequeue(block)
            self.effects.commands.append(Touch(block))
        self.ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block; those without owners join the free queue in the given
        order, or the quarantine while a batch uses them.
        """
        freed = []
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                freed.append(block)
        for block in freed:
            if self.quarantine is not None and block in self.quarantine.busy:
                self.quarantine.queue.append(block)
            else:
                self._enqueue(block)
            self.effects.commands.append(Free(block, self.has_key(block)))

    def _take_front(self, count: int) -> list[int]:
        """Remove the free blocks that leave next from the queue."""
        return self.queue.take_front(count)

    def _take(self, count: int, tenant: int) -> list[int]:
        """Remove the free blocks that a tenant may take and that leave next."""
        spare, blocks = self.spare(tenant), list[int]()
        assert spare is not None
        for _ in range(count):
            blocks.append(self._next(spare))
            spare.note(blocks[-1])
            self._dequeue(blocks[-1])
        self.note_takers(blocks, [tenant] * count)
        return blocks

    def _next(self, spare: Spare) -> int:
        """Return the block that leaves next among those that may be taken."""
        return spare.first(iter(self.queue))

    def _dequeue(self, block: int) -> None:
        """Remove a block from the free queue."""
        self.queue.remove(block)

    def _enqueue(self, block: int) -> None:
        """Put a block without owner at the end of the free queue that the policy names."""
        if block in self.older:
            self.older -= {block}
            self.queue.append(block, OLDER)
        elif self.eviction == "uncached_first" and not self.has_key(block):
            self.queue.prepend(block)
        else:
            self.queue.append(block)

    def use(self, block: int, number: int) -> None:
        """Note that a batch uses a block, even if the block loses its owners."""
        if self.quarantine is not None:
            self.quarantine.use(block, number)

    def end_use(self, ended: Callable[[int], bool]) -> None:
        """Note that the batches with these numbers have ended; no block moves yet."""
        if self.quarantine is not None:
            self.quarantine.end_use(ended)

    def end_quarantine(self) -> None:
        """Let blocks that no batch uses join the free queue, in the order of their release."""
        if self.quarantine is not None:
            for block in self.quarantine.end():
                self._enqueue(block)

    def clear_index(self) -> None:
        """Forget every key."""
        self.tails = None if self.tails is None else Tails()
        for block in range(len(self.keys)):
            if self.keys[block] is not None:
                self.keys[block] = None
        self.index.clear()
        self.silent = frozenset()
        self.effects.commands.append(EvictAll())

    def start_epoch(self) -> None:
        """Forget every key; free blocks leave before all those freed later."""
        for block in range(len(self.keys)):
            if self.has_key(block):
                self.keys[block] = None
                if not self.is_queued(block):
                    self.older |= {block}
        self.index.clear()
        self.tails = None if self.tails is None else Tails()
        self.silent = frozenset()
        self.queue.splice(CURRENT, behind=OLDER)
        self.effects.commands.append(EvictAll())

    def pin(self, block: int) -> None:
        """Add an owner that is not a request."""
        self.touch(block)
        self.pins = self.pins.set(block, self.pins.get(block, 0) + 1)

    def unpin(self, block: int) -> None:
        """Remove an owner that `pin` added."""
        left = self.pins[block] - 1
        self.pins = self.pins.set(block, left) if left else self.pins.delete(block)
        self.release([block])

    def check_block(self, block: int) -> None:
        """Raise UnknownBlock unless the pool has this block and it is not the null block."""
        last = len(self.ref_counts) - 1
        if not isinstance(block, int) or not self.first_block <= block <= last:
            raise UnknownBlock(block=block, first=self.first_block, last=last)

    def check_pins(self, blocks: Iterable[int]) -> None:
        """Raise UnknownBlock or UnusedBlock unless each block can be pinned."""
        for block in blocks:
            self.check_block(block)
            if self.ref_counts[block] == 0 and not self.has_key(block):
                raise UnusedBlock(block=block)

    def check_unpins(self, blocks: Sequence[int], held: Mapping[int, int]) -> None:
        """Raise UnknownBlock or NotPinned unless each block has the pins to be removed. held: pins
        per block that the caller may not remove.
        """
        for block, requested in self.count_blocks(blocks):
            num_pins = self.pins.get(block, 0) - held.get(block, 0)
            if num_pins < requested:
                raise NotPinned(block=block, num_pins=num_pins, requested=requested)

    def count_blocks(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Count how often each block is named. Raises UnknownBlock for the first invalid id."""
        times = Counter(block for block in blocks if isinstance(block, int))
        for block in blocks:
            self.check_block(block)
            yield block, times[block]
