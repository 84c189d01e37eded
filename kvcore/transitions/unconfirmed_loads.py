# SPDX-License-Identifier: Apache-2.0
"""What transitions note about external loads that may still fail, and about what rests on them.

Invariants: a request that becomes an owner of a block that rests on a load rests on the load, too.
A request whose count falls to the start of the load does not rest on it any more. A load is
confirmed when the batch after its own is taken (`max_in_flight=0`), or when its own batch
completes. `rewind` reports a failed load. Orders are those of first resting, so that no outcome
depends on a name. Twin: rust/src/transitions/unconfirmed_loads.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace as evolve

from kvcore.state.batch_records import UnconfirmedLoad
from kvcore.state.transaction import Transaction


def note_load(tx: Transaction, request_id: str, first: int, end: int) -> None:
    """Note that the open batch gets tokens [first, end) of a request from elsewhere."""
    number = tx.batch.number
    load = UnconfirmedLoad(number, first, end, request_id, ((request_id, end),))
    tx.loads = (*tx.loads, load)


def rest(tx: Transaction, request_id: str, blocks: Iterable[int]) -> None:
    """Note that a request became an owner of blocks."""
    held = {block for block in blocks if tx.device.keys[block] is not None}
    tx.loads = tuple(
        _counting(load, request_id, min(load.end, max(ends)))
        if (ends := [end for block, end in load.blocks if block in held])
        else load
        for load in tx.loads
    )


def note_keyed(tx: Transaction, request_id: str, keyed: Sequence[tuple[int, int]]) -> None:
    """Note that blocks of a request got their keys; each with the place behind its last token."""
    names = {block for block, _ in keyed}
    loads = []
    for load in tx.loads:
        blocks = [pair for pair in load.blocks if pair[0] not in names]
        if load.counted_by(request_id):
            blocks += [pair for pair in keyed if pair[1] > load.first]
        loads.append(evolve(load, blocks=tuple(blocks)))
    tx.loads = tuple(loads)


def note_rewritten(tx: Transaction, request_id: str, block: int, end: int) -> None:
    """Note that a request writes a block again that keeps its key."""
    tx.loads = tuple(
        evolve(load, blocks=(*load.blocks, (block, end)))
        if load.counted_by(request_id) and end > load.first and (block, end) not in load.blocks
        else load
        for load in tx.loads
    )


def inherit_rest(tx: Transaction, parent_id: str, child_id: str, num_tokens: int) -> None:
    """Let a forked child, which counts num_tokens tokens, rest on what its parent rests on."""
    tx.loads = tuple(
        _counting(load, child_id, min(load.counted_by(parent_id), num_tokens)) for load in tx.loads
    )


def fall_to(tx: Transaction, request_id: str, num_tokens: int) -> None:
    """Note that a request counts no more than num_tokens tokens.

    A load of the open batch does not take place if no request rests on it any more.
    """
    loads = []
    for load in tx.loads:
        left = [
            (name, min(end, num_tokens) if name == request_id else end)
            for name, end in load.requests
        ]
        requests = tuple(pair for pair in left if pair[1] > load.first)
        if requests or load.batch != tx.batch.number:
            loads.append(evolve(load, requests=requests))
    tx.loads = tuple(loads)


def forget_loader(tx: Transaction, request_id: str) -> None:
    """Note that a request is removed: it can report its loads no more."""
    tx.loads = tuple(
        evolve(load, loader=None) if load.loader == request_id else load for load in tx.loads
    )


def confirm(loads: tuple[UnconfirmedLoad, ...], number: int) -> tuple[UnconfirmedLoad, ...]:
    """The loads of batches later than this one."""
    return tuple(load for load in loads if load.batch > number)


def is_unconfirmed(tx: Transaction, block: int) -> bool:
    """Whether a block with a key rests on a load."""
    return any(block == each for load in tx.loads for each, _ in load.blocks)


def most_loaded(tx: Transaction, request_id: str) -> int:
    """The end of the last load that a request asked for or rests on, 0 without one."""
    ends = [load.end for load in tx.loads if load.loader == request_id]
    ends += [load.counted_by(request_id) for load in tx.loads]
    return max(ends, default=0)


def first_reported(tx: Transaction, request_id: str, num_tokens: int) -> int | None:
    """The start of the first load that a request's rewind to num_tokens tokens reports, or None."""
    reported = (load for load in tx.loads if load.is_reported([request_id], num_tokens))
    return min((load.first for load in reported), default=None)


def spoilt_requests(
    tx: Transaction, request_ids: Sequence[str], num_tokens: int
) -> list[tuple[str, int]]:
    """The requests that a report reaches besides those that make it, each with the tokens that it
    keeps.
    """
    kept: dict[str, int] = {}
    for load in tx.loads:
        if load.is_reported(request_ids, num_tokens):
            end = max(num_tokens, load.first)
            spoilt = (name for name, counted in load.requests if counted > end)
            kept |= {name: min(end, kept.get(name, end)) for name in spoilt}
    return [(name, end) for name, end in kept.items() if name not in request_ids]


def spoil(tx: Transaction, request_ids: Sequence[str], num_tokens: int) -> None:
    """Withdraw the keys of what rests on the loads that are reported; these end there."""
    loads = []
    for load in tx.loads:
        if load.is_reported(request_ids, num_tokens):
            end = max(num_tokens, load.first)
            for block, block_end in load.blocks:
                if block_end > end:
                    tx.device.unpublish(block)
            load = evolve(load, end=end)
        if load.end > load.first:
            loads.append(load)
    tx.loads = tuple(loads)


def _counting(load: UnconfirmedLoad, request_id: str, end: int) -> UnconfirmedLoad:
    """The load with a request that counts its tokens up to an end, at least."""
    known = load.counted_by(request_id)
    if end <= max(known, load.first):
        return load
    if not known:
        return evolve(load, requests=(*load.requests, (request_id, end)))
    requests = tuple((name, end if name == request_id else old) for name, old in load.requests)
    return evolve(load, requests=requests)
