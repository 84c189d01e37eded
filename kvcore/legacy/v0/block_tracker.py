# SPDX-License-Identifier: Apache-2.0
"""Small records of the V0 block manager: use of a block, owners as a view, copies, hits, objects.

Rules: owners are counted by the core alone; `RefCounter` asks it. `ObjectPool` keeps spare Python
objects, not blocks: which object is spare says nothing about which block is free; an object goes
back to the pool that made it, whichever allocator has it then. Source: S002-01 to 03, 05, 34, 49,
73.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.v0.block_interfaces import Block, BlockId, PooledBlock
from kvcore.legacy.v0.errors import WrongCall, WrongValue, require
from kvcore.legacy.v0.tier_blocks import TierBlocks

NEVER_ACCESSED = -1
HIT_RATE_BATCH = 1000
RefCount = int


class BlockTracker:
    """How one physical block is used inside a prefix-caching allocator."""

    __slots__ = ("active", "computed", "last_accessed")

    def __init__(self) -> None:
        self.active = False
        self.reset()

    def reset(self) -> None:
        """Forget access and computation."""
        self.last_accessed: float = NEVER_ACCESSED
        self.computed = False

    def enable(self) -> None:
        """Begin to track. Raises WrongCall where that was begun."""
        if self.active:
            require(False, "the block is tracked already")
        self.active = True
        self.last_accessed = NEVER_ACCESSED
        self.computed = False

    def disable(self) -> None:
        """End to track. Raises WrongCall where that was not begun."""
        if not self.active:
            require(False, "the block is not tracked")
        self.active = False
        self.last_accessed = NEVER_ACCESSED
        self.computed = False


class RefCounterProtocol(Protocol):
    """How many own each block."""

    def incr(self, block_id: BlockId) -> RefCount:
        """Add an owner."""

    def decr(self, block_id: BlockId) -> RefCount:
        """Take an owner."""

    def get(self, block_id: BlockId) -> RefCount:
        """Owners of a block."""


class RefCounter(RefCounterProtocol):
    """How many own each block: a view on the core, or on blocks of its own, without commands."""

    def __init__(
        self,
        all_block_indices: Iterable[BlockId],
        *,
        blocks: TierBlocks | None = None,
        backend: BackendName = "python",
    ) -> None:
        """blocks: of an allocator; None: new ones of these ids, each once."""
        self._is_alone = blocks is None
        if blocks is None:
            ids = tuple(dict.fromkeys(all_block_indices))
            backing = Backing(len(ids), eviction="ranked", backend=backend)
            blocks = TierBlocks(backing, "device", ids)
        self._blocks = blocks

    def incr(self, block_id: BlockId) -> int:
        """Add an owner; its new count. Raises WrongCall for an unknown block."""
        self._known(block_id)
        blocks = self._blocks
        if blocks.ref_count(block_id) == 0 and not blocks.has_key(block_id):
            blocks.take_this(block_id)
        else:
            blocks.touch([block_id])
        self._forget_commands()
        return blocks.ref_count(block_id)

    def decr(self, block_id: BlockId) -> int:
        """Take an owner; its new count. Raises WrongCall for an unknown or a free block."""
        count = self.get(block_id)
        require(count > 0, "block {block} has {count} owners", block=block_id, count=count)
        self._blocks.release([block_id])
        self._forget_commands()
        return count - 1

    def get(self, block_id: BlockId) -> int:
        """Owners of a block. Raises WrongCall for an unknown block."""
        self._known(block_id)
        return self._blocks.ref_count(block_id)

    @property
    def _refcounts(self) -> dict[BlockId, RefCount]:
        """All owners by rising id, as tests of the original read them: a copy."""
        return {each: self._blocks.ref_count(each) for each in sorted(self._blocks.ids)}

    def as_readonly(self) -> ReadOnlyRefCounter:
        """A view that changes nothing."""
        return ReadOnlyRefCounter(self)

    def _known(self, block_id: BlockId) -> None:
        reason, ids = "block {block} is not known, {num} are", self._blocks.ids
        require(block_id in ids, reason, block=block_id, num=len(ids))

    def _forget_commands(self) -> None:
        if self._is_alone:
            self._blocks.backing.take_batch()


class ReadOnlyRefCounter(RefCounterProtocol):
    """How many own each block, to look at."""

    def __init__(self, refcounter: RefCounter) -> None:
        self._refcounter = refcounter

    def incr(self, block_id: BlockId) -> int:
        """Raises WrongValue."""
        raise WrongValue(reason=f"a read-only view cannot add an owner to block {block_id}")

    def decr(self, block_id: BlockId) -> int:
        """Raises WrongValue."""
        raise WrongValue(reason=f"a read-only view cannot take an owner from block {block_id}")

    def get(self, block_id: BlockId) -> int:
        """Owners of a block."""
        return self._refcounter.get(block_id)


class CopyOnWriteTracker:
    """Copies that were made, until they are asked for."""

    def __init__(self, refcounter: RefCounterProtocol) -> None:
        self._refcounter = refcounter
        self._copies: list[tuple[BlockId, BlockId]] = []

    def is_appendable(self, block: Block) -> bool:
        """Whether nobody else would see what is appended."""
        return block.block_id is None or self._refcounter.get(block.block_id) <= 1

    def record_cow(self, src_block_id: BlockId | None, trg_block_id: BlockId | None) -> None:
        """Note a copy. Raises WrongCall where a block is None."""
        if src_block_id is None or trg_block_id is None:
            pair = f"{src_block_id} to {trg_block_id}"
            raise WrongCall(reason=f"a copy is from block to block, not from {pair}")
        self._copies.append((src_block_id, trg_block_id))

    def clear_cows(self) -> list[tuple[BlockId, BlockId]]:
        """Hand out source and target of each copy, in order, and forget them."""
        copies, self._copies = self._copies, []
        return copies


@dataclass
class CacheMetricData:
    """Share of look-ups that hit, over completed batches of `block_size` and the current one."""

    num_completed_blocks: int = 0
    completed_block_cache_hit_rate: float = 0.0
    num_incompleted_block_queries: int = 0
    num_incompleted_block_hit: int = 0
    block_size: int = HIT_RATE_BATCH

    def query(self, hit: bool) -> None:
        """Count a look-up."""
        self.query_all(1, int(hit))

    def query_all(self, num: int, num_hits: int) -> None:
        """Count so many look-ups, those that hit first."""
        self.num_incompleted_block_queries += num
        self.num_incompleted_block_hit += num_hits
        while self.num_incompleted_block_queries >= self.block_size:
            self._complete()

    def get_hit_rate(self) -> float:
        """Batches weighted by their sizes, which is hits by look-ups; 0.0 without any."""
        completed = self.num_completed_blocks * self.block_size
        hits = self.completed_block_cache_hit_rate * completed + self.num_incompleted_block_hit
        queries = completed + self.num_incompleted_block_queries
        return hits / queries if queries else 0.0

    def _complete(self) -> None:
        hits = min(self.num_incompleted_block_hit, self.block_size)
        self.num_incompleted_block_queries -= self.block_size
        self.num_incompleted_block_hit -= hits
        sum_of_rates = self.completed_block_cache_hit_rate * self.num_completed_blocks
        self.num_completed_blocks += 1
        rate = (sum_of_rates + hits / self.block_size) / self.num_completed_blocks
        self.completed_block_cache_hit_rate = rate


class ObjectPool:
    """Block objects that are used again, last one in first out."""

    def __init__(self, create: Callable[[], PooledBlock], pool_size: int) -> None:
        """create: a new object, which `begin` fills."""
        self._create = create
        self._spare: list[PooledBlock] = []
        self._num_made = 0
        self.pool_size = pool_size

    def get(self) -> PooledBlock:
        """An object to fill; twice as many may exist once all are used."""
        if self._spare:
            return self._spare.pop()
        if self._num_made == self.pool_size:
            self.pool_size = max(2 * self.pool_size, 1)
        block = self._create()
        block.pool_id, block.home = self._num_made, self._spare
        self._num_made += 1
        return block

    def put(self, block: Block) -> None:
        """Take an object that is used no more back to the pool that made it, if one did."""
        if isinstance(block, Block) and block.home is not None:
            block.home.append(block)
