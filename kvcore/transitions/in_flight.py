# SPDX-License-Identifier: Apache-2.0
"""What transitions note about unfinished batches: marks, published keys and blocks in use.

Invariants: a batch marks each request that it changes, in the order of first marking; a mark
outlives that the request leaves the open batch, and goes when the request is removed. When a block
leaves a table, it is in use by every unfinished batch whose forward pass reads or writes it there:
one that schedules the request and was taken with the block in that place. Nothing is kept if
batches finish as they are taken. Twin: rust/src/transitions/in_flight.rs.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        _store(tx, len(tx.unfinished) - 1, request_id, made)


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


def let_go(tx: Transaction, request: RequestState, group: int, positions: Iterable[int]) -> None:
    """Note that the blocks in these places leave a table: unfinished batches still use them."""
    if not tx.unfinished:
        return
    for position in positions:
        block = request.tables[group][position]
        if not tx.is_null(block):
            for number in users(tx, request.request_id, group, position):
                tx.device.use(block, number)


def shorten(tx: Transaction, request_id: str, group: int, length: int) -> None:
    """Note that a table was cut: what comes behind is not what unfinished batches use."""
    for index, batch in enumerate(tx.unfinished):
        known = batch.marks.get(request_id)
        if known is None or known.held[group] <= length:
            continue
        held = (*known.held[:group], length, *known.held[group + 1 :])
        replaced = frozenset(at for at in known.replaced if at[0] != group or at[1] < length)
        _store(tx, index, request_id, evolve(known, held=held, replaced=replaced))


def replace(tx: Transaction, request_id: str, group: int, position: int) -> None:
    """Note that a place of a table has another block by now."""
    for index, batch in enumerate(tx.unfinished):
        known = batch.marks.get(request_id)
        if known is not None and position < known.held[group]:
            replaced = known.replaced | {(group, position)}
            _store(tx, index, request_id, evolve(known, replaced=replaced))


def _store(tx: Transaction, index: int, request_id: str, made: Mark) -> None:
    batch = tx.unfinished[index]
    tx.unfinished[index] = evolve(batch, marks=batch.marks.set(request_id, made))


def num_finished(tx: Transaction, request: RequestState) -> int:
    """Tokens of a request, drafts aside, that no unfinished batch computes, nor the open one."""
    counts = [request.num_accepted]
    marks = [batch.marks for batch in tx.unfinished]
    name = request.request_id
    counts += [each[name].before for each in (*marks, tx.marks) if name in each]
    return min(counts)
