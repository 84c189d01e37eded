# SPDX-License-Identifier: Apache-2.0
"""The owners of the first block manager's blocks: sequences by their tables, and prefixes.

A sequence owns each block of its table once. Blocks owned by sequences of a group that did not wait
when it was admitted are noted beside the tables. A prefix owns its blocks as a sequence does.
Blocks are given back tail first.

Invariants: each owner that the pool counts has a name here; `check` compares them. Source: S003-06,
10, 13, 24, 31 to 33.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.blocks.named_enum import Device
from kvcore.legacy.v0_3.block_allocator import BlockAllocator, BlockTable
from kvcore.legacy.v0_3.errors import (
    AlreadyAllocated,
    OnOtherDevice,
    PrefixNotReady,
    PrefixTooLong,
    UnknownPrefix,
    UnknownSequence,
)
from kvcore.legacy.v0_3.sequences import Prefix, Sequence, SequenceGroup


class SequenceTables:
    """The tables of sequences over two devices.

    others: blocks of sequences that did not wait when their group was admitted.
    """

    def __init__(self, backing: Backing, gpu: BlockAllocator) -> None:
        self._backing = backing
        self._gpu = gpu
        self.tables: dict[int, BlockTable] = {}
        self.others: dict[int, list[int]] = {}
        self.prefixes: dict[Prefix, None] = {}

    def find(self, seq: Sequence) -> BlockTable:
        """The table of a sequence. Raises UnknownSequence."""
        try:
            return self.tables[seq.seq_id]
        except KeyError:
            raise self.unknown(seq) from None

    def unknown(self, seq: Sequence) -> UnknownSequence:
        """The error that a sequence has no table."""
        return UnknownSequence(sequence=seq.seq_id, num_tables=len(self.tables))

    def find_all(self, seqs: Iterable[Sequence], allocator: BlockAllocator) -> list[BlockTable]:
        """The tables of sequences whose blocks are all on one device.

        Raises UnknownSequence, OnOtherDevice.
        """
        tables = []
        for seq in seqs:
            table = self.find(seq)
            if table.allocator is not allocator and table.numbers:
                raise on_other_device(seq, table, allocator.device)
            tables.append(table)
        return tables

    def find_unfinished(self, seq_group: SequenceGroup) -> list[BlockTable]:
        """The tables of a group's unfinished sequences. Raises UnknownSequence."""
        return [self.find(seq) for seq in seq_group.get_seqs() if not seq.is_finished()]

    def fit(self, tables: list[BlockTable], room: int, apart: Iterable[int] = ()) -> bool:
        """Whether the blocks of tables are no more than this many, those apart on the GPU left out.

        Blocks are looked at only where more would not fit if each table had its own.
        """
        if sum([len(table.numbers) for table in tables]) <= room:
            return True
        on_gpu = set().union(*[each.numbers for each in tables if each.allocator is self._gpu])
        on_cpu = set().union(*[each.numbers for each in tables if each.allocator is not self._gpu])
        return len(on_gpu.difference(apart)) + len(on_cpu) <= room

    def check_new(self, seqs: Iterable[Sequence]) -> None:
        """Raise AlreadyAllocated unless no sequence has a table."""
        for seq in seqs:
            table = self.tables.get(seq.seq_id)
            if table is not None:
                raise AlreadyAllocated(sequence=seq.seq_id, num_blocks=len(table))

    def give_back(self, seq_id: int) -> None:
        """Give back what a sequence owns, and forget it."""
        others = self.others.pop(seq_id, None)
        if others is not None:
            self._gpu.release(others[::-1])
        self.give_back_table(seq_id)

    def give_back_table(self, seq_id: int) -> None:
        """Give back the blocks of a sequence's table, if it has one, and forget it."""
        table = self.tables.pop(seq_id, None)
        if table is not None:
            table.allocator.release(table.distinct()[::-1])

    def give_back_all(self) -> None:
        """Give back what all sequences own, and forget them."""
        for seq_id in dict.fromkeys((*self.tables, *self.others)):
            self.give_back(seq_id)

    def add_prefix(self, prefix: Prefix, table: BlockTable) -> None:
        """Note that a prefix holds the first blocks of a table, as the sequences do."""
        prefix.set_block_table(table[: table.num_prefix])
        self.prefixes[prefix] = None

    def check_prefix(self, prefix: Prefix) -> None:
        """Raise UnknownPrefix unless a prefix got its blocks here."""
        if prefix not in self.prefixes:
            raise UnknownPrefix(num_tokens=prefix.get_length())

    def free_prefix(self, prefix: Prefix) -> None:
        """Give back what a prefix owns. Raises UnknownPrefix."""
        self.check_prefix(prefix)
        del self.prefixes[prefix]
        self._gpu.release(prefix_numbers(prefix)[::-1])
        prefix.block_table = None
        prefix.computed = False

    def size_prefix(self, seq_group: SequenceGroup, num_blocks: int) -> int:
        """Blocks of a group's prefix, of this many of its prompt.

        Raises UnknownPrefix, PrefixTooLong.
        """
        prefix = seq_group.prefix
        if prefix is None:
            return 0
        if prefix.allocated:
            self.check_prefix(prefix)
        num_prefix = prefix.get_num_blocks()
        if num_prefix > num_blocks:
            who = seq_group.request_id
            raise PrefixTooLong(group=who, num_blocks=num_blocks, num_prefix=num_prefix)
        return num_prefix

    def ready_prefix(self, seq_group: SequenceGroup) -> list[int]:
        """The numbers of a group's prefix's blocks, none without one.

        Raises PrefixNotReady, UnknownPrefix.
        """
        prefix = seq_group.prefix
        if prefix is None:
            return []
        if prefix.block_table is None or not prefix.computed:
            raise PrefixNotReady(
                group=seq_group.request_id,
                allocated=prefix.allocated,
                computed=prefix.computed,
            )
        self.check_prefix(prefix)
        return prefix_numbers(prefix)

    def check(self) -> None:
        """Raise InvariantViolation unless each block has the owners that are named here."""
        held: dict[bool, list[int]] = {True: [], False: []}
        for table in self.tables.values():
            held[table.allocator is self._gpu] += table.distinct()
        for more in (*self.others.values(), *map(prefix_numbers, self.prefixes)):
            held[True] += more
        self._backing.check(held[True], held[False])


def prefix_numbers(prefix: Prefix | None) -> list[int]:
    """The numbers of a prefix's blocks, none before it is allocated."""
    if prefix is None:
        return []
    return [block.block_number for block in prefix.block_table or ()]


def distinct_of(tables: Iterable[BlockTable]) -> list[int]:
    """The number of each block of tables once a table that has it, by its first position there."""
    numbers: list[int] = []
    for table in tables:
        numbers += table.distinct()
    return numbers


def on_other_device(seq: Sequence, table: BlockTable, device: Device) -> OnOtherDevice:
    """The error that a sequence's blocks are not on a device."""
    return OnOtherDevice(
        block=table.numbers[-1] if table.numbers else None,
        sequence=seq.seq_id,
        device=table.allocator.device.name,
        expected=device.name,
    )
