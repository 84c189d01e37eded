# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: states that other requests may start from, and when they get their keys.

Invariants: the state at the end of a step is a checkpoint if its tokens are a multiple of the
group's block size. It gets its key when its batch is taken, or completed with
`publish="completed"`, never by the call: a hit copies the block, and the open batch has not yet
written it. Until a batch in flight publishes a checkpoint, it owns the block, so that the key comes
even if the request goes on or leaves. With `duplicates="merge"` a state that is already findable
gets no second key. Twin: rust/src/transitions/checkpoints.rs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace
from pyrsistent import PVector

from kvcore.state.batch_records import BatchInFlight, OwedCheckpoint, PublishedKey
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions.in_flight import note_published_key, num_finished
from kvcore.transitions.unconfirmed_loads import note_keyed
from kvcore.types.events import BlockStored

Stored = Callable[[Transaction, RequestState, int, int, int], BlockStored]
"""Makes the event that a request's blocks became findable: `publish.stored`, which imports this."""


def note_end(tx: Transaction, request: RequestState, *, publishes: bool) -> None:
    """Note whether the state after a request's step in the open batch is a checkpoint. publishes:
    whether it may get a key.
    """
    drop_end(tx, request.request_id)
    sizes = [group.block_size for group in tx.config.groups if group.is_state]
    if publishes and any(request.num_computed % size == 0 for size in sizes):
        tx.batch = replace(tx.batch, ends=tx.batch.ends.append(request.request_id))


def drop_end(tx: Transaction, request_id: str) -> None:
    """Forget the checkpoint of a request that the open batch does not write any more."""
    if request_id in tx.batch.ends:
        tx.batch = replace(tx.batch, ends=tx.batch.ends.remove(request_id))


def settle_ends(tx: Transaction, ends: PVector[str], stored: Stored) -> None:
    """Give the checkpoints of the batch just taken their keys, or their blocks to the batch until
    it is completed.
    """
    waits = tx.config.publish == "completed" and tx.config.max_in_flight
    for request_id in ends:
        request = tx.request(request_id)
        found = checkpoints(tx, request, stored)
        if not waits:
            keys = publish_states(tx, request, found)
            if tx.config.max_in_flight:
                batch = tx.in_flight[-1]
                tx.in_flight[-1] = replace(batch, published_keys=batch.published_keys.extend(keys))
            continue
        for owed in found:
            tx.device.touch(owed.block)
        batch = tx.in_flight[-1]
        tx.in_flight[-1] = replace(batch, owed=(*batch.owed, *found))


def cache_state(tx: Transaction, request: RequestState, num_tokens: int, stored: Stored) -> None:
    """Publish the state at a request's count, if it is a checkpoint among its first num_tokens
    tokens and no unfinished batch writes it; the open batch publishes what it writes.
    """
    if request.num_computed != num_tokens:
        return
    if request.request_id in tx.scheduled:
        if request.request_id not in tx.batch.ends:
            note_end(tx, request, publishes=True)
    elif tx.config.publish == "scheduled" or num_finished(tx, request) == num_tokens:
        for block, key in publish_states(tx, request, checkpoints(tx, request, stored)):
            note_published_key(tx, block, key)


def checkpoints(tx: Transaction, request: RequestState, stored: Stored) -> list[OwedCheckpoint]:
    """Return the checkpoints at a request's count that have no key, group by group."""
    count, found = request.num_computed, []
    if tx.is_stale(request) or count > len(request.block_hashes) * tx.config.hash_block_size:
        return []
    for group_id, group in enumerate(tx.config.groups):
        if group.is_state and count and count % group.block_size == 0:
            block, place = request.tables[group_id][-1], count // group.block_size - 1
            if tx.device.keys[block] is None:
                event = None
                if tx.effects.events_enabled:
                    event = stored(tx, request, group_id, place, place + 1)
                key = request.key(tx.config, group_id, place)
                found.append(OwedCheckpoint(block, key, event))
    return found


def publish_states(
    tx: Transaction, request: RequestState, found: Iterable[OwedCheckpoint]
) -> list[PublishedKey]:
    """Make the states at a request's count findable; return their blocks and keys."""
    published = [(each.block, each.key) for each in found if _publish(tx, each)]
    if published and tx.loads:
        count = request.num_computed
        note_keyed(tx, request.request_id, [(block, count) for block, _ in published])
    return published


def publish_owed(tx: Transaction, batch: BatchInFlight) -> None:
    """Make the checkpoints of a completed batch findable, and give back its blocks."""
    for owed in batch.owed:
        _publish(tx, owed)
    tx.device.release([owed.block for owed in batch.owed])


def give_back(tx: Transaction, is_lost: Callable[[OwedCheckpoint], bool]) -> None:
    """Let the batches in flight give back checkpoints that they will not publish."""
    for index, batch in enumerate(tx.in_flight):
        lost = [owed.block for owed in batch.owed if is_lost(owed)]
        if lost:
            kept = tuple(owed for owed in batch.owed if not is_lost(owed))
            tx.in_flight[index] = replace(batch, owed=kept)
            tx.device.release(lost)


def withdraw_states(tx: Transaction, request: RequestState, num_tokens: int) -> None:
    """Withdraw the keys of a request's states after more than num_tokens tokens, wherever they are:
    checkpoints have left its table.
    """
    keys: list[bytes] = []
    for group_id, group in enumerate(tx.config.groups):
        if group.is_state:
            first, end = num_tokens // group.block_size, request.num_computed // group.block_size
            end = min(end, request.num_hashed(tx.config, group_id))
            keys.extend(request.key(tx.config, group_id, place) for place in range(first, end))
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
    return True
