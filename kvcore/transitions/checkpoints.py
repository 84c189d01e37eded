# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: states that other requests may start from, and when they get their keys.

Invariants: the state at the end of a step is a checkpoint if its tokens are a multiple of the
group's block size, or if the call marked it; then no event names it. It gets its key when its batch
is taken, or completed with `publish="completed"`, never by the call: a hit copies the block, and
the open batch has not yet written it. Until a batch in flight publishes a checkpoint, it owns the
block, so that the key comes even if the request goes on or leaves. A state whose last token is to
come gets its key with that token, and is lost if the request leaves before; until then the table of
the request keeps it (`window.py`). With `duplicates="merge"` a state that is already findable gets
no second key.
Twin: rust/src/transitions/checkpoints.rs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from kvcore.state.batch_records import BatchInFlight, OwedCheckpoint, PublishedKey
from kvcore.state.open_batch import OpenBatch
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions.in_flight import give_back, note_written_key, num_finished
from kvcore.transitions.unconfirmed_loads import note_keyed
from kvcore.types.events import BlockStored

Stored = Callable[[Transaction, RequestState, int, int, int], BlockStored]
"""Makes the event that a request's blocks became findable: `publish.stored`, which imports this."""


def note_end(
    tx: Transaction, request: RequestState, *, publishes: bool, marked: bool = False
) -> None:
    """Note whether the state after a request's step in the open batch is a checkpoint. publishes:
    whether it may get a key. marked: whether it is one in all groups.
    """
    drop_end(tx, request.request_id)
    sizes = [group.block_size for group in tx.config.groups if group.is_state]
    whole = [request.state_count % size == 0 for size in sizes]
    if publishes and (marked or any(whole)):
        tx.batch = replace(tx.batch, ends=tx.batch.ends.append(request.request_id))
        if not all(whole) and marked:
            tx.batch = replace(tx.batch, marked=tx.batch.marked | {request.request_id})


def drop_end(tx: Transaction, request_id: str) -> None:
    """Forget the checkpoint of a request that the open batch does not write any more."""
    if request_id in tx.batch.ends:
        ends, marked = tx.batch.ends.remove(request_id), tx.batch.marked - {request_id}
        tx.batch = replace(tx.batch, ends=ends, marked=marked)


def settle_ends(tx: Transaction, taken: OpenBatch, stored: Stored) -> None:
    """Give the checkpoints of the batch just taken their keys, or their blocks to the batch until
    it is completed.
    """
    waits = tx.config.publish == "completed" and tx.config.max_in_flight
    for request_id in taken.ends:
        request, marked = tx.request(request_id), request_id in taken.marked
        count = request.state_count
        found = checkpoints(tx, request, count, stored, marked=marked)
        if not waits:
            keys = publish_states(tx, request, count, found)
            if tx.config.max_in_flight:
                batch = tx.in_flight[-1]
                tx.in_flight[-1] = replace(batch, published_keys=batch.published_keys.extend(keys))
            continue
        _owe(tx, request, count, len(tx.in_flight) - 1, found)


def cache_state(tx: Transaction, request: RequestState, num_tokens: int, stored: Stored) -> None:
    """Publish the state at a request's count, if it is a checkpoint among its first num_tokens
    tokens and no unfinished batch writes it; the open batch publishes what it writes.
    """
    if request.state_count != num_tokens:
        return
    if tx.scheduled[request.row] is not None:
        if request.request_id not in tx.batch.ends:
            note_end(tx, request, publishes=True)
    elif tx.config.publish == "scheduled" or num_finished(tx, request) == num_tokens:
        found = checkpoints(tx, request, num_tokens, stored)
        for block, key in publish_states(tx, request, num_tokens, found):
            note_written_key(tx, request.request_id, num_tokens, block, key)


