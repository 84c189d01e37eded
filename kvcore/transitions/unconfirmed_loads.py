# SPDX-License-Identifier: Apache-2.0
"""Records of external loads that may still fail, and of what rests on them.

Invariants: a request that becomes an owner of a block that rests on a load rests on the load, too.
A request whose count falls to the start of the load no longer rests on it, but can report it until
the request is removed. The part of a load that no request can report any more is dropped, and the
keys that rest on it are withdrawn.
A load is confirmed when the batch after its own is taken (`max_in_flight=0`), or when its own batch
completes. `rewind` reports a failed load. Requests are in the order in which they first rested on
the load, so that no outcome depends on a name. Twin: rust/src/transitions/unconfirmed_loads.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from kvcore.state.batch_records import Reporter, UnconfirmedLoad
from kvcore.state.transaction import Transaction
from kvcore.transitions.in_flight import give_back
from kvcore.types.config import NO_LIMIT
from kvcore.types.keys import HASH_SIZE


def note_load(tx: Transaction, request_id: str, first: int, end: int) -> None:
    """Note that the open batch loads tokens [first, end) of a request from outside."""
    reporter = Reporter(request_id, end, end)
    tx.loads = (*tx.loads, UnconfirmedLoad(tx.batch.number, first, end, (reporter,)))


def note_owner(
    tx: Transaction, request_id: str, blocks: Iterable[int], num_tokens: int = NO_LIMIT
) -> None:
    """Note that a request became an owner of blocks, of which it counts at most num_tokens
    tokens.
    """
    held = {block for block in blocks if tx.device.has_key(block)}
    tx.loads = tuple(
        _counting(load, request_id, min(load.end, max(ends), num_tokens))
        if (ends := [end for block, end in load.blocks if block in held])
        else load
        for load in tx.loads
    )


def note_keyed(tx: Transaction, request_id: str, keyed: Sequence[tuple[int, int]]) -> None:
    """Note that blocks of a request got their keys, or that a batch owes them; each with the
    position after its last token.
    """
    for block, end in keyed:
        if tx.device.tail_keys(block):
            note_tail(tx, request_id, block, end, had_key=True)
    keyed = [pair for pair in keyed if not tx.device.tail_keys(pair[0])]
    names = {block for block, _ in keyed}
    loads = []
    for load in tx.loads:
        blocks = [pair for pair in load.blocks if pair[0] not in names]
        if load.reporter(request_id).counted:
            blocks += [pair for pair in keyed if pair[1] > load.first]
        loads.append(replace(load, blocks=tuple(blocks)))
    tx.loads = tuple(loads)


def note_tail(
    tx: Transaction,
    request_id: str,
    block: int,
    end: int,
    *,
    had_key: bool,
    writes: bool = True,
    shares: Sequence[str] = (),
) -> None:
    """Note that a block of a request got a tail key, with the position behind its last token. Of a
    block that had a key already, the greatest such position counts. writes: the key ends behind all
    others of the block, so the request wrote what it names; else that rests on a load only if the
    block is noted. shares: other requests that count all of it, and so rest on what it rests on.
    """
    loads = []
    for load in tx.loads:
        blocks = [pair for pair in load.blocks if had_key or pair[0] != block]
        if load.reporter(request_id).counted > 0 and end > load.first:
            known = [place for place, pair in enumerate(blocks) if pair[0] == block]
            for place in known:
                blocks[place] = (block, max(end, blocks[place][1]))
            if not known and writes and all(load.reporter(name).counted for name in shares):
                blocks.append((block, end))
        loads.append(replace(load, blocks=tuple(blocks)))
    tx.loads = tuple(loads)


def note_rewritten(tx: Transaction, request_id: str, block: int, end: int) -> None:
    """Note that a request rewrites a block that keeps its key."""
    tx.loads = tuple(
        replace(load, blocks=(*load.blocks, (block, end)))
        if load.reporter(request_id).counted > 0
        and end > load.first
        and (block, end) not in load.blocks
        else load
        for load in tx.loads
    )


def inherit_loads(tx: Transaction, parent_id: str, child_id: str, num_tokens: int) -> None:
    """Let a forked child, which counts num_tokens tokens, rest on what its parent rests on."""
    tx.loads = tuple(
        _counting(load, child_id, min(load.reporter(parent_id).counted, num_tokens))
        for load in tx.loads
    )


def lower_counted(tx: Transaction, request_id: str, num_tokens: int) -> None:
    """Note that a request counts at most num_tokens tokens.

    A load of the open batch is dropped if no request rests on it any more.
    """
    loads = []
    for load in tx.loads:
        counted = min(load.reporter(request_id).counted, num_tokens)
        load = _with(load, request_id, counted if counted > load.first else 0)
        if load.batch != tx.batch.number or any(each.counted for each in load.reporters):
            loads.append(load)
    tx.loads = tuple(loads)


def forget_reporter(tx: Transaction, request_id: str) -> None:
    """Note that a request is removed and can no longer report loads.

    Each load then ends after the last token whose failure another request can report. Keys that
    rest on later tokens are withdrawn.
    """
    loads = []
    for load in tx.loads:
        left = tuple(each for each in load.reporters if each.request_id != request_id)
        end = max((each.most for each in left), default=load.first)
        if end < load.end:
            load = _withdraw(tx, replace(load, end=end))
        if left:
            loads.append(replace(load, reporters=left))
    tx.loads = tuple(loads)


def confirm_loads(loads: tuple[UnconfirmedLoad, ...], number: int) -> tuple[UnconfirmedLoad, ...]:
    """Return the loads of batches later than this one."""
    return tuple(load for load in loads if load.batch > number)


def is_unconfirmed(tx: Transaction, block: int) -> bool:
    """Return whether a block with a key rests on a load."""
    return any(block == each for load in tx.loads for each, _ in load.blocks)


def most_loaded(tx: Transaction, request_id: str) -> int:
    """Return the end of the last load that a request started or ever rested on, 0 if there
    is none.
    """
    return max((load.reporter(request_id).most for load in tx.loads), default=0)


def first_reported(tx: Transaction, request_id: str, num_tokens: int) -> int | None:
    """Return the start of the first load that a rewind of a request to num_tokens tokens reports,
    or None.
    """
    reported = (load for load in tx.loads if load.is_reported([request_id], num_tokens))
    return min((load.first for load in reported), default=None)


def spoilt_requests(
    tx: Transaction, request_ids: Sequence[str], num_tokens: int
) -> list[tuple[str, int]]:
    """Return the requests that a report reaches, without those that make it, each with the tokens
    that it keeps.
    """
    kept: dict[str, int] = {}
    for load in tx.loads:
        if load.is_reported(request_ids, num_tokens):
            end = max(num_tokens, load.first)
            spoilt = (each.request_id for each in load.reporters if each.counted > end)
            kept |= {name: min(end, kept.get(name, end)) for name in spoilt}
    return [(name, end) for name, end in kept.items() if name not in request_ids]


def reached_requests(tx: Transaction, request_ids: Sequence[str], num_tokens: int) -> Iterator[str]:
    """Yield the requests that ever counted tokens which a report says were not loaded, even if they
    left.

    If such a request counts tokens again, it was rescheduled, and takes only later output.
    """
    for load in tx.loads:
        if load.is_reported(request_ids, num_tokens):
            end = max(num_tokens, load.first)
            yield from (each.request_id for each in load.reporters if each.most > end)


def spoil_loads(tx: Transaction, request_ids: Sequence[str], num_tokens: int) -> None:
    """Withdraw the keys of what rests on the reported loads, and shorten these."""
    loads = []
    for load in tx.loads:
        if load.is_reported(request_ids, num_tokens):
            load = _withdraw(tx, _cut(load, max(num_tokens, load.first)))
        if load.end > load.first:
            loads.append(load)
    tx.loads = tuple(loads)


def _withdraw(tx: Transaction, load: UnconfirmedLoad) -> UnconfirmedLoad:
    """Withdraw the keys of what rests on a load past its end, also those that batches owe; return
    the load with what is left.

    Parts of a block that end at or before the end stay findable.
    """
    unit, left = tx.config.hash_block_size, dict[tuple[int, int], None]()
    if tx.config.has_states:
        spoilt_blocks = {block for block, end in load.blocks if end > load.end}
        give_back(tx, lambda owed: owed.block in spoilt_blocks)
    for block, end in load.blocks:
        if end > load.end:
            kept = _kept_tails(tx, load, block, end)
            tx.device.unpublish_full(block)
            spoilt = [key for key in tx.device.tail_keys(block) if key not in kept]
            tx.device.withdraw_tails(block, spoilt)
            end = load.end // unit * unit
        if end > load.first and tx.rests(block):
            left[block, end] = None
    return replace(load, blocks=tuple(left))


def _kept_tails(tx: Transaction, load: UnconfirmedLoad, block: int, end: int) -> set[bytes]:
    """Return the tail keys up to the end of a load, in the block that a position `end` is in or
    behind, of the requests that can report the load.
    """
    tails = tx.device.tail_keys(block)
    if not tails:
        return set()
    config, unit = tx.config, tx.config.hash_block_size
    group_id = int.from_bytes(tails[0][HASH_SIZE:])
    size = config.groups[group_id].block_size
    kept: set[bytes] = set()
    for each in load.reporters:
        request = tx.requests[each.request_id]
        last = min(load.end // unit, len(request.block_hashes)) * unit
        counts = range((end - 1) // size * size + unit, last + 1, unit)
        kept.update(request.key_at(config, group_id, count) for count in counts)
    return kept


def _cut(load: UnconfirmedLoad, end: int) -> UnconfirmedLoad:
    """Return the load with an earlier end, which no request counts past."""
    reporters = (
        replace(each, counted=min(each.counted, end), most=min(each.most, end))
        for each in load.reporters
    )
    return replace(load, end=end, reporters=tuple(reporters))


def _counting(load: UnconfirmedLoad, request_id: str, end: int) -> UnconfirmedLoad:
    """Return the load with a request that counts its tokens at least up to an end."""
    known = load.reporter(request_id)
    if end <= max(known.counted, load.first):
        return load
    if not known.most:
        return replace(load, reporters=(*load.reporters, Reporter(request_id, end, end)))
    return _with(load, request_id, end)


def _with(load: UnconfirmedLoad, request_id: str, counted: int) -> UnconfirmedLoad:
    """Return the load with a new end of the tokens that a request counts."""
    reporters = (
        replace(each, counted=counted, most=max(each.most, counted))
        if each.request_id == request_id
        else each
        for each in load.reporters
    )
    return replace(load, reporters=tuple(reporters))
