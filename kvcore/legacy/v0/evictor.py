# SPDX-License-Identifier: Apache-2.0
"""The LRU evictor of the V0 block manager: a view of what the core's queue would evict by priority.

It holds the blocks that have content and no owner: earliest access first, then longest chain, then
lowest id. The core keeps this order, so no entry becomes stale. A caller that removes a block
becomes its owner. An evictor without an allocator has a small pool of its own, owns each block
there that it does not hold, and grows with the ids that it is given. Source: S002-19 to 23, X-03.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

import attrs

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.blocks.named_enum import NamedEnum
from kvcore.legacy.v0.block import BlockId
from kvcore.legacy.v0.errors import UnknownName, WrongValue, require
from kvcore.legacy.v0.tier_blocks import TierBlocks, key_of_hash

POOL_SIZE = 64
"""Initial blocks of an evictor without an allocator."""


class EvictionPolicy(NamedEnum):
    """The policies by which blocks to evict are chosen."""

    LRU = enum.auto()


@attrs.define
class BlockMetaData:
    """The entry of an evictable block."""

    content_hash: int
    num_hashed_tokens: int
    last_accessed: float


class Evictor(ABC):
    """Chooses the next block to evict, among those without an owner."""

    @abstractmethod
    def evict(self) -> tuple[BlockId, int]:
        """Remove the first block and return its id and the forgotten hash."""


class LRUEvictor(Evictor):
    """The evictable blocks of an allocator, or of a pool of its own."""

    def __init__(
        self, blocks: TierBlocks | None = None, *, backend: BackendName = "python"
    ) -> None:
        """blocks: those of an allocator; None: make a pool for this evictor."""
        self._backend: BackendName = backend
        self._is_alone = blocks is None
        self._blocks = self._all_owned(frozenset()) if blocks is None else blocks

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks.ids and self._blocks.is_evictable(block_id)

    @property
    def num_blocks(self) -> int:
        """The number of evictable blocks. Cost: O(free blocks)."""
        return len(self._blocks.evictable())

    @property
    def free_table(self) -> dict[BlockId, BlockMetaData]:
        """A copy of each block's entry, by ascending id. Cost: O(free blocks)."""
        return {each: self._data_of(each) for each in sorted(self._blocks.evictable())}

    def evict(self) -> tuple[BlockId, int]:
        """Remove the first block and return its id and old hash. Raises WrongValue if empty."""
        evictable = self._blocks.evictable()
        if not evictable:
            reason = f"none of {len(self._blocks)} blocks is evictable"
            raise WrongValue(reason=f"No usable cache memory left: {reason}")
        content_hash = self._data_of(evictable[0]).content_hash
        self._blocks.evict(evictable[0])
        self._forget_commands()
        return evictable[0], content_hash

    def add(
        self, block_id: BlockId, content_hash: int, num_hashed_tokens: int, last_accessed: float
    ) -> None:
        """Give up the only owner of a block that has this content.

        An evictor without an allocator accepts any block and replaces its entry. Raises WrongCall.
        """
        if self._is_alone:
            self._own(block_id, BlockMetaData(content_hash, num_hashed_tokens, last_accessed))
        count, found = self._blocks.ref_count(block_id), self._blocks.content_hash(block_id)
        reason = "block {block} has {count} owners and content {found}, not 1 and {content_hash}"
        fields = {"count": count, "found": found, "content_hash": content_hash}
        holds = (count, found) == (1, content_hash)
        require(holds, reason, block=block_id, **fields)
        self._blocks.set_priority([block_id], last_accessed, num_hashed_tokens)
        self._blocks.release([block_id])
        self._forget_commands()

    def update(self, block_id: BlockId, last_accessed: float) -> None:
        """Set the access time of a block. Raises UnknownName if it is not in the evictor."""
        if block_id not in self:
            known = f"{self.num_blocks} blocks are in the evictor"
            raise UnknownName(name="block", value=block_id, known=known, block=block_id)
        self._blocks.set_priority([block_id], last_accessed)

    def remove(self, block_id: BlockId) -> None:
        """Remove a block with its content. Raises WrongValue if it is not in the evictor."""
        if block_id not in self:
            raise WrongValue(reason=f"block {block_id} is not in the evictor", block=block_id)
        if self._is_alone:
            self._blocks.evict(block_id)
        else:
            self._blocks.touch([block_id])
        self._forget_commands()

    def _data_of(self, block_id: BlockId) -> BlockMetaData:
        content_hash = self._blocks.content_hash(block_id)
        assert content_hash is not None
        time, length = self._blocks.priority_of(block_id)
        return BlockMetaData(content_hash, length, time)

    def _own(self, block_id: BlockId, data: BlockMetaData) -> None:
        """Own a block of the evictor's pool with this content; the pool grows if needed."""
        key = key_of_hash(data.content_hash)
        if block_id not in self._blocks.ids:
            kept, more = self.free_table, range(2 * len(self._blocks) + POOL_SIZE)
            ids = self._blocks.ids.union(more if block_id in more else (block_id,))
            self._blocks = self._all_owned(ids)
            for each, its in kept.items():
                self._own(each, its)
            self._blocks.release(list(kept))
        self._blocks.set_priority([block_id], data.last_accessed, data.num_hashed_tokens)
        if block_id in self:
            self._blocks.evict(block_id)
        self._blocks.publish(block_id, key, data.num_hashed_tokens)

    def _all_owned(self, ids: frozenset[BlockId]) -> TierBlocks:
        """Make a pool of these blocks, each with one owner."""
        backing = Backing(len(ids), eviction="priority", backend=self._backend)
        backing.blocks.take(len(ids), "device")
        return TierBlocks(backing, "device", sorted(ids))

    def _forget_commands(self) -> None:
        if self._is_alone:
            self._blocks.backing.take_batch()


def make_evictor(
    eviction_policy: EvictionPolicy,
    blocks: TierBlocks | None = None,
    *,
    backend: BackendName = "python",
) -> LRUEvictor:
    """Make the evictor of a policy. Raises WrongValue for an unknown one."""
    if eviction_policy != EvictionPolicy.LRU:
        raise WrongValue(reason=f"unknown eviction policy {eviction_policy!r}: there is LRU")
    return LRUEvictor(blocks, backend=backend)
