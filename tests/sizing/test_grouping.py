# SPDX-License-Identifier: Apache-2.0
"""Groups of equal blocks over one pool, and the manager that runs on them."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Group, KVCacheManager, Request
from kvcore.sizing import (
    ChunkedLocalSpec,
    KVCacheConfig,
    LayerSpec,
    Limits,
    blocks_per_request,
    group_layers,
    make_grouped_config,
    make_layout,
    request_bytes,
)
from kvcore.sizing.errors import NoLayers, NotEnoughMemory
from kvcore.sizing.grouping import NUM_GROUPS_MAX, choose_num_slots
from kvcore.sizing.layout import make_manager_config
from kvcore.types.errors import GroupsDoNotFit, InvalidConfig
from tests.sizing.models import BLOCK, PAGE, full, layers, sliding


def test_alternating_layers_are_two_groups_of_the_same_slots() -> None:
    model = layers(sliding(128), full(), sliding(128), full())
    config = make_grouped_config(model, 100 * PAGE, Limits(max_model_len=64))
    assert [(group.layer_names, group.spec) for group in config.groups] == [
        (("layer 1", "layer 3"), full()),
        (("layer 0", "layer 2"), sliding(128)),
    ]
    assert config.num_slots == 2
    assert config.block_bytes == 2 * PAGE
    assert config.num_blocks == 50
    assert [tensor.shared_by for tensor in config.tensors] == [
        ("layer 1", "layer 0"),
        ("layer 3", "layer 2"),
    ]
    assert sum(tensor.size_bytes for tensor in config.tensors) == 100 * PAGE


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "num_slots"),
    [
        (12, 12, 12),  # gpt-oss 20b
        (10, 52, 10),  # Gemma 3 27b: 6 windowed groups, 8 slots empty, none of them full
        (8, 40, 8),  # Gemma 3 12b
        (5, 29, 5),  # Gemma 3 4b
        (4, 22, 4),  # Gemma 3 1b
        (1, 7, 1),
        (79, 1, 79),  # one windowed layer: no slot of full attention is left empty for it
        (1, 79, 12),  # 1 + 7 groups: fewer slots would make more than NUM_GROUPS_MAX
    ],
)
def test_slots_are_left_empty_where_that_costs_least(
    num_full: int, num_sliding: int, num_slots: int
) -> None:
    assert choose_num_slots({full(): num_full, sliding(): num_sliding}) == num_slots


def test_without_full_attention_the_fewest_slots_are_left_empty() -> None:
    assert choose_num_slots({sliding(16): 4, sliding(32): 6}) == 2  # 2 + 3 groups, none empty
    assert choose_num_slots({sliding(16): 4, sliding(32): 4}) == 4  # none empty in 2 groups


def test_more_kinds_than_groups_have_a_group_each() -> None:
    kinds = [sliding(window) for window in range(1, NUM_GROUPS_MAX + 3)]
    groups = group_layers(layers(*kinds))
    assert [group.spec for group in groups] == kinds


def test_smaller_pages_become_blocks_of_more_tokens() -> None:
    large, small = full(num_kv_heads=4), sliding(64, num_kv_heads=1)
    groups = group_layers(layers(large, small, large, small))
    assert [group.spec.block_size for group in groups] == [BLOCK, 4 * BLOCK]
    assert {group.spec.page_bytes for group in groups} == {4 * PAGE}
    # A request of 200 tokens: 13 blocks of 16, and 4 of 64, which is less than a window and a step.
    assert blocks_per_request(groups, Limits(max_model_len=200)) == 13 + 4


def test_pages_that_are_no_multiples_are_refused_with_groups_and_sizes() -> None:
    model = layers(full(head_size=96), sliding(128))
    with pytest.raises(GroupsDoNotFit) as caught:
        group_layers(model)
    assert caught.value.fields == {
        "groups": [f"full_attention_16_{PAGE * 3 // 2}", f"sliding_window_128_16_{PAGE}"],
        "sizes": [PAGE * 3 // 2, PAGE],
    }


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(NoLayers):
        group_layers({})


def test_a_windowed_request_needs_no_more_than_it_fills() -> None:
    model = layers(full(), sliding(64))
    limits = Limits(max_model_len=32, max_num_batched_tokens=16)
    assert sliding(64).max_blocks(limits) == 2 + 1
    assert blocks_per_request(group_layers(model), limits) == 2 + 2
    with pytest.raises(NotEnoughMemory) as caught:
        make_grouped_config(model, 4 * PAGE - 1, limits)
    assert caught.value.fields["longest_model_len"] == 16
    assert make_grouped_config(model, 4 * PAGE, limits).num_blocks == 4


def test_a_manager_runs_on_the_groups_of_a_model() -> None:
    """A window of 8 in blocks of 4: a long request holds its history once, its window once."""
    shape = {"block_size": 4}
    model = layers(sliding(8, **shape), full(**shape), sliding(8, **shape), full(**shape))
    limits = Limits(max_model_len=32, max_num_batched_tokens=8, null_block=True)
    groups = group_layers(model)
    # Full attention: 8 blocks. The window: 7 tokens and a step of 8 in 4 blocks, and one.
    assert blocks_per_request(groups, limits) == 8 + 5
    config = make_manager_config(make_layout(groups, 14), limits, enable_caching=False)
    page = 2 * model["layer 0"].page_bytes
    assert config.groups == (
        Group(4, page_bytes=page),
        Group(4, kind="sliding_window", window=8, page_bytes=page),
    )
    manager = KVCacheManager(config, backend="python")
    manager.add_request(Request("long", list(range(32))))
    for _ in range(4):
        assert manager.allocate_slots("long", 8)
        manager.take_batch()
    with pytest.raises(InvalidConfig, match="needs 13 blocks and the null block, so 14"):
        make_manager_config(make_layout(groups, 13), limits)


def test_a_manager_with_windows_gets_the_null_block_also_if_no_one_counted_it() -> None:
    bare = Limits(max_model_len=64, max_num_batched_tokens=16)
    for windowed in (sliding(16), chunked(32)):
        model = layers(full(), windowed)
        config = make_grouped_config(model, 20 * PAGE, bare)
        assert make_manager_config(config, bare).null_block
        assert make_manager_config(config, bare) == make_manager_config(
            config, attrs.evolve(bare, null_block=True)
        )
        needed = blocks_per_request(config.groups, bare)
        just = make_grouped_config(model, needed * PAGE, bare)
        with pytest.raises(InvalidConfig, match=f"null block, so {needed + 1}"):
            make_manager_config(just, bare)
    plain = make_grouped_config(layers(full()), 4 * PAGE, bare)
    assert not make_manager_config(plain, bare).null_block


def chunked(chunk: int) -> LayerSpec:
    return ChunkedLocalSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=64, dtype="float16", window=chunk
    )


kinds = st.one_of(
    st.just(full()),
    st.just(full(num_kv_heads=2)),
    st.integers(1, 90).map(sliding),
    st.integers(1, 90).map(chunked),
)


@given(st.lists(kinds, min_size=1, max_size=12))
def test_groups_are_a_partition_into_equal_pages(specs: list[LayerSpec]) -> None:
    model = layers(*specs)
    groups = group_layers(model)
    names = [name for group in groups for name in group.layer_names]
    assert sorted(names) == sorted(model)
    assert len({group.spec.page_bytes for group in groups}) == 1
    assert len(groups) <= max(NUM_GROUPS_MAX, len(set(specs)))
    for group in groups:
        for name in group.layer_names:
            resized = attrs.evolve(model[name], block_size=group.spec.block_size)
            assert resized == group.spec
            assert group.spec.block_size % model[name].block_size == 0
    assert model == layers(*specs)


def accepts(layout: KVCacheConfig, limits: Limits) -> bool:
    """Tell whether a manager can be made with this many blocks for one request of full length."""
    try:
        make_manager_config(layout, limits)
    except InvalidConfig:
        return False
    return True


@given(
    st.lists(kinds, min_size=1, max_size=5),
    st.integers(1, 300),
    st.integers(1, 64),
    st.integers(1, 120),
)
def test_what_fits_is_what_the_manager_accepts(
    specs: list[LayerSpec], length: int, batched: int, num_blocks: int
) -> None:
    limits = Limits(max_model_len=length, max_num_batched_tokens=batched, null_block=True)
    layout = make_layout(group_layers(layers(*specs)), num_blocks)
    fits = request_bytes(layout.groups, limits) <= num_blocks * layout.block_bytes
    assert accepts(layout, limits) == fits
