# SPDX-License-Identifier: Apache-2.0
"""Requests come, grow and go.

Rules: a request's tokens and its chain of block hashes grow together, so each full block is hashed
once; an engine that hands in hashes of its own hands in all of them. Drafts stand behind the tokens
and are never hashed; those that were scheduled are accepted or dropped before anything else is
scheduled. A row is given for the life of a request; the row given back last is used first. Without
prefix caching there are no hashes. Twin: rust/src/transitions/requests.rs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace as evolve
from pyrsistent import pvector

from kvcore.hashing.block_hash import hash_blocks
from kvcore.hashing.extra_keys import read_extra_keys
from kvcore.state.draft import Draft, transition
from kvcore.state.state import RequestState, State
from kvcore.transitions.in_flight import forget
from kvcore.transitions.unconfirmed_loads import forget_loader
from kvcore.types.arguments import read_count
from kvcore.types.errors import (
    BeyondDrafts,
    DraftsPending,
    EmptyRequestId,
    InOpenBatch,
    RepeatedRequest,
    StillHoldsBlocks,
    WrongBlockHashes,
)
from kvcore.types.keys import HASH_SIZE
from kvcore.types.tokens import read_request_tokens, read_tokens
from kvcore.types.values import Outcome, Request


def add_request(state: State, request: Request) -> Outcome[State, int]:
    """Make a request known; value: its row.

    Raises EmptyRequestId, RepeatedRequest, EmptyTokens, InvalidToken, UnsupportedBuffer,
    InvalidExtraKey, UnsortedMedia, CountMismatch, WrongBlockHashes.
    """

    def change(draft: Draft) -> int:
        check_new_id(draft, request.request_id)
        tokens = read_request_tokens(request.request_id, request.tokens)
        extra_keys = read_extra_keys(request, len(tokens), draft.config.hash_block_size)
        own_hashes = request.block_hashes is not None
        known = evolve(
            empty_request(draft, request.request_id),
            own_hashes=own_hashes,
            skip_reading=bool(request.skip_reading_prefix_cache),
            extra_keys=extra_keys,
        )
        known = extend(draft, known, tokens)
        if request.block_hashes is not None:
            known = extend_hashes(draft, known, request.block_hashes)
        draft.store(known)
        return known.row

    return transition(state, change)


def add_tokens(state: State, request_id: str, tokens: Any) -> Outcome[State, None]:
    """Add tokens behind those that a request has; full blocks are hashed.

    Raises UnknownRequest, EmptyTokens, InvalidToken, UnsupportedBuffer, DraftsPending.
    """

    def change(draft: Draft) -> None:
        request = draft.request(request_id)
        values = read_request_tokens(request_id, tokens)
        check_no_drafts(request)
        draft.store(extend(draft, request, values))

    return transition(state, change)


def add_block_hashes(
    state: State, request_id: str, hashes: Sequence[bytes]
) -> Outcome[State, None]:
    """Add the engine's hashes of the next full blocks of a request that brought its own.

    Raises UnknownRequest, WrongBlockHashes.
    """

    def change(draft: Draft) -> None:
        draft.store(extend_hashes(draft, draft.request(request_id), hashes))

    return transition(state, change)


def add_drafts(state: State, request_id: str, tokens: Any) -> Outcome[State, None]:
    """Put guessed tokens behind those of a request, in place of the guesses before; none is fine.

    They can be scheduled, and are published only when they were accepted. Raises UnknownRequest,
    SwappedOut, LoadUnfinished, InvalidToken, UnsupportedBuffer, DraftsPending.
    """

    def change(draft: Draft) -> None:
        request = draft.idle(request_id)
        values = read_tokens(tokens)
        check_drafts_settled(request)
        draft.store(evolve(request, drafts=pvector(values)))

    return transition(state, change)


def accept(state: State, request_id: str, num_accepted: int) -> Outcome[State, None]:
    """Make the first drafts tokens of the request and drop the others; its blocks stay.

    The computed count falls to the accepted tokens. Raises UnknownRequest, SwappedOut,
    InvalidCount, InOpenBatch, BeyondDrafts.
    """

    def change(draft: Draft) -> None:
        request = draft.on_device(request_id)
        count = read_count("num_accepted", num_accepted)
        scheduled = max(0, request.num_computed - len(request.tokens))
        if scheduled and request_id in draft.records:
            raise InOpenBatch(thing=f"request {request_id!r}")
        if count > scheduled:
            raise BeyondDrafts(request=repr(request_id), num_scheduled=scheduled, asked=count)
        longer = extend(draft, request, request.drafts[:count])
        draft.store(
            evolve(
                longer,
                drafts=pvector(),
                num_computed=min(request.num_computed, len(longer.tokens)),
            )
        )

    return transition(state, change)


def remove_request(state: State, request_id: str) -> Outcome[State, None]:
    """Forget a request that holds no blocks; its row can be given again.

    Raises UnknownRequest, StillHoldsBlocks.
    """

    def change(draft: Draft) -> None:
        request = draft.request(request_id)
        held = sum(len(table) for table in (*request.tables, *request.host_tables))
        if held:
            raise StillHoldsBlocks(request=repr(request_id), num_blocks=held)
        del draft.requests[request_id]
        forget(draft, request_id)
        forget_loader(draft, request_id)
        draft.rows = draft.rows.set(request.row, None)
        draft.free_rows = draft.free_rows.append(request.row)

    return transition(state, change)


def check_new_id(draft: Draft, request_id: str) -> None:
    """Raise EmptyRequestId or RepeatedRequest unless a request of this id can be added."""
    if not isinstance(request_id, str) or not request_id or not _is_text(request_id):
        raise EmptyRequestId(value=repr(request_id))
    if request_id in draft.requests:
        raise RepeatedRequest(request=repr(request_id))


def check_no_drafts(request: RequestState) -> None:
    """Raise DraftsPending while the request has drafts."""
    if request.drafts:
        raise DraftsPending(request=repr(request.request_id), num_drafts=len(request.drafts))


def check_drafts_settled(request: RequestState) -> None:
    """Raise DraftsPending while the request has scheduled drafts that were not yet accepted."""
    if request.num_computed > len(request.tokens):
        check_no_drafts(request)


def _is_text(request_id: str) -> bool:
    try:
        request_id.encode()
    except UnicodeEncodeError:
        return False
    return True


def empty_request(draft: Draft, request_id: str) -> RequestState:
    """A request without tokens, in a row of its own."""
    if draft.free_rows:
        row = draft.free_rows[-1]
        draft.free_rows = draft.free_rows.delete(len(draft.free_rows) - 1)
    else:
        row = len(draft.rows)
        draft.rows = draft.rows.append(None)
    draft.rows = draft.rows.set(row, request_id)
    num_groups = len(draft.config.groups)
    return RequestState(request_id, row, (0,) * num_groups, (pvector(),) * num_groups)


def extend(draft: Draft, request: RequestState, tokens: Sequence[int]) -> RequestState:
    """The request with more tokens and the hashes of the blocks that they fill."""
    longer = request.tokens.extend(tokens)
    if not draft.config.enable_caching or request.own_hashes:
        return evolve(request, tokens=longer)
    hashed = len(request.block_hashes)
    size = draft.config.hash_block_size
    start = hashed * size
    if len(longer) - start < size:
        return evolve(request, tokens=longer)
    hashes = hash_blocks(
        draft.parent_hash(request, hashed),
        list(longer[start:]),
        size,
        start=start,
        extra_keys=request.extra_keys,
        hashing=draft.config.hashing,
    )
    return evolve(request, tokens=longer, block_hashes=request.block_hashes.extend(hashes))


def extend_hashes(draft: Draft, request: RequestState, hashes: Sequence[bytes]) -> RequestState:
    """The request with more of the engine's hashes. Raises WrongBlockHashes."""
    given = list(hashes)
    most = len(request.tokens) // draft.config.hash_block_size - len(request.block_hashes)
    reason = None
    if not request.own_hashes:
        reason = "it did not bring its own when it was added"
    elif len(given) > most:
        reason = f"its tokens fill {most} more blocks"
    elif not all(isinstance(each, bytes) and len(each) == HASH_SIZE for each in given):
        reason = f"each must be {HASH_SIZE} bytes"
    if reason is not None:
        name = repr(request.request_id)
        raise WrongBlockHashes(request=name, num_hashes=len(given), reason=reason)
    return evolve(request, block_hashes=request.block_hashes.extend(given))
