# SPDX-License-Identifier: Apache-2.0
"""The LRU evictor of the V0 block manager: a view on what the core's ranked queue would evict.

Rules: in it are blocks with content and without owner. The order is smallest time, then longest
chain, then lowest id, by what was said last; the core keeps it, so nothing stale stays behind.
Taking a block out makes the caller its owner. An evictor without allocator has a small pool of its
own, owns there whatever is not in it, and grows with the ids it is given. Source: S002-19 to 23,
X-03.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.blocks.named_enum import NamedEnum
from kvcore.legacy.v0.block_interfaces import BlockId
from kvcore.legacy.v0.errors import UnknownName, WrongValue, require
from kvcore.legacy.v0.tier_blocks import TierBlocks, key_of_hash

POOL_SIZE = 64
"""Blocks that an evictor of its own begins with."""


class EvictionPolicy(NamedEnum):
    """How evicted blocks are chosen."""

    LRU = enum.auto()


class BlockMetaData:
    """What is known of an evictable block."""

    def __init__(self, content_hash: int, num_hashed_tokens: int, last_accessed: float) -> None:
        self.content_hash = content_hash
        self.num_hashed_tokens = num_hashed_tokens
        self.last_accessed = last_accessed


class Evictor(ABC):
    """Chooses among blocks without owner."""

    @abstractmethod
    def __init__(self) -> None:
        pass

    @abstractmethod
    def __contains__(self, block_id: object) -> bool:
        pass

    @abstractmethod
    def evict(self) -> tuple[BlockId, int]:
        """Take the first one out, with the hash that is forgotten."""

    @abstractmethod
    def add(
        self, block_id: BlockId, content_hash: int, num_hashed_tokens: int, last_accessed: float
    ) -> None:
        """Put a block in."""

    @abstractmethod
    def update(self, block_id: BlockId, last_accessed: float) -> None:
        """Say when a block was used."""

    @abstractmethod
    def remove(self, block_id: BlockId) -> None:
        """Take a block out."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """How many are in it."""


class LRUEvictor(Evictor):
    """Evictable blocks, of an allocator or by themselves."""

    def __init__(
        self, blocks: TierBlocks | None = None, *, backend: BackendName = "python"
    ) -> None:
        """blocks: of an allocator; None: a pool of its own."""
        self._own: BackendName | None = backend if blocks is None else None
        self._blocks = _all_owned((), backend) if blocks is None else blocks

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks.ids and self._blocks.is_evictable(block_id)

    @property
    def num_blocks(self) -> int:
        """How many are in it. Cost: O(free blocks)."""
        return len(self._blocks.evictable())

    @property
    def free_table(self) -> dict[BlockId, BlockMetaData]:
        """What is known of each, by rising id, as a copy. Cost: O(free blocks)."""
        return {each: self._data_of(each) for each in sorted(self._blocks.evictable())}

    def evict(self) -> tuple[BlockId, int]:
        """Take the first one out, with the hash that is forgotten. Raises WrongValue if empty."""
        evictable = self._blocks.evictable()
        if not evictable:
            total = len(self._blocks)
            raise WrongValue(
                reason=f"No usable cache memory left: none of {total} blocks is evictable"
            )
        block = evictable[0]
        content_hash = self._data_of(block).content_hash
        self._blocks.evict(block)
        self._forget_commands()
        return block, content_hash

    def add(
        self, block_id: BlockId, content_hash: int, num_hashed_tokens: int, last_accessed: float
    ) -> None:
        """Give up the only owner of a block that has this content.

        By itself: take any block in, in place of what was said of it. Raises WrongCall.
        """
        if self._own is not None:
            self._take_in(block_id, content_hash, num_hashed_tokens, last_accessed)
        count, found = self._blocks.ref_count(block_id), self._blocks.content_hash(block_id)
        reason = "block {block} has {count} owners and content {found}, not 1 and {content_hash}"
        fields = {"count": count, "found": found, "content_hash": content_hash}
        holds = (count, found) == (1, content_hash)
        require(holds, reason, block=block_id, **fields)
        self._blocks.rank(block_id, last_accessed, num_hashed_tokens)
        self._blocks.release([block_id])
        self._forget_commands()

    def update(self, block_id: BlockId, last_accessed: float) -> None:
        """Say when a block was used. Raises UnknownName where it is not in the evictor."""
        if block_id not in self:
            known = f"{self.num_blocks} blocks are in the evictor"
            raise UnknownName(name="block", value=repr(block_id), known=known, block=block_id)
        self._blocks.rank(block_id, last_accessed)

    def remove(self, block_id: BlockId) -> None:
        """Take a block out with its content. Raises WrongValue where it is not in the evictor."""
        if block_id not in self:
            raise WrongValue(reason=f"block {block_id} is not in the evictor", block=block_id)
        if self._own is None:
            self._blocks.touch([block_id])
        else:
            self._blocks.evict(block_id)
        self._forget_commands()

    def _data_of(self, block_id: BlockId) -> BlockMetaData:
        blocks = self._blocks
        content_hash = blocks.content_hash(block_id)
        assert content_hash is not None
        time, length = blocks.backing.rank_of(blocks.place(block_id), blocks.tier)
        return BlockMetaData(content_hash, length, time)

    def _take_in(self, block_id: BlockId, content_hash: int, length: int, time: float) -> None:
        """Own a block of the own pool that has this content."""
        assert self._own is not None
        key = key_of_hash(content_hash)
        if block_id not in self._blocks.ids:
            self._grow(block_id, self._own)
        blocks = self._blocks
        blocks.rank(block_id, time, length)  # what is no time or length raises here
        if block_id in self:
            blocks.evict(block_id)
        blocks.backing.publish(blocks.place(block_id), key, blocks.tier)

    def _grow(self, block_id: BlockId, backend: BackendName) -> None:
        """Have a pool in which there is a block of this id as well."""
        old, kept = self._blocks, self.free_table
        more = range(2 * len(old) + POOL_SIZE)
        grown = _all_owned(old.ids.union(more if block_id in more else (block_id,)), backend)
        for each, data in kept.items():
            key = key_of_hash(data.content_hash)
            grown.backing.publish(grown.place(each), key, grown.tier)
            grown.rank(each, data.last_accessed, data.num_hashed_tokens)
        grown.release(list(kept))
        self._blocks = grown

    def _forget_commands(self) -> None:
        if self._own is not None:
            self._blocks.backing.take_batch()


def check_policy(eviction_policy: object) -> None:
    """Raise WrongValue for any policy but LRU."""
    if eviction_policy != EvictionPolicy.LRU:
        raise WrongValue(reason=f"unknown eviction policy {eviction_policy!r}: there is LRU")


def make_evictor(
    eviction_policy: EvictionPolicy,
    blocks: TierBlocks | None = None,
    *,
    backend: BackendName = "python",
) -> LRUEvictor:
    """The evictor of a policy. Raises WrongValue for an unknown one."""
    check_policy(eviction_policy)
    return LRUEvictor(blocks, backend=backend)


def _all_owned(ids: Iterable[BlockId], backend: BackendName) -> TierBlocks:
    """A pool of these blocks, each with one owner."""
    order = sorted(ids)
    backing = Backing(len(order), eviction="ranked", backend=backend)
    backing.take(len(order))
    return TierBlocks(backing, "device", order)
