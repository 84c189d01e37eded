# SPDX-License-Identifier: Apache-2.0
"""Collections of V0's block objects: a pool of objects that are used again, and a list with ids.

Rules: an object's pool says nothing about which block is free; it goes back to the pool that made
it, whichever allocator has it then. A list of ids that was handed out is live until the list is
updated or reset. Source: S002-05, 66.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.legacy.v0.block_interfaces import Block, BlockAllocator, BlockId
from kvcore.legacy.v0.errors import require


class BlockPool:
    """Blocks of any class, made ahead and used again, last one in first out."""

    def __init__(
        self,
        block_size: int,
        create_block: Callable[..., Block],
        allocator: BlockAllocator | None,
        pool_size: int,
    ) -> None:
        """create_block: takes the fields of a block by name. Raises WrongCall."""
        require(pool_size >= 0, "a pool of {num} blocks", num=pool_size)
        self._block_size = block_size
        self._create_block = create_block
        self._allocator = allocator
        self._pool_size = 0
        self._spare: list[Block] = []
        self._add(pool_size)

    def increase_pool(self) -> None:
        """Have twice as many."""
        self._add(max(self._pool_size, 1))

    def init_block(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        physical_block_id: BlockId | None,
        extra_hash: int | None = None,
    ) -> Block:
        """An object that is made anew for a block."""
        if not self._spare:
            self.increase_pool()
        block: Any = self._spare.pop()
        pool_id = block.pool_id
        block.__init__(
            prev_block=prev_block,
            token_ids=token_ids,
            block_size=block_size,
            allocator=block._allocator,
            block_id=physical_block_id,
            extra_hash=extra_hash,
        )
        block.pool_id, block.home = pool_id, self._spare
        made: Block = block
        return made

    def free_block(self, block: Block) -> None:
        """Take an object back that is used no more."""
        self._spare.append(block)

    def put(self, block: Block) -> None:
        """The same, for the pool that made it, if one did."""
        if block.home is not None:
            block.home.append(block)

    def _add(self, num: int) -> None:
        first, self._pool_size = self._pool_size, self._pool_size + num
        made = []
        for pool_id in range(first, self._pool_size):
            block = self._create_block(
                prev_block=None,
                token_ids=[],
                block_size=self._block_size,
                allocator=self._allocator,
                block_id=None,
                extra_hash=None,
            )
            block.pool_id, block.home = pool_id, self._spare
            made.append(block)
        self._spare[:0] = made[::-1]


class BlockList:
    """Blocks, and their ids beside them."""

    def __init__(self, blocks: list[Block]) -> None:
        self.update(blocks)

    def update(self, blocks: list[Block]) -> None:
        """Be this list; ids that were handed out stay what they were. Raises WrongCall."""
        ids = [_id_of(block) for block in blocks]
        self._blocks, self._block_ids = blocks, ids

    def append_token_ids(self, block_index: int, token_ids: list[int]) -> None:
        """Add tokens to a block, whose id may change."""
        block = self._blocks[block_index]
        block.append_token_ids(token_ids)
        self._block_ids[block_index] = _id_of(block)

    def append(self, new_block: Block) -> None:
        """Add a block."""
        self._block_ids.append(_id_of(new_block))
        self._blocks.append(new_block)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, block_index: int) -> Block:
        return self._blocks[block_index]

    def __setitem__(self, block_index: int, new_block: Block) -> None:
        block_id = _id_of(new_block)
        self._blocks[block_index] = new_block
        self._block_ids[block_index] = block_id

    def reset(self) -> None:
        """Be empty; what was handed out stays what it was."""
        self.update([])

    def ids(self) -> list[BlockId]:
        """Their ids, as a live list."""
        return self._block_ids

    def list(self) -> list[Block]:
        """The blocks, as a live list."""
        return self._blocks


def _id_of(block: Block) -> BlockId:
    block_id = block.block_id
    require(block_id is not None, "a block of {num} tokens has no id", num=len(block.token_ids))
    assert block_id is not None
    return block_id
