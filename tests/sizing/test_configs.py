# SPDX-License-Identifier: Apache-2.0
"""Cache configurations of one worker and of several, from layers that fit on paper."""

from __future__ import annotations

import attrs
import pytest

from kvcore.sizing import (
    ChunkedLocalSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    LayerSpec,
    Limits,
    create_kv_cache_group_specs,
    estimate_max_model_len,
    get_kv_cache_config,
    is_kv_cache_type_uniform,
    make_grouped_config,
    make_layout,
    make_unified_config,
    make_uniform_config,
    max_concurrency,
    num_cache_tokens,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_configs,
)
from kvcore.sizing.errors import (
    EmptyGroup,
    GroupCountDiffers,
    GroupKindDiffers,
    GroupLayersDiffer,
    MixedSpecs,
    NoLayers,
    NotEnoughBlocks,
    NotEnoughMemory,
    SpecsDiffer,
    UnknownLayer,
)
from kvcore.types.errors import GroupsDoNotFit
from tests.sizing.models import BLOCK, PAGE, full, layers, sliding

SHORT = Limits(max_model_len=64)


def chunked(chunk: int = 64) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=64, dtype="float16", window=chunk
    )


@pytest.mark.seed("S001-57")
def test_each_list_of_layers_becomes_a_group_in_order() -> None:
    model = layers(full(), sliding(), full())
    assert create_kv_cache_group_specs(model, [["layer 1"], ["layer 2", "layer 0"]]) == (
        KVCacheGroupSpec(("layer 1",), sliding()),
        KVCacheGroupSpec(("layer 2", "layer 0"), full()),
    )


@pytest.mark.seed("S001-57")
def test_layers_of_one_group_are_kept_alike() -> None:
    model = layers(full(), full(head_size=32, num_kv_heads=2))
    assert is_kv_cache_type_uniform(model)  # as many bytes, in another shape
    with pytest.raises(SpecsDiffer, match=r"group 0: layer layer 1 is .*head_size=32") as caught:
        create_kv_cache_group_specs(model, [list(model)])
    assert caught.value.fields["first"] == full()


def test_a_group_names_layers_of_the_model() -> None:
    with pytest.raises(UnknownLayer, match="group 1 names layer layer 9"):
        create_kv_cache_group_specs(layers(full()), [["layer 0"], ["layer 9"]])
    with pytest.raises(EmptyGroup, match="group 1 has no layer"):
        create_kv_cache_group_specs(layers(full()), [["layer 0"], []])


@pytest.mark.seed("S001-58")
@pytest.mark.parametrize(
    ("model", "uniform"),
    [
        ({}, False),
        (layers(full()), True),
        (layers(full(), full()), True),
        (layers(sliding(), sliding()), True),
        (layers(sliding(16), sliding(32)), False),
        (layers(full(), sliding()), False),
        (layers(full(), full(block_size=32)), False),
        (layers(full(), full(dtype="fp8")), False),
    ],
)
def test_uniform_is_exactly_one_kind(model: dict[str, LayerSpec], uniform: bool) -> None:
    assert is_kv_cache_type_uniform(model) is uniform


@pytest.mark.seed("S001-60")
@pytest.mark.parametrize(
    ("available", "blocks"),
    [(30 * PAGE, 10), (30 * PAGE - 1, 9), (32 * PAGE + 5, 10), (2 * PAGE, 0), (0, 0)],
)
def test_blocks_are_what_fits_in_all_layers(available: int, blocks: int) -> None:
    assert blocks == available // PAGE // 3
    config = make_uniform_config(layers(full(), full(), full()), available, SHORT)
    assert config.num_blocks == blocks


@pytest.mark.seed("S001-61")
@pytest.mark.parametrize("blocks", [4, 1_000_000])
def test_a_number_of_blocks_that_is_given_replaces_what_fits(blocks: int) -> None:
    model, limits = layers(full(), full()), Limits(max_model_len=64, num_blocks=blocks)
    for make in (get_kv_cache_config, make_uniform_config, make_grouped_config):
        assert make(model, 8 * PAGE, limits).num_blocks == blocks


def test_a_number_of_blocks_below_one_request_is_refused() -> None:
    model, one = layers(full(), full()), Limits(max_model_len=64, num_blocks=1)
    for make in (get_kv_cache_config, make_grouped_config):
        with pytest.raises(NotEnoughBlocks) as caught:
            make(model, 8 * PAGE, one)
        assert str(caught.value) == (
            "one request of 64 tokens needs 4 blocks, num_blocks is 1; "
            "the longest request that fits has 16 tokens"
        )
        assert caught.value.fields["longest_model_len"] == 16
    for make in (make_uniform_config, make_unified_config):  # as vLLM 0.8.5: not checked
        assert make(model, 8 * PAGE, one).num_blocks == 1
    nothing = attrs.evolve(one, null_block=True)
    with pytest.raises(NotEnoughBlocks, match=r"needs 5 blocks with the null block, .* is 1$"):
        make_grouped_config(model, 10 * PAGE, nothing)


