# SPDX-License-Identifier: Apache-2.0
"""The rules by kind of layer in vLLM 0.8.5's V1 manager: hits, and what a window skips.

Full attention hits from the left up to the first miss, and keeps everything. A sliding window looks
from the right for as many blocks in a row as its next query sees before itself; the null block
stands for what is left of them; fewer count only from block 0 on. What is skipped is the core's
rule (`kvcore.types.groups.skipped_blocks`). Source: S001-79 to 81.
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
    """Hits and trims of layers of one kind: those of full attention, unless a class says otherwise.

    group: the layers as the core has them.
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
        """The blocks of the longest hit of a chain. num_dropped: last ones that are not used.

        From the left up to the first miss, less what is dropped.
        """
        pool = self.block_pool
        if not block_hashes or pool.get_cached_block(block_hashes[0]) is None:
            return []  # before the other keys are read
        found = pool.backing.blocks.lookup_prefix(keys_of(block_hashes, pool.backend), "device")
        return [pool.blocks[place] for place in found[: max(0, len(found) - num_dropped)]]

    def remove_skipped_blocks(
        self, blocks: list[KVCacheBlock], num_computed_tokens: int
    ) -> list[KVCacheBlock]:
        """Put the null block in the places of what no later query sees; in place.

        Returns what stood there, highest first, down to the first null. They keep their owners.
        """
        end, null = skipped_blocks(self.group, num_computed_tokens), self.block_pool.null_block
        removed = list(takewhile(lambda block: block is not null, reversed(blocks[:end])))
        end = min(end, len(blocks))
        blocks[end - len(removed) : end] = [null] * len(removed)
        return removed


class FullAttentionManager(SpecializedManager):
    """Every query sees all tokens before it."""


class SlidingWindowManager(SpecializedManager):
    """A query sees a window of tokens."""

    def __init__(self, kv_cache_spec: Any, block_pool: BlockPool) -> None:
        super().__init__(kv_cache_spec, block_pool)
        self.sliding_window = self.group.window or 1
        self.sliding_window_contiguous_blocks = -(-(self.sliding_window - 1) // self.block_size)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHashType], num_dropped: int = 0
    ) -> list[KVCacheBlock]:
        """The last run of enough blocks, less what is dropped behind it; null before it."""
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
    """The manager of such layers. Raises WrongArgument, InvalidCount."""
    kind = FullAttentionManager if read_spec(kv_cache_spec).window is None else SlidingWindowManager
    return kind(kv_cache_spec, block_pool)
