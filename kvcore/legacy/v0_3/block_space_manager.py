# SPDX-License-Identifier: Apache-2.0
"""The first block manager: tables of sequences over two stacks of blocks.

The sequences of a group share the blocks of their prompt; a write to a shared last block copies it.
A window is a ring: a block that left the window is used again. A shared prefix owns its blocks
itself and stands before the ring. Blocks are freed tail first, so that freeing what was just
allocated restores the stack.

Invariants: a sequence owns each block of its table once, however often the ring repeats it, and a
copy on write replaces the block at all its positions; so forks of windows lose no block, and a swap
moves each block once. A call that raises changes nothing. Source: S003-01 to S003-37; X-01, 05,
10, 11, 14.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.blocks.named_enum import AllocStatus, Device
from kvcore.legacy.blocks.tiers import Tiers
from kvcore.legacy.v0_3.block_allocator import (
    BlockAllocator,
    BlockTable,
    PhysicalTokenBlock,
    make_backing,
)
from kvcore.legacy.v0_3.errors import EmptyTable, NoWaitingSequence, WrongWatermark, WrongWindow
from kvcore.legacy.v0_3.sequences import (
    LogicalTokenBlock,
    Prefix,
    PrefixPool,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    has_status,
    seqs_of,
)
from kvcore.legacy.v0_3.tables import SequenceTables, distinct_of, on_other_device, prefix_numbers
from kvcore.types.arguments import read_count, read_int
from kvcore.types.commands import Batch
from kvcore.types.values import Refused

__all__ = [
    "AllocStatus",
    "BlockAllocator",
    "BlockSpaceManager",
    "BlockTable",
    "Device",
    "LogicalTokenBlock",
    "PhysicalTokenBlock",
    "Prefix",
    "PrefixPool",
    "Sequence",
    "SequenceGroup",
    "SequenceStatus",
]


class BlockSpaceManager:
    """Decides which block holds which tokens of a sequence, on two devices; touches no tensor.

    watermark: share of the GPU's blocks that admission and swap-in leave free. sliding_window:
    number of tokens that a query sees; None for all. copy_reused: whether a shared block of a
    window is copied before it is reused; in the original, forked sequences write into it.
    Raises WrongWindow, WrongWatermark, InvalidCount, BackendMissing.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        *,
        copy_reused: bool = False,
        backend: BackendName = "python",
    ) -> None:
        self.block_size = read_count("block_size", block_size, 1)
        self.num_total_gpu_blocks = read_count("num_gpu_blocks", num_gpu_blocks)
        self.num_total_cpu_blocks = read_count("num_cpu_blocks", num_cpu_blocks)
        self.block_sliding_window = _window_blocks(sliding_window, self.block_size)
        if not _is_share(watermark):
            raise WrongWatermark(watermark=watermark)
        self.watermark = watermark
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.copy_reused = copy_reused
        self._backing = make_backing(num_gpu_blocks, num_cpu_blocks, backend=backend)
        self.gpu_allocator = BlockAllocator(
            Device.GPU, block_size, num_gpu_blocks, backing=self._backing
        )
        self.cpu_allocator = BlockAllocator(
            Device.CPU, block_size, num_cpu_blocks, backing=self._backing
        )
        self._tables = SequenceTables(self._backing, self.gpu_allocator)
        self.block_tables = self._tables.tables

    def __repr__(self) -> str:
        gpu, cpu = self.gpu_allocator, self.cpu_allocator
        return f"<BlockSpaceManager of {len(self.block_tables)} sequences: {gpu!r}, {cpu!r}>"

    def can_allocate(self, seq_group: SequenceGroup) -> AllocStatus:
        """Return whether the prompt of a group's first waiting sequence fits above the watermark.

        Raises NoWaitingSequence, PrefixTooLong, UnknownPrefix.
        """
        needed = self._num_fresh(seq_group, len(_waiting(seq_group)[0].logical_token_blocks))
        if self.num_total_gpu_blocks - needed < self.watermark_blocks:
            return AllocStatus.NEVER
        if self.get_num_free_gpu_blocks() - needed >= self.watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def allocate(self, seq_group: SequenceGroup) -> None:
        """Give a group's waiting sequences the blocks of their prompt, which they share.

        Every sequence of the group becomes an owner; one that is not waiting stays an owner until
        it is freed. A new prefix owns its blocks, too. Raises NoWaitingSequence, AlreadyAllocated,
        PrefixTooLong, UnknownPrefix, OutOfMemory.
        """
        waiting = _waiting(seq_group)
        num_logical = len(waiting[0].logical_token_blocks)
        num_fresh = self._num_fresh(seq_group, num_logical)
        self._tables.check_new(waiting)
        prefix, num_owners = seq_group.prefix, len(seq_group.get_seqs())
        fresh = self.gpu_allocator.take(num_fresh, "group", seq_group.request_id)
        table = BlockTable(self.gpu_allocator, list(fresh))
        held = fresh * (num_owners - 1)
        if prefix is not None:
            shared = prefix_numbers(prefix)
            table.numbers[:0], table.num_prefix = shared, prefix.get_num_blocks()
            held += tuple(shared) * num_owners
            if not prefix.allocated:
                self._tables.add_prefix(prefix, table)
                held += tuple(table.numbers[: table.num_prefix])
        self.gpu_allocator.hold(held)
        if len(waiting) < num_owners:
            for each in seq_group.get_seqs():
                if not has_status(each, SequenceStatus.WAITING):
                    self._tables.others.setdefault(each.seq_id, []).extend(table.numbers)
        window = self.block_sliding_window
        while window is not None and len(table.numbers) < num_logical:
            table.reuse(window)
        self.block_tables[waiting[0].seq_id] = table
        for each in waiting[1:]:
            self.block_tables[each.seq_id] = table.copy()

    def can_append_slot(self, seq_group: SequenceGroup) -> bool:
        """Return whether one block per running sequence is free; ignores the watermark."""
        free = self._backing.blocks.num_free("device")
        if len(seq_group.get_seqs()) <= free:  # whatever their statuses
            return True
        return len(seqs_of(seq_group, SequenceStatus.RUNNING)) <= free

    def append_slot(self, seq: Sequence) -> tuple[int, int] | None:
        """Make room for the newest token of a sequence; returns the copy that this needs, if any.

        A call adds at most one block. The copy is (source, target); the runtime makes it before it
        writes. Raises UnknownSequence, EmptyTable, OnOtherDevice, OutOfMemory.
        """
        try:
            table = self.block_tables[seq.seq_id]
        except KeyError:
            raise self._tables.unknown(seq) from None
        if table.allocator is not self.gpu_allocator:
            raise on_other_device(seq, table, Device.GPU)
        numbers, num_logical = table.numbers, len(seq.logical_token_blocks)
        if self.block_sliding_window is not None and len(numbers) < num_logical:
            return self._append_to_window(seq, table, self.block_sliding_window)
        number = self._backing.blocks.append(numbers, num_logical)
        if number is None:
            if numbers:
                return None
            raise EmptyTable(sequence=seq.seq_id)
        if type(number) is Refused:
            raise self.gpu_allocator.out_of_memory(1, "sequence", seq.seq_id)
        if len(numbers) < num_logical:
            numbers.append(number)
            return None
        last = numbers[-1]
        if table.is_ring or table.num_prefix == len(numbers):
            return table.replace(last, number)
        numbers[-1] = number
        return last, number

    def fork(self, parent_seq: Sequence, child_seq: Sequence) -> None:
        """Let a child share its parent's blocks instead of its own; takes no free block.

        Raises UnknownSequence.
        """
        table = self._tables.find(parent_seq)
        table.allocator.hold(table.distinct())
        if child_seq.seq_id in self.block_tables:
            self._tables.give_back_table(child_seq.seq_id)
        self.block_tables[child_seq.seq_id] = table.copy()

    def can_swap_in(self, seq_group: SequenceGroup) -> bool:
        """Return whether a group fits on the GPU with one more block per swapped sequence.

        The watermark stays free.
        """
        tables = self._tables.find_unfinished(seq_group)
        left = self.watermark_blocks + len(seqs_of(seq_group, SequenceStatus.SWAPPED))
        return self._tables.fit(tables, self.get_num_free_gpu_blocks() - left)

    def swap_in(self, seq_group: SequenceGroup) -> dict[int, int]:
        """Move the blocks of a group's swapped sequences to the GPU, after the group's prefix.

        Returns CPU number -> GPU number, in order of first use. Raises PrefixNotReady,
        UnknownPrefix, UnknownSequence, OnOtherDevice, OutOfMemory.
        """
        shared = self._tables.ready_prefix(seq_group)
        seqs = seqs_of(seq_group, SequenceStatus.SWAPPED)
        tables = self._tables.find_all(seqs, self.cpu_allocator)
        used = distinct_of(tables)
        mapping = self.gpu_allocator.bring(used, "group", seq_group.request_id)
        self.gpu_allocator.hold(shared * len(seqs))
        for seq, table in zip(seqs, tables, strict=True):
            numbers = [*shared, *map(mapping.__getitem__, table.numbers)]
            moved = BlockTable(self.gpu_allocator, numbers, len(shared), table.is_ring)
            self.block_tables[seq.seq_id] = moved
        return mapping

    def can_swap_out(self, seq_group: SequenceGroup) -> bool:
        """Return whether a group's blocks fit on the CPU; those of its prefix stay on the GPU."""
        tables = self._tables.find_unfinished(seq_group)
        free = self.get_num_free_cpu_blocks()
        return self._tables.fit(tables, free, prefix_numbers(seq_group.prefix))

    def swap_out(self, seq_group: SequenceGroup) -> dict[int, int]:
        """Move the blocks of a group's running sequences to the CPU.

        The blocks of its prefix stay on the GPU and only lose these owners. Returns GPU number ->
        CPU number, in order of first use. Raises UnknownSequence,
        OnOtherDevice, OutOfMemory.
        """
        seqs = seqs_of(seq_group, SequenceStatus.RUNNING)
        tables = self._tables.find_all(seqs, self.gpu_allocator)
        used = distinct_of(tables)
        shared = set(prefix_numbers(seq_group.prefix))
        own = [number for number in used if number not in shared] if shared else used
        mapping = self.cpu_allocator.bring(own, "group", seq_group.request_id)
        if shared:
            self.gpu_allocator.release([number for number in used if number in shared])
        for seq, table in zip(seqs, tables, strict=True):
            numbers = table.numbers
            if shared:
                numbers = [number for number in numbers if number not in shared]
            moved = BlockTable(
                self.cpu_allocator, [*map(mapping.__getitem__, numbers)], 0, table.is_ring
            )
            self.block_tables[seq.seq_id] = moved
        return mapping

    def free(self, seq: Sequence) -> None:
        """Free a sequence's blocks, tail first; does nothing if it has none."""
        self._tables.give_back(seq.seq_id)

    def reset(self) -> None:
        """Free the blocks of all sequences; prefixes keep theirs."""
        self._tables.give_back_all()

    def free_prefix(self, prefix: Prefix) -> None:
        """Free the blocks that a prefix owns; sequences stay owners. Raises UnknownPrefix."""
        self._tables.free_prefix(prefix)

    def get_block_table(self, seq: Sequence) -> list[int]:
        """Return a copy of a sequence's block numbers. Raises UnknownSequence."""
        return self._tables.find(seq).numbers.copy()

    def get_num_free_gpu_blocks(self) -> int:
        """Return the number of GPU blocks without an owner."""
        return self._backing.blocks.num_free("device")

    def get_num_free_cpu_blocks(self) -> int:
        """Return the number of CPU blocks without an owner."""
        return self.cpu_allocator.get_num_free_blocks()

    def take_batch(self) -> Batch:
        """Close the open batch: the commands since the last one, for a runtime."""
        return self._backing.take_batch()

    def state(self) -> Tiers:
        """Return the state of both tiers as a value. Cost: O(pool) with the twin."""
        return self._backing.state()

    def check(self) -> None:
        """Raise InvariantViolation unless the owners of each block are exactly its holders."""
        self._tables.check()

    def _num_fresh(self, seq_group: SequenceGroup, num_logical: int) -> int:
        """Return how many blocks a group's prompt takes. Raises UnknownPrefix, PrefixTooLong."""
        own, prefix = num_logical, seq_group.prefix
        if prefix is not None:
            own -= self._tables.size_prefix(seq_group, num_logical)
        if self.block_sliding_window is not None:
            own = min(own, self.block_sliding_window)
        return own if prefix is None or prefix.allocated else own + prefix.get_num_blocks()

    def _append_to_window(
        self, seq: Sequence, table: BlockTable, window: int
    ) -> tuple[int, int] | None:
        """Append a fresh block or the ring's next one to a table; returns as `append_slot` does."""
        if len(table.numbers) - table.num_prefix < window:
            table.numbers += self.gpu_allocator.take(1, "sequence", seq.seq_id)
            return None
        pair = None
        if self.copy_reused:
            number = table.next_of_ring(window)
            target = self._backing.blocks.own(number)
            if type(target) is Refused:
                raise self.gpu_allocator.out_of_memory(1, "sequence", seq.seq_id)
            if target != number:
                pair = table.replace(number, target)
        table.reuse(window)
        return pair


def _waiting(seq_group: SequenceGroup) -> list[Sequence]:
    """Return a group's waiting sequences. Raises NoWaitingSequence."""
    waiting = seqs_of(seq_group, SequenceStatus.WAITING)
    if not waiting:
        raise NoWaitingSequence(group=seq_group.request_id, num_seqs=seq_group.num_seqs())
    return waiting


def _is_share(watermark: Any) -> bool:
    return isinstance(watermark, Real) and 0.0 <= float(watermark) < math.inf


def _window_blocks(sliding_window: int | None, block_size: int) -> int | None:
    if sliding_window is None:
        return None
    number = read_int(sliding_window)
    if not isinstance(number, int) or number <= 0 or number % block_size:
        raise WrongWindow(sliding_window=sliding_window, block_size=block_size)
    return number // block_size
