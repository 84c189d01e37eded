# SPDX-License-Identifier: Apache-2.0
"""What blocks and allocators of one device have in common in V0, for those who ask by type.

Rules: names are the original's; `device` is a keyword that allocators of one device refuse. An
engine's own `Device` compares equal by name. Source: S002-08, 14, 15, 28, 51, 65.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from kvcore.legacy.blocks.named_enum import NamedEnum
from kvcore.legacy.v0 import errors

BlockId = int


class Device(NamedEnum):
    """Where a block is: the core's device tier, or its host tier."""

    GPU = enum.auto()
    CPU = enum.auto()


class Block(ABC):
    """Tokens that share one physical block."""

    pool_id: int | None = None
    home: list[Any] | None = None
    """The spare objects of the pool that made it, which it goes back to."""

    class Factory(Protocol):
        """What makes a block for an allocator."""

        def __call__(
            self,
            prev_block: Block | None,
            token_ids: list[int],
            block_size: int,
            allocator: Any,
            block_id: BlockId | None = None,
            computed: bool = False,
            extra_hash: int | None = None,
        ) -> Block:
            """A block of these tokens."""

    @abstractmethod
    def append_token_ids(self, token_ids: list[int]) -> None:
        """Add tokens."""

    @property
    @abstractmethod
    def block_id(self) -> BlockId | None:
        """The physical block; None where there is none."""

    @block_id.setter
    @abstractmethod
    def block_id(self, value: BlockId | None) -> None:
        """Name another one."""

    @property
    @abstractmethod
    def token_ids(self) -> list[int]:
        """The tokens."""

    @property
    @abstractmethod
    def num_empty_slots(self) -> int:
        """Tokens that still fit."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether no token fits any more."""

    @property
    @abstractmethod
    def prev_block(self) -> Block | None:
        """The block before in its sequence."""

    @property
    @abstractmethod
    def content_hash(self) -> int | None:
        """The hash of all tokens up to its end; None where it has none."""

    @property
    @abstractmethod
    def extra_hash(self) -> int | None:
        """What else its content hangs on."""

    @property
    @abstractmethod
    def num_tokens_total(self) -> int:
        """Tokens of the sequence up to its end."""

    @property
    @abstractmethod
    def computed(self) -> bool:
        """Whether it was found computed."""

    @computed.setter
    @abstractmethod
    def computed(self, value: bool) -> None:
        """Say so."""

    @property
    @abstractmethod
    def last_accessed(self) -> float:
        """When it was used."""

    @last_accessed.setter
    @abstractmethod
    def last_accessed(self, last_accessed_ts: float) -> None:
        """Say so."""


class PooledBlock(Block):
    """A block object that is used for one block after another."""

    @abstractmethod
    def begin(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: Any,
        block_id: BlockId | None,
        extra_hash: int | None = None,
        content_hash: int | None = None,
        computed: bool = False,
    ) -> None:
        """Be a new block, whatever this object was before."""


class BlockAllocator(ABC):
    """Gives blocks of one device."""

    NoFreeBlocksError = errors.NoFreeBlocksError

    @abstractmethod
    def allocate_mutable_block(
        self,
        prev_block: Block | None,
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> Block:
        """An empty block."""

    @abstractmethod
    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> Block:
        """A full block."""

    @abstractmethod
    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> list[Block]:
        """Full blocks, one behind the other."""

    @abstractmethod
    def free(self, block: Block, keep_block_object: bool = False) -> None:
        """Give a block back."""

    @abstractmethod
    def fork(self, last_block: Block) -> list[Block]:
        """Another sequence over the same blocks."""

    @abstractmethod
    def cow_block_if_not_appendable(self, block: Block) -> BlockId:
        """A block of its own for one that others hold too."""

    @abstractmethod
    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Make a full block findable."""

    @abstractmethod
    def get_num_free_blocks(self, device: Device | None = None) -> int:
        """Blocks that could be given."""

    @abstractmethod
    def get_num_total_blocks(self) -> int:
        """All blocks."""

    @abstractmethod
    def get_physical_block_id(self, absolute_id: BlockId) -> int:
        """The place of an id among all."""

    @property
    @abstractmethod
    def all_block_ids(self) -> frozenset[BlockId]:
        """Every id."""

    @abstractmethod
    def swap_out(self, blocks: Sequence[Block]) -> None:
        """Give blocks back and keep their objects."""

    @abstractmethod
    def swap_in(self, blocks: Sequence[Block]) -> None:
        """Find or take blocks for objects that have none."""

    @abstractmethod
    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        """The copies since the last call."""

    @abstractmethod
    def mark_blocks_as_accessed(self, block_ids: list[BlockId], now: float) -> None:
        """Say when blocks were used."""

    @abstractmethod
    def mark_blocks_as_computed(self, block_ids: list[BlockId]) -> None:
        """Count what was promoted as computed."""

    @abstractmethod
    def get_common_computed_block_ids(
        self, computed_seq_block_ids: list[list[BlockId]]
    ) -> list[BlockId]:
        """What these lists begin with alike."""

    @abstractmethod
    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        """Blocks that full ones would take here."""

    @abstractmethod
    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
        """The hashes up to the first that is not cached."""

    @abstractmethod
    def get_prefix_cache_hit_rate(self) -> float:
        """Share of look-ups that hit; -1 without caching."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all content, if no block is used."""


def chain(last_block: Block) -> list[Block]:
    """A block and all before it, first to last."""
    blocks = [last_block]
    while (block := blocks[-1].prev_block) is not None:
        blocks.append(block)
    return blocks[::-1]
