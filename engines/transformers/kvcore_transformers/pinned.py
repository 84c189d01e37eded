# SPDX-License-Identifier: Apache-2.0
"""The parts of transformers 5.23.0 that the adapter replaces and calls.

None of them is public, so any difference stops the installation: if a call meant something else in
another release, kvcore's answer to it would be wrong.
"""

from __future__ import annotations

import importlib
import inspect

VERSION = "5.23.0"
PACKAGE = "transformers.generation.continuous_batching"


class NotServed(RuntimeError):
    """Says what kvcore_transformers does not support, and why."""


PARAMETERS: dict[str, dict[str, str]] = {
    "cache.PagedAttentionCache": {
        "__init__": (
            "self config continuous_batching_config "
            "device distributed_helper dtype model_supports_logits_to_keep"
        ),
        "_infer_max_decode_fast_path_length": "self",
        "_infer_read_cache_limit": "self",
        "can_store_request_tokens": "self state request_len dry_run",
        "compute_free_capacity": "self relative",
        "count_new_complete_blocks": "self state request_len",
        "count_storable_requests": "self list_blocks_needed",
        "evict_cached_blocks": "self",
        "extend_read_and_write_indices": (
            "self request_id past_length query_length read_index write_index"
        ),
        "fill_block_table": "self request_id past_length query_length block_table",
        "free_all_requests": "self clear_ledgers",
        "free_blocks": "self request_id no_cache",
        "get_block_table_key": "self flash_attn_with_kvcache_fn",
        "get_cache_for_block_table": "self layer_idx",
        "mark_complete_blocks": "self state complete_blocks",
        "perform_cache_copy": "self copy_src_and_dst",
        "prepare_fork_request": "self src_state dst_req_ids copy_src_and_dst",
        "reset": "self",
        "search_prefix_match": "self request_id prompt_ids",
        "update": "self key_states value_states layer_idx kwargs",
    },
    "cache_allocators.CacheAllocator": {
        "_after_cache_tensor_init": "self non_trash_bytes bytes_per_sector cache_tensor pool",
        "_before_cache_tensor_init": (
            "self index layer_indices tokens_per_page bytes_per_page allow_block_sharing"
        ),
        "acquire_prefix_blocks": "self request_id prefix_len block_ids",
        "allocate_cache_to_request": "self request_id past_length query_length",
        "copy_blocks": "self source_block_ids dest_block_ids",
        "count_non_shareable_blocks": "self source_request_id past_length",
        "count_shareable_blocks": "self source_request_id past_length",
        "fill_block_table": "self request_id past_length query_length block_table",
        "fork_blocks": "self source_request_id dest_request_id past_length",
        "free_all_requests": "self",
        "free_blocks": "self request_id no_cache",
        "get_cache_for_block_table": "self layer_idx",
        "get_read_indices": "self request_id past_length query_length",
        "get_seqlen_k": "self past_length query_length",
        "get_write_indices": "self request_id past_length query_length",
        "mark_complete_blocks": "self request_id token_ids new_new_blocks",
        "match_prefix_blocks": "self prompt_ids",
        "needs_new_blocks": "self request_id past_length query_length",
        "needs_new_sectors": "self request_id past_length query_length",
        "register_cache_tensor": "self bytes_per_sector non_trash_bytes cache_tensor pool",
        "update": "self key_states value_states layer_idx read_index write_index",
    },
    "cache_allocators.FullAttentionCacheAllocator": {
        "__init__": (
            "self index config num_key_value_heads "
            "cache_dtype page_size layer_indices allow_block_sharing"
        ),
        "_compute_blocks_needed": "self allocated_blocks past_length query_length",
        "allocate_cache_to_request": "self request_id past_length query_length",
        "fill_block_table": "self request_id past_length query_length block_table",
        "get_cache_for_block_table": "self layer_idx",
        "get_read_indices": "self request_id past_length query_length",
        "get_seqlen_k": "self past_length query_length",
        "get_write_indices": "self request_id past_length query_length",
        "needs_new_blocks": "self request_id past_length query_length",
        "register_cache_tensor": "self bytes_per_sector non_trash_bytes cache_tensor pool",
        "update": "self key_states value_states layer_idx read_index write_index",
    },
    "cache_allocators.SlidingAttentionCacheAllocator": {
        "__init__": (
            "self index config num_key_value_heads "
            "cache_dtype page_size layer_indices allow_block_sharing"
        ),
        "_compute_blocks_needed": "self allocated_blocks past_length query_length",
        "_token_indices_to_physical_indices": "self request_id start_index length",
        "fill_block_table": "self request_id past_length query_length block_table",
        "get_cache_for_block_table": "self layer_idx",
        "get_read_indices": "self request_id past_length query_length",
        "get_seqlen_k": "self past_length query_length",
        "get_write_indices": "self request_id past_length query_length",
        "update": "self key_states value_states layer_idx read_index write_index",
    },
    "cache_allocators.CachePool": {
        "__init__": "self num_sectors num_allocators num_reserved_sectors",
        "allocate_sector": "self index",
        "count_free_blocks": "self index",
        "free_blocks": "self index block_ids",
        "get_free_blocks": "self index num_blocks",
        "reset": "self",
        "set_blocks_per_sector": "self index blocks_per_sector",
        "try_to_free_sectors": "self",
    },
    "offloading_manager.OffloadingManager": {
        "__init__": (
            "self cache scheduler cpu_offload_space_gib "
            "safety_threshold compute_stream distributed_helper"
        ),
        "_compute_num_cpu_sectors": "self cpu_offload_space_gib safety_threshold",
        "_offload_to_cpu": "self victims victim_block_tables",
        "_reserve_cpu_blocks": "self block_counts",
        "_stream_ctx": "self",
        "free_all_waiting_cpu_caches": "self",
        "free_request_cpu_cache": "self state",
        "offload_requests": "self",
        "reset": "self",
        "restore_scheduled_requests": "self requests_in_batch",
    },
    "scheduler.Scheduler": {
        "__init__": "self cache safety_margin max_requests_per_batch",
        "_process_candidates": (
            "self candidates token_budget cache_budget request_ids_to_remove_from_waiting"
        ),
        "_schedule_request": (
            "self state request_tokens token_budget request_ids_to_remove_from_waiting"
        ),
        "add_waiting_request": "self state",
        "clear_cancelled_requests": "self",
    },
    "continuous_api.ContinuousMixin": {
        "init_continuous_batching": (
            "self generation_config continuous_batching_config workload_hints"
        ),
    },
    "continuous_api.ContinuousBatchingManager": {
        "__init__": "self model generation_config continuous_batching_config workload_hints",
        "_create_batch_processor": "self",
        "_handle_critical_error": "self error batch_processor",
    },
    "requests.RequestState": {
        "create_equivalent_initial_request": "self",
        "current_len": "self",
    },
}
"""Parameters of each method, by class. Of the first six classes the adapter replaces everything
that others call; of the other classes it replaces or calls these methods.
"""
WHOLE = tuple(PARAMETERS)[:6]
ATTRIBUTES = {
    "cache.PagedAttentionCache": (
        "allow_block_sharing bytes_per_sector cache_allocators cache_tensor num_sectors pool"
        " read_cache_limit use_prefix_sharing"
    ),
    "cache_allocators.CacheAllocator": (
        "block_table blocks_per_sector index supports_block_sharing tokens_per_page"
    ),
    "cache_allocators.SlidingAttentionCacheAllocator": "sliding_window supports_block_sharing",
    "scheduler.Scheduler": (
        "active_requests block_new_requests cache max_requests_per_batch starved_requests"
    ),
    "continuous_api.ContinuousBatchingManager": (
        "_original_attn_impl batch_processor distributed_helper model"
    ),
    "requests.RequestState": (
        "_status generated_tokens initial_tokens is_cpu_offloaded num_children position_offset"
        " remaining_prefill_tokens request_id status"
    ),
    "requests.RequestStatus": "DECODING FINISHED PENDING",
}
"""What the adapter reads and sets, by class."""


