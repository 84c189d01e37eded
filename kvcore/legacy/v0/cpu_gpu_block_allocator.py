# SPDX-License-Identifier: Apache-2.0
"""One allocator for the GPU and the CPU, made of two, with swaps between them.

Ids of the GPU come first; the id of a block tells which allocator frees it. Both use one backing:
the blocks of the GPU are its device tier, those of the CPU its host tier. Swapped blocks are copied
before they are freed; a block whose content is already there is not copied. The null block is a
GPU block that is taken when it is first needed, and never freed.
Source: S002-50, 65, 69 to 71.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.blocks.named_enum import Device
from kvcore.legacy.v0.block import Block, BlockId, NaiveBlock, NullBlock
from kvcore.legacy.v0.block_allocator import BlockAllocator
from kvcore.legacy.v0.common import ids_of
from kvcore.legacy.v0.errors import NotSupported, UnknownDevice, UnknownName, WrongValue, require
from kvcore.legacy.v0.naive_block import NaiveBlockAllocator
from kvcore.legacy.v0.prefix_caching_allocator import PrefixCachingBlockAllocator
from kvcore.legacy.v0.tier_blocks import TierBlocks
from kvcore.types.arguments import read_count
from kvcore.types.commands import Batch

KINDS: dict[str, Callable[..., BlockAllocator]] = {
    "naive": partial(NaiveBlockAllocator, NaiveBlock),
    "prefix_caching": PrefixCachingBlockAllocator,
}


class CpuGpuBlockAllocator:
    """The blocks of the GPU and of the CPU."""

    @staticmethod
    def create(
        allocator_type: str,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        *,
        backend: BackendName = "python",
    ) -> CpuGpuBlockAllocator:
        """Make an allocator of a type. Raises WrongValue for an unknown type, InvalidCount."""
        kind = KINDS.get(allocator_type)
        if kind is None:
            known = " and ".join(KINDS)
            raise WrongValue(reason=f"unknown allocator type {allocator_type!r}: there are {known}")
        num_gpu = read_count("num_gpu_blocks", num_gpu_blocks)
        num_cpu = read_count("num_cpu_blocks", num_cpu_blocks)
        ids = range(num_gpu + num_cpu)
        on_gpu = kind(num_gpu, block_size, ids[:num_gpu], backend=backend)
        on_cpu = kind(num_cpu, block_size, ids[num_gpu:], backend=backend)
        return CpuGpuBlockAllocator(on_cpu, on_gpu)

    def __init__(
        self, cpu_block_allocator: BlockAllocator, gpu_block_allocator: BlockAllocator
    ) -> None:
        """Takes over two allocators.

        Raises WrongCall if a block of one is in use, or if they share ids.
        """
        on_cpu, on_gpu = cpu_block_allocator, gpu_block_allocator
        shared = sorted(on_cpu.all_block_ids & on_gpu.all_block_ids)
        require(not shared, "blocks {blocks} are the CPU's and the GPU's", blocks=shared)
        sizes = [each.get_num_total_blocks() for each in (on_gpu, on_cpu)]
        for allocator, total in zip((on_gpu, on_cpu), sizes, strict=True):
            free = allocator.get_num_free_blocks()
            require(free == total, "{free} of {total} blocks are free", free=free, total=total)
        self.backing = Backing(*sizes, eviction="priority", backend=on_gpu.backend)
        on_gpu.rebind(TierBlocks(self.backing, "device", on_gpu.blocks.order))
        if sizes[1]:  # else it keeps its own empty backing
            on_cpu.rebind(TierBlocks(self.backing, "host", on_cpu.blocks.order))
        self.on_gpu = on_gpu
        self._allocators = {Device.CPU: on_cpu, Device.GPU: on_gpu}
        self.all_block_ids: frozenset[BlockId] = on_gpu.all_block_ids | on_cpu.all_block_ids
        self._swap_mapping: dict[BlockId, BlockId] = {}
        self._null_block: NullBlock | None = None

    @property
    def has_null_block(self) -> bool:
        """Whether the null block has been taken."""
        return self._null_block is not None

    def take_batch(self) -> Batch:
        """Close and number the open batch; it holds the commands since the previous one."""
        return self.backing.take_batch()

    def allocator(self, device: Device) -> Any:
        """Return the allocator of a device. Raises WrongValue."""
        return self._of(device)

    def owner(self, block: Block) -> BlockAllocator:
        """Return the allocator of a block. Raises WrongCall if it has no id, UnknownName."""
        (block_id,) = ids_of([block], "Freeing unallocated block is undefined")
        return self._allocators[self._device(block_id)]

    def allocate_or_get_null_block(self) -> NullBlock:
        """Return the null block, taking it if needed. Raises NoFreeBlocksError."""
        if self._null_block is None:
            self._null_block = NullBlock(self.allocate_mutable_block(None, Device.GPU))
        return self._null_block

    def allocate_mutable_block(
        self, prev_block: Block | None, device: Device, extra_hash: int | None = None
    ) -> Any:
        """Take a block and return an empty object for it. Raises WrongValue, NoFreeBlocksError."""
        return self._of(device).allocate_mutable_block(prev_block, extra_hash)

    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        device: Device,
        extra_hash: int | None = None,
    ) -> list[Any]:
        """Allocate full blocks, all or none. Raises WrongCall, WrongValue, NoFreeBlocksError."""
        allocator = self._of(device)
        return allocator.allocate_immutable_blocks(prev_block, block_token_ids, extra_hash)

    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        device: Device,
        extra_hash: int | None = None,
    ) -> Any:
        """Allocate a full block. Raises WrongCall, WrongValue, NoFreeBlocksError."""
        return self.allocate_immutable_blocks(prev_block, [token_ids], device, extra_hash)[0]

    def free(self, block: Block, keep_block_object: bool = False) -> None:
        """Free a block in its own allocator; does nothing for the null block. Raises WrongCall."""
        if not isinstance(block, NullBlock):
            self.owner(block).free(block, keep_block_object)

    def free_all(self, blocks: Sequence[Block]) -> None:
        """Free blocks of one device, all or none, except the null block. Raises WrongCall."""
        real = [block for block in blocks if not isinstance(block, NullBlock)]
        if real:
            self.owner(real[0]).free_all(real)

    def fork(self, last_block: Block) -> list[Block]:
        """Return another chain over the same blocks. Raises WrongCall."""
        reason = "the null block {block} is forked"
        require(not isinstance(last_block, NullBlock), reason, block=last_block.block_id)
        return self.owner(last_block).fork(last_block)

    def get_num_free_blocks(self, device: Device) -> int:
        """Return the number of blocks of a device without an owner."""
        return self._of(device).get_num_free_blocks()

    def get_num_total_blocks(self, device: Device) -> int:
        """Return the number of all blocks of a device."""
        return self._of(device).get_num_total_blocks()

    def get_physical_block_id(self, device: Device, absolute_id: BlockId) -> int:
        """Return the position of an id among those of a device. Raises WrongValue."""
        return self._of(device).get_physical_block_id(absolute_id)

    def get_num_full_blocks_touched(self, blocks: Sequence[Block], device: Device) -> int:
        """Return how many blocks of a device the full ones among these would take."""
        return self._of(device).get_num_full_blocks_touched(blocks)

    def swap(
        self, blocks: Sequence[Block], src_device: Device, dst_device: Device
    ) -> dict[BlockId, BlockId]:
        """Move blocks to the other device and return old id -> new id.

        Raises WrongCall, NoFreeBlocksError.
        """
        source, target = self.pair(src_device, dst_device)
        moved = [block for block in blocks if not isinstance(block, NullBlock)]
        old = self.move(moved, source, target)
        source.num_by_hand += 1
        target.num_by_hand += 1
        return dict(zip(old, ids_of(moved), strict=True))

    def pair(self, src_device: Device, dst_device: Device) -> tuple[BlockAllocator, BlockAllocator]:
        """Return the allocators of two devices. Raises WrongCall if they are equal, WrongValue."""
        source, target = self._of(src_device), self._of(dst_device)
        if source is target:
            reason = "blocks are swapped from {device} to itself"
            require(False, reason, device=src_device.name)
        return source, target

    def move(
        self, blocks: Sequence[Block], source: BlockAllocator, target: BlockAllocator
    ) -> list[BlockId]:
        """Exchange blocks for blocks of the other device, all or none; returns the old ids.

        Raises WrongCall, UnknownName, NoFreeBlocksError.
        """
        old = source.check_held(blocks)
        new, there = target.place_contents(blocks, f"swap in of {len(old)} blocks")
        copies = dict(zip(new, old, strict=True))
        for block, block_id in zip(blocks, new, strict=True):
            if not block.token_ids or block_id in there:
                copies.pop(block_id, None)
        of, to = source.blocks.places(copies.values()), target.blocks.places(copies)
        for pair in zip(of, to, strict=True):
            if target is self.on_gpu:
                self.backing.blocks.copy_in(*pair)
            else:
                self.backing.blocks.copy_out(*pair)
        if target is not self.on_gpu:
            target.note_written(copies)
        source.give_back(old)
        target.adopt(blocks, new)
        self._swap_mapping.update(zip(old, new, strict=True))
        return old

    def get_and_reset_swaps(self) -> list[tuple[BlockId, BlockId]]:
        """Return (old id, new id) of the blocks swapped since the last call."""
        swaps, self._swap_mapping = list(self._swap_mapping.items()), {}
        return swaps

    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        """Return (source, target) of each copy on the GPU since the last call, in order."""
        return self.on_gpu.clear_copy_on_writes()

    def mark_blocks_as_accessed(self, block_ids: list[BlockId], now: float) -> None:
        """Record the access time of blocks in their allocators, if these cache prefixes.

        Raises WrongValue, UnknownName.
        """
        if self.on_gpu.caches:
            devices = [self._device(each) for each in block_ids]
            for device, allocator in self._allocators.items():
                mine = [each for each, its in zip(block_ids, devices, strict=True) if its is device]
                if mine:
                    allocator.mark_blocks_as_accessed(mine, now)

    def mark_blocks_as_computed(self, block_ids: list[BlockId]) -> None:
        """Mark all blocks promoted on the GPU since the last call as computed."""
        self.on_gpu.mark_blocks_as_computed(block_ids)

    def get_common_computed_block_ids(
        self, computed_seq_block_ids: list[list[BlockId]]
    ) -> list[BlockId]:
        """Return the common prefix of lists of block ids."""
        return self.on_gpu.get_common_computed_block_ids(computed_seq_block_ids)

    def find_cached_blocks_prefix(
        self, block_hashes: list[int], device: Device = Device.GPU
    ) -> list[int]:
        """Return the hashes up to the first that is not both cached and computed."""
        return self._of(device).find_cached_blocks_prefix(block_hashes)

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Return the share of look-ups that hit on a device; -1 without caching."""
        return self._of(device).get_prefix_cache_hit_rate()

    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        """Forget all content of a device, or of both, unless a block there is in use."""
        chosen = [*self._allocators.values()] if device is None else [self._of(device)]
        used = [each for each in chosen if each.get_num_free_blocks() < len(each.blocks)]
        if any(each.caches for each in used):
            return False
        return all(each.reset_prefix_cache() for each in chosen)

    def cow_block_if_not_appendable(self, block: Block) -> BlockId:
        """Raise NotSupported."""
        raise NotSupported(reason=f"block {block.block_id}: its own allocator copies it")

    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Raise NotSupported."""
        raise NotSupported(reason=f"block {block.block_id}: its own allocator promotes it")

    def _of(self, device: Device) -> BlockAllocator:
        """Return the allocator of a device, given by any enumeration with these names."""
        found = self._allocators.get(device)
        if found is None:
            raise UnknownDevice(reason=f"device must be Device.GPU or Device.CPU, not {device!r}")
        return found

    def _device(self, block_id: BlockId) -> Device:
        for device, allocator in self._allocators.items():
            if block_id in allocator.all_block_ids:
                return device
        known = f"there are {len(self.all_block_ids)} of both devices"
        raise UnknownName(name="block", value=block_id, known=known, block=block_id)


DeviceAwareBlockAllocator = CpuGpuBlockAllocator
