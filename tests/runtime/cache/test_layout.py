# SPDX-License-Identifier: Apache-2.0
"""Layout and cache tensors: shapes, places in memory, and sizes that cannot be made."""

from __future__ import annotations

import itertools
import mmap
from typing import Any

import pytest
import torch
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.errors import (
    GroupOutOfRange,
    InvalidLayout,
    InvalidSize,
    LayerOutOfRange,
    NoMemory,
)
from kvcore_runtime.cache.host_memory import HUGE_BYTES_MIN, HUGE_PAGE_BYTES
from kvcore_runtime.cache.layout import DTYPES, CacheLayout

SIZES: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 5, "block_size": 4}


@pytest.mark.parametrize("dtype", DTYPES)
def test_page_size_is_what_one_block_of_the_tensor_takes(dtype: torch.dtype) -> None:
    layout = CacheLayout(**SIZES, dtype=dtype)
    assert layout.page_size_bytes == torch.empty(layout.shape(1), dtype=dtype).nbytes


def test_block_major_makes_a_block_one_contiguous_page() -> None:
    cache = Cache(CacheLayout(**SIZES), 6, 2)
    assert cache.blocks.data.shape == (6, 3, 2, 4, 2, 5)
    assert all(cache.blocks.data[block].is_contiguous() for block in range(6))
    assert cache.host_blocks.data.shape == (2, 3, 2, 4, 2, 5)
    assert cache.layout.num_pieces == 1


def test_layer_major_makes_a_layer_s_blocks_contiguous() -> None:
    cache = Cache(CacheLayout(**SIZES, order="layer_major"), 6)
    assert cache.blocks.data.shape == (6, 3, 2, 4, 2, 5)
    for layer in range(3):
        assert all(part.is_contiguous() for part in cache.layer(layer))
    assert not cache.blocks.data[0].is_contiguous()
    assert cache.layout.num_pieces == 6


@pytest.mark.parametrize("order", ["block_major", "layer_major"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_views_are_the_parts_of_a_block(order: Any, dtype: torch.dtype) -> None:
    cache = Cache(CacheLayout(**SIZES, dtype=dtype, order=order), 5)
    for value, (layer, part) in enumerate(itertools.product(range(3), range(2)), start=1):
        cache.layer(layer)[part][2] = value
    expected = torch.arange(1, 7, dtype=dtype).view(3, 2, 1, 1, 1).expand(3, 2, 4, 2, 5)
    assert torch.equal(cache.blocks.data[2], expected)
    assert torch.count_nonzero(cache.blocks.data) == expected.numel()
    page = cache.blocks.pieces[:, 2].contiguous().view(-1).view(dtype)
    assert torch.equal(page, expected.reshape(-1))


def test_groups_of_unlike_blocks_share_the_bytes_of_a_page() -> None:
    cache = Cache(CacheLayout(**SIZES), 6, groups=[(3, 4), (2, 6), (1, 12)])
    for block, group in enumerate(cache.groups):
        assert group.data.data_ptr() == cache.blocks.data.data_ptr()
        for layer in range(group.layout.num_layers):
            for part in cache.layer(layer, block):
                part[block] = block + 1.0
    for block in range(3):
        assert cache.blocks.data[block].unique().tolist() == [block + 1.0]
    assert not cache.blocks.data[3:].any()


def test_groups_that_do_not_share_a_page_are_refused() -> None:
    with pytest.raises(InvalidLayout, match="num_layers=2: pages of 640 bytes, expected 960"):
        Cache(CacheLayout(**SIZES), 6, groups=[(3, 4), (2, 4)])
    layered = CacheLayout(**SIZES, order="layer_major")
    with pytest.raises(InvalidLayout, match="pages in one piece"):
        Cache(layered, 6, groups=[(3, 4), (2, 6)])
    cache = Cache(layered, 6, groups=[(3, 4), (3, 4)])
    with pytest.raises(GroupOutOfRange, match="group 2 is not one of the 2 groups 0 to 1"):
        cache.layer(0, 2)


def test_guard_mode_starts_as_nan_and_else_as_zeros() -> None:
    layout = CacheLayout(**SIZES, dtype=torch.bfloat16)
    guarded = Cache(layout, 2, 2, guard=True)
    assert guarded.blocks.data.isnan().all()
    assert guarded.host_blocks.data.isnan().all()
    assert not Cache(layout, 2, 2).blocks.data.any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_kv_heads", -1),
        ("head_dim", True),
        ("block_size", 1.5),
        ("dtype", torch.int8),
        ("order", "heads_major"),
    ],
)
def test_layout_that_cannot_be_made_names_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidLayout, match=f"{field}={value}") as caught:
        CacheLayout(**{**SIZES, field: value})
    assert caught.value.field == field


def test_cache_of_no_blocks_and_layer_past_the_end_are_named() -> None:
    layout = CacheLayout(**SIZES)
    with pytest.raises(InvalidSize, match="num_blocks=0"):
        Cache(layout, 0)
    with pytest.raises(InvalidSize, match="num_host_blocks=-2"):
        Cache(layout, 1, -2)
    with pytest.raises(LayerOutOfRange, match="layer 3 is not one of the 3 layers 0 to 2"):
        Cache(layout, 1).layer(3)
    with pytest.raises(LayerOutOfRange, match="layer -1"):
        Cache(layout, 1).layer(-1)
    with pytest.raises(GroupOutOfRange, match="group -1 is not one of the 1 groups 0 to 0"):
        Cache(layout, 1).layer(0, -1)
    for wrong in (True, 2.0):
        with pytest.raises(InvalidSize, match=f"num_blocks={wrong}"):
            Cache(layout, wrong)  # type: ignore[arg-type]  # this is the point


@pytest.mark.parametrize("order", ["block_major", "layer_major"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tier_knows_the_bytes_of_its_pieces(order: Any, dtype: torch.dtype) -> None:
    layout = CacheLayout(**SIZES, dtype=dtype, order=order)
    cache = Cache(layout, 3)
    assert cache.blocks.piece_size_bytes == layout.piece_size_bytes
    assert cache.blocks.piece_size_bytes * layout.num_pieces == layout.page_size_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_tier_begins_at_a_huge_page_and_outlives_its_cache(dtype: torch.dtype) -> None:
    layout = CacheLayout(num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, dtype=dtype)
    num_blocks = -(-HUGE_BYTES_MIN // layout.page_size_bytes)
    cache = Cache(layout, num_blocks, guard=True)
    data = cache.blocks.data
    del cache
    assert data.shape == layout.shape(num_blocks)
    assert data.isnan().all()
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert data.data_ptr() % HUGE_PAGE_BYTES == 0


@pytest.mark.parametrize("shared", [False, True])
def test_a_tier_that_no_memory_holds_is_an_error_with_its_size(shared: bool) -> None:
    layout = CacheLayout(**{**SIZES, "head_dim": 4096}, dtype=torch.float32)
    num_blocks = 2**31 - 1  # 1.7e15 bytes: more than a process can address
    num_bytes = num_blocks * layout.page_size_bytes
    with pytest.raises(NoMemory, match=f"{num_bytes} bytes of memory cannot be had") as caught:
        Cache(layout, num_blocks, shared=shared)
    assert caught.value.fields["num_bytes"] == num_bytes
