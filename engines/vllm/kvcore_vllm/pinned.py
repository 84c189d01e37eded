# SPDX-License-Identifier: Apache-2.0
"""The parts of vLLM 0.33.0 that the adapter replaces, calls and reads.

Few of them are public, so any difference stops the engine: if a call meant something else in
another release, kvcore's answer to it would be wrong.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

VERSION = "0.33.0"


class NotServed(RuntimeError):
    """Says what kvcore_vllm does not support, and why."""


PARAMETERS: dict[str, dict[str, str]] = {
    "v1.core.kv_cache_manager.KVCacheManager": {
        "__init__": (
            "self kv_cache_config max_model_len scheduler_block_size hash_block_size "
            "max_in_flight_tokens enable_caching use_eagle num_hash_lookahead_tokens "
            "num_prefill_lookahead log_stats enable_kv_cache_events dcp_world_size pcp_world_size "
            "metrics_collector watermark enable_mamba_shared_prefix_checkpoint"
        ),
        "allocate_slots": (
            "self request num_new_tokens num_new_computed_tokens new_computed_blocks "
            "num_lookahead_tokens num_external_computed_tokens delay_cache_blocks "
            "num_encoder_tokens full_sequence_must_fit reserved_blocks has_scheduled_reqs "
            "skip_zeroing_group_ids"
        ),
        "cache_blocks": "self request num_computed_tokens",
        "create_kv_cache_blocks": "self blocks",
        "estimate_cached_tokens": "self request",
        "evict_blocks": "self block_ids",
        "finalize_partial_tail_offloads": "self request",
        "free": "self request",
        "get_block_ids": "self request_id",
        "get_block_ids_for_computed_tokens": "self request_id num_computed_tokens",
        "get_blocks": "self request_id",
        "get_computed_blocks": "self request max_cache_hit_length",
        "get_computed_blocks_for_connector": "self request max_cache_hit_length",
        "get_num_common_prefix_blocks": "self running_request_id",
        "make_prefix_cache_stats": "self",
        "new_step_starts": "self",
        "pop_blocks_for_free": "self request",
        "prefix_cache_lookup_enabled": "self request",
        "record_blocks_for_zeroing": "self request_id start_token",
        "record_prefix_cache_stats": "self request num_hits",
        "remove_skipped_blocks": "self request_id processed_computed_tokens num_prompt_tokens",
        "reset_prefix_cache": "self",
        "take_boundary_state_offloads": "self",
        "take_events": "self",
        "take_kv_cache_block_copies": "self",
        "take_new_block_ids": "self",
        "truncate_computed_blocks": "self blocks num_computed_tokens",
    },
    "v1.core.kv_cache_manager.KVCacheBlocks": {
        "__init__": "self blocks",
        "get_block_ids": "self allow_none group_ids",
        "get_unhashed_block_ids": "self",
        "get_unhashed_block_ids_all_groups": "self",
        "new_empty": "self",
    },
    "v1.core.block_pool.BlockPool": {
        "evict_blocks": "self block_ids",
        "free_blocks": "self ordered_blocks",
        "get_cached_block": "self block_hash kv_cache_group_ids",
        "get_num_free_blocks": "self",
        "get_usage": "self",
        "is_block_writable": "self block",
        "reset_prefix_cache": "self",
        "take_events": "self",
        "touch": "self blocks",
    },
    "v1.core.kv_cache_coordinator.KVCacheCoordinator": {
        "find_longest_cache_hit": "self block_hashes max_cache_hit_length",
        "get_num_blocks_to_allocate": (
            "self request_id num_tokens new_computed_blocks num_encoder_tokens "
            "total_computed_tokens num_local_computed_tokens num_tokens_main_model "
            "apply_admission_cap prefill_end"
        ),
    },
    "v1.core.sched.scheduler.Scheduler": {
        "__init__": (
            "self vllm_config kv_cache_config structured_output_manager block_size hash_block_size "
            "mm_registry include_finished_set log_stats"
        ),
        "_connector_finished": "self request",
        "_drain_deferred_frees": "self",
        "_free_request_blocks": "self request",
        "_request_remaining_blocks": "self request",
        "_update_waiting_for_remote_kv": "self request",
        "schedule": "self throttle_prefills",
    },
    "v1.core.sched.async_scheduler.AsyncScheduler": {
        "_update_after_schedule": "self scheduler_output",
    },
    "v1.metrics.stats.PrefixCacheStats": {
        "record": "self num_tokens num_hits preempted hits_by_source",
    },
    "v1.core.kv_cache_utils": {
        "generate_block_hash_extra_keys": "request start_token_idx end_token_idx start_mm_idx",
        "generate_lookahead_block_hash_extra_keys": (
            "request start_token_idx end_token_idx hash_end_token_idx start_mm_idx"
        ),
        "maybe_convert_block_hash": "hash_bytes",
        "partial_hash_hits_enabled": (
            "kv_cache_groups hash_block_size dcp_world_size manager_classes"
        ),
        "to_event_extra_keys": "extra_keys",
    },
    "v1.kv_cache_interface": {
        "get_kv_cache_spec_kind": "kv_cache_spec",
        "get_kv_cache_spec_sliding_window": "kv_cache_spec",
        "get_mamba_prefill_checkpoint_position": (
            "num_tokens hash_block_size drop_eagle_block num_hash_lookahead_tokens"
        ),
    },
}
"""Parameters of each method or function, by class or module. Of the first class the adapter
replaces all public ones; of the others it replaces or calls these, or is called by them.
"""
WHOLE = "v1.core.kv_cache_manager.KVCacheManager"

FIELDS = {
    "v1.core.kv_cache_utils.KVCacheBlockCopy": "src_block_id dst_block_id",
    "v1.kv_cache_interface.KVCacheGroupSpec": (
        "layer_names kv_cache_spec is_eagle_group host_resident role"
    ),
    "v1.kv_cache_interface.KVCacheConfig": (
        "num_blocks kv_cache_groups prefix_cache_retention_interval"
    ),
    "v1.kv_cache_interface.FullAttentionSpec": "block_size dcp_sharded",
    "v1.kv_cache_interface.SlidingWindowSpec": (
        "block_size dcp_sharded sliding_window extra_retained_tokens"
    ),
    "v1.kv_cache_interface.SlidingWindowMLASpec": (
        "sliding_window extra_retained_tokens bounded_replay"
    ),
    "v1.kv_cache_interface.ChunkedLocalAttentionSpec": (
        "block_size dcp_sharded attention_chunk_size"
    ),
    "v1.kv_cache_interface.CrossAttentionSpec": "block_size",
    "v1.kv_cache_interface.MambaSpec": (
        "block_size mamba_cache_mode num_speculative_blocks num_prefill_checkpoint_blocks"
    ),
    "v1.kv_cache_interface.UniformTypeKVCacheSpecs": "kv_cache_specs",
    "distributed.kv_events.BlockStored": (
        "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys "
        "group_idx kv_cache_spec_kind kv_cache_spec_sliding_window locality ownership session_id "
        "lookahead_token_ids"
    ),
    "distributed.kv_events.BlockRemoved": "block_hashes medium group_idx locality ownership",
}
"""Fields that the adapter reads; of events, which it writes, all fields."""


def check_release() -> None:
    """Refuse a vLLM that is not the pinned one. Raises NotServed."""
    import vllm

    if vllm.__version__.partition("+")[0] != VERSION:
        raise NotServed(f"kvcore_vllm serves vLLM {VERSION}; this is {vllm.__version__}")
    found = list(differences())
    if found:
        raise NotServed(f"this vLLM {VERSION} is not as released: {'; '.join(found)}")


def differences() -> Iterator[str]:
    """Return a sentence for each difference from the pinned release."""
    for path, pinned in PARAMETERS.items():
        functions = {n: each for n, each in vars(_find(path)).items() if inspect.isfunction(each)}
        actual = {
            name: " ".join(inspect.signature(function).parameters)
            for name, function in functions.items()
            if name in pinned or (path == WHOLE and name[0] != "_")
        }
        for name in sorted(pinned.keys() | actual.keys()):
            old, new = pinned.get(name), actual.get(name)
            if old != new:
                was = "is new" if old is None else f"took ({old})"
                now = "is gone" if new is None else f"takes ({new})"
                yield f"{path}.{name} {was}, {now}"
    for path, names in FIELDS.items():
        known = {
            name for base in _find(path).__mro__ for name in vars(base).get("__annotations__", ())
        }
        gone = [name for name in names.split() if name not in known]
        if gone:
            yield f"{path} has no {', '.join(gone)}"


def _find(path: str) -> Any:
    """Return a class or a module of vLLM."""
    module, _, name = f"vllm.{path}".rpartition(".")
    if name[0].isupper():
        return getattr(importlib.import_module(module), name)
    return importlib.import_module(f"vllm.{path}")
