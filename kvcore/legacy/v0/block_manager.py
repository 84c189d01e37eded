# SPDX-License-Identifier: Apache-2.0
"""V0's manager of sequences over both tiers: admission, growth, fork, swap, windows.

A first allocation leaves `watermark_blocks` free; growth ignores the watermark. With a window,
admission counts only the last blocks of a sequence, although its prompt takes all of them. Each
call does all or nothing, and an error names the sequence. Source: S002-38 to 41, 63, 66 to 72.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.blocks.named_enum import Device
from kvcore.legacy.v0 import manager_interfaces
from kvcore.legacy.v0.block import Block, BlockId
from kvcore.legacy.v0.block_allocator import check_block_size
from kvcore.legacy.v0.block_table import BlockTable
from kvcore.legacy.v0.common import ids_of
from kvcore.legacy.v0.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcore.legacy.v0.errors import NoFreeBlocksError, NoneWaits, UnknownName, for_sequence, require
from kvcore.legacy.v0.manager_sizes import blocks_of_watermark, blocks_of_window
from kvcore.legacy.v0.prefix_caching_allocator import read_time
from kvcore.legacy.v0.sequence_trackers import ComputedBlocksTracker, LastAccessBlocksTracker
from kvcore.legacy.v0.sequences import AllocStatus, GroupLike, SequenceLike, SequenceStatus
from kvcore.legacy.v0.utils import check_no_caching_or_swa_for_blockmgr_encdec, encoder_of
from kvcore.types.commands import Batch


class SelfAttnBlockSpaceManager(manager_interfaces.BlockSpaceManager, version="selfattn"):
    """Allocates the blocks of sequences, which it knows by their ids."""

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        enable_caching: bool = False,
        *,
        backend: BackendName = "python",
    ) -> None:
        """watermark: share of GPU blocks that admission leaves free. sliding_window: in tokens.

        Raises WrongCall for a negative watermark, WrongValue, InvalidCount.
        """
        check_block_size(block_size)
        self.watermark_blocks = blocks_of_watermark(watermark, num_gpu_blocks)
        self.block_size = block_size
        self.num_total_gpu_blocks = num_gpu_blocks
        self.num_total_cpu_blocks = num_cpu_blocks
        self.sliding_window = sliding_window
        self.max_block_sliding_window = blocks_of_window(sliding_window, block_size)
        self.watermark = watermark
        self.enable_caching = enable_caching
        self.block_allocator = CpuGpuBlockAllocator.create(
            "prefix_caching" if enable_caching else "naive",
            num_gpu_blocks,
            num_cpu_blocks,
            block_size,
            backend=backend,
        )
        self.block_tables: dict[int, BlockTable] = {}
        self.cross_block_tables: dict[str, BlockTable] = {}
        self._computed_blocks_tracker = ComputedBlocksTracker(
            self.block_allocator, block_size, enable_caching
        )
        self._last_access_blocks_tracker = LastAccessBlocksTracker(self.block_allocator)

    def take_batch(self) -> Batch:
        """Close and number the open batch; it holds the commands since the previous one."""
        return self.block_allocator.take_batch()

    def can_allocate(self, seq_group: GroupLike, num_lookahead_slots: int = 0) -> AllocStatus:
        """Return whether the prompt of a waiting group, and of its encoder, can be given blocks.

        Raises NotSupported, NoneWaits.
        """
        check_no_caching_or_swa_for_blockmgr_encdec(self, seq_group)
        tokens = _waiting(seq_group)[0].get_token_ids()
        needed = BlockTable.get_num_required_blocks(tokens, self.block_size, num_lookahead_slots)
        encoder = encoder_of(seq_group)
        if encoder is not None:
            needed += self._needed_for(encoder)
        if self.max_block_sliding_window is not None:
            needed = min(needed, self.max_block_sliding_window)
        if self.num_total_gpu_blocks - needed < self.watermark_blocks:
            return AllocStatus.NEVER
        if self.get_num_free_gpu_blocks() - needed >= self.watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def allocate(self, seq_group: GroupLike) -> None:
        """Give a waiting group's sequences the blocks of their prompt, which they share.

        An encoder gets blocks of its own.

        Raises NoneWaits, WrongCall if one has blocks, NotSupported, NoFreeBlocksError.
        """
        waiting = _waiting(seq_group)
        check_no_caching_or_swa_for_blockmgr_encdec(self, seq_group)
        ids = [seq.seq_id for seq in waiting]
        for seq_id in ids:
            self._check_new(seq_id)
        if len(set(ids)) < len(ids):
            require(False, "sequences {ids} are not distinct", ids=ids)
        first, table, encoder = waiting[0], self._empty_table(), encoder_of(seq_group)
        if encoder is not None:
            self._check_cross(seq_group.request_id, self._needed_for(first, encoder))
        tokens = first.get_token_ids()
        if tokens:
            try:
                table.allocate(tokens, extra_hash=first.extra_hash())
            except NoFreeBlocksError as error:
                raise for_sequence(error, first.seq_id) from None
        self._add(first.seq_id, table)
        for seq_id in ids[1:]:
            self._add(seq_id, table.fork() if tokens else self._empty_table())
        if encoder is not None:
            self.cross_block_tables[seq_group.request_id] = cross = self._empty_table()
            if tokens := encoder.get_token_ids():
                cross.allocate(tokens, extra_hash=encoder.extra_hash())

    def can_append_slots(self, seq_group: GroupLike, num_lookahead_slots: int) -> bool:
        """Return whether a running group's new tokens and lookahead slots fit."""
        seqs = seq_group.get_seqs(status=SequenceStatus.RUNNING)
        touched = sum(self._touched(seq, num_lookahead_slots) for seq in seqs)
        free = self.get_num_free_gpu_blocks()
        if touched > free or self.max_block_sliding_window is None:
            return touched <= free
        if seqs and not self.block_allocator.has_null_block:
            free -= 1
        for seq in seqs if free >= 0 else ():
            table, num_tokens = self._table(seq.seq_id), len(seq.get_token_ids())
            free += table.count_passed(seq.data.get_num_computed_tokens())
            free -= table.count_needed(num_tokens, num_lookahead_slots)
            if free < 0:
                break
        return free >= 0

    def append_slots(
        self, seq: SequenceLike, num_lookahead_slots: int
    ) -> list[tuple[BlockId, BlockId]]:
        """Give a sequence's new tokens slots; returns (source, target) of each copied block.

        Raises UnknownName, WrongCall, NoFreeBlocksError.
        """
        table = self._table(seq.seq_id)
        unseen = seq.get_token_ids()[table.num_full_slots :]
        num_computed, extra_hash = seq.data.get_num_computed_tokens(), seq.extra_hash()
        try:
            table.append_token_ids(unseen, num_lookahead_slots, num_computed, extra_hash)
        except NoFreeBlocksError as error:
            raise for_sequence(error, seq.seq_id) from None
        return self.block_allocator.on_gpu.clear_copy_on_writes()

    def fork(self, parent_seq: SequenceLike, child_seq: SequenceLike) -> None:
        """Let a new sequence share all blocks of its parent; does nothing if it has none.

        Raises WrongCall if the child has blocks.
        """
        table = self.block_tables.get(parent_seq.seq_id)
        if table is None:
            return
        self._check_new(child_seq.seq_id)
        self._add(child_seq.seq_id, table.fork())

    def free(self, seq: SequenceLike) -> None:
        """Free a sequence's blocks; does nothing if it has none."""
        seq_id = seq.seq_id
        table = self.block_tables.get(seq_id)
        if table is None:
            return
        ids = [block.block_id or 0 for block in table.blocks]
        self._last_access_blocks_tracker.update_seq_blocks_last_access(seq_id, ids)
        self._last_access_blocks_tracker.remove_seq(seq_id)
        self.remove_seq_from_computed_blocks_tracker(seq)
        table.free()
        del self.block_tables[seq_id]

    def free_cross(self, seq_group: GroupLike) -> None:
        """Free the blocks of a group's encoder; does nothing if it has none."""
        table = self.cross_block_tables.get(seq_group.request_id)
        if table is not None:
            table.free()
            del self.cross_block_tables[seq_group.request_id]

    def remove_seq_from_computed_blocks_tracker(self, seq: SequenceLike) -> None:
        """Forget a sequence's number of cached tokens, if it is known."""
        if self._computed_blocks_tracker.tracks(seq.seq_id):
            self._computed_blocks_tracker.remove_seq(seq.seq_id)

    def get_block_table(self, seq: SequenceLike) -> list[BlockId]:
        """Return the ids of a sequence's blocks, as a live list. Raises UnknownName."""
        return self._table(seq.seq_id).physical_block_ids

    def get_cross_block_table(self, seq_group: GroupLike) -> list[BlockId]:
        """Return the ids of the blocks of a group's encoder, as a live list. Raises WrongCall."""
        name, num = seq_group.request_id, len(self.cross_block_tables)
        reason = "request {name!r} has no blocks of an encoder, {num} requests have"
        require(name in self.cross_block_tables, reason, name=name, num=num)
        return self.cross_block_tables[name].physical_block_ids

    def access_all_blocks_in_seq(self, seq: SequenceLike, now: float) -> None:
        """Record when a sequence was used. Raises WrongCall, WrongValue."""
        if self.enable_caching:
            read_time(now)
            self._last_access_blocks_tracker.update_last_access(seq.seq_id, now)

    def mark_blocks_as_computed(
        self,
        seq_group: GroupLike,  # noqa: ARG002 # blocks of all groups are marked
        token_chunk_size: int,  # noqa: ARG002
    ) -> None:
        """Mark all blocks promoted since the last call as computed."""
        self.block_allocator.mark_blocks_as_computed([])

    def get_common_computed_block_ids(self, seqs: Sequence[SequenceLike]) -> list[BlockId]:
        """Return the common prefix of the sequences' cached blocks. Raises UnknownName."""
        tables = [self._table(seq.seq_id).physical_block_ids for seq in seqs]
        cached = [
            table[: self.get_num_cached_tokens(seq) // self.block_size]
            for table, seq in zip(tables, seqs, strict=True)
        ]
        return self.block_allocator.get_common_computed_block_ids(cached)

    def get_num_cached_tokens(self, seq: SequenceLike) -> int:
        """Return the number of tokens in a sequence's cached leading blocks. Raises WrongCall."""
        return self._computed_blocks_tracker.get_num_cached_tokens(seq)

    def can_swap_in(self, seq_group: GroupLike, num_lookahead_slots: int) -> AllocStatus:
        """Return whether a swapped group and its new tokens fit on the GPU."""
        return self._can_swap(seq_group, Device.GPU, SequenceStatus.SWAPPED, num_lookahead_slots)

    def swap_in(self, seq_group: GroupLike) -> list[tuple[BlockId, BlockId]]:
        """Move a swapped group to the GPU; returns (CPU, GPU) position of each block, in order.

        Raises UnknownName, WrongCall, NoFreeBlocksError.
        """
        return self._swap(seq_group, SequenceStatus.SWAPPED, Device.CPU, Device.GPU)

    def can_swap_out(self, seq_group: GroupLike) -> bool:
        """Return whether a running group fits on the CPU."""
        status = self._can_swap(seq_group, Device.CPU, SequenceStatus.RUNNING, 0)
        return status is AllocStatus.OK

    def swap_out(self, seq_group: GroupLike) -> list[tuple[BlockId, BlockId]]:
        """Move a running group to the CPU; returns (GPU, CPU) position of each block, in order.

        Raises UnknownName, WrongCall, NoFreeBlocksError.
        """
        return self._swap(seq_group, SequenceStatus.RUNNING, Device.GPU, Device.CPU)

    def get_num_free_gpu_blocks(self) -> int:
        """Return the number of GPU blocks without an owner."""
        return self.block_allocator.on_gpu.get_num_free_blocks()

    def get_num_free_cpu_blocks(self) -> int:
        """Return the number of CPU blocks without an owner."""
        return self.block_allocator.get_num_free_blocks(Device.CPU)

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Return the share of look-ups that hit on a device; -1 without caching."""
        return self.block_allocator.get_prefix_cache_hit_rate(device)

    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        """Forget all content of a device, or of both, unless a block there is in use."""
        return self.block_allocator.reset_prefix_cache(device)

    def _table(self, seq_id: int) -> BlockTable:
        table = self.block_tables.get(seq_id)
        if table is None:
            known = f"{len(self.block_tables)} have blocks"
            raise UnknownName(name="sequence", value=seq_id, known=known, sequence=seq_id)
        return table

    def _empty_table(self) -> BlockTable:
        window = self.max_block_sliding_window
        return BlockTable(self.block_size, self.block_allocator, max_block_sliding_window=window)

    def _check_new(self, seq_id: int) -> None:
        table = self.block_tables.get(seq_id)
        if table is not None:
            reason = "block table already exists: sequence {sequence} holds {num} blocks"
            require(False, reason, sequence=seq_id, num=len(table.physical_block_ids))

    def _check_cross(self, name: str, needed: int) -> None:
        """Raise if a request already has a cross table, or if too few blocks are free."""
        reason = "block table already exists: the encoder of request {name!r} has one"
        require(name not in self.cross_block_tables, reason, name=name)
        free, total = self.get_num_free_gpu_blocks(), self.num_total_gpu_blocks
        if needed > free:
            who = f"request {name!r} with its encoder"
            raise NoFreeBlocksError(who=who, needed=needed, free=free, total=total)

    def _needed_for(self, *seqs: SequenceLike) -> int:
        """Return how many blocks the tokens of sequences take."""
        count = BlockTable.get_num_required_blocks
        return sum(count(seq.get_token_ids(), self.block_size) for seq in seqs)

    def _add(self, seq_id: int, table: BlockTable) -> None:
        self.block_tables[seq_id] = table
        self._last_access_blocks_tracker.add_seq(seq_id)

    def _touched(self, seq: SequenceLike, num_lookahead_slots: int) -> int:
        table = self._table(seq.seq_id)
        return table.count_touched(len(seq.get_token_ids()), num_lookahead_slots)

    def _can_swap(
        self,
        seq_group: GroupLike,
        device: Device,
        status: SequenceStatus,
        num_lookahead_slots: int,
    ) -> AllocStatus:
        touched, allocator = 0, self.block_allocator.allocator(device)
        blocks: list[Block] = []
        for seq in seq_group.get_seqs(status=status):
            table = self._table(seq.seq_id)
            real, num_full = table.real_blocks, table.num_full_slots // self.block_size
            not_full = len(real) + table.num_null_blocks - num_full
            num_tokens = len(seq.get_token_ids())
            touched += max(table.count_touched(num_tokens, num_lookahead_slots), not_full)
            blocks += real
        touched += allocator.get_num_full_blocks_touched(blocks)
        watermark_blocks = self.watermark_blocks if device is Device.GPU else 0
        if allocator.get_num_total_blocks() < touched:
            return AllocStatus.NEVER
        if allocator.get_num_free_blocks() - touched >= watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def _swap(
        self, seq_group: GroupLike, status: SequenceStatus, source: Device, target: Device
    ) -> list[tuple[BlockId, BlockId]]:
        seqs = seq_group.get_seqs(status=status)
        tables = [self._table(seq.seq_id) for seq in seqs]
        blocks = [block for table in tables for block in table.real_blocks]
        of, to = self.block_allocator.pair(source, target)
        try:
            old = self.block_allocator.move(blocks, of, to)
        except NoFreeBlocksError as error:
            raise for_sequence(error, ", ".join(str(seq.seq_id) for seq in seqs)) from None
        for table in tables:
            table.moved(to)
        new = to.blocks.places(ids_of(blocks))
        return list(zip(of.blocks.places(old), new, strict=True))


BlockSpaceManager = SelfAttnBlockSpaceManager


def _waiting(seq_group: GroupLike) -> Sequence[SequenceLike]:
    """Return a group's waiting sequences. Raises NoneWaits if there are none."""
    waiting = seq_group.get_seqs(status=SequenceStatus.WAITING)
    if not waiting:
        request = seq_group.request_id
        raise NoneWaits(reason=f"request {request!r} has 0 waiting sequences", request=request)
    return waiting
