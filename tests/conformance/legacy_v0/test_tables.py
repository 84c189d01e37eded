# SPDX-License-Identifier: Apache-2.0
"""V0's allocator of two tiers, and its block table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcore import SwapIn, SwapOut
from kvcore.legacy.v0.block_table import BlockTable
from kvcore.legacy.v0.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcore.legacy.v0.naive_block import NaiveBlockAllocator
from kvcore.legacy.v0.prefix_caching_block import (
    Device,
    NoFreeBlocksError,
    PrefixCachingBlockAllocator,
)
from tests.conftest import Backend
from tests.legacy.v0.small import ids, two_tiers, unchanged

KINDS = ["naive", "prefix_caching"]
GPU, CPU = Device.GPU, Device.CPU


def table(
    tiers: CpuGpuBlockAllocator, num_tokens: int = 0, window: int | None = None
) -> BlockTable:
    """Return a table of this many different tokens."""
    made = BlockTable(2, tiers, max_block_sliding_window=window)
    if num_tokens:
        made.allocate(list(range(num_tokens)))
    return made


@pytest.mark.seed("S002-65")
@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_the_gpu_come_first_and_who_frees_follows_from_the_id(
    backend: Backend, kind: str
) -> None:
    tiers = two_tiers(backend, 3, 2, kind)
    assert tiers.all_block_ids == frozenset(range(5))
    on_gpu = [tiers.allocate_mutable_block(None, GPU) for _ in range(3)]
    on_cpu = [tiers.allocate_immutable_block(None, [n, n], CPU) for n in range(2)]
    assert (ids(on_gpu), ids(on_cpu)) == ([0, 1, 2], [3, 4])
    free = tiers.get_num_free_blocks
    assert (free(GPU), free(CPU)) == (0, 0)
    tiers.free(on_cpu[0])
    assert (free(GPU), free(CPU)) == (0, 1)
    tiers.free(on_gpu[1])
    assert (free(GPU), free(CPU)) == (1, 1)
    assert (tiers.get_num_total_blocks(GPU), tiers.get_num_total_blocks(CPU)) == (3, 2)
    assert tiers.get_physical_block_id(CPU, 4) == 1
    for call in (
        lambda: tiers.get_num_free_blocks(None),  # type: ignore[arg-type] # a device is required
        lambda: tiers.allocate_mutable_block(None, "GPU"),  # type: ignore[arg-type] # of its kind
    ):
        assert isinstance(unchanged(call, tiers), ValueError)


@pytest.mark.seed("S002-66")
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_fills_blocks_then_adds_some_and_can_look_ahead(
    backend: Backend, kind: str
) -> None:
    tiers = two_tiers(backend, 6, 0, kind)
    made = table(tiers, 5)
    assert made.physical_block_ids == [0, 1, 2]
    assert [block.token_ids for block in made.blocks] == [[0, 1], [2, 3], [4]]
    if kind == "prefix_caching":
        assert [block.content_hash is None for block in made.blocks] == [False, False, True]
    live = made.physical_block_ids
    made.append_token_ids([5, 6])
    assert (live, made.num_full_slots) == ([0, 1, 2, 3], 7)
    assert [block.token_ids for block in made.blocks[2:]] == [[4, 5], [6]]
    made.ensure_num_empty_slots(4)
    assert live == [0, 1, 2, 3, 4, 5]
    made.ensure_num_empty_slots(5)
    assert len(live) == 6
    error = unchanged(lambda: made.ensure_num_empty_slots(6), made)
    assert isinstance(error, NoFreeBlocksError)
    made.append_token_ids([7, 8])
    assert [block.token_ids for block in made.blocks[3:]] == [[6, 7], [8], []]
    assert made.get_unseen_token_ids(list(range(11))) == [9, 10]
    made.free()
    assert (made.physical_block_ids, made.blocks, tiers.get_num_free_blocks(GPU)) == ([], [], 6)
    assert live == [0, 1, 2, 3, 4, 5]  # what was handed out is the reader's from then on
    # Freed from the first on, so that the last one leaves next; what has content is hit.
    again = [5, 4, 3] if kind == "naive" else [0, 1, 5]
    assert table(tiers, 5).physical_block_ids == again
    assert BlockTable.get_num_required_blocks([1, 2, 3], 2, 2) == 3


@pytest.mark.seed("S002-67")
@pytest.mark.parametrize(
    ("held", "new", "lookahead", "touched"),
    [
        *((4, 1, 0, 1), (4, 2, 0, 1), (4, 3, 0, 2), (3, 1, 0, 1), (3, 2, 0, 2), (3, 1, 4, 3)),
        *((3, 0, 0, 1), (4, 0, 0, 0), (3, 0, 3, 2)),
    ],
)
def test_touched_blocks_hold_new_tokens_and_slots_ahead(
    backend: Backend, held: int, new: int, lookahead: int, touched: int
) -> None:
    made = table(two_tiers(backend, 8), held)
    tokens = list(range(held, held + new))
    assert made.get_num_blocks_touched_by_append_slots(tokens, lookahead) == touched


@pytest.mark.seed("S002-68")
@pytest.mark.parametrize("kind", KINDS)
def test_appending_to_a_fork_makes_one_copy_with_slots_ahead_or_without(
    backend: Backend, kind: str
) -> None:
    tiers = two_tiers(backend, 8, 0, kind)
    made = table(tiers, 3)
    fork = made.fork()
    assert fork.physical_block_ids == [0, 1]
    fork.append_token_ids([8])
    assert (fork.physical_block_ids, made.physical_block_ids) == ([0, 2], [0, 1])
    assert tiers.clear_copy_on_writes() == [(1, 2)]
    made.append_token_ids([9])
    assert (made.physical_block_ids, tiers.clear_copy_on_writes()) == ([0, 1], [])
    tail = made.fork()
    tail.append_token_ids([7])
    ahead = tail.fork()
    ahead.ensure_num_empty_slots(3)
    assert tiers.clear_copy_on_writes() == []
    ahead.append_token_ids([5, 6, 7])
    assert tiers.clear_copy_on_writes() == [(3, 5)]
    for each in (made, fork, tail, ahead):
        each.free()
    assert tiers.get_num_free_blocks(GPU) == 8


@pytest.mark.seed("S002-70")
@pytest.mark.parametrize("kind", KINDS)
def test_the_null_block_is_a_gpu_block_taken_when_first_asked_for(
    backend: Backend, kind: str
) -> None:
    tiers = two_tiers(backend, 2, 0, kind)
    assert tiers.get_num_free_blocks(GPU) == 2
    held = tiers.allocate_mutable_block(None, GPU)
    null = tiers.allocate_or_get_null_block()
    assert tiers.allocate_or_get_null_block() is null
    assert (held.block_id, null.block_id, tiers.get_num_free_blocks(GPU)) == (0, 1, 0)
    tiers.free(null)
    tiers.free(null)
    assert tiers.get_num_free_blocks(GPU) == 0
    wrong: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: null.append_token_ids([1]), ValueError),
        (lambda: setattr(null, "block_id", None), ValueError),
        (lambda: tiers.fork(null), AssertionError),
    ]
    for call, kind_of_error in wrong:
        error = unchanged(call, tiers)
        assert isinstance(error, kind_of_error)
        assert "null block 1" in str(error)
    full_tiers = two_tiers(backend, 1, 0, kind)
    full_tiers.allocate_mutable_block(None, GPU)
    error = unchanged(full_tiers.allocate_or_get_null_block, full_tiers)
    assert isinstance(error, NoFreeBlocksError)


@pytest.mark.seed("S002-71")
def test_there_are_two_kinds_of_allocators_and_ids_belong_to_one(backend: Backend) -> None:
    for kind, made in zip(KINDS, (NaiveBlockAllocator, PrefixCachingBlockAllocator), strict=True):
        assert isinstance(two_tiers(backend, 1, 1, kind).allocator(CPU), made)
    for unknown in ("", "lru", "prefix"):
        with pytest.raises(ValueError, match="there are naive and prefix_caching"):
            two_tiers(backend, 1, 1, unknown)
    gpu = PrefixCachingBlockAllocator(3, 2, [7, 8, 9], backend=backend)
    with pytest.raises(AssertionError, match=r"blocks \[9\] are the CPU's and the GPU's"):
        CpuGpuBlockAllocator(PrefixCachingBlockAllocator(2, 2, [9, 1], backend=backend), gpu)
    tiers = CpuGpuBlockAllocator(
        cpu_block_allocator=PrefixCachingBlockAllocator(2, 2, [5, 1], backend=backend),
        gpu_block_allocator=gpu,
    )
    assert [tiers.allocate_mutable_block(None, CPU).block_id for _ in range(2)] == [5, 1]
    gpu.allocate_mutable_block(None)
    with pytest.raises(AssertionError, match="2 of 3 blocks are free"):
        CpuGpuBlockAllocator(PrefixCachingBlockAllocator(1, 2, [0], backend=backend), gpu)


@pytest.mark.seed("S002-50", "S002-65")
def test_swapped_blocks_are_copied_unless_their_content_is_there(backend: Backend) -> None:
    tiers = two_tiers(backend, 4, 4)
    made = table(tiers, 5)
    tiers.mark_blocks_as_computed([])
    tiers.take_batch()
    assert tiers.swap(made.blocks, GPU, CPU) == {0: 4, 1: 5, 2: 6}
    assert [each for each in tiers.take_batch() if isinstance(each, SwapOut)] == [
        SwapOut(0, 0),
        SwapOut(1, 1),
        SwapOut(2, 2),
    ]
    made.update(list(made.blocks))
    assert made.physical_block_ids == [4, 5, 6]
    assert tiers.get_and_reset_swaps() == [(0, 4), (1, 5), (2, 6)]
    assert tiers.get_and_reset_swaps() == []
    # Blocks 0 and 1 were kept: the way back copies the last block alone.
    mapping = tiers.swap(made.blocks, CPU, GPU)
    assert mapping == {4: 0, 5: 1, 6: 2}
    assert [each for each in tiers.take_batch() if isinstance(each, SwapIn)] == [SwapIn(2, 2)]


@pytest.mark.seed("S002-50")
def test_a_swap_that_does_not_fit_changes_nothing(backend: Backend) -> None:
    tiers = two_tiers(backend, 4, 2)
    made = table(tiers, 5)
    blocks = made.blocks
    error = unchanged(lambda: tiers.swap(blocks, GPU, CPU), tiers, made)
    assert isinstance(error, NoFreeBlocksError)
    assert "3 blocks are needed, 2 of 2 are free" in str(error)
    # One full block is there already, in use: two more are needed.
    tiers.allocate_immutable_block(None, [0, 1], CPU)
    assert tiers.get_num_full_blocks_touched(made.blocks, CPU) == 1
    error = unchanged(lambda: tiers.swap(made.blocks, GPU, GPU), tiers, made)
    assert isinstance(error, AssertionError)
    error = unchanged(lambda: tiers.swap(made.blocks, CPU, GPU), tiers, made)
    assert isinstance(error, KeyError)


@pytest.mark.seed("S002-66")
def test_a_table_that_does_not_fit_takes_nothing(backend: Backend) -> None:
    tiers = two_tiers(backend, 2, 0)
    made = table(tiers)
    calls: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: made.allocate([1, 2, 3, 4, 5]), NoFreeBlocksError),
        (lambda: made.allocate([]), AssertionError),
        (lambda: made.append_token_ids([1]), AssertionError),
        (lambda: made.ensure_num_empty_slots(1), AssertionError),
        (lambda: made.fork(), AssertionError),
    ]
    for call, kind in calls:
        assert isinstance(unchanged(call, tiers, made), kind)
    made.allocate([1, 2, 3])
    error = unchanged(lambda: made.append_token_ids([4, 5]), tiers, made)
    assert isinstance(error, NoFreeBlocksError)
    fork = made.fork()
    error = unchanged(lambda: fork.append_token_ids([4]), tiers, made, fork)
    assert isinstance(error, NoFreeBlocksError)
    assert isinstance(unchanged(lambda: made.allocate([1]), tiers, made), AssertionError)


@pytest.mark.seed("S002-50")
def test_shared_content_is_moved_once_and_shared_again(backend: Backend) -> None:
    tiers = two_tiers(backend, 8, 5)
    made = table(tiers, 5)
    blocks = [*made.blocks, *made.fork().blocks, *made.fork().blocks]
    tiers.take_batch()
    tiers.swap(blocks, GPU, CPU)
    # Two contents, and the part-full block of each of the three.
    assert ids(blocks) == [8, 9, 10, 8, 9, 11, 8, 9, 12]
    copies = [each for each in tiers.take_batch() if isinstance(each, SwapOut)]
    assert [(each.block, each.host_block) for each in copies] == [
        *((0, 0), (1, 1), (2, 2), (2, 3), (2, 4))
    ]
    assert (tiers.get_num_free_blocks(GPU), tiers.get_num_free_blocks(CPU)) == (8, 0)
