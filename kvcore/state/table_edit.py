# SPDX-License-Identifier: Apache-2.0
"""Changes of block tables, each with its command and its effect on batches in flight.

Invariants: no other file makes a `SetTable` or a `CutTable`. A block that leaves a table is in use
by every batch in flight whose forward pass reads or writes it there, that is, each batch that
schedules the request and was taken with the block in that place. Twin:
rust/src/state/table_edit.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from kvcore.state.batch_records import RequestEntry
from kvcore.state.state import NULL_BLOCK, RequestState, Table
from kvcore.state.transaction import Transaction
from kvcore.types.commands import CutTable, SetTable, Zero


class TableEdit:
    """The tables of one request while a transition changes them.

    tables: the current ones; the transition puts them into the request.
    """

    __slots__ = ("request_id", "row", "tables", "tx", "wishes")

    def __init__(self, tx: Transaction, request: RequestState) -> None:
        self.tx = tx
        self.request_id = request.request_id
        self.row = request.row
        self.tables = list(request.tables)
        self.wishes = request.wishes

    def extend(self, group_id: int, blocks: Iterable[int], *, fresh: bool = False) -> None:
        """Append blocks to a table, each as it is yielded. fresh: nothing fills them."""
        added = []
        for position, block in enumerate(blocks, len(self.tables[group_id])):
            if fresh:
                self._note_new(group_id, block)
            self.tx.effects.commands.append(SetTable(self.row, group_id, position, block))
            added.append(block)
        self.tables[group_id] = self.tables[group_id].extend(added)

    def share(self, group_id: int, blocks: Table) -> None:
        """Add the request as an owner of blocks, which become its table; the table must be
        empty.
        """
        for position, block in enumerate(blocks):
            if not self.tx.is_null(block):
                self.tx.device.touch(block)
            self.tx.effects.commands.append(SetTable(self.row, group_id, position, block))
        self.tables[group_id] = blocks

    def replace(self, group_id: int, position: int, block: int, *, fresh: bool = False) -> None:
        """Replace a block of a table and release the old one. fresh: nothing fills the new one."""
        table = self.tables[group_id]
        self._keep_in_use(group_id, range(position, position + 1))
        self._note_replaced(group_id, position)
        if fresh:
            self._note_new(group_id, block)
        self.tx.effects.commands.append(SetTable(self.row, group_id, position, block))
        self._note_wishes(group_id, range(position, position + 1))
        self.tx.device.release([table[position]])
        self.tables[group_id] = table.set(position, block)

    def blank(self, group_id: int, first: int, end: int) -> None:
        """Put the null block into places [first, end) and release the old blocks, the last one
        first.
        """
        table = self.tables[group_id]
        self._keep_in_use(group_id, range(first, end))
        self._note_wishes(group_id, range(first, end))
        self.tx.device.release(table[first:end][::-1])
        changed = table.evolver()
        for position in range(first, end):
            changed[position] = NULL_BLOCK
            self._note_replaced(group_id, position)
            self.tx.effects.commands.append(SetTable(self.row, group_id, position, NULL_BLOCK))
        self.tables[group_id] = changed.persistent()

    def move_last(self, group_id: int, position: int) -> None:
        """Move the last block of a table to a position, which becomes the last one. Null blocks
        fill the places between; a block at the new position is released.
        """
        table = self.tables[group_id]
        last, block = len(table) - 1, table[-1]
        if position == last:
            return
        set_table = self.tx.effects.commands.append
        if position > last:
            self._keep_in_use(group_id, range(last, last + 1))
            self._note_replaced(group_id, last)
            set_table(SetTable(self.row, group_id, last, NULL_BLOCK))
            self.tables[group_id] = table.set(last, NULL_BLOCK)
            self.extend(group_id, [*[NULL_BLOCK] * (position - last - 1), block])
            return
        self._keep_in_use(group_id, range(position, position + 1))
        self._note_replaced(group_id, position)
        self._shorten(group_id, position + 1)
        set_table(SetTable(self.row, group_id, position, block))
        set_table(CutTable(self.row, group_id, position + 1))
        if not self.tx.is_null(table[position]):
            self._note_wishes(group_id, range(position, position + 1))
            self.tx.device.release([table[position]])
        self.tables[group_id] = table[:position].append(block)

    def keep_of_end(self, group_id: int, first: int, kept: Sequence[int]) -> None:
        """Replace the end of a table, from place `first` on, by some of its blocks, in order. The
        others are released, the last one first. kept: places in the end, ascending.
        """
        tx, table = self.tx, self.tables[group_id]
        end, length = table[first:], first + len(kept)
        self._keep_in_use(group_id, range(first, len(table)))
        for position, place in enumerate(kept, first):
            if end[place] != table[position]:
                self._note_replaced(group_id, position)
                tx.effects.commands.append(SetTable(self.row, group_id, position, end[place]))
        self._shorten(group_id, length)
        tx.effects.commands.append(CutTable(self.row, group_id, length))
        left = [place for place in range(len(end)) if place not in kept]
        for place in left:
            self._note_wishes(group_id, range(first + place, first + place + 1))
        tx.device.release([end[place] for place in left[::-1]])
        self.tables[group_id] = table[:first].extend(end[place] for place in kept)

    def cut(self, group_id: int, length: int) -> None:
        """Keep `length` blocks of a table and release the others, the last one first."""
        tx, table = self.tx, self.tables[group_id]
        self._keep_in_use(group_id, range(length, len(table)))
        self._shorten(group_id, length)
        self._note_wishes(group_id, range(length, len(table)))
        tx.device.release([block for block in table[length:][::-1] if not tx.is_null(block)])
        tx.effects.commands.append(CutTable(self.row, group_id, length))
        self.tables[group_id] = table[:length]

    def _keep_in_use(self, group_id: int, positions: range) -> None:
        """Note that batches in flight still use the blocks in these places, which leave."""
        for position in positions if self.tx.in_flight else ():
            block = self.tables[group_id][position]
            if not self.tx.is_null(block):
                for number in users(self.tx, self.request_id, group_id, position):
                    self.tx.device.use(block, number)

    def _note_wishes(self, group_id: int, positions: range) -> None:
        """Note how long the blocks in these places, which leave, should stay cached."""
        table, device = self.tables[group_id], self.tx.device
        if device.pool.retention is None:
            return
        from kvcore.pool.retention import RetentionTransaction  # few pools have levels
        from kvcore.types.retention import wish_at

        assert isinstance(device, RetentionTransaction)
        size = self.tx.config.groups[group_id].block_size
        for position in positions:
            if not self.tx.is_null(table[position]):
                wish = wish_at(self.wishes, (position + 1) * size - 1)
                device.note_wish(table[position], wish)

    def _shorten(self, group_id: int, length: int) -> None:
        """Note that a table is cut: batches in flight do not use blocks that are appended later."""
        for index, batch in enumerate(self.tx.in_flight):
            known = batch.entries.get(self.request_id)
            if known is None or known.held[group_id] <= length:
                continue
            held = (*known.held[:group_id], length, *known.held[group_id + 1 :])
            replaced = frozenset(at for at in known.replaced if at[0] != group_id or at[1] < length)
            self._set_entry(index, replace(known, held=held, replaced=replaced))

    def _note_replaced(self, group_id: int, position: int) -> None:
        """Note that a place of a table has a different block now."""
        for index, batch in enumerate(self.tx.in_flight):
            known = batch.entries.get(self.request_id)
            if known is not None and position < known.held[group_id]:
                self._set_entry(
                    index, replace(known, replaced=known.replaced | {(group_id, position)})
                )

    def _set_entry(self, index: int, made: RequestEntry) -> None:
        batch = self.tx.in_flight[index]
        entries = batch.entries.set(self.request_id, made)
        self.tx.in_flight[index] = replace(batch, entries=entries)

    def _note_new(self, group_id: int, block: int) -> None:
        """Record a block as new, and zero it if its group needs zeroing."""
        tx, group = self.tx, self.tx.config.groups[group_id]
        if group.zero_new_blocks:
            tx.effects.commands.append(Zero(block))
        if tx.config.record_new_blocks and group.kind in ("full_attention", "mla"):
            new = tx.new_blocks
            tx.new_blocks = (*new[:group_id], new[group_id].append(block), *new[group_id + 1 :])


def users(tx: Transaction, request_id: str, group_id: int, position: int) -> list[int]:
    """List the batches in flight whose forward pass uses the block in this place of a table."""
    found = []
    for batch in tx.in_flight:
        known = batch.entries.get(request_id)
        if known is not None and known.uses(group_id, position):
            found.append(batch.number)
    return found


def rebuild(tx: Transaction, row: int) -> None:
    """Set the tables of a row in the runtime again, whatever they are there."""
    request_id = tx.rows[row]
    for group_id in range(len(tx.config.groups)):
        tx.effects.commands.append(CutTable(row, group_id, 0))
        table = () if request_id is None else tx.request(request_id).tables[group_id]
        for position, block in enumerate(table):
            tx.effects.commands.append(SetTable(row, group_id, position, block))
