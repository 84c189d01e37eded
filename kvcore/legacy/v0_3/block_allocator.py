# SPDX-License-Identifier: Apache-2.0
"""The allocator of the early manager for one device, and live views of its blocks.

Free blocks are a stack: the highest number is taken first, and the block that was freed last is
taken next. The core's pool keeps the owners and the stack; a `PhysicalTokenBlock` reads them.
Source: S003-01 to S003-03.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.blocks.named_enum import Device
from kvcore.legacy.v0_3.errors import AlreadyFreed, ForeignBlock, OutOfMemory
from kvcore.types.arguments import read_count
from kvcore.types.commands import Batch, Tier
from kvcore.types.values import Refused


class PhysicalTokenBlock:
    """One block: its number, and a live count of its owners."""

    __slots__ = ("_allocator", "block_number", "block_size", "device")

    def __init__(
        self,
        device: Device,
        block_number: int,
        block_size: int,
        allocator: BlockAllocator | None = None,
    ) -> None:
        self.device = device
        self.block_number = block_number
        self.block_size = block_size
        self._allocator = allocator

    @property
    def ref_count(self) -> int:
        """The number of owners; 0 for a block without an allocator."""
        return 0 if self._allocator is None else self._allocator.ref_count(self.block_number)

    def __repr__(self) -> str:
        return (
            f"PhysicalTokenBlock(device={self.device}, block_number={self.block_number}, "
            f"ref_count={self.ref_count})"
        )


class BlockTable(Sequence[PhysicalTokenBlock]):
    """The blocks of a sequence by position, all on one device; reads as a list of blocks.

    numbers: block numbers by position. num_prefix: number of leading blocks that are not part of a
    window's ring. is_ring: whether a block may stand at several positions.
    """

    __slots__ = ("allocator", "is_ring", "num_prefix", "numbers")

    def __init__(
        self,
        allocator: BlockAllocator,
        numbers: list[int],
        num_prefix: int = 0,
        is_ring: bool = False,
    ) -> None:
        self.allocator = allocator
        self.numbers = numbers
        self.num_prefix = num_prefix
        self.is_ring = is_ring

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> PhysicalTokenBlock: ...
    @overload
    def __getitem__(self, index: slice) -> list[PhysicalTokenBlock]: ...
    def __getitem__(self, index: int | slice) -> PhysicalTokenBlock | list[PhysicalTokenBlock]:
        if isinstance(index, slice):
            return [self.allocator.block(number) for number in self.numbers[index]]
        return self.allocator.block(self.numbers[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockTable | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment] # as a list

    def __repr__(self) -> str:
        return f"BlockTable({self.allocator.device.name}, {self.numbers}, {self.num_prefix})"

    def copy(self) -> BlockTable:
        """Return a copy of the table over the same blocks."""
        return BlockTable(self.allocator, self.numbers.copy(), self.num_prefix, self.is_ring)

    def distinct(self) -> list[int]:
        """Return each block number once, by its first position; the caller must not change it."""
        return list(dict.fromkeys(self.numbers)) if self.is_ring else self.numbers

    def next_of_ring(self, window: int) -> int:
        """Return the block of a full window of `window` blocks that is reused next."""
        return self.numbers[self.num_prefix + (len(self.numbers) - self.num_prefix) % window]

    def reuse(self, window: int) -> None:
        """Append the block that `next_of_ring` returns."""
        self.numbers.append(self.next_of_ring(window))
        self.is_ring = True

    def replace(self, number: int, target: int) -> tuple[int, int]:
        """Replace a block at all its positions; a block of the prefix then belongs to the ring.

        Returns both numbers.
        """
        numbers = self.numbers
        if self.is_ring:
            self.numbers = [target if each == number else each for each in numbers]
        else:
            place = numbers.index(number, 0 if numbers[-1] != number else len(numbers) - 1)
            numbers[place] = target
            if self.num_prefix > place:
                self.num_prefix = place
        return number, target


class BlockAllocator:
    """The blocks of one device.

    backing: that of a manager which also has the blocks of another device; None: the allocator
    makes its own. Raises InvalidCount, InvalidConfig, BackendMissing.
    """

    def __init__(
        self,
        device: Device,
        block_size: int,
        num_blocks: int,
        *,
        backend: BackendName = "python",
        backing: Backing | None = None,
    ) -> None:
        self.device = device
        self.block_size = read_count("block_size", block_size, 1)
        self.num_blocks = read_count("num_blocks", num_blocks)
        self.tier: Tier = "device" if device == Device.GPU else "host"
        self.backing = backing or make_backing(
            *((0, num_blocks) if device == Device.CPU else (num_blocks, 0)), backend=backend
        )
        self._blocks = tuple(
            PhysicalTokenBlock(device, number, block_size, self) for number in range(num_blocks)
        )

    def __repr__(self) -> str:
        free = self.get_num_free_blocks()
        return f"<BlockAllocator {self.device.name}: {free} of {self.num_blocks} blocks free>"

    def allocate(self) -> PhysicalTokenBlock:
        """Take a free block and give it one owner. Raises OutOfMemory."""
        return self._blocks[self.take(1, "the call", None)[0]]

    def take(self, count: int, kind: str, name: object) -> tuple[int, ...]:
        """Take free blocks, give each one owner, and return their numbers.

        kind, name: the user of the blocks, for messages. Raises OutOfMemory and takes none.
        """
        if not count:
            return ()
        taken = self.backing.blocks.take(count, self.tier) if self.num_blocks else None
        if taken is None or type(taken) is Refused:
            raise self.out_of_memory(count, kind, name)
        return taken

    def bring(self, numbers: Sequence[int], kind: str, name: object) -> dict[int, int]:
        """Move an owner of each block of the other device here; returns block -> its copy.

        kind, name: the user of the blocks, for messages. Raises OutOfMemory and moves none.
        """
        if not numbers:
            return {}
        blocks = self.backing.blocks
        move = blocks.move_out if self.tier == "host" else blocks.move_in
        moved = move(numbers) if self.num_blocks else None
        if moved is None or type(moved) is Refused:
            raise self.out_of_memory(len(set(numbers)), kind, name)
        return moved

    def out_of_memory(self, count: int, kind: str, name: object) -> OutOfMemory:
        """Return the error that says who needs how many blocks."""
        return OutOfMemory(
            who=kind if name is None else f"{kind} {name!r}",
            needed=count,
            available=self.get_num_free_blocks(),
            num_blocks=self.num_blocks,
            device=self.device.name,
        )

    def free(self, block: PhysicalTokenBlock) -> None:
        """Take one owner from a block. Raises AlreadyFreed, ForeignBlock."""
        self.check_own(block)
        if block.ref_count == 0:
            raise AlreadyFreed(block=block, ref_count=0, requested=1)
        self.release([block.block_number])

    def hold(self, numbers: Sequence[int]) -> None:
        """Add one owner to each block per occurrence in numbers."""
        if numbers:
            self.backing.blocks.touch(numbers, self.tier)

    def release(self, numbers: Sequence[int]) -> None:
        """Take one owner from each block per occurrence in numbers, in order."""
        if numbers:
            self.backing.blocks.release(numbers, self.tier)

    def check_own(self, block: PhysicalTokenBlock) -> None:
        """Raise ForeignBlock unless the block belongs to this allocator."""
        number = getattr(block, "block_number", None)
        own = isinstance(number, int) and 0 <= number < self.num_blocks and self._blocks[number]
        if own is not block:
            raise ForeignBlock(block=block, num_blocks=self.num_blocks, device=self.device.name)

    def block(self, number: int) -> PhysicalTokenBlock:
        """Return the view of a block."""
        return self._blocks[number]

    def ref_count(self, number: int) -> int:
        """Return the number of owners of a block."""
        return self.backing.blocks.ref_count(number, self.tier)

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks without an owner."""
        return self.backing.blocks.num_free(self.tier) if self.num_blocks else 0

    @property
    def free_blocks(self) -> list[PhysicalTokenBlock]:
        """The blocks without an owner; the last one is taken next. Cost: O(free blocks)."""
        numbers = self.backing.blocks.free_blocks(self.tier) if self.num_blocks else ()
        return [self._blocks[number] for number in reversed(numbers)]

    def take_batch(self) -> Batch:
        """Close the open batch and return its commands, those since the last call."""
        return self.backing.take_batch()


def make_backing(
    num_gpu_blocks: int, num_cpu_blocks: int, *, backend: BackendName = "python"
) -> Backing:
    """Make one stack of blocks per device; the highest number is taken first."""
    return Backing(
        num_gpu_blocks,
        num_cpu_blocks,
        eviction="uncached_first",
        order="descending",
        backend=backend,
    )
