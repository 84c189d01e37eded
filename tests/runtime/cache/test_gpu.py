# SPDX-License-Identifier: Apache-2.0
"""Copies, swaps, tables, guard mode and overlapped steps on a CUDA device."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.copies import KERNEL_SWAP_BYTES_MAX
from kvcore_runtime.cache.guard import Reads
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.model.model import tiny_model

from kvcore import Config
from kvcore.types.commands import (
    Allocate,
    Command,
    CopyOnWrite,
    CutTable,
    Free,
    SetTable,
    SwapIn,
    SwapOut,
    Zero,
    close,
)
from tests.runtime.model.questions import answer, assert_drained, requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

NUM_BLOCKS = 8
HEAD_DIMS = (1, 64, 4096, 16384)
BATCHES: list[list[Command]] = [
    [Allocate(block) for block in range(1, NUM_BLOCKS)],
    [SwapOut(1, 0), SwapOut(2, 1), CopyOnWrite(3, 4), Zero(5), SetTable(0, 0, 0, 3)],
    [CopyOnWrite(4, 6), CopyOnWrite(6, 7), SwapOut(7, 2), SwapIn(0, 4), SetTable(0, 0, 1, 4)],
    [SwapIn(2, 1), SwapIn(1, 5), CutTable(0, 0, 1), SetTable(0, 0, 1, 6), Zero(2)],
]


def make_runtime(device: str, layout: CacheLayout, guard: bool) -> Runtime:
    cache = Cache(layout, NUM_BLOCKS, 4, device=device, guard=guard)
    return Runtime(cache, BlockTables(4, 4, 64, layout.block_size, device=device))


def write(runtime: Runtime) -> None:
    """Play a forward pass that writes every block, on the current stream."""
    shape = runtime.cache.blocks.data.shape
    content = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    runtime.cache.blocks.data.copy_(content.to(runtime.cache.layout.dtype))


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("order", ["block_major", "layer_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_batches_give_on_the_gpu_what_they_give_on_the_cpu(
    head_dim: int, dtype: torch.dtype, order: Any, guard: bool
) -> None:
    layout = CacheLayout(
        num_layers=2, num_kv_heads=1, head_dim=head_dim, block_size=5, dtype=dtype, order=order
    )
    runtimes = [make_runtime(device, layout, guard) for device in ("cpu", "cuda")]
    for number, commands in enumerate(BATCHES):
        for runtime in runtimes:
            runtime.apply(close(number, commands))
            if number == 0:
                write(runtime)
    cpu, gpu = runtimes
    gpu.cache.synchronize()
    for mine, theirs in (
        (gpu.cache.blocks.data, cpu.cache.blocks.data),
        (gpu.cache.host_blocks.data, cpu.cache.host_blocks.data),
    ):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(gpu.tables.blocks.cpu(), cpu.tables.blocks)
    slots = [each.tables.slot_mapping([0], [3], [6], pad_to=9).cpu() for each in runtimes]
    assert torch.equal(slots[0], slots[1])


def test_both_ways_of_swapping_are_covered() -> None:
    """The head sizes above lie on both sides of the limit between kernel and copy engine."""
    sizes = [2 * 2 * 5 * head_dim * 2 for head_dim in HEAD_DIMS]
    assert min(sizes) <= KERNEL_SWAP_BYTES_MAX < max(sizes)


def test_host_tier_is_pinned_and_swaps_wait_for_the_forward_pass() -> None:
    layout = CacheLayout(num_layers=4, num_kv_heads=8, head_dim=128, block_size=64)
    cache = Cache(layout, 64, 64, device="cuda")
    assert cache.host_blocks.data.is_pinned()
    runtime = Runtime(cache, BlockTables(1, 1, 1, 64, device="cuda"))
    torch.cuda._sleep(50_000_000)
    cache.blocks.data.fill_(3.0)
    runtime.apply(close(0, [SwapOut(block, block) for block in range(1, 64)]))
    cache.blocks.data.fill_(4.0)
    runtime.apply(close(1, [SwapIn(block, 64 - block) for block in range(1, 32)]))
    after = cache.blocks.data[33:].clone()
    cache.synchronize()
    assert bool((cache.host_blocks.data[1:] == 3.0).all())
    assert bool((after == 3.0).all())


def test_guard_poisons_on_the_gpu() -> None:
    layout = CacheLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=2)
    runtime = make_runtime("cuda", layout, guard=True)
    runtime.apply(close(0, [Allocate(1), Allocate(2)]))
    runtime.cache.blocks.data[[1, 2]] = 1.0
    runtime.apply(close(1, [Free(1, False), SetTable(0, 0, 0, 2)]))
    assert bool(runtime.cache.blocks.data[1].isnan().all())
    runtime.check_reads(Reads([0], [0], [2], ["r"]))
    runtime.check_content(Reads([0], [0], [2], ["r"]))


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_steps_overlap_on_a_stream_of_their_own(max_in_flight: int) -> None:
    model = tiny_model(dtype=torch.float64, device="cuda")
    config = Config(20, num_host_blocks=20, hash_seed=b"gpu")
    options = EngineOptions(token_budget=64)
    plain = answer(Engine(model, config, options), requests(temperature=0.0))
    config = attrs.evolve(config, max_in_flight=max_in_flight, publish="completed")
    engine = Engine(model, config, options)
    ahead = answer(engine, requests(temperature=0.0))
    assert {key: each.tokens for key, each in ahead.items()} == {
        key: each.tokens for key, each in plain.items()
    }
    assert engine.metrics.num_overlapped > 0
    assert_drained(engine)


def test_a_forward_pass_plans_no_length_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose lengths cuDNN had not seen in that thread took ten times as long."""
    assert torch.backends.cuda.cudnn_sdp_enabled()
    attend, allowed = torch.nn.functional.scaled_dot_product_attention, set()

    def watched(*arguments: Any, **options: Any) -> torch.Tensor:
        allowed.add(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    engine = Engine(tiny_model(device="cuda"), Config(20, hash_seed=b"gpu"))
    answer(engine, requests(temperature=0.0))
    assert allowed == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()