def publish_reached(tx: Transaction, request: RequestState, num_known: int, stored: Stored) -> None:
    """Publish the checkpoints behind the first num_known tokens whose tokens are known now, as far
    as taken batches write them; one that is not yet written belongs to its batch until then.
    """
    record, name = tx.scheduled[request.row], request.request_id
    taken = request.num_computed if record is None else record.num_computed_before
    waits = tx.config.publish == "completed" and tx.config.max_in_flight
    for count in range(num_known + 1, min(request.tokens.length, taken) + 1):
        found = checkpoints(tx, request, count, stored)
        if waits and num_finished(tx, request) < count:
            begun = (
                name in each.entries and each.entries[name].before < count for each in tx.in_flight
            )
            last = max(index for index, writes in enumerate(begun) if writes)
            _owe(tx, request, count, last, found)
            continue
        for block, key in publish_states(tx, request, count, found):
            note_written_key(tx, name, count, block, key)


def checkpoints(
    tx: Transaction, request: RequestState, count: int, stored: Stored, *, marked: bool = False
) -> list[OwedCheckpoint]:
    """Return the checkpoints of a request after `count` tokens that have no key, group by group.

    marked: also those of groups in which a block does not end there, which no event names.
    """
    found: list[OwedCheckpoint] = []
    if tx.is_stale(request) or count > len(request.block_hashes) * tx.config.hash_block_size:
        return []
    for group_id, group in enumerate(tx.config.groups):
        whole = count % group.block_size == 0
        if group.is_state and count and (whole or marked):
            place = (count - 1) // group.block_size
            block = request.tables[group_id][place]
            if not tx.is_null(block) and tx.device.keys[block] is None:
                event = None
                if whole and tx.effects.events_enabled:
                    event = stored(tx, request, group_id, place, place + 1)
                key = request.key_at(tx.config, group_id, count)
                found.append(OwedCheckpoint(block, key, event))
    return found


def publish_states(
    tx: Transaction, request: RequestState, count: int, found: Iterable[OwedCheckpoint]
) -> list[PublishedKey]:
    """Make the states of a request after `count` tokens findable; return their blocks and keys."""
    published = [(each.block, each.key) for each in found if _publish(tx, each)]
    if published and tx.loads:
        note_keyed(tx, request.request_id, [(block, count) for block, _ in published])
    return published


def _owe(
    tx: Transaction, request: RequestState, count: int, index: int, found: Sequence[OwedCheckpoint]
) -> None:
    """Let a batch in flight own the checkpoints of a request after `count` tokens until it
    publishes them.
    """
    for owed in found:
        tx.device.touch(owed.block)
    batch = tx.in_flight[index]
    tx.in_flight[index] = replace(batch, owed=(*batch.owed, *found))
    if tx.loads:
        note_keyed(tx, request.request_id, [(owed.block, count) for owed in found])


def publish_owed(tx: Transaction, batch: BatchInFlight) -> None:
    """Make the checkpoints of a completed batch findable, and give back its blocks."""
    for owed in batch.owed:
        _publish(tx, owed)
    tx.device.release([owed.block for owed in batch.owed])


def withdraw_states(tx: Transaction, request: RequestState, num_tokens: int) -> None:
    """Withdraw the keys of a request's states after more than num_tokens tokens, wherever they are:
    checkpoints have left its table.
    """
    keys: list[bytes] = []
    size = tx.config.hash_block_size
    end = min(request.num_computed, len(request.block_hashes) * size)
    counts = range((num_tokens // size + 1) * size, end + 1, size)
    for group_id, group in enumerate(tx.config.groups):
        if group.is_state:
            keys.extend(request.key_at(tx.config, group_id, count) for count in counts)
    for key in keys:
        for block in tx.device.index.blocks(key):
            tx.device.unpublish(block)
    give_back(tx, lambda owed: owed.key in keys)


def _publish(tx: Transaction, found: OwedCheckpoint) -> bool:
    """Make a state findable. True: it has its key now."""
    if tx.config.duplicates == "merge" and tx.device.index.first(found.key) is not None:
        return False
    tx.device.publish(found.block, found.key)
    if found.event is not None:
        tx.effects.announce(found.event)
    elif tx.effects.events_enabled:
        tx.device.silent |= {found.block}
    return True
