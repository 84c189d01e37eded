# SPDX-License-Identifier: Apache-2.0
"""Code that was written for vLLM 0.8.5's V1 manager, and looks closer than an engine does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvcore import sizing
from kvcore.legacy.v1_0_8.block_pool import BlockPool
from kvcore.legacy.v1_0_8.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    read_spec,
)
from kvcore.legacy.v1_0_8.kv_cache_manager import KVCacheManager
from kvcore.legacy.v1_0_8.kv_cache_utils import (
    BlockHashType,
    _get_kv_cache_config_uniform_type,
    check_enough_kv_cache_memory,
    create_kv_cache_group_specs,
    estimate_max_model_len,
    get_kv_cache_config,
    hash_request_tokens,
    is_kv_cache_type_uniform,
    unify_kv_cache_configs,
)
from kvcore.types.errors import WrongArgument
from tests.conformance.legacy_utils.requests import (
    SIZE,
    EngineRequest,
    ModelConfig,
    Span,
    VllmConfig,
    with_media,
)
from tests.conformance.legacy_utils.stories import all_of, decode, free, make, resume
from tests.conftest import Backend


def extra_keys(manager: KVCacheManager, request: EngineRequest) -> list[Any]:
    """Return the extra keys of a request's hashes."""
    return [each.extra_keys for each in manager.req_to_block_hashes[request.request_id]]


def test_generated_tokens_take_the_last_item_alone(backend: Backend) -> None:
    """A prompt has 11 tokens in blocks of 4, so an answer of one token fills the third block.

    "b" ends where that block begins, and would count (S001-37) if it were asked; "c" is asked.
    """
    manager = make(backend)
    request = with_media(11, ("a", 1, 2), ("b", 5, 3), ("c", 8, 2), lora=7)
    assert resume(manager, request) == [1, 2, 3]
    hashes = manager.req_to_block_hashes["r"]
    assert extra_keys(manager, request) == [(7, "a"), (7, "b")]
    assert decode(manager, request, 100) == []
    assert extra_keys(manager, request) == [(7, "a"), (7, "b"), (7, "c")]
    assert manager.req_to_block_hashes["r"] is hashes
    assert decode(manager, request, 101, 102, 103, 104) == [4]
    assert extra_keys(manager, request)[3] == (7,)


def test_the_last_item_counts_once_more_where_it_ends_at_a_block(backend: Backend) -> None:
    """As in the original, "b" ends at token 8 and is asked for the block that begins there."""
    manager = make(backend)
    request = with_media(9, ("a", 1, 2), ("b", 5, 3))
    resume(manager, request)
    decode(manager, request, 100, 101, 102)
    assert extra_keys(manager, request) == [("a",), ("b",), ("b",)]


def test_items_before_the_last_do_not_mark_generated_tokens(backend: Backend) -> None:
    """Two items lie in the rest of the prompt: the original's key names the second alone."""
    manager = make(backend)
    request = with_media(7, ("a", 0, 1), ("b", 4, 1), ("c", 5, 1))
    resume(manager, request)
    decode(manager, request, 100)
    assert extra_keys(manager, request) == [("a",), ("c",)]


def test_a_prompt_in_chunks_that_nobody_looked_up_has_all_its_media(backend: Backend) -> None:
    """The first call hashes what a look-up would have hashed, so later chunks change nothing."""
    manager = make(backend)
    request = with_media(14, ("a", 1, 4), ("b", 5, 3), ("c", 8, 1), ("d", 9, 2))
    for _ in range(3):
        assert manager.allocate_slots(request, SIZE) is not None
        request.num_computed_tokens += SIZE
    expected = hash_request_tokens(hash, SIZE, request)
    assert manager.req_to_block_hashes["r"] == expected
    assert extra_keys(manager, request) == [("a",), ("a", "b"), ("c", "d")]
    assert [block.block_hash for block in manager.req_to_blocks["r"]] == expected
    other = with_media(14, ("a", 1, 4), ("b", 5, 3), ("c", 8, 1), ("d", 9, 2))
    other.request_id = "s"
    hits, num_hit = manager.get_computed_blocks(other)
    assert (hits, num_hit) == (manager.req_to_blocks["r"], 12)


def test_a_first_chunk_publishes_its_own_blocks_alone(backend: Backend) -> None:
    """What is hashed ahead is not found: its blocks are not there yet."""
    manager = make(backend)
    request = EngineRequest("r", list(range(12)), mm_positions=[Span(1, 2)], mm_hashes=["a"])
    manager.allocate_slots(request, 6)
    assert len(manager.req_to_block_hashes["r"]) == 3
    assert (len(manager.block_pool.cached_block_hash_to_block), manager.num_cached_block) == (
        1,
        {"r": 1},
    )
    manager.check()


@pytest.mark.parametrize("name", ["hash", "builtin", "md5", ""])
def test_whatever_is_not_sha256_is_the_builtin_hash(backend: Backend, name: str) -> None:
    assert make(backend, caching_hash_algo=name).caching_hash_fn is hash


