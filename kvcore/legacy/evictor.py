# SPDX-License-Identifier: Apache-2.0
"""The LRU evictor of the V0 block manager: a view on what the core's ranked queue would evict.

Rules: in it are blocks with content and without owner. The order is smallest time, then longest
chain, then lowest id, by what was said last; the core keeps it, so nothing stale stays behind.
Taking a block out makes the caller its owner. Source: S002-19 to 23, X-03.
"""

from __future__ import annotations

import enum

from kvcore.legacy.block_errors import WrongValue, require
from kvcore.legacy.interfaces import BlockId
from kvcore.legacy.tier_blocks import TierBlocks


class EvictionPolicy(enum.Enum):
    """How evicted blocks are chosen."""

    LRU = enum.auto()


class LRUEvictor:
    """Evictable blocks of an allocator."""

    def __init__(self, blocks: TierBlocks) -> None:
        self._blocks = blocks

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks.ids and self._blocks.is_evictable(block_id)

    @property
    def num_blocks(self) -> int:
        """How many are in it. Cost: O(free blocks)."""
        return len(self._blocks.evictable())

    def evict(self) -> tuple[BlockId, int]:
        """Take the first one out, with the hash that is forgotten. Raises WrongValue if empty."""
        evictable = self._blocks.evictable()
        if not evictable:
            total = len(self._blocks)
            raise WrongValue(
                reason=f"No usable cache memory left: none of {total} blocks is evictable"
            )
        block = evictable[0]
        content_hash = self._blocks.content_hash(block)
        assert content_hash is not None
        self._blocks.evict(block)
        return block, content_hash

    def add(
        self, block_id: BlockId, content_hash: int, num_hashed_tokens: int, last_accessed: float
    ) -> None:
        """Give up the only owner of a block that has this content. Raises WrongCall else."""
        count, found = self._blocks.ref_count(block_id), self._blocks.content_hash(block_id)
        reason = "block {block} has {count} owners and content {found}, not 1 and {content_hash}"
        fields = {"count": count, "found": found, "content_hash": content_hash}
        holds = (count, found) == (1, content_hash)
        require(holds, reason, block=block_id, **fields)
        self._blocks.rank(block_id, last_accessed, num_hashed_tokens)
        self._blocks.release([block_id])

    def update(self, block_id: BlockId, last_accessed: float) -> None:
        """Say when a block was used. Raises WrongValue where it is not in the evictor."""
        self._held(block_id)
        self._blocks.rank(block_id, last_accessed)

    def remove(self, block_id: BlockId) -> None:
        """Take a block out with its content. Raises WrongValue where it is not in the evictor."""
        self._held(block_id)
        self._blocks.touch([block_id])

    def _held(self, block_id: BlockId) -> None:
        if block_id not in self:
            raise WrongValue(reason=f"block {block_id} is not in the evictor", block=block_id)


def check_policy(eviction_policy: object) -> None:
    """Raise WrongValue for any policy but LRU."""
    if eviction_policy is not EvictionPolicy.LRU:
        raise WrongValue(reason=f"unknown eviction policy {eviction_policy!r}: there is LRU")


def make_evictor(eviction_policy: EvictionPolicy, blocks: TierBlocks) -> LRUEvictor:
    """The evictor of a policy. Raises WrongValue for an unknown one."""
    check_policy(eviction_policy)
    return LRUEvictor(blocks)
