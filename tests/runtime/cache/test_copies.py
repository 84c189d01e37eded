# SPDX-License-Identifier: Apache-2.0
"""Copies, fills and swaps of pages: tensors against a dict of pages."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from kvcore_runtime.cache import copies
from kvcore_runtime.cache.cache import Cache, Tier
from kvcore_runtime.cache.copies import (
    copy_blocks,
    fill_pages,
    merge_runs,
    swap_in,
    swap_out,
    zero_blocks,
)
from kvcore_runtime.cache.errors import BlockOutOfRange, CopyHazard, LayoutMismatch, UnequalLists
from kvcore_runtime.cache.layout import DTYPES, CacheLayout

NUM_BLOCKS = 12


def make_cache(
    order: Any = "block_major", dtype: torch.dtype = torch.float32, dim: int = 4
) -> Cache:
    """Return a cache whose elements all differ within a tier, or nearly so."""
    layout = CacheLayout(
        num_layers=2, num_kv_heads=2, head_dim=dim, block_size=3, dtype=dtype, order=order
    )
    cache = Cache(layout, NUM_BLOCKS, NUM_BLOCKS)
    generator = torch.Generator().manual_seed(7)
    for tier in (cache.blocks, cache.host_blocks):
        tier.data.copy_(torch.randn(tier.data.shape, generator=generator).to(dtype))
    return cache


def pages(tier: Tier) -> dict[int, torch.Tensor]:
    return {block: tier.data[block].clone() for block in range(tier.num_blocks)}


def assert_pages(tier: Tier, expected: dict[int, torch.Tensor]) -> None:
    for block, page in expected.items():
        assert torch.equal(tier.data[block], page), f"{tier.name} block {block}"


@pytest.mark.parametrize("part_bytes", [8, copies.PART_BYTES])
@pytest.mark.parametrize("threads_bytes_min", [0, 10**9])
@pytest.mark.parametrize("order", ["block_major", "layer_major"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 4])
def test_copies_move_whole_pages_and_nothing_else(
    dtype: torch.dtype,
    order: Any,
    dim: int,
    threads_bytes_min: int,
    part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "THREADS_BYTES_MIN", threads_bytes_min)
    monkeypatch.setattr(copies, "PART_BYTES", part_bytes)
    cache = make_cache(order, dtype, dim)
    placed = random.Random(3)
    for _ in range(8):
        device, host = pages(cache.blocks), pages(cache.host_blocks)
        blocks = placed.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        sources, targets = sorted(blocks[:5]), sorted(blocks[5:10])
        copy_blocks(cache, sources, targets)
        device |= {y: device[x] for x, y in zip(sources, targets, strict=True)}
        hosts = placed.sample(range(NUM_BLOCKS), 5)
        swap_out(cache, targets, hosts)
        host |= {y: device[x] for x, y in zip(targets, hosts, strict=True)}
        swap_in(cache, hosts[:3], blocks[9:])
        device |= {y: host[x] for x, y in zip(hosts[:3], blocks[9:], strict=True)}
        zero_blocks(cache, blocks[:2])
        device |= {y: torch.zeros_like(device[y]) for y in blocks[:2]}
        assert_pages(cache.blocks, device)
        assert_pages(cache.host_blocks, host)
        cache.blocks.data[blocks[0]] = placed.random()


@pytest.mark.parametrize("block_size", [5243, 2 * 5243])
def test_a_page_that_parts_do_not_divide_is_copied_whole(block_size: int) -> None:
    """Just over 1 and 2 MiB, 2 parts do not divide 131,075 words, nor 4 parts 262,150 words."""
    layout = CacheLayout(num_layers=1, num_kv_heads=1, head_dim=25, block_size=block_size)
    assert layout.page_size_bytes > 2 * copies.PART_BYTES
    assert layout.page_size_bytes % copies.PART_BYTES
    cache = Cache(layout, 3, 2)
    cache.blocks.data.copy_(torch.arange(cache.blocks.data.numel()).view(cache.blocks.data.shape))
    device, host = pages(cache.blocks), pages(cache.host_blocks)
    copy_blocks(cache, [0], [2])
    swap_out(cache, [1], [0])
    swap_in(cache, [0], [0])
    assert_pages(cache.blocks, {0: device[1], 1: device[1], 2: device[0]})
    assert_pages(cache.host_blocks, host | {0: device[1]})


def test_a_run_of_neighbours_is_one_copy() -> None:
    assert merge_runs([4, 5, 6, 9, 1], [0, 1, 2, 3, 7]) == [(1, 7, 1), (4, 0, 3), (9, 3, 1)]
    assert merge_runs([6, 4, 5], [2, 0, 1]) == [(4, 0, 3)]
    assert merge_runs([5, 4], [0, 1]) == [(4, 1, 1), (5, 0, 1)]
    assert merge_runs([], []) == []


def test_nan_payload_and_negative_zero_survive_a_copy() -> None:
    cache = make_cache()
    bits = cache.blocks.data.view(torch.int32)
    bits[0] = 0x7FC12345
    bits[0, 0] = -(2**31)
    copy_blocks(cache, [0], [5])
    swap_out(cache, [5], [2])
    assert torch.equal(bits[5], bits[0])
    assert torch.equal(cache.host_blocks.data.view(torch.int32)[2], bits[0])


@pytest.mark.parametrize("order", ["block_major", "layer_major"])
def test_fill_takes_any_value(order: Any) -> None:
    cache = make_cache(order)
    before = pages(cache.blocks)
    fill_pages(cache.blocks, [3, 9, 4], float("nan"))
    assert cache.blocks.data[[3, 4, 9]].isnan().all()
    assert_pages(cache.blocks, {b: page for b, page in before.items() if b not in (3, 4, 9)})


@pytest.mark.parametrize(
    ("sources", "targets", "error", "text"),
    [
        ([1, 2], [3], UnequalLists, "sources has 2 items and targets has 1"),
        ([1, 12], [3, 4], BlockOutOfRange, "block 12 is not one of the 12 blocks of the device"),
        ([1, 2], [3, -1], BlockOutOfRange, "block -1"),
        ([1, 2], [3, 3], CopyHazard, "block 3 of the device tier is written twice"),
        ([1, 2], [2, 4], CopyHazard, "block 2 of the device tier is both read and written"),
        ([3, 2], [2, 3], CopyHazard, "block 2 of the device tier is both read and written"),
    ],
)
def test_copies_that_cannot_run_together_change_nothing(
    sources: list[int], targets: list[int], error: type[Exception], text: str
) -> None:
    cache = make_cache()
    before = pages(cache.blocks)
    with pytest.raises(error, match=text):
        copy_blocks(cache, sources, targets)
    assert_pages(cache.blocks, before)


def test_the_same_id_in_two_tiers_is_no_hazard_but_a_missing_host_tier_is_named() -> None:
    cache = make_cache()
    swap_out(cache, [1, 2], [2, 1])
    with pytest.raises(BlockOutOfRange, match="block 0 is not one of the 0 blocks of the host"):
        swap_out(Cache(cache.layout, 4), [1], [0])
    with pytest.raises(BlockOutOfRange, match="block 12"):
        zero_blocks(cache, [0, 12])


def test_no_copies_are_none_even_with_a_tier_of_no_blocks() -> None:
    cache = Cache(make_cache().layout, 4)
    swap_in(cache, [], [])
    swap_out(cache, [], [])
    assert not cache.blocks.data.any()


def test_pages_of_two_layouts_do_not_mix() -> None:
    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 1, "order": "layer_major"}
    layouts = [
        CacheLayout(num_layers=2, block_size=2, **sizes),
        CacheLayout(num_layers=4, block_size=2, **sizes),  # more pieces of the same size
        CacheLayout(num_layers=2, block_size=1, dtype=torch.float16, **sizes),  # words of 2 bytes
    ]
    tiers = [Cache(each, 3).blocks for each in layouts]
    for unlike in tiers[1:]:
        assert tiers[0].pieces.shape[2] == unlike.pieces.shape[2]
        with pytest.raises(LayoutMismatch):
            copies.copy_pages(tiers[0], unlike, [0], [1])
    one, other = make_cache(dim=4), make_cache("layer_major", dim=4)
    with pytest.raises(LayoutMismatch, match=r"384 bytes in 1 pieces .* 384 bytes in 4 pieces"):
        copies.copy_pages(one.blocks, other.blocks, [0], [1])
