# SPDX-License-Identifier: Apache-2.0
"""The allocator of blocks without content hashes: V0 without prefix caching.

There are no hits, and nothing is promoted. Source: S002-06, 16, 24, 26, 33, 42, 50, 66, 68, 71.
"""

from __future__ import annotations

from kvcore.legacy.blocks.named_enum import Device
from kvcore.legacy.v0.block import BlockId, NaiveBlock
from kvcore.legacy.v0.block_allocator import BlockAllocator, check_no_device
from kvcore.legacy.v0.common import BlockPool
from kvcore.legacy.v0.errors import NoFreeBlocksError
from kvcore.legacy.v0.tier_blocks import TierBlocks

__all__ = ["NaiveBlock", "NaiveBlockAllocator"]


class NaiveBlockAllocator(BlockAllocator):
    """An allocator whose sequences share only what was forked."""

    def free_block_id(self, block_id: BlockId) -> None:
        """Take an owner from a block by its id, whichever object has it. Raises WrongCall."""
        self.give_back([block_id])

    @property
    def _free_block_indices(self) -> tuple[BlockId, ...]:
        """The ids without owner and content, next first; tests of the original read them."""
        blocks = self.blocks
        return tuple(each for each in blocks.free_blocks() if not blocks.is_evictable(each))


class HashlessAllocator(NaiveBlockAllocator):
    """A naive allocator over the blocks of a prefix-caching allocator that have no content."""

    def __init__(self, blocks: TierBlocks, block_size: int) -> None:
        pool = BlockPool(block_size, NaiveBlock, self, 0)
        super().__init__(NaiveBlock, len(blocks), block_size, (), pool, blocks=blocks)

    def get_num_free_blocks(self, device: Device | None = None) -> int:
        """Return the number of blocks without owner and content. Cost: O(free blocks)."""
        check_no_device(device)
        return len(self._free_block_indices)

    def take_empty(self, count: int = 1, who: str = "blocks without content") -> list[BlockId]:
        """Take blocks without content and return their ids. Raises NoFreeBlocksError."""
        free, total = self.get_num_free_blocks(), len(self.blocks)
        if count > free:
            raise NoFreeBlocksError(who=who, needed=count, free=free, total=total)
        return super().take_empty(count)
