# SPDX-License-Identifier: Apache-2.0
"""The calls that vLLM's scheduler and connectors make to the manager's coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvcore import Hit, Request
from kvcore import KVCacheManager as Core
from kvcore_vllm.blocks import Block

PROBE = "\0 look-up"
"""The id of the request that stands for bare hashes; no request of vLLM has such an id."""


class Coordinator:
    """Counts blocks, and looks up bare hashes."""

    num_reprefillable_tokens = 0

    def __init__(self, manager: Any, specs: Sequence[Any]) -> None:
        self._manager = manager
        self._config = manager.compat.config
        groups = self._config.groups
        self.block_pool = manager.block_pool
        self.enable_partial_hash_hits = manager.parts is not None
        self.retention_interval = manager.kv_cache_config.prefix_cache_retention_interval
        config, dropped = self._config, list[int]()
        if len(groups) > 1:
            dropped = [g.block_size for n, g in enumerate(groups) if config.drops_last_hit(n)]
        behind = config.hash_block_size if config.has_tails else max(dropped, default=0)
        self.num_dropped = behind if dropped else 0
        """Tokens behind a hit that must be found too. With several groups vLLM lets them include a
        request's last token."""
        self.single_type_managers = tuple(
            SimpleNamespace(
                block_pool=self.block_pool,
                block_size=group.block_size,
                kv_cache_group_id=number,
                kv_cache_spec=spec,
            )
            for number, (group, spec) in enumerate(zip(groups, specs, strict=True))
        )
        self.full_attention_group_id = next(
            (n for n, group in enumerate(groups) if group.kind in ("full_attention", "mla")), None
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Sequence[Block]],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Count the free blocks that a request would take: new ones, and hits without an owner."""
        del total_computed_tokens, num_local_computed_tokens  # computed tokens have their blocks
        del prefill_end  # only for states inside a chunk
        needed = 0
        tables = self._manager.get_block_ids(request_id)
        for number, (group, table, hits) in enumerate(
            zip(self._config.groups, tables, new_computed_blocks, strict=True)
        ):
            num_slots = num_encoder_tokens if group.is_cross else num_tokens
            num_slots = num_tokens_main_model if group.is_state else num_slots
            num_blocks, cap = -(-num_slots // group.block_size), self._config.cap(number)
            if apply_admission_cap and cap is not None and not group.is_state:
                num_blocks = min(num_blocks, cap)
            num_new = max(0, num_blocks - len(table) - len(hits))
            needed += min(num_new, 1) if group.is_state else num_new  # skipped positions take none
            needed += sum(not each.is_null and each.ref_cnt == 0 for each in hits)
        return needed

    def num_needed_by_whole(self, request: Any, hit: Any, num_encoder_tokens: int) -> int:
        """Count the free blocks that a whole request would take behind its hit, if any."""
        num_tokens = min(request.num_tokens, self._manager.max_model_len)
        hits = (self._manager.empty_kv_cache_blocks if hit is None else hit).blocks
        call = (request.request_id, num_tokens, hits, num_encoder_tokens, 0, 0, num_tokens)
        return self.get_num_blocks_to_allocate(*call, apply_admission_cap=True)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[tuple[Sequence[Block], ...], int, int]:
        """Return the blocks and tokens of the longest hit up to this length.

        Last, the number of tokens behind it that all groups find but state groups.
        """
        hit = self.look_up(block_hashes, max_cache_hit_length)
        return (
            tuple(
                [self.block_pool.block(each) for each in group]
                for group in self._manager.shown(hit.blocks.blocks)
            ),
            hit.num_tokens,
            max(0, hit.num_common - hit.num_tokens),
        )

    def look_up(self, block_hashes: Sequence[bytes], most: int) -> Hit:
        """Return that hit: a request of these hashes is added and removed."""
        core: Core = self._manager.compat.core
        most += self.num_dropped
        num_hashes = min(len(block_hashes), (most + 1) // self._config.hash_block_size)
        hashes = list(block_hashes[:num_hashes])
        core.add_request(Request(PROBE, bytes(most + 1), block_hashes=hashes))
        hit = core.get_computed_blocks(PROBE)
        core.remove_request(PROBE)
        return hit
