# SPDX-License-Identifier: Apache-2.0
"""What transitions note about unfinished batches: marks and published keys.

Invariants: a batch marks each request that it changes, in the order of first marking; a mark
outlives that the request leaves the open batch, and goes when the request is removed. Nothing is
kept if batches finish as they are taken. Blocks in use are noted where tables change:
`state/table_edit.py`. Twin: rust/src/transitions/in_flight.rs.
"""

from __future__ import annotations

from immutables import Map
from msgspec.structs import replace as evolve

from kvcore.state.batch_records import Mark, in_order, next_order
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction


def mark(
    tx: Transaction, request_id: str, before: int, restore: int, *, publishes: bool | None = None
) -> None:
    """Note in the open batch what it does to a request; counts only fall.

    publishes: as the last call says that says it.
    """
    if not tx.config.tracks_batches:
        return
    known = tx.marks.get(request_id)
    if known is None:
        made = Mark(next_order(tx.marks), before, restore, bool(publishes))
    else:
        made = evolve(
            known,
            before=min(known.before, before),
            restore=min(known.restore, restore),
            publishes=known.publishes if publishes is None else publishes,
        )
    tx.marks = tx.marks.set(request_id, made)


def note_given(tx: Transaction, block: int, key: bytes) -> None:
    """Note a key that a cancel of the open batch withdraws."""
    if tx.config.max_in_flight:
        tx.given = tx.given.append((block, key))


def leave(tx: Transaction, request_id: str) -> None:
    """Note that a request left the open batch: what it remembers stays, but publishes nothing."""
    known = tx.marks.get(request_id)
    if known is not None:
        tx.marks = tx.marks.set(request_id, evolve(known, publishes=False))


def lower(tx: Transaction, request_id: str, num_tokens: int) -> None:
    """Note that a cancel of the batch that was just taken restores no more of a request."""
    if tx.unfinished and request_id in tx.unfinished[-1].marks:
        known = tx.unfinished[-1].marks[request_id]
        made = evolve(known, restore=min(known.restore, num_tokens))
        marks = tx.unfinished[-1].marks.set(request_id, made)
        tx.unfinished[-1] = evolve(tx.unfinished[-1], marks=marks)


def inherit(tx: Transaction, parent_id: str, child_id: str) -> None:
    """Give a forked child its parent's marks; no batch schedules it."""
    for index, batch in enumerate(tx.unfinished):
        if parent_id in batch.marks:
            tx.unfinished[index] = evolve(batch, marks=_with(batch.marks, parent_id, child_id))
    if parent_id in tx.marks:
        tx.marks = _with(tx.marks, parent_id, child_id)


def _with(marks: Map[str, Mark], parent_id: str, child_id: str) -> Map[str, Mark]:
    parent = marks[parent_id]
    held = (0,) * len(parent.held)
    child = Mark(next_order(marks), parent.before, parent.restore, parent.publishes, held)
    return marks.set(child_id, child)


def forget(tx: Transaction, request_id: str) -> None:
    """Drop a request's marks in all batches."""
    for index, batch in enumerate(tx.unfinished):
        if request_id in batch.marks:
            marks = _without(batch.marks, request_id)
            tx.unfinished[index] = evolve(batch, marks=marks)
    if request_id in tx.marks:
        tx.marks = _without(tx.marks, request_id)


def _without(marks: Map[str, Mark], request_id: str) -> Map[str, Mark]:
    left = [(name, each) for name, each in in_order(marks) if name != request_id]
    return Map({name: evolve(each, order=at) for at, (name, each) in enumerate(left)})


def num_finished(tx: Transaction, request: RequestState) -> int:
    """Tokens of a request, drafts aside, that no unfinished batch computes, nor the open one."""
    counts = [request.num_accepted]
    marks = [batch.marks for batch in tx.unfinished]
    name = request.request_id
    counts += [each[name].before for each in (*marks, tx.marks) if name in each]
    return min(counts)
