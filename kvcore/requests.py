# SPDX-License-Identifier: Apache-2.0
"""Requests come, grow and go.

Rules: a request's tokens and its chain of block hashes grow together, so each full block is hashed
once. A row is given for the life of a request; the row given back last is used first. Without
prefix caching there are no hashes. Twin: rust/src/requests.rs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from pyrsistent import PVector, pvector

from kvcore.errors import EmptyRequestId, RepeatedRequest, StillHoldsBlocks
from kvcore.hashing import hash_blocks
from kvcore.state import Draft, RequestState, State, transition
from kvcore.tokens import read_request_tokens
from kvcore.values import Outcome, Request


def add_request(state: State, request: Request) -> Outcome[State, int]:
    """Make a request known; value: its row.

    Raises EmptyRequestId, RepeatedRequest, EmptyTokens, InvalidToken, UnsupportedBuffer.
    """

    def change(draft: Draft) -> int:
        check_new_id(draft, request.request_id)
        tokens = read_request_tokens(request.request_id, request.tokens)
        known = empty_request(draft, request.request_id)
        draft.store(extend(draft, known, tokens))
        return known.row

    return transition(state, change)


def add_tokens(state: State, request_id: str, tokens: Any) -> Outcome[State, None]:
    """Add tokens behind those that a request has; full blocks are hashed.

    Raises UnknownRequest, EmptyTokens, InvalidToken, UnsupportedBuffer.
    """

    def change(draft: Draft) -> None:
        request = draft.request(request_id)
        draft.store(extend(draft, request, read_request_tokens(request_id, tokens)))

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
        draft.rows = draft.rows.set(request.row, None)
        draft.free_rows = draft.free_rows.append(request.row)

    return transition(state, change)


def check_new_id(draft: Draft, request_id: str) -> None:
    """Raise EmptyRequestId or RepeatedRequest unless a request of this id can be added."""
    if not isinstance(request_id, str) or not request_id or not _is_text(request_id):
        raise EmptyRequestId(value=repr(request_id))
    if request_id in draft.requests:
        raise RepeatedRequest(request=repr(request_id))


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
    tables: tuple[PVector[int], ...] = (pvector(),) * num_groups
    return RequestState(request_id, row, pvector(), pvector(), 0, tables, (0,) * num_groups)


def extend(draft: Draft, request: RequestState, tokens: Sequence[int]) -> RequestState:
    """The request with more tokens and the hashes of the blocks that they fill."""
    longer = request.tokens.extend(tokens)
    if not draft.config.enable_caching:
        return attrs.evolve(request, tokens=longer)
    hashed = len(request.block_hashes)
    size = draft.config.block_size
    start = hashed * size
    if len(longer) - start < size:
        return attrs.evolve(request, tokens=longer)
    parent = draft.parent_hash(request, hashed)
    hashes = hash_blocks(parent, longer[start:], size)
    return attrs.evolve(request, tokens=longer, block_hashes=request.block_hashes.extend(hashes))
