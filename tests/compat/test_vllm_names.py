# SPDX-License-Identifier: Apache-2.0
"""`docs/from_vllm.md` names every class, method and function of 0.21.0's manager files."""

from __future__ import annotations

import re

import pytest

from kvcore import sizing
from kvcore.sizing import errors
from tests.compat.test_docs import NO_COUNTERPART, TEXT

NAMES = {
    "block_pool.py": """
        BlockHashToBlockMap BlockPool _maybe_evict_cached_block _unexpected_blocks_type
        cache_full_blocks evict_blocks free_blocks get_cached_block get_new_blocks
        get_num_free_blocks get_one_block get_usage insert pop reset_prefix_cache
        take_events touch
    """,
    "kv_cache_manager.py": """
        KVCacheBlocks KVCacheManager allocate_slots cache_blocks create_kv_cache_blocks
        evict_blocks free get_block_ids get_blocks get_computed_blocks
        get_num_common_prefix_blocks get_unhashed_block_ids
        get_unhashed_block_ids_all_groups make_prefix_cache_stats new_empty
        new_step_starts remove_skipped_blocks reset_prefix_cache take_events
        take_new_block_ids usage
    """,
    "kv_cache_coordinator.py": """
        HybridKVCacheCoordinator KVCacheCoordinator KVCacheCoordinatorNoPrefixCache
        UnitaryKVCacheCoordinator _get_block_hashes allocate_new_blocks
        allocate_new_computed_blocks cache_blocks find_longest_cache_hit free get_blocks
        get_kv_cache_coordinator get_num_blocks_to_allocate get_num_common_prefix_blocks
        new_step_starts remove_skipped_blocks verify_and_split_kv_cache_groups
    """,
    "single_type_kv_cache_manager.py": """
        ChunkedLocalAttentionManager CrossAttentionManager FullAttentionManager
        MambaManager SingleTypeKVCacheManager SinkFullAttentionManager
        SlidingWindowManager _get_num_evictable_blocks allocate_new_blocks
        allocate_new_computed_blocks cache_blocks find_longest_cache_hit free
        get_manager_for_kv_cache_spec get_num_blocks_to_allocate
        get_num_common_prefix_blocks get_num_skipped_tokens new_step_starts
        remove_skipped_blocks take_new_block_ids
    """,
    "kv_cache_utils.py": """
        BlockHashListWithBlockSize FreeKVCacheBlockQueue KVCacheBlock
        _annotate_eagle_groups_deepseek_v4 _approximate_gcd _auto_fit_max_model_len
        _check_enough_kv_cache_memory _estimate_max_model_len_from_groups
        _gen_lora_extra_hash_keys _gen_mm_extra_hash_keys
        _gen_prompt_embeds_extra_hash_keys _get_kv_cache_config_deepseek_v4
        _get_kv_cache_groups_uniform_groups _get_kv_cache_groups_uniform_page_size
        _get_kv_cache_groups_uniform_spec _get_kv_cache_groups_uniform_type _get_value_at
        _max_memory_usage_bytes_from_groups _pool_bytes_per_block
        _project_kv_cache_groups_to_worker _report_kv_cache_config append append_n
        block_hash check_enough_kv_cache_memory create_kv_cache_group_specs
        estimate_max_model_len fits fits_in_memory generate_block_hash_extra_keys
        generate_scheduler_kv_cache_config get_all_free_blocks get_block_hash get_group_id
        get_kv_cache_config_from_groups get_kv_cache_configs get_kv_cache_groups
        get_max_concurrency_for_kv_cache_config get_num_blocks get_request_block_hasher
        get_uniform_page_size group_and_unify_kv_cache_specs hash_block_tokens
        init_none_hash is_kv_cache_page_size_uniform is_kv_cache_spec_uniform
        is_kv_cache_type_attention_free make_block_hash_with_group_id
        max_memory_usage_bytes may_override_num_blocks maybe_convert_block_hash
        need_extra_keys popleft popleft_n remove request_block_hasher reset_hash
        resolve_kv_cache_block_sizes unify_hybrid_kv_cache_specs
        unify_kv_cache_spec_page_size
    """,
}
"""Without those that Python itself calls (`__init__`, `__len__`, ...)."""


@pytest.mark.parametrize("file", NAMES)
def test_the_page_has_every_name_of_a_file(file: str) -> None:
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", TEXT))))
    assert set(NAMES[file].split()) - named == set()


def test_what_is_said_to_stand_for_sizes_exists() -> None:
    table = NO_COUNTERPART.partition("kv_cache_utils.py`: sizes")[2]
    right = [line.split("|")[2] for line in table.splitlines() if line.startswith("| `_")]
    right += [line.split("|")[2] for line in table.splitlines() if re.match(r"\| `[a-z]", line)]
    named = {name for cell in right for name in re.findall(r"`(\w+)[`(]", cell)}
    assert len(named) > 10
    assert named - {*sizing.__all__, *vars(errors), "GroupsDoNotFit"} == set()
