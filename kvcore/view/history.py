# SPDX-License-Identifier: Apache-2.0
"""Derives what happened to each block from a record's calls and the commands of their batches.

Owners follow from the tables that commands set, and free and cached blocks from commands too, so
the cost of a step depends only on what it changed. The state is queried only in steps that changed
the host tier, and after a cancel, which drops commands that took, held or freed blocks.
Invariants: after each batch, owners and findable free blocks equal those of the state before it was
taken: what the call itself merges is among the commands of the next batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcore.manager import KVCacheManager
from kvcore.record.calls import SHAPES
from kvcore.record.reader import RecordedCall
from kvcore.state.state import NO_HOST_BLOCK, State
from kvcore.types.commands import (
    Allocate,
    Batch,
    CopyOnWrite,
    CutTable,
    Evict,
    EvictAll,
    Free,
    Load,
    SetTable,
    Store,
    SwapIn,
    SwapOut,
    Touch,
)
from kvcore.view import columns
from kvcore.view.columns import Columns

COUNTS = (
    *("num_new_tokens", "num_tokens", "num_accepted", "num_computed_tokens", "batch", "operation"),
    *(
        "total_computed_tokens",
        "epoch",
        "now_ms",
        "tokens",
        "hashes",
        "block_ids",
        "request_ids",
        "requests",
    ),
)
"""The argument shown with a call: the first of these that it has; of a list, its length."""
NOT_SHOWN = {"take_batch", "take_events", "take_stats", "take_new_block_ids"}
MOVES = {
    CopyOnWrite.kind: (columns.COPY, 1, 0),
    SwapOut.kind: (columns.SWAP_OUT, 0, 1),
    SwapIn.kind: (columns.SWAP_IN, 1, 0),
    Store.kind: (columns.STORE, 1, 0),
    Load.kind: (columns.LOAD, 2, 0),
}
"""Commands that move contents: the event, and the fields for its x and z."""


class Table:
    """The blocks of a request in one group; None for a position without one."""

    __slots__ = ("blocks", "request")

    def __init__(self, request: int) -> None:
        self.request = request
        self.blocks: list[int | None] = []


class History:
    """The events of a run. names: of the requests, by number; an id that is added again gets a new
    number. lists: lists of requests that calls name; the first one is empty.
    """

    def __init__(self) -> None:
        self.events = Columns()
        self.names: list[str] = []
        self.lists: list[tuple[int, ...]] = [()]
        self.outcomes: list[str] = ["done"]
        self.num_steps = 0
        self._known_lists: dict[tuple[int, ...], int] = {(): 0}
        self.is_open = False
        self._num_free_host = -1

    def begin(self, manager: KVCacheManager) -> None:
        """Start from a manager's state, and forget what was before."""
        state = manager.state()
        self.first_block, self.num_groups = state.device.first_block, len(state.config.groups)
        self.numbers: dict[str, int] = {}
        self.rows: dict[int, int] = {}
        self.tables: dict[tuple[int, int], Table] = {}
        self.host: dict[int, int] = {}
        self._replaced: tuple[int, int, int] | None = None
        self._freed: dict[int, bool] = {}
        self._touched: set[int] = set()
        self._evicted: int | None = None
        self._left: set[int] = set()
        self._cancelled = False
        self.events.add(columns.RESET)
        keys, counts = state.device.keys, state.device.ref_counts
        self._fresh = {
            block: False
            for block, count in enumerate(counts)
            if count and block >= self.first_block
        }
        for row, name in enumerate(state.rows):
            if name is not None:
                self.rows[row] = self._new(name)
                for group_id, table in enumerate(state.requests[name].tables):
                    for position, block in enumerate(table):
                        self._set(row, group_id, position, block)
        for block, count in enumerate(counts):
            if block >= self.first_block and not count and keys[block] is not None:
                self.events.add(columns.FREE, block, 0, 1)
        self._end_batch(state.batch.number - 1, 0, manager, manager.num_free_blocks, moved=True)

    def call(self, call: RecordedCall) -> None:
        """Add a call that was made."""
        result, arguments = call.result, call.arguments
        if result is None or call.name in NOT_SHOWN:
            return
        self.is_open = True
        self._cancelled |= call.name == "cancel"
        named, count = 0, _count(arguments)
        if "request_id" in arguments:
            named = self._number(arguments["request_id"]) + 1
        elif call.name in ("add_request", "fork"):
            request = arguments.get("request")
            name = request.request_id if request else arguments["child_id"]
            if result.what == "done":
                self.rows[result.numbers[0]] = self._new(name)
            named = self._number(name) + 1
            count = len(request.tokens) if request else self._number(arguments["parent_id"])
        elif (several := arguments.get("requests", arguments.get("request_ids"))) is not None:
            named = self._list(several)
        if call.name == "get_computed_blocks" and result.what == "done":
            count = result.numbers[0]
        if result.what not in self.outcomes:
            self.outcomes.append(result.what)
        kind = columns.FIRST_CALL + SHAPES[call.name].opcode
        self.events.add(kind, named, count, self.outcomes.index(result.what))
        if result.what.startswith("refused"):
            self.events.add(columns.REFUSED, *result.numbers[-3:])

    def batch(self, batch: Batch, call: int, manager: KVCacheManager, num_free: int) -> None:
        """Add a batch that the manager has just returned from the call of this number. num_free:
        its free blocks before, since the call's own commands (merges) are in the next batch.
        """
        rows = zip(*(batch.column(name).tolist() for name in ("kind", *"abcd")), strict=True)
        moved = False
        for kind, *fields in rows:
            block = fields[0]
            if self._replaced is not None and (kind != Free.kind or block + 1 != self._replaced[0]):
                self._leave_replaced()
            if kind == SetTable.kind:
                self._set(*fields)
            elif kind == Free.kind:
                self._free(block, cached=bool(fields[1]))
            elif kind == CutTable.kind:
                self._cut(*fields[:3])
            elif kind == Allocate.kind:
                evicts, self._evicted = block == self._evicted, None
                self._settle(block)
                self._fresh[block] = evicts
            elif kind == Touch.kind:
                self._settle(block)
                self._touched.add(block)
            elif kind == Evict.kind:
                self._settle(block)
                self._evicted = block
            elif kind == EvictAll.kind:
                moved = True
                self._settle_all()
                self.events.add(columns.FORGET_ALL)
            elif kind in MOVES:
                moved = True
                event, x, z = MOVES[kind]
                self.events.add(event, fields[x], 0, fields[z])
        self._end_batch(batch.number, call, manager, num_free, moved=moved)

    def _end_batch(
        self, number: int, call: int, manager: KVCacheManager, num_free: int, *, moved: bool
    ) -> None:
        self._settle_all()
        if self._cancelled:
            self._follow_holders(manager.state())
        self._cancelled = False
        if manager.config.num_host_blocks:
            if moved or manager.num_free_host_blocks != self._num_free_host:
                self._follow_host(manager.state())
            self._num_free_host = manager.num_free_host_blocks
        self.events.add(columns.BATCH, number, call, num_free)
        self.num_steps += 1
        self.is_open = False

    def _set(self, row: int, group_id: int, position: int, block: int) -> None:
        """Set a position of a table to a block, or to none for the null block."""
        table = self.tables.get((row, group_id))
        if table is None or not table.blocks:
            table = self.tables[row, group_id] = Table(self.rows[row])
        table.blocks += [None] * (position + 1 - len(table.blocks))
        old, new = table.blocks[position], block if block >= self.first_block else None
        if old == new:
            return
        place = position * self.num_groups + group_id
        table.blocks[position] = new
        if new is None:
            if old is not None:
                self._drop(old, table.request, place, implied=False)
            return
        if old is not None:
            self._replaced = (old + 1, table.request, place)
        if new in self._fresh:
            kind = columns.TAKE_EVICTING if self._fresh.pop(new) else columns.TAKE
        else:
            self._settle(new, held=False)
            kind = columns.HIT
        self.events.add(kind, new, table.request, place)

    def _cut(self, row: int, group_id: int, length: int) -> None:
        """Shorten a table, last block first."""
        table = self.tables.get((row, group_id))
        if table is None:
            return
        for position in range(len(table.blocks) - 1, length - 1, -1):
            block = table.blocks[position]
            if block is not None:
                self._drop(block, table.request, position * self.num_groups + group_id)
        del table.blocks[length:]

    def _drop(self, block: int, request: int, place: int, *, implied: bool = True) -> None:
        """Note that a request has dropped a block. If no request has it, its Free command came
        before.
        """
        cached = self._freed.pop(block, None)
        kind = (columns.FREED, columns.FREED_CACHED)[cached] if cached is not None else columns.DROP
        (self._left.add if cached is None else self._left.discard)(block)
        self.events.add(kind, 0 if implied else block + 1, request, place)

    def _free(self, block: int, *, cached: bool) -> None:
        if self._replaced is None:
            self._settle(block)
            self._freed[block] = cached
            return
        kind = columns.FREED_CACHED if cached else columns.FREED
        self.events.add(kind, *self._replaced)
        self._left.discard(block)
        self._replaced = None

    def _leave_replaced(self) -> None:
        if self._replaced is not None:
            self.events.add(columns.DROP, *self._replaced)
            self._left.add(self._replaced[0] - 1)
            self._replaced = None

    def _follow_holders(self, state: State) -> None:
        """Write what the dropped commands of a cancel held or freed for no table."""
        known = self._left.union(*(table.blocks for table in self.tables.values()))
        for block, count in enumerate(state.device.ref_counts):
            if count and block >= self.first_block and block not in known:
                self._hold(block)
            elif not count and block in self._left:
                self._left.remove(block)
                self.events.add(columns.FREE, block, 0, state.device.keys[block] is not None)

    def _hold(self, block: int) -> None:
        self._left.add(block)
        self.events.add(columns.HOLD, block)

    def _settle(self, block: int, *, held: bool = True) -> None:
        """Write the pending event of a block, since no later command can change it.

        held: it was touched, but not for a table.
        """
        if self._evicted is not None:
            self.events.add(columns.FORGET, self._evicted)
            self._evicted = None
        if block in self._freed:
            self._left.discard(block)
            self.events.add(columns.FREE, block, 0, self._freed.pop(block))
        if block in self._fresh:
            self._touched.add(block)
            if self._fresh.pop(block):
                self.events.add(columns.FORGET, block)
        if block in self._touched:
            self._touched.remove(block)
            if held:
                self._hold(block)

    def _settle_all(self) -> None:
        self._leave_replaced()
        for block in (*self._freed, *self._fresh, *self._touched):
            self._settle(block)
        if self._evicted is not None:
            self.events.add(columns.FORGET, self._evicted)
            self._evicted = None

    def _follow_host(self, state: State) -> None:
        """Write which owners changed in the host tier."""
        assert state.host is not None
        now = {
            block: 1
            for block, count in enumerate(state.host.ref_counts)
            if count or state.host.keys[block] is not None
        }
        for name, request in state.requests.items():
            for table in request.host_tables:
                now |= {block: self._number(name) + 2 for block in table if block != NO_HOST_BLOCK}
        for block in sorted({*now, *self.host}):
            if now.get(block, 0) != self.host.get(block, 0):
                self.events.add(columns.HOST, block, now.get(block, 0))
        self.host = now

    def _number(self, name: str) -> int:
        """Return the number of a request; a new one for an unknown id."""
        return self.numbers[name] if name in self.numbers else self._new(name)

    def _new(self, name: str) -> int:
        self.numbers[name] = len(self.names)
        self.names.append(name)
        return self.numbers[name]

    def _list(self, requests: Iterable[str | int]) -> int:
        """Return the number of a list of ids or rows."""
        numbers = tuple(
            self._number(each) if isinstance(each, str) else self.rows[each]
            for each in requests
            if isinstance(each, str) or each in self.rows
        )
        if numbers not in self._known_lists:
            self._known_lists[numbers] = len(self.lists)
            self.lists.append(numbers)
        return self._known_lists[numbers]


def _count(arguments: dict[str, Any]) -> int:
    """Return the number shown with a call."""
    value = next((arguments[name] for name in COUNTS if arguments.get(name) is not None), 0)
    return value if isinstance(value, int) else len(value)