@pytest.mark.parametrize(
    ("dtype", "size"), [("torch.uint8", 1), ("torch.float64", 8), ("torch.int32", 4)]
)
def test_caches_of_these_kinds_of_numbers_have_sizes(dtype: str, size: int) -> None:
    """fp8 caches of that release are bytes; a key and a value for each of 16 * 8 * 128 numbers."""
    spec = FullAttentionSpec(16, 8, 128, dtype, False)
    assert spec.page_size_bytes == 2 * 16 * 8 * 128 * size


def test_a_model_without_layers_needs_nothing_and_is_not_served() -> None:
    config = VllmConfig(ModelConfig(100))
    check_enough_kv_cache_memory(config, {}, 1)
    with pytest.raises(ValueError, match="memory"):
        check_enough_kv_cache_memory(config, {}, 0)
    with pytest.raises(NotImplementedError, match="no layer has a cache"):
        get_kv_cache_config(config, {}, 1)
    with pytest.raises(AssertionError, match="no layer has a cache"):
        _get_kv_cache_config_uniform_type(config, {}, 1)


def layer(num_heads: int, *, use_mla: bool = False) -> FullAttentionSpec:
    """Return a layer of attention; with MLA it has half as many bytes per head."""
    return FullAttentionSpec(4, num_heads, 8, "float16", use_mla)


def test_mla_of_the_same_page_size_is_of_the_same_type() -> None:
    """The original's type ids say so; such layers still do not form a group."""
    layers = {"a": layer(2, use_mla=True), "b": layer(1)}
    assert layers["a"].type_id == layers["b"].type_id
    assert is_kv_cache_type_uniform(layers)
    with pytest.raises(AssertionError):
        get_kv_cache_config(VllmConfig(ModelConfig(8)), layers, 2**20)


def test_groups_of_one_type_keep_their_order() -> None:
    """MLA, full, full are all of one type, so the worker's order stays."""

    def config(*specs: FullAttentionSpec) -> KVCacheConfig:
        groups = [KVCacheGroupSpec([f"l{place}"], spec) for place, spec in enumerate(specs)]
        return KVCacheConfig(5, {}, groups)

    latent, full, wide = layer(2, use_mla=True), layer(1), layer(3)
    configs = [config(wide, full, latent), config(wide, full, latent)]
    unify_kv_cache_configs(configs)
    for each in configs:
        assert [group.layer_names for group in each.kv_cache_groups] == [["l1"], ["l2"], ["l0"]]
    turned = [config(full, latent), config(latent, full)]
    with pytest.raises(AssertionError, match="rank 1: group 0"):
        unify_kv_cache_configs(turned)
    assert [group.layer_names for group in turned[1].kv_cache_groups] == [["l0"], ["l1"]]


def test_specs_are_copied_as_dataclasses() -> None:
    spec = FullAttentionSpec(16, 2, 64, "float16")
    larger = dataclasses.replace(spec, block_size=32)
    assert larger.page_size_bytes == 2 * spec.page_size_bytes
    config = KVCacheConfig(4, {}, [KVCacheGroupSpec(["l0"], spec)])
    assert dataclasses.asdict(config)["kv_cache_groups"][0]["kv_cache_spec"]["head_size"] == 64


def test_other_calls_of_sizing_answer_as_the_original() -> None:
    with pytest.raises(KeyError, match="names layer nothing"):
        create_kv_cache_group_specs({"a": layer(1)}, [["nothing"]])
    assert estimate_max_model_len(VllmConfig(ModelConfig(8)), {"a": layer(1)}, -5) == 0
    calls: list[Any] = [estimate_max_model_len, _get_kv_cache_config_uniform_type]
    for call in calls:
        with pytest.raises(WrongArgument, match="available_bytes must be an integer, not '8GiB'"):
            call(VllmConfig(ModelConfig(8)), {"a": layer(1)}, "8GiB")


def test_null_blocks_of_a_hit_take_no_room(backend: Backend) -> None:
    """All 4 blocks are cached and free; a window of 9 needs two of 4 hits, so two can be taken."""
    manager = make(backend, 5, window=9)
    first = EngineRequest("0", list(range(16)))
    assert resume(manager, first) == [1, 2, 3, 4]
    manager.free(first)
    second = EngineRequest("1", list(range(17)))
    hits, num_hit = manager.get_computed_blocks(second)
    assert ([block.block_id for block in hits], num_hit) == ([0, 0, 3, 4], 16)
    assert resume(manager, second) == [2]


def test_a_block_becomes_full_behind_null_blocks(backend: Backend) -> None:
    """A window of one token keeps nothing; the original raises an error here."""
    manager = make(backend, window=1)
    request = EngineRequest("0", list(range(8)))
    assert resume(manager, request) == [1, 2]
    assert decode(manager, request, *range(100, 115)) == [3, 4, 5, 6]
    places = [block.block_id for block in manager.req_to_blocks["0"]]
    assert places == [0, 0, 3, 4, 5, 6]
    shown = [block.block_hash for block in manager.req_to_blocks["0"]]
    assert shown == [None, None, *hash_request_tokens(hash, SIZE, request)[2:], None]


