# SPDX-License-Identifier: Apache-2.0
"""Seed 001: the names of vLLM 0.8.5's kv_cache_utils, over the core.

Rules: the metrics are `kvcore.metrics`', the sizes `kvcore.sizing`'s; the rest is in the files
named below. Whatever has the original's attributes is a request, a configuration or statistics.
Source: seed 001. Twin: none.
"""

from __future__ import annotations

from typing import Any

from kvcore import metrics
from kvcore.legacy.v1_0_8.block_hashes import (
    NONE_HASH,
    BlockHashType,
    _gen_lora_extra_hash_keys,
    _gen_mm_extra_hash_keys,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    hash_request_tokens,
    need_extra_keys,
)
from kvcore.legacy.v1_0_8.kv_cache_sizes import (
    _get_kv_cache_config_uniform_type,
    check_enough_kv_cache_memory,
    create_kv_cache_group_specs,
    estimate_max_model_len,
    get_kv_cache_config,
    is_kv_cache_type_uniform,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_configs,
)
from kvcore.legacy.v1_0_8.live_blocks import FreeKVCacheBlockQueue, KVCacheBlock
from kvcore.types.errors import WrongArgument
from kvcore.types.values import PrefixCacheStats

__all__ = [
    "NONE_HASH",
    "BlockHashType",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "PrefixCachingMetrics",
    "_gen_lora_extra_hash_keys",
    "_gen_mm_extra_hash_keys",
    "_get_kv_cache_config_uniform_type",
    "check_enough_kv_cache_memory",
    "create_kv_cache_group_specs",
    "estimate_max_model_len",
    "generate_block_hash_extra_keys",
    "get_kv_cache_config",
    "hash_block_tokens",
    "hash_request_tokens",
    "is_kv_cache_type_uniform",
    "need_extra_keys",
    "unify_hybrid_kv_cache_specs",
    "unify_kv_cache_configs",
]


class PrefixCachingMetrics(metrics.PrefixCachingMetrics):
    """Hit rate over the most recent requests; queries and hits are what the statistics count.

    The rule is the core's: as many old updates leave as it takes, the newest stays.
    """

    def observe(self, stats: Any) -> None:
        """Add an update, an object with requests, queries, hits and reset. Raises WrongArgument."""
        try:
            counts = (stats.requests, stats.queries, stats.hits)
        except AttributeError:
            expected = "an object with requests, queries, hits and reset"
            raise WrongArgument(name="stats", expected=expected, value=repr(stats)) from None
        super().observe(PrefixCacheStats(*counts, reset=bool(getattr(stats, "reset", False))))
