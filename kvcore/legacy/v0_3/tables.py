# SPDX-License-Identifier: Apache-2.0
"""The owners of the first block manager's blocks: sequences with their tables, and prefixes.

A sequence owns each block of its table once. If a sequence was not waiting when its group was
admitted, its blocks are recorded apart from the tables. A prefix owns its blocks as a sequence
does. Blocks are freed tail first.

Invariants: each owner that the pool counts is recorded here; `check` compares them. Source:
S003-06, 10, 13, 24, 31 to 33.
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

    others: sequence id -> blocks of a sequence that was not waiting when its group was admitted.
    """

    def __init__(self, backing: Backing, gpu: BlockAllocator) -> None:
        self._backing = backing
        self._gpu = gpu
        self.tables: dict[int, BlockTable] = {}
        self.others: dict[int, list[int]] = {}
        self.prefixes: dict[Prefix, None] = {}

    def find(self, seq: Sequence) -> BlockTable:
        """Return the table of a sequence. Raises UnknownSequence."""
        try:
            return self.tables[seq.seq_id]
        except KeyError:
            raise self.unknown(seq) from None

    def unknown(self, seq: Sequence) -> UnknownSequence:
        """Return the error for a sequence without a table."""
        return UnknownSequence(sequence=seq.seq_id, num_tables=len(self.tables))

    def find_all(self, seqs: Iterable[Sequence], allocator: BlockAllocator) -> list[BlockTable]:
        """Return the tables of sequences, whose blocks must all be on one device.

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
        """Return the tables of a group's unfinished sequences. Raises UnknownSequence."""
        return [self.find(seq) for seq in seq_group.get_seqs() if not seq.is_finished()]

    def fit(self, tables: list[BlockTable], room: int, apart: Iterable[int] = ()) -> bool:
        """Return whether the distinct blocks of tables number at most `room`.

        apart: blocks on the GPU that are not counted. Shared blocks are looked up only if the
        tables would not fit without sharing.
        """
        if sum([len(table.numbers) for table in tables]) <= room:
            return True
        on_gpu = set().union(*[each.numbers for each in tables if each.allocator is self._gpu])
        on_cpu = set().union(*[each.numbers for each in tables if each.allocator is not self._gpu])
        return len(on_gpu.difference(apart)) + len(on_cpu) <= room

    def check_new(self, seqs: Iterable[Sequence]) -> None:
        """Raise AlreadyAllocated if a sequence has a table."""
        for seq in seqs:
            table = self.tables.get(seq.seq_id)
            if table is not None:
                raise AlreadyAllocated(sequence=seq.seq_id, num_blocks=len(table))

    def give_back(self, seq_id: int) -> None:
        """Free what a sequence owns, and forget it."""
        others = self.others.pop(seq_id, None)
        if others is not None:
            self._gpu.release(others[::-1])
        self.give_back_table(seq_id)

    def give_back_table(self, seq_id: int) -> None:
        """Free the blocks of a sequence's table, if it has one, and forget the table."""
        table = self.tables.pop(seq_id, None)
        if table is not None:
            table.allocator.release(table.distinct()[::-1])

    def give_back_all(self) -> None:
        """Free what all sequences own, and forget them."""
        for seq_id in dict.fromkeys((*self.tables, *self.others)):
            self.give_back(seq_id)

    def add_prefix(self, prefix: Prefix, table: BlockTable) -> None:
        """Record that a prefix owns the first blocks of a table."""
        prefix.set_block_table(table[: table.num_prefix])
        self.prefixes[prefix] = None

    def check_prefix(self, prefix: Prefix) -> None:
        """Raise UnknownPrefix unless a prefix has blocks of this manager."""
        if prefix not in self.prefixes:
            raise UnknownPrefix(num_tokens=prefix.get_length())

    def free_prefix(self, prefix: Prefix) -> None:
        """Free what a prefix owns. Raises UnknownPrefix."""
        self.check_prefix(prefix)
        del self.prefixes[prefix]
        self._gpu.release(prefix_numbers(prefix)[::-1])
        prefix.block_table = None
        prefix.computed = False

    def size_prefix(self, seq_group: SequenceGroup, num_blocks: int) -> int:
        """Return how many of a prompt's `num_blocks` blocks are its group's prefix.

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
        """Return the block numbers of a group's prefix; empty if it has no prefix.

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
        """Raise InvariantViolation unless each block has exactly the owners recorded here."""
        held: dict[bool, list[int]] = {True: [], False: []}
        for table in self.tables.values():
            held[table.allocator is self._gpu] += table.distinct()
        for more in (*self.others.values(), *map(prefix_numbers, self.prefixes)):
            held[True] += more
        self._backing.check(held[True], held[False])


def prefix_numbers(prefix: Prefix | None) -> list[int]:
    """Return the block numbers of a prefix; empty before it is allocated."""
    if prefix is None:
        return []
    return [block.block_number for block in prefix.block_table or ()]


def distinct_of(tables: Iterable[BlockTable]) -> list[int]:
    """Return the distinct block numbers of each table, one table after the other."""
    numbers: list[int] = []
    for table in tables:
        numbers += table.distinct()
    return numbers


def on_other_device(seq: Sequence, table: BlockTable, device: Device) -> OnOtherDevice:
    """Return the error for a sequence whose blocks are not on a device."""
    return OnOtherDevice(
        block=table.numbers[-1] if table.numbers else None,
        sequence=seq.seq_id,
        device=table.allocator.device.name,
        expected=device.name,
    )
