# SPDX-License-Identifier: Apache-2.0
"""Two allocators as one, for the GPU and the CPU, and swapping between them.

Rules: ids of the GPU come first. Which allocator frees a block follows from its id. Both work on
one backing, the GPU's blocks its device tier, the CPU's its host tier. Swapped blocks are copied
before they are given back; a block whose content is there already is not copied. The null block is
a GPU block that is taken when it is first asked for, and never given back. Source: S002-50, 65, 69
to 71.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.v0.block_interfaces import Block, BlockAllocator, BlockId, Device
from kvcore.legacy.v0.device_interfaces import DeviceAwareBlockAllocator
from kvcore.legacy.v0.errors import NotSupported, UnknownDevice, UnknownName, WrongValue, require
from kvcore.legacy.v0.naive_block import NaiveBlock, NaiveBlockAllocator
from kvcore.legacy.v0.null_block import NullBlock
from kvcore.legacy.v0.prefix_caching_allocator import PrefixCachingBlockAllocator
from kvcore.legacy.v0.tier_blocks import TierBlocks
from kvcore.types.arguments import read_count
from kvcore.types.commands import Batch

__all__ = [
    "KINDS",
    "Allocator",
    "Block",
    "BlockAllocator",
    "BlockId",
    "CpuGpuBlockAllocator",
    "Device",
    "DeviceAwareBlockAllocator",
    "NaiveBlock",
    "NaiveBlockAllocator",
    "NullBlock",
    "PrefixCachingBlockAllocator",
]

Allocator = NaiveBlockAllocator | PrefixCachingBlockAllocator

KINDS: dict[str, Callable[..., Allocator]] = {
    "naive": partial(NaiveBlockAllocator, NaiveBlock),
    "prefix_caching": PrefixCachingBlockAllocator,
}


class CpuGpuBlockAllocator(DeviceAwareBlockAllocator):
    """Blocks of the GPU and of the CPU."""

    @staticmethod
    def create(
        allocator_type: str,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        *,
        backend: BackendName = "python",
    ) -> CpuGpuBlockAllocator:
        """Fresh allocators. Raises WrongValue for an unknown type, InvalidCount."""
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

    def __init__(self, cpu_block_allocator: Allocator, gpu_block_allocator: Allocator) -> None:
        """Takes allocators over, none of whose blocks is used. Raises WrongCall else, and where
        they share ids.
        """
        on_cpu, on_gpu = cpu_block_allocator, gpu_block_allocator
        shared = sorted(on_cpu.all_block_ids & on_gpu.all_block_ids)
        require(not shared, "blocks {blocks} are the CPU's and the GPU's", blocks=shared)
        for allocator in (on_cpu, on_gpu):
            free, total = allocator.get_num_free_blocks(), allocator.get_num_total_blocks()
            require(free == total, "{free} of {total} blocks are free", free=free, total=total)
        backing = Backing(
            on_gpu.get_num_total_blocks(),
            on_cpu.get_num_total_blocks(),
            eviction="ranked",
            backend=on_gpu.backend,
        )
        on_gpu.rebind(TierBlocks(backing, "device", on_gpu.order))
        on_cpu.rebind(TierBlocks(backing, "host", on_cpu.order))
        self._backing = backing
        self._cpu: Any = on_cpu
        self._gpu: Any = on_gpu
        self.on_gpu: Any = on_gpu
        self._swap_mapping: dict[BlockId, BlockId] = {}
        self._null_block: NullBlock | None = None

    @property
    def backing(self) -> Backing:
        """The blocks of both in the core."""
        return self._backing

    @property
    def _allocators(self) -> dict[Device, Any]:
        """The allocator of each device, as tests of the original read them."""
        return {Device.CPU: self._cpu, Device.GPU: self._gpu}

    @property
    def all_block_ids(self) -> frozenset[BlockId]:
        """Every id."""
        ids: frozenset[BlockId] = self._gpu.all_block_ids | self._cpu.all_block_ids
        return ids

    @property
    def has_null_block(self) -> bool:
        """Whether the null block was taken."""
        return self._null_block is not None

    def take_batch(self) -> Batch:
        """Close and number the open batch: the commands since the last one."""
        return self._backing.take_batch()

    def allocator(self, device: Device) -> Any:
        """The allocator of a device. Raises WrongValue."""
        if device is Device.GPU:
            return self._gpu
        if device is Device.CPU:
            return self._cpu
        if device == Device.GPU:  # of an engine's own enumeration
            return self._gpu
        if device == Device.CPU:
            return self._cpu
        raise UnknownDevice(reason=f"device must be Device.GPU or Device.CPU, not {device!r}")

    def owner(self, block: Block) -> Any:
        """The allocator of a block. Raises WrongCall where it has no id, UnknownName."""
        block_id = block.block_id
        if block_id is None:
            reason = "Freeing unallocated block is undefined: it has no id, and {num} tokens"
            require(False, reason, num=len(block.token_ids))
        assert block_id is not None
        return self.allocator(self._device(block_id))

    def allocate_or_get_null_block(self) -> NullBlock:
        """The block that stands for none. Raises NoFreeBlocksError."""
        if self._null_block is None:
            self._null_block = NullBlock(self.allocate_mutable_block(None, Device.GPU))
        return self._null_block

    def allocate_mutable_block(
        self, prev_block: Block | None, device: Device, extra_hash: int | None = None
    ) -> Block:
        """An empty block. Raises WrongValue, NoFreeBlocksError."""
        block: Block = self.allocator(device).allocate_mutable_block(prev_block, extra_hash)
        return block

    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        device: Device,
        extra_hash: int | None = None,
    ) -> list[Block]:
        """Full blocks, all or none. Raises WrongCall, WrongValue, NoFreeBlocksError."""
        blocks: list[Block] = self.allocator(device).allocate_immutable_blocks(
            prev_block, block_token_ids, extra_hash
        )
        return blocks

    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        device: Device,
        extra_hash: int | None = None,
    ) -> Block:
        """A full block. Raises WrongCall, WrongValue, NoFreeBlocksError."""
        return self.allocate_immutable_blocks(prev_block, [token_ids], device, extra_hash)[0]

    def free(self, block: Block, keep_block_object: bool = False) -> None:
        """Give a block back to who owns it; the null block stays. Raises WrongCall."""
        if not isinstance(block, NullBlock):
            self.owner(block).free(block, keep_block_object)

    def fork(self, last_block: Block) -> list[Block]:
        """Another chain over the same blocks. Raises WrongCall."""
        reason = "the null block {block} is forked"
        require(not isinstance(last_block, NullBlock), reason, block=last_block.block_id)
        forked: list[Block] = self.owner(last_block).fork(last_block)
        return forked

    def get_num_free_blocks(self, device: Device) -> int:
        """Blocks of a device without owner."""
        free: int = self.allocator(device).get_num_free_blocks()
        return free

    def free_all(self, blocks: Sequence[Block]) -> None:
        """Give blocks of one device back, all or none; the null block stays. Raises WrongCall."""
        real = [block for block in blocks if not isinstance(block, NullBlock)]
        if real:
            self.owner(real[0]).free_all(real)

    def get_num_total_blocks(self, device: Device) -> int:
        """All blocks of a device."""
        total: int = self.allocator(device).get_num_total_blocks()
        return total

    def get_physical_block_id(self, device: Device, absolute_id: BlockId) -> int:
        """The place of an id among a device's. Raises WrongValue."""
        place: int = self.allocator(device).get_physical_block_id(absolute_id)
        return place

    def get_num_full_blocks_touched(self, blocks: Sequence[Block], device: Device) -> int:
        """How many blocks of a device these would take, full ones alone."""
        touched: int = self.allocator(device).get_num_full_blocks_touched(blocks)
        return touched

    def swap(
        self, blocks: Sequence[Block], src_device: Device, dst_device: Device
    ) -> dict[BlockId, BlockId]:
        """Move blocks to the other device; old to new id. Raises WrongCall, NoFreeBlocksError."""
        source, target = self.pair(src_device, dst_device)
        moved = [block for block in blocks if not isinstance(block, NullBlock)]
        old = source.ids_of(moved)
        empty = [at for at, block in enumerate(moved) if not block.token_ids]
        new = self.move(old, target.contents_of(moved), empty, source, target)
        for block, block_id in zip(moved, new, strict=True):
            target.adopt(block, block_id)
        return dict(zip(old, new, strict=True))

    def pair(self, src_device: Device, dst_device: Device) -> tuple[Any, Any]:
        """The allocators of two devices. Raises WrongCall where it is one, WrongValue."""
        source, target = self.allocator(src_device), self.allocator(dst_device)
        if source is target:
            reason = "blocks are swapped from {device} to itself"
            require(False, reason, device=src_device.name)
        return source, target

    def move(
        self,
        old: list[BlockId],
        contents: tuple[Sequence[bytes | None], Sequence[int]],
        empty: Sequence[int],
        source: Any,
        target: Any,
    ) -> list[BlockId]:
        """Give blocks of these contents and lengths up for blocks of the other device, whose ids
        are returned; those at the places in `empty` have nothing to copy. All or none.

        Raises WrongCall, UnknownName, NoFreeBlocksError.
        """
        source.check_owned(old)
        new: list[BlockId]
        new, there = target.place_contents(*contents, f"swap in of {len(old)} blocks")
        if there or empty or len(set(new)) < len(new):
            pairs = dict(zip(new, old, strict=True))
            for each in there.union(map(new.__getitem__, empty)):
                del pairs[each]
            self._copy(source, target, [*pairs.values()], [*pairs])
        else:
            self._copy(source, target, old, new)
        source.give_back(old)
        self._swap_mapping.update(zip(old, new, strict=True))
        return new

    def get_and_reset_swaps(self) -> list[tuple[BlockId, BlockId]]:
        """Old and new id of what was swapped since the last call."""
        swaps, self._swap_mapping = list(self._swap_mapping.items()), {}
        return swaps

    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        """Source and target of each copy on the GPU since the last call, in order."""
        copies: list[tuple[BlockId, BlockId]] = self._gpu.clear_copy_on_writes()
        return copies

    def mark_blocks_as_accessed(self, block_ids: list[BlockId], now: float) -> None:
        """Say when blocks were used, each to its owner, if a block can be hit.

        Raises WrongValue, UnknownName.
        """
        if not self._gpu.caches:
            return
        for each in (self._gpu, self._cpu):
            if each.all_block_ids.issuperset(block_ids):
                each.mark_blocks_as_accessed(block_ids, now)
                return
        devices = [self._device(each) for each in block_ids]
        for device in dict.fromkeys(devices):
            mine = [each for each, its in zip(block_ids, devices, strict=True) if its is device]
            self.allocator(device).mark_blocks_as_accessed(mine, now)

    def mark_blocks_as_computed(self, block_ids: list[BlockId]) -> None:
        """Count what was promoted on the GPU since the last call as computed."""
        self._gpu.mark_blocks_as_computed(block_ids)

    def get_common_computed_block_ids(
        self, computed_seq_block_ids: list[list[BlockId]]
    ) -> list[BlockId]:
        """What these lists begin with alike."""
        ids: list[BlockId] = self._gpu.get_common_computed_block_ids(computed_seq_block_ids)
        return ids

    def find_cached_blocks_prefix(
        self, block_hashes: list[int], device: Device = Device.GPU
    ) -> list[int]:
        """The hashes up to the first that is not cached and computed."""
        found: list[int] = self.allocator(device).find_cached_blocks_prefix(block_hashes)
        return found

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Share of look-ups that hit on a device."""
        rate: float = self.allocator(device).get_prefix_cache_hit_rate()
        return rate

    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        """Forget all content of a device, or of both, unless a block is used there."""
        chosen = [self._cpu, self._gpu] if device is None else [self.allocator(device)]
        if not all(each.get_num_free_blocks() == each.get_num_total_blocks() for each in chosen):
            return all(isinstance(each, NaiveBlockAllocator) for each in chosen)
        return all(each.reset_prefix_cache() for each in chosen)

    def cow_block_if_not_appendable(self, block: Block) -> BlockId:
        """Raises NotSupported."""
        raise NotSupported(reason=f"block {block.block_id}: its own allocator copies it")

    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Raises NotSupported."""
        raise NotSupported(reason=f"block {block.block_id}: its own allocator promotes it")

    def _device(self, block_id: BlockId) -> Device:
        if block_id in self._gpu.all_block_ids:
            return Device.GPU
        if block_id in self._cpu.all_block_ids:
            return Device.CPU
        known = f"there are {len(self.all_block_ids)} of both devices"
        raise UnknownName(name="block", value=repr(block_id), known=known, block=block_id)

    def _copy(self, source: Any, target: Any, blocks: list[BlockId], copies: list[BlockId]) -> None:
        """Fill blocks of one allocator from blocks of the other."""
        of, to = source.blocks.places(blocks), target.blocks.places(copies)
        if target is self._cpu:
            self._backing.blocks.copy_pairs(of, to, "host")
            target.note_written(copies)
        else:
            self._backing.blocks.copy_pairs(to, of, "device")