def test_null_blocks_are_no_common_prefix(backend: Backend) -> None:
    manager = make(backend, window=1)
    request = EngineRequest("0", list(range(8)))
    resume(manager, request)
    assert manager.get_num_common_prefix_blocks(request, 1) == 2
    decode(manager, request, 100)
    for num_running in (1, 2, 3):
        assert manager.get_num_common_prefix_blocks(request, num_running) == 0


def test_eagle_with_a_window_reads_no_null_block(backend: Backend) -> None:
    """A window of 9 reads two blocks: three cached ones give two, two give none."""
    manager = make(backend, window=9, use_eagle=True)
    first = EngineRequest("0", list(range(12)))
    resume(manager, first)
    manager.free(first)
    blocks = manager.block_pool.blocks
    longer = EngineRequest("1", list(range(13)))
    assert manager.get_computed_blocks(longer) == (blocks[1:3], 8)
    blocks[1].reset_hash()
    assert manager.get_computed_blocks(longer) == ([], 0)


def record(number: int) -> BlockHashType:
    """Return some hash."""
    return BlockHashType(number, ())


def test_a_map_that_is_written_by_hand_decides_what_is_found(backend: Backend) -> None:
    """Free blocks become findable, and are forgotten, without a change of the queue."""
    manager = make(backend, 12, window=9)
    resume(manager, EngineRequest("0", list(range(8))))
    manager.free(EngineRequest("0", []))
    pool, find = manager.block_pool, manager.specialized_manager.find_longest_cache_hit
    cached, blocks, queue = pool.cached_block_hash_to_block, pool.blocks, free(manager)
    hashes = [record(number) for number in range(6)]
    for place in (0, 1, 3):
        cached[hashes[place]] = {place + 4: blocks[place + 4]}
    assert (len(cached), free(manager)) == (5, queue)
    assert find(hashes) == blocks[4:6]
    cached[hashes[2]] = {6: blocks[6]}
    assert find(hashes) == [blocks[0], blocks[0], blocks[6], blocks[7]]
    assert (blocks[6].block_hash, blocks[6].ref_cnt) == (hashes[2], 0)
    del cached[hashes[3]]
    assert find(hashes) == [blocks[0], blocks[5], blocks[6]]
    assert cached == {
        **{each: cached[each] for each in manager.req_to_block_hashes["0"]},
        **{hashes[place]: {place + 4: blocks[place + 4]} for place in range(3)},
    }
    manager.check()
    cached.clear()
    assert (find(hashes), len(cached), free(manager)) == ([], 0, queue)
    assert [block.block_hash for block in blocks] == [None] * 12
    manager.check()


def test_a_hash_can_be_given_other_blocks(backend: Backend) -> None:
    manager = make(backend)
    request = EngineRequest("0", list(range(4)))
    resume(manager, request)
    cached, blocks = manager.block_pool.cached_block_hash_to_block, manager.block_pool.blocks
    (known,) = manager.req_to_block_hashes["0"]
    cached[known] = {7: blocks[3], 2: blocks[2]}  # a block is known by its own id
    assert dict(cached[known]) == {3: blocks[3], 2: blocks[2]}
    assert (blocks[1].block_hash, blocks[1].ref_cnt) == (None, 1)
    with pytest.raises(TypeError):
        del cached[known][3]  # type: ignore[attr-defined] # a view has no such call
    cached[known] = {2: blocks[2]}
    assert manager.block_pool.get_cached_block(known) is blocks[2]
    cached[known] = {}
    assert known not in cached
    assert (cached.get(known), cached.get(known, 5), len(cached[known])) == (None, 5, 0)
    with pytest.raises(KeyError):
        print(cached[known][2])
    with pytest.raises(KeyError):
        cached.pop(known)
    with pytest.raises(KeyError):
        del cached[known]
    manager.check()


def test_what_cannot_be_found_is_not_written(backend: Backend) -> None:
    manager, other = make(backend), make(backend)
    resume(manager, EngineRequest("0", list(range(4))))
    cached, blocks = manager.block_pool.cached_block_hash_to_block, manager.block_pool.blocks
    before = all_of(manager)
    for wrong in (
        {0: blocks[0]},
        {2: blocks[2], 1: blocks[1]},
        {2: blocks[2], 3: other.block_pool.blocks[3]},
    ):
        with pytest.raises(ValueError, match=r"\d"):
            cached[record(7)] = wrong
        assert all_of(manager) == before


def test_no_new_full_block_asks_for_no_hash(backend: Backend) -> None:
    """Nothing is hashed and nothing is missing, whatever the lists hold."""
    manager = make(backend)
    hashes: list[BlockHashType] = []
    request = EngineRequest("0", [1, 2])
    manager.block_pool.cache_full_blocks(request, [], hashes, 3, 3, SIZE, hash)
    assert hashes == []


@pytest.mark.parametrize("num_blocks", [0, -1, None])
def test_a_pool_has_a_block(backend: Backend, num_blocks: Any) -> None:
    with pytest.raises(AssertionError, match="num_blocks"):
        BlockPool(num_blocks, True, backend=backend)


def test_a_spec_of_sizing_stands_for_itself() -> None:
    window = sizing.SlidingWindowSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype="float16", window=8
    )
    assert read_spec(window) is window