def test_blocks_that_are_set_are_judged_in_all_groups() -> None:
    model = layers(full(), sliding(16))
    limits = Limits(max_model_len=1024, max_num_batched_tokens=16, num_blocks=64 + 3)
    assert make_grouped_config(model, 200 * PAGE, limits).num_blocks == 67
    assert get_kv_cache_config(model, 200 * PAGE, limits).num_blocks == 67
    short = attrs.evolve(limits, num_blocks=66)
    assert get_kv_cache_config(model, 200 * PAGE, short).num_blocks == 66  # one group of 64 blocks
    with pytest.raises(NotEnoughBlocks, match="needs 67 blocks, num_blocks is 66"):
        make_grouped_config(model, 200 * PAGE, short)
    assert estimate_max_model_len(model, 200 * PAGE, limits) == 1024
    assert estimate_max_model_len(model, 200 * PAGE, short) == 1024 - 16


@pytest.mark.seed("S001-62")
def test_each_layer_has_its_tensor_and_the_group_the_models_order() -> None:
    model = {"b": full(), "a": full(), "c": full()}
    assert get_kv_cache_config(model, 15 * PAGE, SHORT) == KVCacheConfig(
        5,
        tuple(KVCacheTensor(5 * PAGE, (name,)) for name in "bac"),
        (KVCacheGroupSpec(("b", "a", "c"), full()),),
    )


@pytest.mark.seed("S001-63")
def test_layers_of_one_pool_have_one_page_size() -> None:
    model = layers(full(), full(head_size=96))
    groups = create_kv_cache_group_specs(model, [["layer 0"], ["layer 1"]])
    with pytest.raises(GroupsDoNotFit, match=rf"blocks of \[{PAGE}, {PAGE * 3 // 2}\] bytes"):
        make_layout(groups, 4)
    with pytest.raises(SpecsDiffer):
        make_uniform_config(model, 100 * PAGE, SHORT)


@pytest.mark.seed("S001-64")
@pytest.mark.parametrize(("length", "requests"), [(64, 2.5), (160, 1.0), (100, 1.6)])
def test_tokens_and_concurrency_follow_from_the_blocks(length: int, requests: float) -> None:
    limits = Limits(max_model_len=length)
    config = make_uniform_config(layers(full(), full()), 20 * PAGE, limits)
    assert num_cache_tokens(config, limits) == 10 * BLOCK == 160
    assert max_concurrency(config, limits) == requests == 160 / length


def test_the_null_block_holds_no_tokens() -> None:
    limits = Limits(max_model_len=64, null_block=True)
    config = make_uniform_config(layers(full()), 9 * PAGE, limits)
    assert config.num_blocks == 9
    assert num_cache_tokens(config, limits) == 8 * BLOCK
    assert max_concurrency(config, limits) == 2.0


@pytest.mark.seed("S001-65")
def test_beside_full_attention_windows_and_chunks_become_full() -> None:
    shape = {"num_kv_heads": 4, "head_size": 32, "dtype": "fp8", "block_size": 32}
    model = layers(full(), sliding(48, **shape), chunked())
    before = dict(model)
    unified = unify_hybrid_kv_cache_specs(model)
    assert unified == layers(full(), full(**shape), full())
    assert model == before
    assert model is not unified


@pytest.mark.seed("S001-65")
@pytest.mark.parametrize(
    "model",
    [{}, layers(sliding(16), sliding(32)), layers(chunked(), sliding()), layers(full(), full())],
)
def test_without_both_kinds_layers_stay_as_they_are(model: dict[str, LayerSpec]) -> None:
    assert unify_hybrid_kv_cache_specs(model) == model


@pytest.mark.seed("S001-65", "S001-66")
def test_two_windows_and_no_full_attention_are_no_one_group() -> None:
    with pytest.raises(MixedSpecs, match=r"sliding_window_16_.*, sliding_window_32_") as caught:
        get_kv_cache_config(layers(sliding(16), sliding(32)), 100 * PAGE, SHORT)
    kinds = sorted([sliding(16).type_id, sliding(32).type_id])
    assert caught.value.fields == {"count": 2, "type_ids": kinds}


