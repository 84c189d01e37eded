# SPDX-License-Identifier: Apache-2.0
"""What a manager of sequences does in V0, and which there are, by the names of a configuration.

Rules: names and arguments are the original's. Source: S002-38, 39, 59, 66 to 72.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as List
from typing import ClassVar

from kvcore.legacy.v0.block_interfaces import BlockId, Device
from kvcore.legacy.v0.errors import WrongValue
from kvcore.legacy.v0.sequences import AllocStatus, GroupLike, SequenceLike

Pairs = list[tuple[BlockId, BlockId]]


class BlockSpaceManager(ABC):
    """Gives blocks to sequences."""

    _versions: ClassVar[dict[str, type[BlockSpaceManager]]] = {}

    def __init_subclass__(cls, version: str | None = None) -> None:
        """version: the name by which `get_block_space_manager_class` finds the class."""
        if version is not None:
            BlockSpaceManager._versions[version] = cls

    @staticmethod
    def get_block_space_manager_class(version: str) -> type[BlockSpaceManager]:
        """The manager of a name: "selfattn" or "placeholder". Raises WrongValue."""
        if version.lower() not in BlockSpaceManager._versions:
            raise WrongValue(reason=f"there are 'selfattn' and 'placeholder', not {version!r}")
        return BlockSpaceManager._versions[version.lower()]

    @abstractmethod
    def can_allocate(self, seq_group: GroupLike, num_lookahead_slots: int = 0) -> AllocStatus:
        """Whether a waiting group's prompt can be given blocks."""

    @abstractmethod
    def allocate(self, seq_group: GroupLike) -> None:
        """Give a waiting group the blocks of its prompt."""

    @abstractmethod
    def can_append_slots(self, seq_group: GroupLike, num_lookahead_slots: int) -> bool:
        """Whether a running group's new tokens fit."""

    @abstractmethod
    def append_slots(self, seq: SequenceLike, num_lookahead_slots: int) -> Pairs:
        """Give a sequence's new tokens slots; what was copied."""

    @abstractmethod
    def fork(self, parent_seq: SequenceLike, child_seq: SequenceLike) -> None:
        """Let a new sequence share all blocks."""

    @abstractmethod
    def can_swap_in(self, seq_group: GroupLike, num_lookahead_slots: int) -> AllocStatus:
        """Whether a swapped group fits on the GPU."""

    @abstractmethod
    def swap_in(self, seq_group: GroupLike) -> Pairs:
        """Move a swapped group to the GPU."""

    @abstractmethod
    def can_swap_out(self, seq_group: GroupLike) -> bool:
        """Whether a running group fits on the CPU."""

    @abstractmethod
    def swap_out(self, seq_group: GroupLike) -> Pairs:
        """Move a running group to the CPU."""

    @abstractmethod
    def free(self, seq: SequenceLike) -> None:
        """Give a sequence's blocks back."""

    @abstractmethod
    def get_block_table(self, seq: SequenceLike) -> list[BlockId]:
        """The ids of a sequence's blocks."""

    @abstractmethod
    def get_num_free_gpu_blocks(self) -> int:
        """Blocks of the GPU without owner."""

    @abstractmethod
    def get_num_free_cpu_blocks(self) -> int:
        """Blocks of the CPU without owner."""

    @abstractmethod
    def access_all_blocks_in_seq(self, seq: SequenceLike, access_time: float) -> None:
        """Note when a sequence was used."""

    @abstractmethod
    def get_common_computed_block_ids(self, seqs: List[SequenceLike]) -> list[BlockId]:
        """What the cached parts of these sequences begin with alike."""

    @abstractmethod
    def mark_blocks_as_computed(self, seq_group: GroupLike, token_chunk_size: int) -> None:
        """Count what was promoted as computed."""

    @abstractmethod
    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Share of look-ups that hit; -1 without caching."""

    @abstractmethod
    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        """Forget all content of a device, or of all."""

    @abstractmethod
    def get_num_cached_tokens(self, seq: SequenceLike) -> int:
        """Tokens of a sequence that are cached."""
