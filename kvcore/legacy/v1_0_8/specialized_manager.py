# SPDX-License-Identifier: Apache-2.0
"""The rules per kind of layer in vLLM 0.8.5's V1 manager: hits, and blocks that a window skips.

Full attention hits from the left up to the first miss, and keeps everything. A sliding window
searches from the right for a run of as many blocks as its next query sees before itself; null
blocks replace those to the left of the run; a shorter run counts only if it starts at block 0. The
core defines which blocks are skipped (`kvcore.types.groups.skipped_blocks`). Source: S001-79 to 81.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from kvcore.legacy.v1_0_8.block_hashes import BlockHashType, keys_of
from kvcore.legacy.v1_0_8.block_pool import BlockPool
from kvcore.legacy.v1_0_8.kv_cache_interface import read_spec
from kvcore.legacy.v1_0_8.live_blocks import KVCacheBlock
from kvcore.types.groups import Group, skipped_blocks


class SpecializedManager:
    """Finds hits and trims tables for layers of one kind; this class is for full attention.

    group: the layers' group in the core.
    """

    def __init__(self, kv_cache_spec: Any, block_pool: BlockPool) -> None:
        spec = read_spec(kv_cache_spec)
        self.group = Group(spec.block_size, kind=spec.kind, window=spec.window)
        self.block_size = spec.block_size
        self.kv_cache_spec = kv_cache_spec
        self.block_pool = block_pool

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHashType], num_dropped: int = 0
    ) -> list[KVCacheBlock]:
        """Return the blocks of the longest hit of a chain, up to the first miss.

        num_dropped: number of blocks to drop from its end.
        """
        pool = self.block_pool
        if not block_hashes or pool.get_cached_block(block_hashes[0]) is None:
            return []  # before the other keys are read
        found = pool.backing.blocks.lookup_prefix(keys_of(block_hashes, pool.backend), "device")
        return [pool.blocks[place] for place in found[: max(0, len(found) - num_dropped)]]

    def remove_skipped_blocks(
        self, blocks: list[KVCacheBlock], num_computed_tokens: int
    ) -> list[KVCacheBlock]:
        """Replace blocks that no later query sees with the null block, in place.

        Returns the replaced blocks, highest first, down to the first null. They keep their owners.
        """
        end, null = skipped_blocks(self.group, num_computed_tokens), self.block_pool.null_block
        removed = list(takewhile(lambda block: block is not null, reversed(blocks[:end])))
        end = min(end, len(blocks))
        blocks[end - len(removed) : end] = [null] * len(removed)
        return removed


class FullAttentionManager(SpecializedManager):
    """Rules for layers whose queries see all earlier tokens."""


class SlidingWindowManager(SpecializedManager):
    """Rules for layers whose queries see a window of tokens."""

    def __init__(self, kv_cache_spec: Any, block_pool: BlockPool) -> None:
        super().__init__(kv_cache_spec, block_pool)
        self.sliding_window = self.group.window or 1
        self.sliding_window_contiguous_blocks = -(-(self.sliding_window - 1) // self.block_size)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHashType], num_dropped: int = 0
    ) -> list[KVCacheBlock]:
        """Return null blocks and then the last run that is long enough, less the dropped blocks."""
        needed = self.sliding_window_contiguous_blocks + num_dropped
        run: list[KVCacheBlock] = []
        place = 0
        for place in range(len(block_hashes) - 1, -1, -1):
            found = self.block_pool.get_cached_block(block_hashes[place])
            run = [found, *run] if found else []
            if found and len(run) >= needed:
                break
        hit = [self.block_pool.null_block] * place + run
        return hit[: max(0, len(hit) - num_dropped)]


def get_specialized_manager(kv_cache_spec: Any, block_pool: BlockPool) -> SpecializedManager:
    """Make the manager for a spec. Raises WrongArgument, InvalidCount."""
    kind = FullAttentionManager if read_spec(kv_cache_spec).window is None else SlidingWindowManager
    return kind(kv_cache_spec, block_pool)