@pytest.mark.seed("S001-66")
def test_memory_is_judged_before_the_kinds() -> None:
    with pytest.raises(NotEnoughMemory):
        get_kv_cache_config(layers(sliding(16), sliding(32)), PAGE, SHORT)
    with pytest.raises(NoLayers):
        get_kv_cache_config({}, PAGE, SHORT)


@pytest.mark.seed("S001-67")
def test_memory_is_judged_after_windows_became_full() -> None:
    """64 pages of full attention and 3 of a window: 67 that make only 33 blocks of both layers."""
    model = layers(full(), sliding(16))
    limits = Limits(max_model_len=1024, max_num_batched_tokens=16)
    assert sum(spec.max_blocks(limits) for spec in model.values()) == 64 + 3
    with pytest.raises(NotEnoughMemory) as caught:
        get_kv_cache_config(model, 67 * PAGE, limits)
    assert caught.value.fields["needed_bytes"] == 2 * 64 * PAGE
    assert caught.value.fields["longest_model_len"] == 33 * BLOCK == 528
    assert get_kv_cache_config(model, 128 * PAGE, limits).num_blocks == 64
    assert make_grouped_config(model, 67 * PAGE, limits).num_blocks == 67  # kept as windows


def worker(num_blocks: int, *parts: tuple[LayerSpec, str]) -> KVCacheConfig:
    """Return a configuration with one group per part: its spec, and one letter per layer's name."""
    groups = tuple(KVCacheGroupSpec(tuple(names), spec) for spec, names in parts)
    return make_layout(groups, num_blocks)


@pytest.mark.seed("S001-68")
def test_workers_agree_on_the_order_of_groups_and_the_fewest_blocks() -> None:
    configs = [
        worker(10, (sliding(16), "ab"), (full(), "cd"), (sliding(16), "ef")),
        worker(7, (full(), "cd"), (sliding(16), "ab"), (sliding(16), "ef")),
    ]
    before = list(configs)
    unified = unify_kv_cache_configs(configs)
    assert [config.num_blocks for config in unified] == [7, 7]
    for config in unified:
        assert [group.layer_names for group in config.groups] == [
            ("c", "d"),
            ("a", "b"),
            ("e", "f"),
        ]
    assert configs == before
    assert [config.num_blocks for config in configs] == [10, 7]


@pytest.mark.seed("S001-68")
def test_workers_whose_layers_are_kept_otherwise_are_refused() -> None:
    shape = {"head_size": 32, "num_kv_heads": 2}  # the same type id
    for other in (full(block_size=32), full(dtype="fp8"), sliding(), full(**shape)):
        with pytest.raises(GroupKindDiffers) as caught:
            unify_kv_cache_configs([worker(4, (full(), "a")), worker(4, (other, "a"))])
        assert caught.value.fields == {
            "rank": 1,
            "group_id": 0,
            "spec": other,
            "first": full(),
        }


@pytest.mark.seed("S001-69")
def test_a_worker_with_more_memory_keeps_its_tensors() -> None:
    large, small = worker(10, (full(), "ab")), worker(7, (full(), "ab"))
    unified = unify_kv_cache_configs([large, small])
    assert unified == (attrs.evolve(large, num_blocks=7), small)
    assert [tensor.size_bytes for tensor in unified[0].tensors] == [10 * PAGE] * 2


@pytest.mark.seed("S001-70")
@pytest.mark.parametrize("reverse", [False, True])
def test_a_worker_with_a_group_of_its_own_is_noticed(reverse: bool) -> None:
    configs = [worker(4, (full(), "a")), worker(4, (full(), "a"), (sliding(), "b"))]
    one, two = [full().type_id], [full().type_id, sliding().type_id]
    expected: dict[str, object] = {"rank": 1, "count": 2, "type_ids": two, "expected": 1}
    expected["first"] = one
    if reverse:
        configs.reverse()
        expected |= {"count": 1, "type_ids": one, "expected": 2, "first": two}
    with pytest.raises(GroupCountDiffers) as caught:
        unify_kv_cache_configs(configs)
    assert caught.value.fields == expected


@pytest.mark.seed("S001-70")
def test_a_worker_with_other_layers_is_noticed() -> None:
    configs = [worker(4, (full(), "ab")), worker(4, (full(), "ab")), worker(4, (full(), "bc"))]
    with pytest.raises(
        GroupLayersDiffer, match="rank 2: group 0 lacks a of rank 0 and has c"
    ) as caught:
        unify_kv_cache_configs(configs)
    assert caught.value.fields == {"rank": 2, "group_id": 0, "missing": ["a"], "extra": ["c"]}
    assert len(unify_kv_cache_configs(configs, same_layers=False)) == 3


def test_no_workers_are_no_configurations() -> None:
    assert unify_kv_cache_configs([]) == ()
