# SPDX-License-Identifier: Apache-2.0
"""What an allocator of several devices does in V0, for those who ask by type.

Rules: names and arguments are the original's. Source: S002-65, 69 to 71.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcore.legacy.v0.block_interfaces import Block, BlockId, Device


class DeviceAwareBlockAllocator(ABC):
    """Gives blocks of a device that is named."""

    @abstractmethod
    def allocate_mutable_block(
        self, prev_block: Block | None, device: Device, extra_hash: int | None = None
    ) -> Block:
        """An empty block."""

    @abstractmethod
    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        device: Device,
        extra_hash: int | None = None,
    ) -> Block:
        """A full block."""

    @abstractmethod
    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        device: Device,
        extra_hash: int | None = None,
    ) -> list[Block]:
        """Full blocks, one behind the other."""

    @abstractmethod
    def get_num_free_blocks(self, device: Device) -> int:
        """Blocks that could be given."""

    @abstractmethod
    def get_num_total_blocks(self, device: Device) -> int:
        """All blocks of a device."""

    @abstractmethod
    def free(self, block: Block) -> None:
        """Give a block back."""

    @abstractmethod
    def fork(self, last_block: Block) -> list[Block]:
        """Another sequence over the same blocks."""

    @property
    @abstractmethod
    def all_block_ids(self) -> frozenset[BlockId]:
        """Every id."""

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
    def get_num_full_blocks_touched(self, blocks: Sequence[Block], device: Device) -> int:
        """Blocks of a device that full ones would take."""

    @abstractmethod
    def swap(
        self, blocks: Sequence[Block], src_device: Device, dst_device: Device
    ) -> dict[BlockId, BlockId]:
        """Move blocks to the other device; old to new id."""

    @abstractmethod
    def get_physical_block_id(self, device: Device, absolute_id: BlockId) -> int:
        """The place of an id among a device's."""

    @abstractmethod
    def allocate_or_get_null_block(self) -> Block:
        """The block that stands for none."""

    @abstractmethod
    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Share of look-ups that hit; -1 without caching."""

    @abstractmethod
    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        """Forget all content of a device, or of all."""

    @abstractmethod
    def find_cached_blocks_prefix(
        self, block_hashes: list[int], device: Device = Device.GPU
    ) -> list[int]:
        """The hashes up to the first that is not cached."""
