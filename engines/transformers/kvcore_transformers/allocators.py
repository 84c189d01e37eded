# SPDX-License-Identifier: Apache-2.0
"""Groups of layers as transformers sees them: the requests' block tables and their indices.

A block of kvcore is a sector of transformers. Block 0, which kvcore never hands out, is sector 1,
into which transformers writes padding. So block n is sector n + 1, and null blocks behind a window
name a sector that no query reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from kvcore import Group


class Full(FullAttentionCacheAllocator):
    """Full-attention layers: the table and the indices."""


class Sliding(SlidingAttentionCacheAllocator):
    """Sliding layers in a table that grows and has null blocks behind the window.

    transformers' own table is a ring, whose blocks are overwritten and cannot be shared.
    """

    supports_block_sharing = True
    get_write_indices = FullAttentionCacheAllocator.get_write_indices
    update = FullAttentionCacheAllocator.update

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the indices of the window before the query, and of the query."""
        seen = min(past_length, self.sliding_window - 1)
        return self.get_write_indices(request_id, past_length - seen, seen + query_length)


class Pool:
    """A stand-in for transformers' pool: kvcore's manager has the blocks."""

    def try_to_free_sectors(self) -> None:
        """Do nothing: a sector is free as soon as its block is."""


def group_of(allocator: Any) -> Group:
    """Describe an allocator as a group of kvcore."""
    size = allocator.blocks_per_sector * allocator.tokens_per_page
    if isinstance(allocator, SlidingAttentionCacheAllocator):
        return Group(size, kind="sliding_window", window=allocator.sliding_window)
    return Group(size)


def within(allocator: Any, blocks: Iterable[int]) -> list[int]:
    """Return the allocator's blocks in the sectors that these blocks of kvcore stand for."""
    n = allocator.blocks_per_sector
    if n == 1:
        return [block + 1 for block in blocks]
    return [inner for block in blocks for inner in range((block + 1) * n, (block + 2) * n)]
