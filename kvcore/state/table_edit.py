# SPDX-License-Identifier: Apache-2.0
"""Changes of block tables: each with its command, and with what batches in flight make of it.

Invariants: no other file makes a `SetTable` or a `CutTable`. When a block leaves a table, it is in
use by every unfinished batch whose forward pass reads or writes it there: one that schedules the
request and was taken with the block in that place. Twin: rust/src/state/table_edit.rs.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace as evolve

from kvcore.state.batch_records import Mark
from kvcore.state.state import NULL_BLOCK, RequestState, Table
from kvcore.state.transaction import Transaction
from kvcore.types.commands import CutTable, SetTable, Zero


class TableEdit:
    """The tables of one request while a transition changes them.

    tables: as they are by now; the transition puts them into the request.
    """

    __slots__ = ("request_id", "row", "tables", "tx")

    def __init__(self, tx: Transaction, request: RequestState) -> None:
        self.tx = tx
        self.request_id = request.request_id
        self.row = request.row
        self.tables = list(request.tables)

    def extend(self, group: int, blocks: Iterable[int], *, fresh: bool = False) -> None:
        """Put blocks at the end of a table, each when it comes. fresh: nothing fills them."""
        added = []
        for position, block in enumerate(blocks, len(self.tables[group])):
            if fresh:
                self._note_new(group, block)
            self.tx.effects.commands.append(SetTable(self.row, group, position, block))
            added.append(block)
        self.tables[group] = self.tables[group].extend(added)

    def share(self, group: int, blocks: Table) -> None:
        """Make the request an owner more of blocks, which its empty table becomes."""
        for position, block in enumerate(blocks):
            if not self.tx.is_null(block):
                self.tx.device.touch(block)
            self.tx.effects.commands.append(SetTable(self.row, group, position, block))
        self.tables[group] = blocks

    def replace(self, group: int, position: int, block: int, *, fresh: bool = False) -> None:
        """Put another block in a place of a table and release the one that was there. fresh:
        nothing fills the new one.
        """
        table = self.tables[group]
        self._keep_in_use(group, range(position, position + 1))
        self._note_replaced(group, position)
        if fresh:
            self._note_new(group, block)
        self.tx.effects.commands.append(SetTable(self.row, group, position, block))
        self.tx.device.release([table[position]])
        self.tables[group] = table.set(position, block)

    def blank(self, group: int, first: int, end: int) -> None:
        """Put the null block in places [first, end) and release the blocks, the last one first."""
        table = self.tables[group]
        self._keep_in_use(group, range(first, end))
        self.tx.device.release(table[first:end][::-1])
        changed = table.evolver()
        for position in range(first, end):
            changed[position] = NULL_BLOCK
            self._note_replaced(group, position)
            self.tx.effects.commands.append(SetTable(self.row, group, position, NULL_BLOCK))
        self.tables[group] = changed.persistent()

    def cut(self, group: int, length: int) -> None:
        """Keep so many blocks of a table and release those behind, the last one first."""
        tx, table = self.tx, self.tables[group]
        self._keep_in_use(group, range(length, len(table)))
        self._shorten(group, length)
        tx.device.release([block for block in table[length:][::-1] if not tx.is_null(block)])
        tx.effects.commands.append(CutTable(self.row, group, length))
        self.tables[group] = table[:length]

    def _keep_in_use(self, group: int, positions: range) -> None:
        """Note that the blocks in these places leave: unfinished batches still use them."""
        for position in positions if self.tx.unfinished else ():
            block = self.tables[group][position]
            if not self.tx.is_null(block):
                for number in users(self.tx, self.request_id, group, position):
                    self.tx.device.use(block, number)

    def _shorten(self, group: int, length: int) -> None:
        """Note that a table is cut: what comes behind is not what unfinished batches use."""
        for index, batch in enumerate(self.tx.unfinished):
            known = batch.marks.get(self.request_id)
            if known is None or known.held[group] <= length:
                continue
            held = (*known.held[:group], length, *known.held[group + 1 :])
            replaced = frozenset(at for at in known.replaced if at[0] != group or at[1] < length)
            self._mark(index, evolve(known, held=held, replaced=replaced))

    def _note_replaced(self, group: int, position: int) -> None:
        """Note that a place of a table has another block by now."""
        for index, batch in enumerate(self.tx.unfinished):
            known = batch.marks.get(self.request_id)
            if known is not None and position < known.held[group]:
                self._mark(index, evolve(known, replaced=known.replaced | {(group, position)}))

    def _mark(self, index: int, made: Mark) -> None:
        batch = self.tx.unfinished[index]
        marks = batch.marks.set(self.request_id, made)
        self.tx.unfinished[index] = evolve(batch, marks=marks)

    def _note_new(self, group: int, block: int) -> None:
        """Zero a block that nothing fills if its group asks for it, and record it as new."""
        tx, rule = self.tx, self.tx.config.groups[group]
        if rule.zero_new_blocks:
            tx.effects.commands.append(Zero(block))
        if tx.config.record_new_blocks and rule.kind in ("full_attention", "mla"):
            new = tx.new_blocks
            tx.new_blocks = (*new[:group], new[group].append(block), *new[group + 1 :])


def users(tx: Transaction, request_id: str, group: int, position: int) -> list[int]:
    """The unfinished batches whose forward pass uses the block in this place of a table."""
    found = []
    for batch in tx.unfinished:
        known = batch.marks.get(request_id)
        if known is None or position >= known.held[group]:
            continue
        if (group, position) not in known.replaced:
            found.append(batch.number)
    return found


def rebuild(tx: Transaction, row: int) -> None:
    """Set the tables of a row anew, whatever they are in the runtime."""
    request_id = tx.rows[row]
    for group in range(len(tx.config.groups)):
        tx.effects.commands.append(CutTable(row, group, 0))
        table = () if request_id is None else tx.request(request_id).tables[group]
        for position, block in enumerate(table):
            tx.effects.commands.append(SetTable(row, group, position, block))
