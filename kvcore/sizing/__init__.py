# SPDX-License-Identifier: Apache-2.0
"""Computes the size of a model's key-value cache, and how its layers form groups of one pool.

It turns layers (`FullAttentionSpec`, `SlidingWindowSpec`, ...), or a Hugging Face config.json
(`read_model`), into groups, blocks and tensors (`KVCacheConfig`), and these into the configuration
of a manager (`make_manager_config`). `kvcore size` is the command for this. It runs once, before
the first request, so it has no twin in Rust.
"""

from kvcore.sizing.configs import (
    estimate_max_model_len,
    get_kv_cache_config,
    is_kv_cache_type_uniform,
    make_grouped_config,
    make_unified_config,
    make_uniform_config,
    request_bytes,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_configs,
)
from kvcore.sizing.grouping import group_layers
from kvcore.sizing.hybrids import StateLayer
from kvcore.sizing.layout import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    blocks_per_request,
    create_kv_cache_group_specs,
    make_layout,
    make_manager_config,
    max_concurrency,
    num_cache_tokens,
    usable_blocks,
)
from kvcore.sizing.memory import (
    check_enough_kv_cache_memory,
    max_request_bytes,
)
from kvcore.sizing.models import Layer, Model, make_layer_specs, read_model
from kvcore.sizing.report import SizeReport, size_model, to_json, to_text
from kvcore.sizing.specs import (
    AttentionSpec,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    SlidingWindowSpec,
    StateSpec,
)
from kvcore.sizing.units import parse_memory
from kvcore.sizing.weights import Budget, count_parameters, make_budget

__all__ = [
    "AttentionSpec",
    "Budget",
    "ChunkedLocalSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheTensor",
    "Layer",
    "LayerSpec",
    "Limits",
    "Model",
    "SizeReport",
    "SlidingWindowSpec",
    "StateLayer",
    "StateSpec",
    "blocks_per_request",
    "check_enough_kv_cache_memory",
    "count_parameters",
    "create_kv_cache_group_specs",
    "estimate_max_model_len",
    "get_kv_cache_config",
    "group_layers",
    "is_kv_cache_type_uniform",
    "make_budget",
    "make_grouped_config",
    "make_layer_specs",
    "make_layout",
    "make_manager_config",
    "make_unified_config",
    "make_uniform_config",
    "max_concurrency",
    "max_request_bytes",
    "num_cache_tokens",
    "parse_memory",
    "read_model",
    "request_bytes",
    "size_model",
    "to_json",
    "to_text",
    "unify_hybrid_kv_cache_specs",
    "unify_kv_cache_configs",
    "usable_blocks",
]
