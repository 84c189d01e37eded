# SPDX-License-Identifier: Apache-2.0
"""Tail keys: which parts of blocks become findable, and when.

Invariants: a tail key is given to a multiple of the hash unit inside a block of an attention group,
once the batch that writes its last token is taken, or completed with `publish="completed"`, never
by the call: a hit copies the block, and the open batch has not yet written it. Keys that the most
recent call of a batch delayed are given by `cache_blocks`. With `duplicates="merge"` a part of a
block that is already findable gets no second key. No event names a tail key.
Twin: rust/src/transitions/tails/keys.rs.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvcore.state.batch_records import PublishedKey, RequestEntry
from kvcore.state.open_batch import OpenBatch
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions.in_flight import note_published_key, note_written_key, num_finished
from kvcore.transitions.unconfirmed_loads import note_tail


def note_delay(tx: Transaction, request_id: str, *, delayed: bool) -> None:
    """Note whether the most recent call of the open batch for a request delays its tail keys."""
    name = frozenset({request_id})
    known = tx.batch.delayed | name if delayed else tx.batch.delayed - name
    tx.batch = replace(tx.batch, delayed=known)


def drop_delay(tx: Transaction, request_id: str) -> None:
    """Forget the delay of a request that leaves the open batch."""
    if request_id in tx.batch.delayed:
        tx.batch = replace(tx.batch, delayed=tx.batch.delayed - {request_id})


def settle_tails(tx: Transaction, taken: OpenBatch) -> None:
    """Give the tail keys of the batch just taken, in the order of rows."""
    if not tx.config.has_tails or tx.config.publish == "completed":
        return
    for name, record in zip(tx.rows, taken.scheduled, strict=True):
        if name is None or record is None or name in taken.delayed:
            continue
        request, before = tx.requests[name], record.num_computed_before
        given = publish_tails(tx, request, before, request.num_accepted)
        if tx.in_flight and given:
            batch = tx.in_flight[-1]
            keys = batch.published_keys.extend(given)
            tx.in_flight[-1] = replace(batch, published_keys=keys)


def fill_tails(tx: Transaction, request: RequestState, num_known: int) -> None:
    """Give the tail keys behind the first num_known tokens whose tokens are known now, as far as
    taken batches write them, or completed ones.
    """
    if tx.config.has_tails:
        completed = tx.config.publish == "completed"
        end = num_finished(tx, request) if completed else request.num_computed
        _give_tails(tx, request, num_known, end)


def cache_tails(tx: Transaction, request: RequestState, count: int) -> None:
    """Give the tail keys of a request's first `count` tokens, as far as the open batch does not
    write them.
    """
    if tx.config.has_tails:
        _give_tails(tx, request, 0, count)


def _give_tails(tx: Transaction, request: RequestState, start: int, end: int) -> None:
    """Give tail keys outside the taking of a batch."""
    record = tx.scheduled[request.row]
    end = end if record is None else min(end, record.num_computed_before)
    for block, key in publish_tails(tx, request, start, end):
        note_written_key(tx, request.request_id, end, block, key)


def complete_tails(tx: Transaction, request: RequestState, made: RequestEntry, end: int) -> None:
    """Give the tail keys of a completed batch, up to `end` tokens, to the blocks that it wrote: a
    copy that a later batch makes may be cancelled. made: the batch's entry of the request.
    """
    later = [*(batch.entries for batch in tx.in_flight), tx.entries]
    wrote = None if all(request.request_id not in entries for entries in later) else made
    publish_tails(tx, request, made.before, end, wrote)


def publish_tails(
    tx: Transaction, request: RequestState, start: int, end: int, wrote: RequestEntry | None = None
) -> list[PublishedKey]:
    """Make the parts of a request's blocks findable that end behind `start` tokens, up to `end`, at
    most its computed ones; return the new keys. wrote: only of blocks that its forward pass used.
    """
    given: list[PublishedKey] = []
    if not tx.config.has_tails or tx.is_stale(request):
        return given
    unit = tx.config.hash_block_size
    last = min(min(end, request.num_accepted) // unit, len(request.block_hashes)) * unit
    for group_id, group in enumerate(tx.config.groups):
        if not group.is_state:
            size = group.block_size
            for position in range(start // size, -(-last // size)):
                ends = max(start, position * size), min(last, (position + 1) * size - 1)
                is_used = wrote is None or wrote.uses(group_id, position)
                if ends[0] // unit < ends[1] // unit and is_used:
                    block = request.tables[group_id][position]
                    given += _publish_parts(tx, request, (group_id, position), block, ends)
    return given


def _publish_parts(
    tx: Transaction,
    request: RequestState,
    place: tuple[int, int],
    block: int,
    ends: tuple[int, int],
) -> list[PublishedKey]:
    """Do the same for the parts of one block, with the content at a place (group, position), that
    end in a range (start, end]; nothing if the block is given back.
    """
    (group_id, position), (start, end) = place, ends
    keys = keys_between(tx, request, group_id, start, end)
    if not keys or tx.is_null(block):
        return []
    had_key, held = tx.device.has_key(block), tx.device.tail_keys(block)
    known, merges = set(held), tx.config.duplicates == "merge"
    first = position * tx.config.groups[group_id].block_size
    rank = _num_shorter(tx, request, (group_id, first), held, start) if held else 0
    given: list[PublishedKey] = []
    writes = False
    for key in keys:
        if key in known:
            rank += tx.device.tail_keys(block)[rank : rank + 1] == (key,)
        elif not (merges and tx.device.first_tail(key) is not None):
            writes = tx.device.keys[block] is None and rank == len(tx.device.tail_keys(block))
            tx.device.publish_tail(block, key, rank)
            known.add(key)
            given.append((block, key))
            rank += 1
    if tx.loads and given:
        unit = tx.config.hash_block_size
        last = (start // unit + 1 + keys.index(given[-1][1])) * unit
        shares = _sharers(tx, request, place, block, last) if writes else ()
        note_tail(
            tx, request.request_id, block, last, had_key=had_key, writes=writes, shares=shares
        )
    return given


def _sharers(
    tx: Transaction, request: RequestState, place: tuple[int, int], block: int, num_tokens: int
) -> list[str]:
    """Return the other requests that hold a block at a place and count this many tokens: of a
    block that lost keys, they may have written the content.
    """
    group_id, position = place
    found = []
    for name in tx.rows if tx.device.ref_counts[block] > 1 else ():
        if name is not None and name != request.request_id:
            other = tx.request(name)
            held = other.tables[group_id][position : position + 1]
            if block in held and other.num_accepted >= num_tokens:
                found.append(name)
    return found


def _num_shorter(
    tx: Transaction,
    request: RequestState,
    origin: tuple[int, int],
    held: tuple[bytes, ...],
    num_tokens: int,
) -> int:
    """Count the tail keys of a block whose parts end at or before num_tokens tokens of a request.
    origin: the group, and the position of the block's first token.
    """
    group_id, first = origin
    unit = tx.config.hash_block_size
    last = min(num_tokens // unit, len(request.block_hashes)) * unit
    for count in range(last, first, -unit):
        key = request.key_at(tx.config, group_id, count)
        if key in held:
            return held.index(key) + 1
    return 0


def move_tails(
    tx: Transaction, request: RequestState, place: tuple[int, int], block: int, older: int
) -> None:
    """Give the tail keys of a block at a place (group, position) of a request's table to the older
    block with the same content, unless the block has other owners, such as pins.
    """
    if tx.device.ref_counts[block] > 1:
        return
    group_id, position = place
    size = tx.config.groups[group_id].block_size
    tx.device.withdraw_tails(block, tx.device.tail_keys(block))
    ends = position * size, (position + 1) * size - 1
    for found, key in _publish_parts(tx, request, place, older, ends):
        if tx.config.publish == "scheduled":
            note_published_key(tx, found, key)


def keys_between(
    tx: Transaction, request: RequestState, group_id: int, start: int, end: int
) -> list[bytes]:
    """Return a request's keys at multiples of the hash unit in (start, end], as far as it has
    hashes.
    """
    unit = tx.config.hash_block_size
    last = min(end // unit, len(request.block_hashes))
    counts = range((start // unit + 1) * unit, last * unit + 1, unit)
    return [request.key_at(tx.config, group_id, count) for count in counts]


def tails_past(
    tx: Transaction, request: RequestState, place: tuple[int, int], block: int, num_tokens: int
) -> list[bytes]:
    """Return the tail keys of a block at a place (group, position) of a request's table that end
    behind its first num_tokens tokens, or are not the request's.
    """
    group_id, position = place
    tails = tx.device.tail_keys(block)
    if not tails:
        return []
    first = position * tx.config.groups[group_id].block_size
    return list(tails[_num_shorter(tx, request, (group_id, first), tails, num_tokens) :])


def note_same(
    tx: Transaction, request: RequestState, place: tuple[int, int], block: int, num_tokens: int
) -> None:
    """Note that a request writes again what the keys of a block behind num_tokens tokens name."""
    group_id, position = place
    start = position * tx.config.groups[group_id].block_size
    own = keys_between(tx, request, group_id, start, start + tx.config.groups[group_id].block_size)
    full, past = tx.device.keys[block], tails_past(tx, request, place, block, num_tokens)
    keys = [*([] if full is None else [full]), *past]
    for key in keys:
        note_published_key(tx, block, key)
    last = full or (past[-1] if past else None)
    if tx.loads and last in own:
        end = start + (own.index(last) + 1) * tx.config.hash_block_size
        note_tail(tx, request.request_id, block, end, had_key=True)


def withdraw_past(
    tx: Transaction, request: RequestState, place: tuple[int, int], block: int, num_tokens: int
) -> None:
    """Forget the keys of a block of a request that end behind its first num_tokens tokens."""
    past = tails_past(tx, request, place, block, num_tokens)
    tx.device.unpublish_full(block)
    tx.device.withdraw_tails(block, past)
