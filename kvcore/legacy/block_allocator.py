# SPDX-License-Identifier: Apache-2.0
"""The early manager's blocks: an allocator for one device, and live views of its blocks.

Rules: free blocks are a stack: the highest number is taken first, and what was freed last is taken
next. A block's owners and the stack are the core's pool's; a `PhysicalTokenBlock` asks for them.
Source: S003-01 to S003-03. Twin: none.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from kvcore.arguments import read_count
from kvcore.commands import Batch, Tier
from kvcore.legacy.backing import BackendName, Backing
from kvcore.legacy.space_errors import AlreadyFreed, ForeignBlock, OutOfMemory
from kvcore.values import Refused


class Device(enum.Enum):
    """Where a block lies."""

    GPU = enum.auto()
    CPU = enum.auto()


class PhysicalTokenBlock:
    """One block: its number, and its owners at the time of the question."""

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
        """Owners; none of a block that no allocator has."""
        return 0 if self._allocator is None else self._allocator.ref_count(self.block_number)

    def __repr__(self) -> str:
        return (
            f"PhysicalTokenBlock(device={self.device}, block_number={self.block_number}, "
            f"ref_count={self.ref_count})"
        )


class BlockTable(list[PhysicalTokenBlock]):
    """The blocks of a sequence by position; the first num_prefix are no part of a window's ring."""

    num_prefix = 0

    def copy(self) -> BlockTable:
        """The same blocks in another table."""
        return make_table(self, self.num_prefix)

    def ring_block(self, window: int) -> PhysicalTokenBlock:
        """The block that a window of so many blocks, all here, uses again behind the last one."""
        return self[self.num_prefix + (len(self) - self.num_prefix) % window]

    def replace(self, block: PhysicalTokenBlock, target: PhysicalTokenBlock) -> None:
        """Put another block in all places of a block; from the first one on all is the ring's."""
        self.num_prefix = min(self.num_prefix, self.index(block))
        self[:] = [target if each is block else each for each in self]

    def distinct(self) -> list[PhysicalTokenBlock]:
        """Each block once, by its first position."""
        return list(dict.fromkeys(self))


def make_table(blocks: Iterable[PhysicalTokenBlock], num_prefix: int = 0) -> BlockTable:
    """A table of these blocks."""
    table = BlockTable(blocks)
    table.num_prefix = num_prefix
    return table


class BlockAllocator:
    """The blocks of one device.

    backing: of a manager that has another device's blocks beside these; without it, the allocator
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
        self.tier: Tier = "device" if device is Device.GPU else "host"
        self.backing = backing or make_backing(
            *((0, num_blocks) if device is Device.CPU else (num_blocks, 0)), backend=backend
        )
        self._blocks = tuple(
            PhysicalTokenBlock(device, number, block_size, self) for number in range(num_blocks)
        )

    def __repr__(self) -> str:
        free = self.get_num_free_blocks()
        return f"<BlockAllocator {self.device.name}: {free} of {self.num_blocks} blocks free>"

    def allocate(self) -> PhysicalTokenBlock:
        """A block with one owner. Raises OutOfMemory."""
        return self.allocate_many(1, "the call")[0]

    def allocate_many(self, count: int, who: str) -> list[PhysicalTokenBlock]:
        """So many blocks with one owner each, or none. who: for the message of OutOfMemory."""
        if not count:
            return []
        taken = self.backing.take(count, self.tier) if self.num_blocks else None
        if taken is None or isinstance(taken, Refused):
            raise self.out_of_memory(count, who)
        return [self._blocks[number] for number in taken]

    def out_of_memory(self, count: int, who: str) -> OutOfMemory:
        """The error of who needs so many blocks."""
        return OutOfMemory(
            who=who,
            needed=count,
            available=self.get_num_free_blocks(),
            num_blocks=self.num_blocks,
            device=self.device.name,
        )

    def free(self, block: PhysicalTokenBlock) -> None:
        """Take one owner from a block. Raises AlreadyFreed, ForeignBlock."""
        self.check_own(block)
        if block.ref_count == 0:
            raise AlreadyFreed(block=repr(block), ref_count=0, asked=1)
        self.release([block])

    def hold(self, blocks: list[PhysicalTokenBlock]) -> None:
        """Add one owner to each block, as often as it is named."""
        if blocks:
            self.backing.touch([block.block_number for block in blocks], self.tier)

    def release(self, blocks: list[PhysicalTokenBlock]) -> None:
        """Take one owner from each block, in order, as often as it is named."""
        if blocks:
            self.backing.release([block.block_number for block in blocks], self.tier)

    def check_own(self, block: PhysicalTokenBlock) -> None:
        """Raise ForeignBlock unless a block is one of these."""
        number = getattr(block, "block_number", None)
        own = isinstance(number, int) and 0 <= number < self.num_blocks and self._blocks[number]
        if own is not block:
            raise ForeignBlock(
                block=repr(block), num_blocks=self.num_blocks, device=self.device.name
            )

    def block(self, number: int) -> PhysicalTokenBlock:
        """The view of a block."""
        return self._blocks[number]

    def ref_count(self, number: int) -> int:
        """Owners of a block."""
        return self.backing.ref_count(number, self.tier)

    def get_num_free_blocks(self) -> int:
        """Blocks without owner."""
        return self.backing.num_free(self.tier) if self.num_blocks else 0

    @property
    def free_blocks(self) -> list[PhysicalTokenBlock]:
        """The blocks without owner, the next to be taken last. Cost: O(free blocks)."""
        numbers = self.backing.free_blocks(self.tier) if self.num_blocks else ()
        return [self._blocks[number] for number in reversed(numbers)]

    def take_batch(self) -> Batch:
        """The commands since the last call."""
        return self.backing.take_batch()


def make_backing(
    num_gpu_blocks: int, num_cpu_blocks: int, *, backend: BackendName = "python"
) -> Backing:
    """Blocks of a stack each, for the GPU and the CPU: the highest number is taken first."""
    return Backing(
        num_gpu_blocks,
        num_cpu_blocks,
        eviction="uncached_first",
        order="descending",
        backend=backend,
    )
