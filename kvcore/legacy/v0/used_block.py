# SPDX-License-Identifier: Apache-2.0
"""The record of one block's use as V0 shows it: a view on what the core and an allocator know.

Rules: a block is active while it has owners; when it was accessed is its rank in the core. Of a
block without owner nothing was said. Source: S002-01 to 03.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from kvcore.legacy.v0.block_interfaces import BlockId
from kvcore.legacy.v0.block_tracker import NEVER_ACCESSED, BlockTracker
from kvcore.legacy.v0.errors import require
from kvcore.legacy.v0.tier_blocks import TierBlocks


class UsedBlock(BlockTracker):
    """How one physical block is used now."""

    __slots__ = ("_block_id", "_blocks", "_computed")

    def __init__(
        self, block_id: BlockId, blocks: TierBlocks, computed: AbstractSet[BlockId]
    ) -> None:
        """computed: the used blocks that are."""
        self._block_id = block_id
        self._blocks = blocks
        self._computed = computed

    @property
    def active(self) -> bool:  # type: ignore[override] # read here, a field of a record by itself
        """Whether it has an owner."""
        return self._blocks.ref_count(self._block_id) > 0

    @property
    def computed(self) -> bool:  # type: ignore[override] # as above
        """Whether it is used and was marked computed."""
        return self.active and self._block_id in self._computed

    @property
    def last_accessed(self) -> float:  # type: ignore[override] # as above
        """When it was used, while it is."""
        return self._blocks.last_accessed(self._block_id) if self.active else NEVER_ACCESSED

    def reset(self) -> None:
        """Raises WrongCall."""
        require(False, "use of block {block} is the core's to forget", block=self._block_id)

    def enable(self) -> None:
        """Raises WrongCall."""
        reason = "block {block} is tracked already, or has no owner"
        require(False, reason, block=self._block_id)

    def disable(self) -> None:
        """Raises WrongCall."""
        reason = "block {block} is not tracked, or has an owner"
        require(False, reason, block=self._block_id)
