# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler and connectors ask about the blocks of a request.

With hits inside blocks vLLM numbers some blocks otherwise than the core (parts.py): results have
vLLM's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.metrics.stats import PrefixCacheStats

from kvcore.compat import KVCacheManager as Compat
from kvcore_vllm.blocks import BlockPool, Blocks, Tables, read_ids
from kvcore_vllm.parts import Parts
from kvcore_vllm.windows import Windows


class Queries:
    """The part of the manager that changes no block."""

    compat: Compat
    block_pool: BlockPool
    empty_kv_cache_blocks: Blocks
    num_kv_cache_groups: int
    parts: Parts | None
    enable_caching: bool
    prefix_cache_stats: PrefixCacheStats | None
    _windows: Windows | None

    @property
    def usage(self) -> float:
        """Share of the usable blocks that have an owner."""
        return self.compat.usage

    def tables(self, request_id: str) -> tuple[list[int], ...]:
        """Return the blocks of a request as the core numbers them, one list per group."""
        tables = self.compat.get_block_ids(request_id)
        return tables if self._windows is None else self._windows.complete(request_id, tables)

    def shown(self, tables: Tables | Sequence[Sequence[int]]) -> Tables:
        """Return vLLM's numbers of blocks of the core."""
        return tuple(tables) if self.parts is None else self.parts.shown(tables)

    def numbers(self, blocks: Any) -> Tables:
        """Return the core's numbers of the blocks of a result."""
        ids = read_ids(blocks)
        return ids if self.parts is None else self.parts.numbers(ids)

    def get_blocks(self, request_id: str) -> Blocks:
        """Return the blocks of a request."""
        if self._windows is None and self.parts is None:
            return self._result(self.compat.get_blocks(request_id).blocks)
        return self._result(self.get_block_ids(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the blocks of a request as one list of ids per group."""
        tables = self.tables(request_id)
        return tables if self.parts is None else self.parts.shown(tables)

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """Return the ids of the blocks of a request's first tokens; all of encoders and states."""
        tables = self.get_block_ids(request_id)
        for group, ids in zip(self.compat.config.groups, tables, strict=True):
            if not (group.is_cross or group.is_state):
                del ids[-(-num_computed_tokens // group.block_size) :]
        return tables

    def estimate_cached_tokens(self, request: Any) -> int:
        """Return the tokens of a request up to the last block that can be found."""
        counts = []
        tables = self.tables(request.request_id)
        for group, table in zip(self.compat.config.groups, tables, strict=True):
            if not group.is_cross:
                has_key = self.compat.core.has_key
                num_blocks = len(table)
                while num_blocks and not (table[num_blocks - 1] and has_key(table[num_blocks - 1])):
                    num_blocks -= 1
                count = num_blocks * group.block_size
                if num_blocks and self.parts is not None:
                    key = self.compat.core.get_block_key(table[num_blocks - 1])
                    count = min(count, self.parts.num_tokens(key) or count)
                counts.append(count)
        return min(counts)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return zeros: vLLM does not use the counts any more."""
        del running_request_id
        return [0] * self.num_kv_cache_groups

    def create_kv_cache_blocks(self, blocks: Sequence[Sequence[Any]]) -> Blocks:
        """Make a result of these blocks."""
        return self._result([[block.block_id for block in group] for group in blocks])

    def truncate_computed_blocks(self, blocks: Any, num_computed_tokens: int) -> Blocks:
        """Return the part of a hit up to a token at which blocks of every group end."""
        cut = []
        for ids, group in zip(read_ids(blocks), self.compat.config.groups, strict=True):
            end, rest = divmod(num_computed_tokens, group.block_size)
            may_be_short = group.is_state or group.is_cross
            assert not rest, f"{num_computed_tokens} tokens end inside a block"
            assert may_be_short or end <= len(ids), f"the hit has {len(ids)} of {end} blocks"
            cut.append(ids[:end])
        return self._result(cut)

    def _result(self, ids: Tables | Sequence[Sequence[int]]) -> Blocks:
        if any(ids):
            return Blocks(tuple(ids), self.block_pool.block)
        return self.empty_kv_cache_blocks

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        """Return whether a request may hit cached content."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Count the look-up of a request that is admitted."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=num_hits,
                preempted=request.num_preemptions > 0,
            )

    def make_prefix_cache_stats(self) -> Any:
        """Return the look-ups since the last call, or None if they are not counted."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats
