# SPDX-License-Identifier: Apache-2.0
"""Updates the records of batches in flight: entries of requests, and published keys.

Invariants: a batch has an entry for each request that it changes, in the order of the first change.
An entry is kept when the request leaves the open batch, and dropped when the request is removed.
Nothing is kept if taking a batch completes it. Beside states a cancel restores the count from
before the batch or none, since inside a step there is no state. `state/table_edit.py`, which
changes tables, notes the blocks in use. Twin: rust/src/transitions/in_flight.rs.
"""

from __future__ import annotations

from collections.abc import Callable

from immutables import Map
from msgspec.structs import replace

from kvcore.state.batch_records import (
    OwedCheckpoint,
    PublishedKey,
    RequestEntry,
    in_order,
    next_order,
)
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.types.errors import BeforeOpenBatch


def note_request(
    tx: Transaction, request_id: str, before: int, restore: int, *, publishes: bool | None = None
) -> None:
    """Note in the open batch its effect on a request; noted counts only fall.

    publishes: whether the most recent call that set this flag allows publication.
    """
    if not tx.config.tracks_batches:
        return
    known = tx.entries.get(request_id)
    if known is None:
        made = RequestEntry(next_order(tx.entries), before, restore, bool(publishes))
    else:
        made = replace(
            known,
            before=min(known.before, before),
            restore=min(known.restore, restore),
            publishes=known.publishes if publishes is None else publishes,
        )
    made = replace(made, restore=_restored(tx, made.before, made.restore))
    tx.entries = tx.entries.set(request_id, made)


def _restored(tx: Transaction, before: int, restore: int) -> int:
    """Return the count that a cancel restores: beside states none inside what the batch
    computes.
    """
    return 0 if tx.config.has_states and restore < before else restore


def note_published_key(tx: Transaction, block: int, key: bytes) -> None:
    """Note a key that cancelling the open batch withdraws."""
    if tx.config.max_in_flight:
        tx.published_keys = tx.published_keys.append((block, key))


def note_written_key(
    tx: Transaction, request_id: str, num_tokens: int, block: int, key: bytes
) -> None:
    """Note the key of a content that ends after a request's first `num_tokens` tokens in the last
    batch whose cancel loses some of them. Without one, no cancel withdraws it.
    """
    if not tx.config.max_in_flight:
        return
    known = tx.entries.get(request_id)
    if known is not None and known.restore < num_tokens:
        note_published_key(tx, block, key)
        return
    for index in reversed(range(len(tx.in_flight))):
        batch = tx.in_flight[index]
        known = batch.entries.get(request_id)
        if known is not None and known.restore < num_tokens:
            keys = batch.published_keys.append((block, key))
            tx.in_flight[index] = replace(batch, published_keys=keys)
            return


def note_left_batch(tx: Transaction, request_id: str) -> None:
    """Note that a request left the open batch: its entry stays, but publishes nothing."""
    known = tx.entries.get(request_id)
    if known is not None:
        tx.entries = tx.entries.set(request_id, replace(known, publishes=False))


def lower_restored(tx: Transaction, request_id: str, num_tokens: int) -> None:
    """Limit what cancelling the batch just taken restores of a request."""
    if tx.in_flight and request_id in tx.in_flight[-1].entries:
        known = tx.in_flight[-1].entries[request_id]
        if known.restore <= num_tokens:
            return
        made = replace(known, restore=_restored(tx, known.before, num_tokens))
        entries = tx.in_flight[-1].entries.set(request_id, made)
        tx.in_flight[-1] = replace(tx.in_flight[-1], entries=entries)


def shift_starts(tx: Transaction, request_id: str, above: int, num_tokens: int) -> None:
    """Let batches begin earlier for a request that dropped positions to come before their first
    one. above: the known tokens, before which nothing moves. Raises BeforeOpenBatch if the open
    batch keeps more positions than are left.
    """
    request = tx.request(request_id)
    record = tx.scheduled[request.row]
    if record is not None:
        before = max(above, record.num_computed_before - num_tokens)
        kept = record.num_kept - record.num_computed_before + before
        left = request.num_computed - num_tokens
        if left < kept:
            raise BeforeOpenBatch(request=request_id, num_kept=kept, requested=left)
        moved = replace(record, num_computed_before=before, num_kept=kept)
        tx.scheduled = tx.scheduled.set(request.row, moved)
    for index, batch in enumerate(tx.in_flight):
        entries = _shifted(batch.entries, request_id, above, num_tokens)
        tx.in_flight[index] = replace(batch, entries=entries)
    tx.entries = _shifted(tx.entries, request_id, above, num_tokens)


def _shifted(
    entries: Map[str, RequestEntry], request_id: str, above: int, num_tokens: int
) -> Map[str, RequestEntry]:
    known = entries.get(request_id)
    if known is None or known.before <= above:
        return entries
    before = max(above, known.before - num_tokens)
    made = replace(known, before=before, restore=min(known.restore, before))
    return entries.set(request_id, made)


def inherit_entries(tx: Transaction, parent_id: str, child_id: str) -> None:
    """Give a forked child its parent's entries, although no batch schedules it. A batch in flight
    uses the blocks that they share.
    """
    shared = tuple(len(table) for table in tx.request(child_id).tables)
    for index, batch in enumerate(tx.in_flight):
        if parent_id in batch.entries:
            entries = _with(batch.entries, parent_id, child_id, shared)
            tx.in_flight[index] = replace(batch, entries=entries)
    if parent_id in tx.entries:
        tx.entries = _with(tx.entries, parent_id, child_id, shared)


def _with(
    entries: Map[str, RequestEntry], parent_id: str, child_id: str, shared: tuple[int, ...]
) -> Map[str, RequestEntry]:
    parent = entries[parent_id]
    held = tuple(map(min, parent.held, shared))
    replaced = frozenset(place for place in parent.replaced if place[1] < held[place[0]])
    child = replace(parent, order=next_order(entries), held=held, replaced=replaced)
    return entries.set(child_id, child)


def forget_entries(tx: Transaction, request_id: str, row: int) -> None:
    """Drop a request's entries in all batches; those in flight keep its row."""
    for index, batch in enumerate(tx.in_flight):
        if request_id in batch.entries:
            entries, rows = _without(batch.entries, request_id), tuple(sorted({*batch.rows, row}))
            tx.in_flight[index] = replace(batch, entries=entries, rows=rows)
    if request_id in tx.entries:
        tx.entries = _without(tx.entries, request_id)


def _without(entries: Map[str, RequestEntry], request_id: str) -> Map[str, RequestEntry]:
    left = [(name, each) for name, each in in_order(entries) if name != request_id]
    return Map({name: replace(each, order=at) for at, (name, each) in enumerate(left)})


def unfinished_keys(tx: Transaction) -> set[PublishedKey]:
    """Return what unfinished batches published, and may yet withdraw."""
    found = {(x.block, x.key) for record in tx.scheduled if record for x in record.unwritten}
    return found.union(tx.published_keys, *(batch.published_keys for batch in tx.in_flight))


def give_back(tx: Transaction, is_lost: Callable[[OwedCheckpoint], bool]) -> None:
    """Let the batches in flight give back checkpoints that they will not publish."""
    for index, batch in enumerate(tx.in_flight):
        lost = [owed.block for owed in batch.owed if is_lost(owed)]
        if lost:
            kept = tuple(owed for owed in batch.owed if not is_lost(owed))
            tx.in_flight[index] = replace(batch, owed=kept)
            tx.device.release(lost)


def num_finished(tx: Transaction, request: RequestState) -> int:
    """Count a request's tokens, without drafts, that neither a batch in flight nor the open one
    computes.
    """
    counts = [request.num_accepted]
    entries = [batch.entries for batch in tx.in_flight]
    name = request.request_id
    counts += [each[name].before for each in (*entries, tx.entries) if name in each]
    return min(counts)
