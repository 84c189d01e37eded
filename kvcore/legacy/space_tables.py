# SPDX-License-Identifier: Apache-2.0
"""Who holds which blocks of the first block manager: sequences by their tables, and prefixes.

Rules: a sequence owns each block of its table once. What a group's sequences own that did not wait
when it was admitted is noted beside the tables; a prefix owns its blocks as a sequence would. So
each owner that the pool counts has a name here, which `check` compares. Blocks are given back tail
first. Source: S003-06, 10, 13, 24, 31 to 33. Twin: none.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.legacy.backing import Backing
from kvcore.legacy.block_allocator import BlockAllocator, BlockTable, Device, PhysicalTokenBlock
from kvcore.legacy.space_errors import (
    AlreadyAllocated,
    OnOtherDevice,
    PrefixNotReady,
    PrefixTooLong,
    UnknownPrefix,
    UnknownSequence,
)
from kvcore.legacy.space_sequences import Prefix, Sequence, SequenceGroup


class SequenceTables:
    """The tables of sequences over two devices.

    others: blocks of sequences that did not wait when their group was admitted.
    """

    def __init__(self, backing: Backing, gpu: BlockAllocator, cpu: BlockAllocator) -> None:
        self._backing = backing
        self._allocators = (gpu, cpu)
        self.tables: dict[int, BlockTable] = {}
        self.others: dict[int, list[PhysicalTokenBlock]] = {}
        self.prefixes: dict[Prefix, None] = {}

    def find(self, seq: Sequence) -> BlockTable:
        """The table of a sequence. Raises UnknownSequence."""
        table = self.tables.get(seq.seq_id)
        if table is None:
            raise UnknownSequence(sequence=seq.seq_id, num_tables=len(self.tables))
        return table

    def find_all(self, seqs: Iterable[Sequence], device: Device) -> list[BlockTable]:
        """The tables of sequences whose blocks are all on a device.

        Raises UnknownSequence, OnOtherDevice.
        """
        tables = []
        for seq in seqs:
            tables.append(self.find(seq))
            check_device(seq, tables[-1], device)
        return tables

    def find_unfinished(self, seq_group: SequenceGroup) -> set[PhysicalTokenBlock]:
        """The blocks of a group's unfinished sequences. Raises UnknownSequence."""
        seqs = (seq for seq in seq_group.get_seqs() if not seq.is_finished())
        return {block for seq in seqs for block in self.find(seq)}

    def check_new(self, seqs: Iterable[Sequence]) -> None:
        """Raise AlreadyAllocated unless no sequence has a table."""
        for seq in seqs:
            table = self.tables.get(seq.seq_id)
            if table is not None:
                raise AlreadyAllocated(sequence=seq.seq_id, num_blocks=len(table))

    def hold(self, blocks: Iterable[PhysicalTokenBlock]) -> None:
        """Add an owner to each block."""
        for allocator, own in self._by_device(blocks):
            allocator.hold(own)

    def give_back(self, seq_id: int) -> None:
        """Give back what a sequence owns, and forget it."""
        blocks = self.others.pop(seq_id, [])[::-1]
        table = self.tables.pop(seq_id, None)
        if table is not None:
            blocks += table.distinct()[::-1]
        for allocator, own in self._by_device(blocks):
            allocator.release(own)

    def give_back_all(self) -> None:
        """Give back what all sequences own, and forget them."""
        for seq_id in dict.fromkeys((*self.tables, *self.others)):
            self.give_back(seq_id)

    def add_prefix(self, prefix: Prefix, blocks: list[PhysicalTokenBlock]) -> None:
        """Note that a prefix holds blocks, besides those who use it."""
        prefix.set_block_table(blocks)
        self.prefixes[prefix] = None

    def check_prefix(self, prefix: Prefix) -> None:
        """Raise UnknownPrefix unless a prefix got its blocks here."""
        if prefix not in self.prefixes:
            raise UnknownPrefix(num_tokens=prefix.get_length())

    def free_prefix(self, prefix: Prefix) -> None:
        """Give back what a prefix owns. Raises UnknownPrefix."""
        self.check_prefix(prefix)
        del self.prefixes[prefix]
        self._allocators[0].release((prefix.block_table or [])[::-1])
        prefix.block_table = None
        prefix.computed = False

    def size_prefix(self, seq_group: SequenceGroup, num_blocks: int) -> int:
        """Blocks of a group's prefix, of so many of its prompt.

        Raises UnknownPrefix, PrefixTooLong.
        """
        prefix = seq_group.prefix
        if prefix is None:
            return 0
        if prefix.allocated:
            self.check_prefix(prefix)
        num_prefix = prefix.get_num_blocks()
        if num_prefix > num_blocks:
            who = repr(seq_group.request_id)
            raise PrefixTooLong(group=who, num_blocks=num_blocks, num_prefix=num_prefix)
        return num_prefix

    def ready_prefix(self, seq_group: SequenceGroup) -> list[PhysicalTokenBlock]:
        """The blocks of a group's prefix, none without one.

        Raises PrefixNotReady, UnknownPrefix.
        """
        prefix = seq_group.prefix
        if prefix is None:
            return []
        if prefix.block_table is None or not prefix.computed:
            raise PrefixNotReady(
                group=repr(seq_group.request_id),
                allocated=prefix.allocated,
                computed=prefix.computed,
            )
        self.check_prefix(prefix)
        return prefix.block_table

    def check(self) -> None:
        """Raise InvariantViolation unless each block has the owners that are named here."""
        held = [block for table in self.tables.values() for block in table.distinct()]
        for more in (*self.others.values(), *(each.block_table or () for each in self.prefixes)):
            held += more
        gpu, cpu = ([block.block_number for block in own] for _, own in self._by_device(held))
        self._backing.check(gpu, cpu)

    def _by_device(
        self, blocks: Iterable[PhysicalTokenBlock]
    ) -> list[tuple[BlockAllocator, list[PhysicalTokenBlock]]]:
        every = list(blocks)
        return [(each, [b for b in every if b.device is each.device]) for each in self._allocators]


def check_device(seq: Sequence, blocks: Iterable[PhysicalTokenBlock], device: Device) -> None:
    """Raise OnOtherDevice unless all these blocks of a sequence are on a device."""
    for block in blocks:
        if block.device is not device:
            raise OnOtherDevice(
                block=block.block_number,
                sequence=seq.seq_id,
                device=block.device.name,
                expected=device.name,
            )
