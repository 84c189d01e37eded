# SPDX-License-Identifier: Apache-2.0
"""The early block allocator: a stack of blocks for one device."""

from __future__ import annotations

import pytest

from kvcore.legacy.v0.interfaces import Device
from kvcore.legacy.v0_3.block_allocator import BlockAllocator, PhysicalTokenBlock
from kvcore.legacy.v0_3.errors import AlreadyFreed, ForeignBlock, OutOfMemory
from kvcore.types.commands import Allocate, Free
from kvcore.types.errors import DoubleFree, InvalidCount, KvcoreError
from tests.conftest import Backend


@pytest.fixture(params=list(Device), ids=lambda device: device.name)
def device(request: pytest.FixtureRequest) -> Device:
    """Return each device in turn."""
    chosen: Device = request.param
    return chosen


def free_numbers(allocator: BlockAllocator) -> list[int]:
    """Return the stack of an allocator, the next block last."""
    return [block.block_number for block in allocator.free_blocks]


@pytest.mark.seed("S003-01", "X-01")
def test_blocks_are_a_stack_with_the_highest_number_on_top(
    backend: Backend, device: Device
) -> None:
    allocator = BlockAllocator(device, 16, 4, backend=backend)
    assert free_numbers(allocator) == [0, 1, 2, 3]
    assert [allocator.allocate().block_number for _ in range(4)] == [3, 2, 1, 0]
    assert (allocator.device, allocator.block_size, allocator.num_blocks) == (device, 16, 4)


@pytest.mark.seed("S003-02")
def test_an_allocated_block_has_one_owner(backend: Backend, device: Device) -> None:
    allocator = BlockAllocator(device, 16, 2, backend=backend)
    block = allocator.allocate()
    assert (block.ref_count, block.device, block.block_size) == (1, device, 16)
    assert allocator.get_num_free_blocks() == 1


@pytest.mark.seed("S003-02")
def test_without_a_free_block_allocation_says_so(backend: Backend, device: Device) -> None:
    allocator = BlockAllocator(device, 16, 1, backend=backend)
    allocator.allocate()
    before = allocator.backing.state()
    text = rf"^Out of memory! No free blocks are available\. .* 0 of 1 blocks on the {device.name}"
    with pytest.raises(ValueError, match=text) as caught:
        allocator.allocate()
    assert isinstance(caught.value, OutOfMemory)
    assert allocator.backing.state() == before


@pytest.mark.seed("S003-03")
def test_the_last_owner_puts_a_block_on_top_of_the_stack(backend: Backend, device: Device) -> None:
    allocator = BlockAllocator(device, 16, 4, backend=backend)
    third, second = allocator.allocate(), allocator.allocate()
    allocator.hold([third.block_number])
    allocator.free(third)
    assert (third.ref_count, free_numbers(allocator)) == (1, [0, 1])
    allocator.free(third)
    assert (third.ref_count, free_numbers(allocator)) == (0, [0, 1, 3])
    allocator.free(second)
    assert allocator.allocate() is second
    assert allocator.allocate() is third


@pytest.mark.seed("S003-03", "X-14")
def test_a_block_is_not_freed_twice(backend: Backend, device: Device) -> None:
    allocator = BlockAllocator(device, 16, 2, backend=backend)
    block = allocator.allocate()
    allocator.free(block)
    before = allocator.backing.state()
    text = r"^Double free! .*block_number=1, ref_count=0.* is already freed\.$"
    with pytest.raises(ValueError, match=text) as caught:
        allocator.free(block)
    assert isinstance(caught.value, AlreadyFreed)
    assert isinstance(caught.value, DoubleFree)
    assert allocator.backing.state() == before


def test_a_kept_block_shows_its_owners_as_they_come_and_go(backend: Backend) -> None:
    allocator = BlockAllocator(Device.GPU, 16, 2, backend=backend)
    kept = allocator.free_blocks[-1]
    assert kept.ref_count == 0
    assert allocator.allocate() is kept
    assert kept.ref_count == 1
    allocator.hold([kept.block_number] * 2)
    assert kept.ref_count == 3
    assert repr(kept) == "PhysicalTokenBlock(device=Device.GPU, block_number=1, ref_count=3)"


def test_the_gpu_s_blocks_are_said_to_the_runtime(backend: Backend) -> None:
    allocator = BlockAllocator(Device.GPU, 16, 2, backend=backend)
    allocator.free(allocator.allocate())
    assert list(allocator.take_batch()) == [Allocate(1), Free(1, False)]
    assert list(allocator.take_batch()) == []


def test_blocks_of_others_are_not_freed(backend: Backend, device: Device) -> None:
    allocator = BlockAllocator(device, 16, 2, backend=backend)
    other = BlockAllocator(device, 16, 2, backend=backend)
    block = allocator.allocate()
    before = allocator.backing.state()
    for stranger in (other.allocate(), PhysicalTokenBlock(device, 1, 16), 1, None):
        with pytest.raises(ForeignBlock, match="none of the 2 blocks"):
            allocator.free(stranger)  # type: ignore[arg-type] # what a caller may get wrong
    assert allocator.backing.state() == before
    assert block.ref_count == 1
    assert PhysicalTokenBlock(device, 1, 16).ref_count == 0


def test_sizes_that_are_none_are_refused(backend: Backend, device: Device) -> None:
    for size, count in ((0, 4), (16, -1), ("x", 4), (16, None)):
        with pytest.raises(InvalidCount):
            BlockAllocator(device, size, count, backend=backend)  # type: ignore[arg-type] # bad
    with pytest.raises(KvcoreError):
        BlockAllocator(device, 16, 4, backend="no such")  # type: ignore[arg-type] # bad


def test_an_allocator_may_have_no_blocks(backend: Backend, device: Device) -> None:
    allocator = BlockAllocator(device, 16, 0, backend=backend)
    assert (allocator.get_num_free_blocks(), allocator.free_blocks) == (0, [])
    with pytest.raises(OutOfMemory, match="0 of 0 blocks"):
        allocator.allocate()