def check_release() -> None:
    """Refuse a transformers that is not the pinned one. Raises NotServed."""
    import transformers

    if transformers.__version__ != VERSION:
        found = transformers.__version__
        raise NotServed(f"kvcore_transformers serves transformers {VERSION}; this is {found}")
    found = differences()
    if found:
        raise NotServed(f"this transformers {VERSION} is not as released: {'; '.join(found)}")


def differences() -> list[str]:
    """Return a sentence for each difference from the pinned release."""
    found = []
    for path, names in ATTRIBUTES.items():
        known = named_by(load(path))
        found += [
            f"{path.split('.')[1]}.{name} is gone" for name in names.split() if name not in known
        ]
    for path, pinned in PARAMETERS.items():
        name, kind = path.split(".")[1], load(path)
        actual = {
            method: " ".join(inspect.signature(function).parameters)
            for method, function in vars(kind).items()
            if inspect.isfunction(function) and (path in WHOLE or method in pinned)
        }
        for method in sorted(pinned.keys() | actual.keys()):
            old, new = pinned.get(method), actual.get(method)
            if old != new:
                was = "is new" if old is None else f"took ({old})"
                now = "is gone" if new is None else f"takes ({new})"
                found.append(f"{name}.{method} {was}, {now}")
    return found


def load(path: str) -> type:
    """Return the class of this name, given as "module.Class"."""
    module, name = path.split(".")
    kind: type = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    return kind


def named_by(kind: type) -> set[str]:
    """Return the names that a class has or its methods use, so attributes set only there too."""
    names = set(dir(kind)) | set(getattr(kind, "__annotations__", ()))
    for function in vars(kind).values():
        if inspect.isfunction(function):
            names |= set(function.__code__.co_names)
    return names
