# SPDX-License-Identifier: Apache-2.0
"""V0's manager for models without attention caches: it says yes, and does nothing.

Rules: answers are the original's, None where it has none. Source: S002-72.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

from kvcore.legacy.v0.block_interfaces import BlockId, Device
from kvcore.legacy.v0.manager_interfaces import BlockSpaceManager, Pairs
from kvcore.legacy.v0.sequences import AllocStatus, GroupLike, SequenceLike

NONE: Any = None
"""What a caller that has no cache does not look at."""


class PlaceholderBlockSpaceManager(BlockSpaceManager, version="placeholder"):
    """Blocks for those who need none."""

    def __init__(self, **kwargs: object) -> None:
        """Takes the settings of any manager."""

    def can_allocate(
        self,
        seq_group: GroupLike,
        num_lookahead_slots: int = 0,
    ) -> AllocStatus:
        """OK."""
        return AllocStatus.OK

    def allocate(self, seq_group: GroupLike) -> None:
        """Does nothing."""

    def can_append_slots(
        self,
        seq_group: GroupLike,
        num_lookahead_slots: int,
    ) -> bool:
        """True."""
        return True

    def append_slots(self, seq: SequenceLike, num_lookahead_slots: int) -> Pairs:
        """No copies."""
        return []

    def fork(self, parent_seq: SequenceLike, child_seq: SequenceLike) -> None:
        """Does nothing."""

    def can_swap_in(
        self,
        seq_group: GroupLike,
        num_lookahead_slots: int,
    ) -> AllocStatus:
        """OK."""
        return AllocStatus.OK

    def swap_in(self, seq_group: GroupLike) -> Pairs:
        """None."""
        pairs: Pairs = NONE
        return pairs

    def can_swap_out(self, seq_group: GroupLike) -> bool:
        """True."""
        return True

    def swap_out(self, seq_group: GroupLike) -> Pairs:
        """None."""
        pairs: Pairs = NONE
        return pairs

    def free(self, seq: SequenceLike) -> None:
        """Does nothing."""

    def get_block_table(self, seq: SequenceLike) -> list[BlockId]:
        """None."""
        table: list[BlockId] = NONE
        return table

    def get_num_free_gpu_blocks(self) -> int:
        """1."""
        return 1

    def get_num_free_cpu_blocks(self) -> int:
        """1."""
        return 1

    def access_all_blocks_in_seq(self, seq: SequenceLike, access_time: float) -> None:
        """Does nothing."""

    def get_common_computed_block_ids(
        self,
        seqs: List[SequenceLike],
    ) -> list[BlockId]:
        """None are cached."""
        return []

    def mark_blocks_as_computed(self, seq_group: GroupLike, token_chunk_size: int) -> None:
        """Does nothing."""

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """-1."""
        return -1

    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        """True."""
        return True

    def get_num_cached_tokens(self, seq: SequenceLike) -> int:
        """0."""
        return 0
