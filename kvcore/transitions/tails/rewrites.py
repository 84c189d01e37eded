# SPDX-License-Identifier: Apache-2.0
"""The blocks that an allocation is about to write although they are shared or have keys.

Invariants: a shared block is replaced (copied if it holds earlier positions), and a keyed block
loses its key unless the write computes exactly the tokens that the key names. If blocks may have
tail keys, a block with a key past the computed or hit tokens is replaced too, whether it is in the
table or is the last block of the hit, so that its content stays; such copies are given up if the
call does not fit with all of them.
Twin: rust/src/transitions/tails/rewrites.rs.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.state.plan_records import Lengths, Rewrite
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions.tails.keys import keys_between, tails_past


def writes_same(
    tx: Transaction, request: RequestState, place: tuple[int, int], lengths: Lengths
) -> bool:
    """Return whether a block's key is that of the content which the new slots will hold.

    Loaded tokens may fail, and lookahead tokens are unknown, so these never count as the same.
    """
    group_id, position = place
    if lengths.local < lengths.total or position >= request.num_hashed(tx.config, group_id):
        return False
    end = (position + 1) * tx.config.groups[group_id].block_size
    if lengths.scheduled < min(lengths.slots, end):
        return False
    key = tx.device.keys[request.tables[group_id][position]]
    return bool(key == request.key(tx.config, group_id, position))


def plan_tailed(
    tx: Transaction, request: RequestState, hits: tuple[tuple[int, ...], ...], lengths: Lengths
) -> tuple[Rewrite, ...]:
    """Return the same if blocks may have tail keys: also for the last block of a hit."""
    rewrites: list[Rewrite] = []
    if lengths.slots <= lengths.local:
        return ()
    for group_id, group in enumerate(tx.config.groups):
        if group.is_cross or group.is_state:
            continue
        size, held = group.block_size, request.tables[group_id] or hits[group_id]
        is_hit = not request.tables[group_id]
        first = max(lengths.local // size, lengths.skipped[group_id])
        for position in range(first, min(len(held), -(-lengths.slots // size))):
            place = group_id, position
            rewrites += _plan_block(tx, request, place, held[position], is_hit, lengths)
    return tuple(rewrites)


def _plan_block(
    tx: Transaction,
    request: RequestState,
    place: tuple[int, int],
    block: int,
    is_hit: bool,
    lengths: Lengths,
) -> Iterator[Rewrite]:
    """Yield the rewrite of one block, unless it is written in place."""
    is_shared = tx.device.ref_counts[block] + is_hit > 1
    past = tails_past(tx, request, place, block, lengths.local)
    if not is_shared and not past and tx.device.keys[block] is None:
        return
    same = not is_shared and _writes_tails(tx, request, place, block, lengths)
    shared = is_shared or not same
    group_id, position = place
    yield Rewrite(
        group_id=group_id,
        position=position,
        shared=shared,
        copied=shared and lengths.local > position * tx.config.groups[group_id].block_size,
        same=same,
        for_key=shared and not is_shared,
    )


def _writes_tails(
    tx: Transaction, request: RequestState, place: tuple[int, int], block: int, lengths: Lengths
) -> bool:
    """Return whether the keys of a block past what is computed or hit are those of the content
    which the new slots will hold.

    Loaded tokens may fail, and lookahead tokens are unknown, so these never count as the same.
    """
    group_id, position = place
    size = tx.config.groups[group_id].block_size
    end = (position + 1) * size
    if lengths.local < lengths.total or lengths.scheduled < min(lengths.slots, end):
        return False
    own = keys_between(tx, request, group_id, position * size, end)
    key = tx.device.keys[block]
    is_whole = position < request.num_hashed(tx.config, group_id)
    if key is not None and not (is_whole and own[-1] == key):
        return False
    return set(own).issuperset(tx.device.tail_keys(block))
