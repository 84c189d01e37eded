# SPDX-License-Identifier: Apache-2.0
"""Convert vLLM's cache groups to kvcore's, and refuse those that kvcore does not serve."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core.kv_cache_coordinator import _validate_prefix_cache_retention_interval
from vllm.v1.core.kv_cache_utils import partial_hash_hits_enabled
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvcore import Config, Group
from kvcore.compat import make_config
from kvcore.types.groups import Kind
from kvcore_vllm.pinned import NotServed

logger = logging.getLogger("vllm.kvcore_vllm")

KINDS: dict[type[Any], Kind] = {
    specs.FullAttentionSpec: "full_attention",
    specs.MLAAttentionSpec: "mla",
    specs.HiddenStateCacheSpec: "mla",
    specs.SlidingWindowSpec: "sliding_window",
    specs.SlidingWindowMLASpec: "sliding_window",
    specs.ChunkedLocalAttentionSpec: "chunked_local",
    specs.CrossAttentionSpec: "cross_attention",
    specs.MambaSpec: "state",
}
"""Exactly these classes: a subclass follows different rules."""

WHY_NO_DRAFTS = (
    "accepting one moves a state to another column of kvcore's tables, and vLLM's workers only"
    " append to theirs"
)

OFF: dict[str, Any] = {"pcp_world_size": 1, "metrics_collector": None}
"""Arguments of vLLM's manager without a counterpart, and their values if they are not used."""


def read_spec(group: Any) -> Any:
    """Return the specification that a group's blocks follow."""
    spec = group.kv_cache_spec
    if isinstance(spec, specs.UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def unserved_states(spec: Any, max_model_len: int, *, enable_caching: bool) -> str | None:
    """Return what of a group's recurrent states is not served, and why after a colon if it is not
    plain; or None.
    """
    if spec.num_speculative_blocks:
        given = f"num_speculative_blocks={spec.num_speculative_blocks}"
        return f"speculative tokens beside state-space layers ({given}): {WHY_NO_DRAFTS}"
    if spec.num_prefill_checkpoint_blocks:
        return "states inside a chunk"
    if spec.mamba_cache_mode == "align":
        return None
    if enable_caching or spec.mamba_cache_mode != "none" or spec.block_size < max_model_len:
        caching = "with" if enable_caching else "without"
        mode, size = spec.mamba_cache_mode, spec.block_size
        return f"the mode {mode!r} of states in blocks of {size} tokens {caching} caching"
    return None


def read_group(
    group: Any, *, max_model_len: int, enable_caching: bool, use_eagle: bool, dcp_world_size: int
) -> Group:
    """Convert a group to kvcore's. Raises NotServed, which names its first layer."""
    spec = read_spec(group)
    kind = KINDS.get(type(spec))
    what = None
    if kind == "state":
        what = unserved_states(spec, max_model_len, enable_caching=enable_caching)
    elif group.role is not specs.KVCacheGroupRole.DEFAULT or group.host_resident:
        what = f"HiSparse groups ({group.role.value})"
    elif kind is None:
        what = f"groups of {type(spec).__name__}"
    elif kind != "cross_attention" and not spec.prefix_cacheable:
        what = f"groups of {type(spec).__name__} that are not cached"
    if kind is None or what is not None:
        layers = group.layer_names
        more = f" and {len(layers) - 1} others" if len(layers) > 1 else ""
        named = f"layer {layers[0]}{more}" if layers else "a group without layers"
        what, colon, why = (what or "").partition(": ")
        raise NotServed(f"kvcore does not serve {what}, which {named} needs{colon}{why}")
    window = None
    if kind == "sliding_window":
        window = spec.sliding_window + spec.extra_retained_tokens
    elif kind == "chunked_local":
        window = spec.attention_chunk_size
    size = spec.block_size * (dcp_world_size if spec.dcp_sharded else 1)
    eagle = use_eagle and group.is_eagle_group and kind != "state"
    return Group(size, kind=kind, window=window, eagle=eagle)


def read_config(
    kv_cache_config: Any,
    *,
    max_model_len: int,
    max_in_flight_tokens: int | None,
    scheduler_block_size: int,
    hash_block_size: int,
    enable_caching: bool,
    enable_events: bool,
    use_eagle: bool,
    dcp_world_size: int,
) -> Config:
    """Convert the configuration of vLLM's manager to kvcore's.

    A pool that cannot hold one request of max_model_len is accepted with a warning, as in vLLM.
    Raises NotServed, InvalidConfig, and ValueError for an interval that vLLM does not accept.
    """
    if not kv_cache_config.kv_cache_groups:
        raise NotServed("kvcore does not serve models without a cache")
    interval = kv_cache_config.prefix_cache_retention_interval
    _validate_prefix_cache_retention_interval(interval, scheduler_block_size, kv_cache_config)
    groups = tuple(
        read_group(
            group,
            max_model_len=max_model_len,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            dcp_world_size=dcp_world_size,
        )
        for group in kv_cache_config.kv_cache_groups
    )
    options: dict[str, Any] = {
        "groups": groups,
        "max_num_batched_tokens": max_in_flight_tokens or max_model_len,
        "enable_caching": enable_caching,
        "enable_events": enable_events,
        "eviction": "uncached_first",
        "use_eagle": use_eagle,
    }
    finest = math.gcd(*(group.block_size for group in groups))
    if hash_block_size < finest and finds_parts(kv_cache_config, hash_block_size, dcp_world_size):
        options["hash_block_size"] = hash_block_size
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        config = make_config(kv_cache_config.num_blocks, max_model_len=max_model_len, **options)
    for each in warned:
        logger.warning("%s", each.message)
    if enable_caching and config.hash_block_size != hash_block_size:
        raise NotServed(
            f"kvcore does not serve hashes of {hash_block_size} tokens, which are finer than the"
            f" groups' blocks of {[group.block_size for group in groups]} tokens"
        )
    return config


def finds_parts(kv_cache_config: Any, hash_block_size: int, dcp_world_size: int) -> bool:
    """Return whether vLLM looks for hits inside blocks."""
    groups = kv_cache_config.kv_cache_groups
    find = KVCacheSpecRegistry.get_manager_class
    managers = [find(group.kv_cache_spec, group.role) for group in groups]
    return len(groups) > 1 and bool(
        partial_hash_hits_enabled(groups, hash_block_size, dcp_world_size, managers)
    )


def has_parts(kv_cache_config: Any, config: Config, dcp_world_size: int) -> bool:
    """Return whether hits may end at every hash, inside blocks of states or of all groups."""
    unit = config.hash_block_size
    is_fine = config.enable_caching and config.hit_alignment == unit
    return is_fine and finds_parts(kv_cache_config, unit, dcp_world_size)


def check_options(options: dict[str, Any]) -> None:
    """Raise NotServed unless these arguments have the values that they have when not used."""
    for name, value in options.items():
        if value != OFF[name]:
            raise NotServed(f"kvcore does not serve {name}={value!r}")


def check_lookahead(num_modules: int, block_size: int) -> None:
    """Raise NotServed unless a block holds the tokens that the prediction modules look ahead."""
    if block_size < num_modules:
        raise NotServed(
            f"{num_modules} tokens are predicted by as many modules: the blocks of"
            f" {block_size} tokens must be as large"
        )
