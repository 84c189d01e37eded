# SPDX-License-Identifier: Apache-2.0
"""Rewind: tokens that requests count were not written, since a load failed or was incomplete.

Invariants: the tokens stay and are computed again. The keys of the requests' blocks past the count
are withdrawn, so no request hits them; any other request that counts tokens in such a block must be
named in the same call. While a load is unconfirmed (`unconfirmed_loads.py`), the rewind of a
request that started it or ever rested on it reports that the load failed. All keys that rest on the
load are then withdrawn, and every request that counts its tokens falls back to the count; a swapped
request waits again. An unfinished load of a named request is given up, and the count falls to what
was loaded.
Twin: rust/src/transitions/rewind.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvcore.state.state import RequestState, State
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions.free import (
    abandon_loads,
    check_leaving,
    cut_tables,
    drop_host,
    leave_open_batch,
)
from kvcore.transitions.tails.keys import withdraw_past
from kvcore.transitions.unconfirmed_loads import (
    first_reported,
    most_loaded,
    reached_requests,
    spoil_loads,
    spoilt_requests,
)
from kvcore.types.arguments import read_count
from kvcore.types.errors import BeyondComputed, HeldByOthers
from kvcore.types.values import Outcome


def rewind(
    state: State, request_ids: Iterable[str], num_computed_tokens: int
) -> Outcome[State, tuple[str, ...]]:
    """Lower the counts of requests to at most num_computed_tokens; value: the ids of those lowered.

    They leave the open batch, and output sampled before is stale. A failed load that is still
    unconfirmed reaches every request that rests on it, named or not. Raises UnknownRequest,
    RepeatedRequest, SwappedOut, LoadUnfinished, InvalidCount, BeyondComputed, HitInOpenBatch,
    HeldByOthers.
    """
    ids = list(request_ids)

    def change(tx: Transaction) -> tuple[str, ...]:
        requests = tx.distinct(ids)
        count = read_count("num_computed_tokens", num_computed_tokens)
        for request in requests:
            check_rewound(tx, request, count)
        kept = [(name, count) for name in ids] + spoilt_requests(tx, ids, count)
        falling = [tx.request(name) for name, _ in kept]
        check_leaving(tx, falling)
        check_held(tx, dict(kept), requests, count)
        for request in requests:
            cut = withdraw_tails(tx, request, count) if tx.config.has_tails else ()
            for block in unwritten(tx, request, count):
                if block not in cut:
                    tx.device.unpublish(block)
        if tx.config.has_states:
            from kvcore.transitions.checkpoints import withdraw_states  # few models have states

            for request in falling:
                withdraw_states(tx, request, count)
        left = [
            name for name in reached_requests(tx, ids, count) if not tx.request(name).num_computed
        ]
        spoil_loads(tx, ids, count)
        for name, num_tokens in kept:
            fall(tx, tx.request(name), num_tokens)
        for name in {*(name for name, _ in kept), *left}:
            tx.put(tx.request(name).awaiting_none(tx.batch.number))
        before = {request.request_id: request.num_computed for request in falling}
        return tuple(name for name in before if tx.request(name).num_computed < before[name])

    return transition(state, change)


def check_rewound(tx: Transaction, request: RequestState, num_tokens: int) -> None:
    """Raise unless a request counts or loads at least num_tokens tokens, and can be cut.

    A request that reports a load may be swapped out, may wait, or may have loads of its own.
    """
    loaded = most_loaded(tx, request.request_id)
    if num_tokens >= loaded:
        tx.idle(request.request_id)
    most = max(request.num_computed, loaded)
    if num_tokens > most:
        raise BeyondComputed(request=request.request_id, num_computed=most, requested=num_tokens)


def fall(tx: Transaction, request: RequestState, num_tokens: int) -> None:
    """Take a request out of the open batch and lower its count to at most num_tokens."""
    if request.host_tables:
        drop_host(tx, request)
        return
    num_tokens = min(num_tokens, num_loaded(tx, request))
    tx.put(abandon_loads(tx, request))
    leave_open_batch(tx, tx.request(request.request_id))
    cut_tables(tx, tx.request(request.request_id), num_tokens)


def num_loaded(tx: Transaction, request: RequestState) -> int:
    """Return the tokens that a request counts, without those still being loaded."""
    if not request.num_loading:
        return request.num_computed
    mine = (op for op in tx.operations.values() if op.request_id == request.request_id)
    return min(request.load_end, *(operation.first_token for operation in mine))


def unwritten(tx: Transaction, request: RequestState, num_tokens: int) -> Iterator[int]:
    """Yield the blocks of a request for positions from num_tokens on, up to the first load that it
    reports; none if that load begins at or before num_tokens.
    """
    loaded = first_reported(tx, request.request_id, num_tokens)
    if loaded is not None and loaded <= num_tokens:
        return
    for group, table in zip(tx.config.groups, request.tables, strict=True):
        if not (group.is_cross or group.is_state):
            first = num_tokens // group.block_size
            end = None if loaded is None else -(-loaded // group.block_size)
            yield from (block for block in table[first:end] if not tx.is_null(block))


def withdraw_tails(tx: Transaction, request: RequestState, num_tokens: int) -> set[int]:
    """Withdraw the keys past num_tokens of the blocks that contain this count, and none before;
    return these blocks.
    """
    blocks, cut = set(unwritten(tx, request, num_tokens)), set()
    for group_id, group in enumerate(tx.config.groups):
        table, position = request.tables[group_id], num_tokens // group.block_size
        inside = num_tokens % group.block_size and not group.is_state
        if inside and position < len(table) and table[position] in blocks:
            withdraw_past(tx, request, (group_id, position), table[position], num_tokens)
            cut.add(table[position])
    return cut


def check_held(
    tx: Transaction, kept: Mapping[str, int], rewound: list[RequestState], num_tokens: int
) -> None:
    """Raise HeldByOthers if another request counts tokens that the rewound ones leave unwritten.
    kept: the most tokens that each lowered request keeps.
    """
    shared: set[int] = set()
    for request in rewound:
        shared.update(
            block for block in unwritten(tx, request, num_tokens) if tx.device.ref_counts[block] > 1
        )
    if not shared:
        return
    blocks: set[int] = set()
    others: set[str] = set()
    for other_id in tx.rows:
        if other_id is None:
            continue
        other = tx.requests[other_id]
        count = min(other.num_computed, kept.get(other_id, other.num_computed))
        if count <= num_tokens:
            continue
        for group, table in zip(tx.config.groups, other.tables, strict=True):
            counted = -(-count // group.block_size)
            first = num_tokens // group.block_size
            found = shared.intersection(table[first:counted])
            if found and not group.is_cross:
                blocks |= found
                others.add(other.request_id)
    if others:
        raise HeldByOthers(blocks=sorted(blocks), requests=sorted(others))
