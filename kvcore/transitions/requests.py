# SPDX-License-Identifier: Apache-2.0
"""Adds, extends and removes requests.

Invariants: a request's tokens and its chain of block hashes grow together, so each full block is
hashed once. An engine that supplies its own hashes supplies all of them. Drafts follow the tokens
and are never hashed; scheduled drafts are accepted or dropped before anything else is scheduled. A
row is assigned for the life of a request; after that it is held until the batch that was open is
finished, so that no unfinished batch uses one row for two requests. The free row given back last is
used first. Without prefix caching there are no hashes.
Twin: rust/src/transitions/requests.rs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.hashing.block_hash import hash_blocks
from kvcore.hashing.extra_keys import read_extra_keys
from kvcore.state.state import RequestState, State
from kvcore.state.transaction import Transaction, transition
from kvcore.state.waiting import forget_waiting, settle_waiting
from kvcore.transitions.free import check_leaving, cut_tables, leave_open_batch
from kvcore.transitions.in_flight import forget_entries, shift_starts
from kvcore.transitions.output import (
    check_output,
    check_sampled,
    check_surplus,
    drop_positions,
    publish_filled,
    take_output,
)
from kvcore.transitions.publish import stored
from kvcore.transitions.tails.keys import fill_tails
from kvcore.transitions.unconfirmed_loads import forget_reporter
from kvcore.types.arguments import read_batch_number, read_count
from kvcore.types.errors import (
    BeyondDrafts,
    DraftsPending,
    EmptyRequestId,
    InOpenBatch,
    PlaceholdersPending,
    RepeatedRequest,
    StillHoldsBlocks,
    WrongBlockHashes,
)
from kvcore.types.keys import HASH_SIZE
from kvcore.types.tokens import read_request_tokens, read_tokens
from kvcore.types.values import Outcome, Request


def add_request(state: State, request: Request) -> Outcome[State, int]:
    """Add a request; value: its row.

    Raises EmptyRequestId, RepeatedRequest, EmptyTokens, InvalidToken, UnsupportedBuffer,
    InvalidExtraKey, UnsortedMedia, CountMismatch, WrongBlockHashes.
    """

    def change(tx: Transaction) -> int:
        check_new_id(tx, request.request_id)
        own_hashes = request.block_hashes is not None
        tokens = read_request_tokens(request.request_id, request.tokens, signed=own_hashes)
        extra_keys = read_extra_keys(request, len(tokens), tx.config.hash_block_size)
        known = replace(
            empty_request(tx, request.request_id),
            own_hashes=own_hashes,
            skip_reading=bool(request.skip_reading_prefix_cache),
            extra_keys=extra_keys,
        )
        if request.retention is not None and tx.device.pool.retention is not None:
            from kvcore.types.retention import steps_of  # few pools have levels

            known = replace(known, wishes=steps_of(request.retention.pieces, len(tokens)))
        known = extend(tx, known, tokens)
        if request.block_hashes is not None:
            known = extend_hashes(tx, known, request.block_hashes)
        tx.put(known)
        settle_waiting(tx, request.request_id)
        return known.row

    return transition(state, change)


def add_tokens(
    state: State, request_id: str, tokens: Any, *, num_rejected: int = 0, batch: int | None = None
) -> Outcome[State, None]:
    """Append tokens to a request. They fill positions to come, in order; full blocks are hashed and
    become findable.

    num_rejected: number of the last positions to come that are dropped first, at most all; beside
    state groups the request then begins again, and output of later batches is out of date. batch:
    the one that sampled the tokens. Raises
    UnknownRequest, EmptyTokens, InvalidToken, UnsupportedBuffer, InvalidCount, DraftsPending,
    InOpenBatch, BatchNotTaken, StaleOutput, OutputOutOfOrder, HitInOpenBatch, BeforeOpenBatch.
    """

    def change(tx: Transaction) -> None:
        request = tx.request(request_id)
        values = read_request_tokens(request_id, tokens, signed=request.own_hashes)
        rejected, number = read_count("num_rejected", num_rejected), read_batch_number(batch)
        check_no_drafts(request)
        check_sampled(tx, request)
        check_output(tx, request, number)
        num_known, to_come = request.tokens.length, request.num_output_placeholders
        dropped = min(rejected, to_come)
        if len(values) > 1:
            check_surplus(tx, request, number, len(values), rejected)
        if dropped and tx.config.has_states:
            request, to_come, number = _begin_anew(tx, request), 0, None
        elif dropped:
            shift_starts(tx, request_id, num_known, dropped)
        request = drop_positions(request, rejected)
        tx.put(take_output(extend(tx, request, values), number))
        if to_come:
            publish_filled(tx, tx.request(request_id), num_known)
        settle_waiting(tx, request_id)

    return transition(state, change)


def add_block_hashes(
    state: State, request_id: str, hashes: Sequence[bytes]
) -> Outcome[State, None]:
    """Add the engine's hashes of the next full blocks of a request that has its own hashes.

    Raises UnknownRequest, WrongBlockHashes.
    """

    def change(tx: Transaction) -> None:
        tx.put(extend_hashes(tx, tx.request(request_id), hashes))
        settle_waiting(tx, request_id)

    return transition(state, change)


def add_drafts(state: State, request_id: str, tokens: Any) -> Outcome[State, None]:
    """Replace the drafts after the tokens of a request; an empty list drops them.

    They can be scheduled, and are published only after they were accepted. Raises UnknownRequest,
    SwappedOut, LoadUnfinished, InvalidToken, UnsupportedBuffer, DraftsPending, PlaceholdersPending.
    """

    def change(tx: Transaction) -> None:
        request = tx.idle(request_id)
        values = read_tokens(tokens, signed=request.own_hashes)
        check_drafts_settled(request)
        check_no_placeholders(request)
        tx.put(replace(request, drafts=pvector(values)))

    return transition(state, change)


def accept(state: State, request_id: str, num_accepted: int) -> Outcome[State, None]:
    """Turn the first drafts into tokens of the request and drop the others; its blocks stay.

    The computed count falls to the accepted tokens. Raises UnknownRequest, SwappedOut,
    InvalidCount, PlaceholdersPending, InOpenBatch, BeyondDrafts.
    """

    def change(tx: Transaction) -> None:
        request = tx.on_device(request_id)
        count = read_count("num_accepted", num_accepted)
        check_no_placeholders(request)
        scheduled = max(0, request.num_computed - request.tokens.length)
        if scheduled and tx.scheduled[request.row] is not None:
            raise InOpenBatch(kind="request", value=request_id)
        if count > scheduled:
            raise BeyondDrafts(request=request_id, num_scheduled=scheduled, requested=count)
        kept, num_known = request, request.tokens.length
        if tx.config.has_states:
            from kvcore.transitions.states import keep_accepted  # few models have states

            kept = keep_accepted(tx, request, count)
        longer = extend(tx, kept, request.drafts[:count])
        count = min(request.num_computed, longer.tokens.length)
        kept = replace(longer, drafts=pvector(), num_computed=count)
        tx.put(kept.awaiting(request.awaited))
        if tx.config.has_states and tx.config.enable_caching:
            from kvcore.transitions.checkpoints import publish_reached

            publish_reached(tx, tx.request(request_id), num_known, stored)
        fill_tails(tx, tx.request(request_id), num_known)

    return transition(state, change)


def remove_request(state: State, request_id: str) -> Outcome[State, None]:
    """Forget a request that holds no blocks; its row is reused once the open batch is finished.

    If no other request can report that an unconfirmed load failed, the keys that rest on the load
    are withdrawn.
    Raises UnknownRequest, StillHoldsBlocks.
    """

    def change(tx: Transaction) -> None:
        request = tx.request(request_id)
        held = sum(len(table) for table in (*request.tables, *request.host_tables))
        if held:
            raise StillHoldsBlocks(request=request_id, num_blocks=held)
        forget_reporter(tx, request_id)
        tx.requests.remove(request_id)
        forget_waiting(tx, request_id)
        forget_entries(tx, request_id, request.row)
        tx.rows = tx.rows.set(request.row, None)
        tx.held_rows += ((request.row, tx.batch.number),)

    return transition(state, change)


def check_new_id(tx: Transaction, request_id: str) -> None:
    """Raise EmptyRequestId or RepeatedRequest unless a request with this id can be added."""
    if not isinstance(request_id, str) or not request_id or not is_text(request_id):
        raise EmptyRequestId(value=request_id)
    if request_id in tx.requests:
        raise RepeatedRequest(request=request_id, reason="is there already")


def check_no_drafts(request: RequestState) -> None:
    """Raise DraftsPending while the request has drafts."""
    if request.drafts:
        raise DraftsPending(request=request.request_id, num_drafts=len(request.drafts))


def check_drafts_settled(request: RequestState) -> None:
    """Raise DraftsPending while the request has scheduled drafts that were not yet accepted."""
    if request.num_computed > request.tokens.length:
        check_no_drafts(request)


def check_no_placeholders(request: RequestState) -> None:
    """Raise PlaceholdersPending while scheduled positions wait for tokens."""
    to_come = request.num_output_placeholders
    if to_come:
        raise PlaceholdersPending(request=request.request_id, num_placeholders=to_come)


def _begin_anew(tx: Transaction, request: RequestState) -> RequestState:
    """Return the request without blocks, whose states include rejected tokens, and without output
    to come, which was sampled behind them. Raises HitInOpenBatch.
    """
    check_leaving(tx, [request])
    leave_open_batch(tx, request)
    cut_tables(tx, tx.request(request.request_id), 0)
    return tx.request(request.request_id).awaiting_none(tx.batch.number)


def is_text(request_id: str) -> bool:
    try:
        request_id.encode()
    except UnicodeEncodeError:
        return False
    return True


def empty_request(tx: Transaction, request_id: str) -> RequestState:
    """Make a request without tokens, in a row of its own."""
    if tx.free_rows:
        row = tx.free_rows[-1]
        tx.free_rows = tx.free_rows.delete(len(tx.free_rows) - 1)
    else:
        row = len(tx.rows)
        tx.rows, tx.scheduled = tx.rows.append(None), tx.scheduled.append(None)
    tx.rows = tx.rows.set(row, request_id)
    num_groups = len(tx.config.groups)
    return RequestState(request_id, row, (0,) * num_groups, (pvector(),) * num_groups)


def extend(tx: Transaction, request: RequestState, tokens: Sequence[int]) -> RequestState:
    """Return the request with more tokens and the hashes of the blocks that they fill."""
    longer = request.tokens.extend(tokens)
    if not tx.config.enable_caching or request.own_hashes:
        return replace(request, tokens=longer)
    hashed = len(request.block_hashes)
    size = tx.config.hash_block_size
    start = hashed * size
    if len(longer) - start < size:
        return replace(request, tokens=longer)
    hashes = hash_blocks(
        tx.parent_hash(request, hashed),
        list(longer[start:]),
        size,
        start=start,
        extra_keys=request.extra_keys,
        hashing=tx.config.hashing,
    )
    return replace(request, tokens=longer, block_hashes=request.block_hashes.extend(hashes))


def extend_hashes(tx: Transaction, request: RequestState, hashes: Sequence[bytes]) -> RequestState:
    """Return the request with more of the engine's hashes. Raises WrongBlockHashes."""
    given = list(hashes)
    most = request.tokens.length // tx.config.hash_block_size - len(request.block_hashes)
    reason = None
    if not request.own_hashes:
        reason = "it did not bring its own when it was added"
    elif len(given) > most:
        reason = f"its tokens fill {most} more blocks"
    elif not all(isinstance(each, bytes) and len(each) == HASH_SIZE for each in given):
        reason = f"each must be {HASH_SIZE} bytes"
    if reason is not None:
        name = request.request_id
        raise WrongBlockHashes(request=name, num_hashes=len(given), reason=reason)
    return replace(request, block_hashes=request.block_hashes.extend(given))
