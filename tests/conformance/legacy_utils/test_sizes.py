# SPDX-License-Identifier: Apache-2.0
"""Seed 001's sizing functions: their results, what they change in place, and their errors."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import pytest

from kvcore.legacy.v1_0_8.errors import (
    LayersDiffer,
    MixedLayers,
    NoGroupLayer,
    RankGroupsDiffer,
    RankLayersDiffer,
    RanksDiffer,
    WindowWithMla,
)
from kvcore.legacy.v1_0_8.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from kvcore.legacy.v1_0_8.kv_cache_utils import (
    PrefixCachingMetrics,
    _get_kv_cache_config_uniform_type,
    check_enough_kv_cache_memory,
    create_kv_cache_group_specs,
    estimate_max_model_len,
    get_kv_cache_config,
    is_kv_cache_type_uniform,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_configs,
)
from kvcore.sizing.errors import NoCacheMemory, NotEnoughMemory
from kvcore.types.errors import InvalidCount, KvcoreError, WrongArgument
from kvcore.types.values import PrefixCacheStats
from tests.conformance.legacy_utils.requests import (
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)

PAGE = 2 * 16 * 2 * 64 * 4
"""Key and value, 16 tokens, 2 heads of 64 numbers of 4 bytes."""
GIB = 2**30


def full(**changes: Any) -> FullAttentionSpec:
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
    return FullAttentionSpec(**{**shape, **changes})


def sliding(window: int = 32, **changes: Any) -> SlidingWindowSpec:
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
    return SlidingWindowSpec(**{**shape, **changes}, sliding_window=window)


def engine(length: int = 64, *, batched: int | None = 16, blocks: int | None = None) -> VllmConfig:
    scheduler, cache = SchedulerConfig(batched), CacheConfig(blocks)
    return VllmConfig(ModelConfig(length), scheduler, cache)


def worker(num_blocks: int, *groups: tuple[list[str], Any]) -> KVCacheConfig:
    made = [KVCacheGroupSpec(names, spec) for names, spec in groups]
    tensors = {name: KVCacheTensor(PAGE * num_blocks) for names, _ in groups for name in names}
    return KVCacheConfig(num_blocks, tensors, made)


@pytest.mark.seed("S001-45", "S001-46", "S001-47", "S001-59")
def test_sizes_of_layers_are_the_core_s() -> None:
    assert full().page_size_bytes == PAGE == sliding().page_size_bytes
    assert full(use_mla=True).page_size_bytes == PAGE // 2
    assert full().max_memory_usage_bytes(engine(65)) == 5 * PAGE
    assert sliding(32).max_memory_usage_bytes(engine(64)) == (3 + 1) * PAGE  # 31 + 16 tokens
    assert full().type_id == f"full_attention_16_{PAGE}"
    assert full(use_mla=True).type_id == f"full_attention_16_{PAGE // 2}"
    assert sliding(32).type_id == f"sliding_window_32_16_{PAGE}"


@pytest.mark.seed("S001-47")
def test_a_window_has_no_mla() -> None:
    with pytest.raises(WindowWithMla, match="window 32") as caught:
        sliding(use_mla=True)
    assert isinstance(caught.value, AssertionError)
    with pytest.raises(InvalidCount):
        sliding(0)


def test_whatever_has_a_spec_s_attributes_is_one() -> None:
    torch = pytest.importorskip("torch")

    class Layer:
        block_size, num_kv_heads, head_size, use_mla = 16, 2, 64, False
        dtype = torch.float32

    specs: dict[str, Any] = {"a": Layer(), "b": full(dtype=torch.float32)}
    assert is_kv_cache_type_uniform(specs)
    with pytest.raises(WrongArgument, match="head_size"):
        is_kv_cache_type_uniform({"a": object()})
    with pytest.raises(WrongArgument, match="max_model_len"):
        estimate_max_model_len(object(), specs, GIB)


@pytest.mark.seed("S001-48", "S001-49", "S001-51", "S001-52")
def test_the_estimate_leaves_the_configuration_as_it_was() -> None:
    specs = {
        f"layer {index}": full(num_kv_heads=32, head_size=128, dtype="float16")
        for index in range(32)
    }
    for requested, longest in ((16385, 16384), (16383, 16383)):
        config = engine(requested)
        assert estimate_max_model_len(config, specs, 8 * GIB) == longest
        assert config == engine(requested)
    assert estimate_max_model_len(engine(64), {"a": full()}, PAGE - 1) == 0
    assert estimate_max_model_len(engine(64), {"a": full()}, PAGE) == 16


@pytest.mark.seed("S001-50")
@pytest.mark.parametrize("num_pages", [0, 1, 3, 4, 5, 8, 9, 100])
def test_the_estimate_is_the_last_length_that_fits(num_pages: int) -> None:
    specs = {"a": full(), "b": sliding(20)}

    def fits(length: int) -> bool:
        need = sum(spec.max_memory_usage_bytes(engine(length)) for spec in specs.values())
        return need <= num_pages * PAGE

    longest = max((length for length in range(1, 71) if fits(length)), default=0)
    assert estimate_max_model_len(engine(70), specs, num_pages * PAGE) == longest


@pytest.mark.seed("S001-56")
def test_a_length_of_0_adds_no_text() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        check_enough_kv_cache_memory(engine(64), {"a": full()}, PAGE - 1)
    assert "longest" not in str(caught.value)
    assert caught.value.fields["longest_model_len"] == 0


@pytest.mark.seed("S001-53", "S001-54", "S001-55")
def test_too_little_memory_is_told_with_the_longest_length() -> None:
    specs = {"a": full(), "b": full()}
    check_enough_kv_cache_memory(engine(64), specs, 8 * PAGE)
    for error, memory, text in (
        (NoCacheMemory, 0, r"no memory is available"),
        (NotEnoughMemory, 8 * PAGE - 1, r"64 tokens needs 0\.00 GiB .* has 48 tokens"),
    ):
        with pytest.raises(error, match=text) as caught:
            check_enough_kv_cache_memory(engine(64), specs, memory)
        assert isinstance(caught.value, ValueError)


@pytest.mark.seed("S001-57")
def test_groups_keep_their_order_and_their_layers_are_alike() -> None:
    specs = {"a": full(), "b": sliding(), "c": full(), "d": sliding(64)}
    groups = create_kv_cache_group_specs(specs, [["c", "a"], ["b"]])
    assert [(group.layer_names, group.kv_cache_spec) for group in groups] == [
        (["c", "a"], full()),
        (["b"], sliding()),
    ]
    with pytest.raises(LayersDiffer, match="group 1: layer d") as caught:
        create_kv_cache_group_specs(specs, [["a"], ["b", "d"]])
    assert isinstance(caught.value, AssertionError)
    with pytest.raises(NoGroupLayer) as empty:
        create_kv_cache_group_specs(specs, [[]])
    assert isinstance(empty.value, IndexError)


@pytest.mark.seed("S001-58")
def test_uniform_is_one_kind_and_nothing_is_not_uniform() -> None:
    assert is_kv_cache_type_uniform({"a": full(), "b": full()}) is True
    assert is_kv_cache_type_uniform({"a": full(), "b": sliding()}) is False
    assert is_kv_cache_type_uniform({"a": sliding(32), "b": sliding(64)}) is False
    assert is_kv_cache_type_uniform({}) is False


@pytest.mark.seed("S001-60", "S001-61", "S001-62")
def test_a_uniform_configuration_divides_the_memory_among_the_layers() -> None:
    specs = {"b": full(), "a": full()}
    made = _get_kv_cache_config_uniform_type(engine(), specs, 21 * PAGE)
    assert made == worker(10, (["b", "a"], full()))
    assert list(made.tensors) == ["b", "a"]
    assert _get_kv_cache_config_uniform_type(engine(), specs, -1).num_blocks == 0
    forced = _get_kv_cache_config_uniform_type(engine(blocks=30), specs, 21 * PAGE)
    assert forced == worker(30, (["b", "a"], full()))


def test_a_number_of_blocks_that_is_set_is_not_judged() -> None:
    short = engine(64, blocks=1)
    assert get_kv_cache_config(short, {"a": full()}, 10 * PAGE).num_blocks == 1
    assert estimate_max_model_len(short, {"a": full()}, 10 * PAGE) == 64
    check_enough_kv_cache_memory(short, {"a": full()}, 10 * PAGE)


@pytest.mark.seed("S001-63")
def test_all_layers_have_one_page_size() -> None:
    with pytest.raises(LayersDiffer, match="layer b") as caught:
        _get_kv_cache_config_uniform_type(engine(), {"a": full(), "b": full(head_size=8)}, GIB)
    assert isinstance(caught.value, AssertionError)


@pytest.mark.seed("S001-64")
def test_what_fits_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        get_kv_cache_config(engine(64), {"a": full()}, 10 * PAGE)
    assert "160 tokens; 2.50 requests of 64 tokens" in caplog.text


@pytest.mark.seed("S001-65")
def test_windows_beside_full_attention_become_full_in_place() -> None:
    specs: dict[str, Any] = {"a": full(), "b": sliding(32), "c": sliding(64)}
    first = specs["a"]
    assert unify_hybrid_kv_cache_specs(specs) is None  # type: ignore[func-returns-value] # as there
    assert specs == {"a": full(), "b": full(), "c": full()}
    assert specs["a"] is first
    alone: dict[str, Any] = {"b": sliding(32), "c": sliding(64)}
    before = copy.deepcopy(alone)
    unify_hybrid_kv_cache_specs(alone)
    assert alone == before


def test_windows_become_specs_of_the_engines_own_class() -> None:
    @dataclass(frozen=True)
    class Full:
        block_size: int
        num_kv_heads: int
        head_size: int
        dtype: str
        use_mla: bool

    @dataclass(frozen=True)
    class Window(Full):
        sliding_window: int

    shape = (16, 2, 64, "float32", False)
    specs: dict[str, Any] = {"a": Full(*shape), "b": Window(32, 1, *shape[2:], 32)}
    first = specs["a"]
    unify_hybrid_kv_cache_specs(specs)
    assert specs["a"] is first
    assert specs == {"a": Full(*shape), "b": Full(32, 1, *shape[2:])}
    assert first == Full(*shape)
    alike: dict[str, Any] = {"a": Full(*shape), "b": Window(*shape, 32)}
    made = get_kv_cache_config(engine(64), alike, 20 * PAGE)
    assert {type(each) for each in alike.values()} == {Full}
    assert type(made.kv_cache_groups[0].kv_cache_spec) is Full


@pytest.mark.seed("S001-66")
def test_a_configuration_converts_in_place_and_what_fits_no_group_is_refused() -> None:
    specs: dict[str, Any] = {"a": full(), "b": sliding(32)}
    made = get_kv_cache_config(engine(64), specs, 20 * PAGE)
    assert made == worker(10, (["a", "b"], full()))
    assert specs == {"a": full(), "b": full()}
    mixed: dict[str, Any] = {"a": sliding(32), "b": sliding(64)}
    with pytest.raises(MixedLayers, match="2 kinds") as caught:
        get_kv_cache_config(engine(64), mixed, 20 * PAGE)
    assert isinstance(caught.value, NotImplementedError)
    assert mixed == {"a": sliding(32), "b": sliding(64)}


@pytest.mark.seed("S001-67")
def test_memory_is_judged_by_the_layers_as_they_will_be_kept() -> None:
    # 1024 tokens: 64 pages of the full layer and 3 of the window's would pass; 128 are needed.
    specs: dict[str, Any] = {"a": full(), "b": sliding(16)}
    config = engine(1024, batched=16)
    needed = sum(spec.max_memory_usage_bytes(config) for spec in specs.values())
    assert needed == 67 * PAGE
    with pytest.raises(NotEnoughMemory, match="1024 tokens"):
        get_kv_cache_config(config, specs, 67 * PAGE)
    assert specs == {"a": full(), "b": sliding(16)}
    assert get_kv_cache_config(config, specs, 128 * PAGE).num_blocks == 64


@pytest.mark.seed("S001-68", "S001-69")
def test_workers_are_made_alike_in_place() -> None:
    configs = [
        worker(10, (["s"], sliding()), (["f"], full())),
        worker(7, (["f"], full()), (["s"], sliding())),
    ]
    groups = configs[0].kv_cache_groups
    assert unify_kv_cache_configs(configs) is configs
    assert [config.num_blocks for config in configs] == [7, 7]
    assert configs[0].kv_cache_groups is groups
    for config in configs:
        assert [group.layer_names for group in config.kv_cache_groups] == [["f"], ["s"]]
    assert configs[0].tensors["f"] == KVCacheTensor(10 * PAGE)


@pytest.mark.seed("S001-68", "S001-70")
def test_workers_that_differ_are_refused_and_left_as_they_were() -> None:
    first = worker(10, (["s"], sliding()), (["f"], full()))
    kinds: list[tuple[type[KvcoreError], KVCacheConfig, bool]] = [
        (RanksDiffer, worker(9, (["s"], sliding(64)), (["f"], full())), False),
        (RankGroupsDiffer, worker(9, (["s"], sliding())), False),
        (RankLayersDiffer, worker(9, (["t"], sliding()), (["f"], full())), True),
    ]
    for error, other, same_layers in kinds:
        configs = [copy.deepcopy(first), copy.deepcopy(other)]
        with pytest.raises(error, match="rank 1") as caught:
            unify_kv_cache_configs(configs, same_layers=same_layers)
        assert isinstance(caught.value, AssertionError)
        assert configs == [first, other]
    # Layers of a pipeline's stages have other names, which is not asked unless told to.
    stages = [worker(10, (["f 0"], full())), worker(9, (["f 1"], full()))]
    assert [config.num_blocks for config in unify_kv_cache_configs(stages)] == [9, 9]


@pytest.mark.seed("S001-21", "S001-22", "S001-23", "S001-24", "S001-25", "S001-26")
def test_metrics_take_an_engine_s_own_statistics() -> None:
    class Stats:
        def __init__(self, requests: int, queries: int, hits: int, reset: bool = False) -> None:
            self.requests, self.queries, self.hits, self.reset = requests, queries, hits, reset

    metrics = PrefixCachingMetrics(5)
    assert (PrefixCachingMetrics().max_recent_requests, metrics.hit_rate) == (1000, 0.0)
    for stats in (Stats(1, 20, 9), Stats(2, 20, 9), Stats(2, 20, 11)):
        metrics.observe(stats)
    assert (metrics.aggregated_requests, metrics.hit_rate) == (5, 29 / 60)
    metrics.observe(Stats(3, 30, 0))  # two older updates must go, the first two
    assert list(metrics.query_queue) == [(2, 20, 11), (3, 30, 0)]
    metrics.observe(Stats(1, 10, 4, reset=True))
    assert (metrics.aggregated_query_total, metrics.aggregated_query_hit) == (10, 4)
    metrics.observe(PrefixCacheStats(1, 10, 6))
    assert metrics.hit_rate == 10 / 20
    before = list(metrics.query_queue)
    with pytest.raises(WrongArgument, match="stats"):
        metrics.observe(object())  # type: ignore[arg-type] # the mistake under test
    assert list(metrics.query_queue) == before
    metrics.reset()
    assert (metrics.aggregated_requests, metrics.hit_rate, len(metrics.query_queue)) == (0, 0.0, 0)
