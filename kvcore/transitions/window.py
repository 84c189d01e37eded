# SPDX-License-Identifier: Apache-2.0
"""Window trims: replace blocks that no later query sees by the null block.

Invariants: a table's null blocks are a prefix of it, but in a state group there are also null
blocks behind its first state. Blocks are given back from the highest skipped
one down to the first null block, so the newest is evicted first. Blocks that the open batch's
forward pass sees are kept until the batch is taken.
Source: S000-15, 16, 39, 40; S001-80. Twin: rust/src/transitions/window.rs.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvcore.state.plan_records import Trim
from kvcore.state.state import RequestState, State
from kvcore.state.table_edit import TableEdit, users
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions.in_flight import note_request
from kvcore.types.arguments import read_count
from kvcore.types.errors import BeyondComputed
from kvcore.types.groups import skipped_blocks
from kvcore.types.values import Outcome


def remove_skipped_blocks(
    state: State, request_id: str, total_computed_tokens: int
) -> Outcome[State, None]:
    """Give back the blocks that no query at total_computed_tokens or later sees.

    Drafts do not count as computed here: they may be dropped. Raises UnknownRequest, SwappedOut,
    LoadUnfinished, InvalidCount, BeyondComputed.
    """

    def change(tx: Transaction) -> None:
        request = tx.idle(request_id)
        count = read_count("total_computed_tokens", total_computed_tokens)
        if count > request.num_accepted:
            raise BeyondComputed(
                request=request_id, num_computed=request.num_accepted, requested=count
            )
        trims = plan_trims(tx, request, visible_from(tx, request, count))
        tx.put(apply_trims(tx, request, trims))

    return transition(state, change)


def visible_from(tx: Transaction, request: RequestState, num_computed: int) -> int:
    """Return the first query whose window must stay: the open batch's if that is earlier."""
    record = tx.scheduled[request.row]
    return num_computed if record is None else min(num_computed, record.num_computed_before)


def plan_trims(tx: Transaction, request: RequestState, seen_from: int) -> tuple[Trim, ...]:
    """Return the held blocks that no query at seen_from or later sees. Changes nothing."""
    trims = []
    for index, group in enumerate(tx.config.groups):
        table = request.tables[index]
        end = first = min(len(table), skipped_blocks(group, seen_from))
        if group.is_state:
            first, last = min(end, request.num_cached[index]), last_state(request, table)
            if first + 1 < end and tx.is_null(table[first + 1]):
                if end > last:
                    trims.append(Trim(index, last, end))
                end = first + 1
        else:
            while first > 0 and not tx.is_null(table[first - 1]):
                first -= 1
        if first < end:
            trims.append(Trim(index, first, end))
    return tuple(trims)


def last_state(request: RequestState, table: Sequence[int]) -> int:
    """Return the place of a request's state in a table, before those after drafts."""
    return len(table) - 1 - request.num_scheduled_drafts


def freed_blocks(tx: Transaction, request: RequestState, trims: tuple[Trim, ...]) -> list[int]:
    """Return the blocks that the trims would add to the free queue."""
    return [
        request.tables[trim.group_id][position]
        for trim in trims
        for position in range(trim.first, trim.end)
        if _comes_back(tx, request, trim.group_id, position)
    ]


def _comes_back(tx: Transaction, request: RequestState, group_id: int, position: int) -> bool:
    """Return whether a block that a table drops would join the free queue at once."""
    block = request.tables[group_id][position]
    if tx.device.ref_counts[block] != 1 or tx.device.is_busy(block):
        return False
    return not users(tx, request.request_id, group_id, position)


def apply_trims(tx: Transaction, request: RequestState, trims: tuple[Trim, ...]) -> RequestState:
    """Put the null block into these places and release the blocks, highest position first; return
    the request.
    """
    if not trims:
        return request
    note_request(tx, request.request_id, request.num_computed, 0)
    edit, num_cached = TableEdit(tx, request), list(request.num_cached)
    for trim in trims:
        edit.blank(trim.group_id, trim.first, trim.end)
        if tx.config.groups[trim.group_id].is_state:
            table = edit.tables[trim.group_id]
            last = last_state(request, table)  # external tokens may bring a state behind it
            next_place = min(trim.end, last)
            num_cached[trim.group_id] = last if tx.is_null(table[next_place]) else next_place
    return replace(request, tables=tuple(edit.tables), num_cached=tuple(num_cached))
