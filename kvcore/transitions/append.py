# SPDX-License-Identifier: Apache-2.0
"""Append: one more token and one more slot for each request of a decode step.

Invariants: every misuse is found before the first request changes. A request is valid if it can
have sampled a token: it holds blocks, and all its tokens are computed, not only scheduled in the
open batch. The token fills the first position to come, if any, so the number of these is unchanged.
Source: S000-21, S004-05 to S004-10. Twin: rust/src/transitions/append.rs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from kvcore.state.plan_records import Refusal
from kvcore.state.state import State
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions.allocate import commit
from kvcore.transitions.output import check_output, publish_filled, take_output
from kvcore.transitions.plan import plan_allocation
from kvcore.transitions.requests import check_no_drafts, extend
from kvcore.transitions.window import apply_trims, plan_trims, visible_from
from kvcore.types.arguments import read_batch_number
from kvcore.types.commands import places_set
from kvcore.types.errors import (
    BeyondModelLength,
    InOpenBatch,
    LengthMismatch,
    NotComputed,
    NotRunning,
    RepeatedRequest,
    UnknownRow,
)
from kvcore.types.slot_request import SlotRequest
from kvcore.types.tokens import read_named, read_tokens
from kvcore.types.values import Appended, Outcome, Refused


def append(
    state: State,
    requests: Iterable[str] | Any,
    tokens: Any = None,
    *,
    batch: int | None = None,
) -> Outcome[State, Appended]:
    """Add one token to each request and schedule one slot for each, in order. Without tokens, the
    slot is for a token to come.

    requests: ids in any iterable, or rows in a buffer of integers or in an iterable other than a
    list or tuple. batch: the one that sampled the tokens. Requests from the first refused one on
    are unchanged, except for the refused one's window trim. Raises WrongArgument,
    UnsupportedBuffer, UnknownRequest, InvalidCount, InvalidToken, LengthMismatch, SwappedOut,
    LoadUnfinished, RepeatedRequest, NotRunning, DraftsPending, InOpenBatch, NotComputed,
    BatchNotTaken, StaleOutput, OutputOutOfOrder, BeyondModelLength.
    """
    named, rows = read_named(requests)

    def change(tx: Transaction) -> Appended:
        ids = read_request_ids(tx, rows) if named is None else named
        values = None
        if tokens is not None:
            values = read_tokens(tokens, signed=all_own_hashes(tx, ids))
        number = read_batch_number(batch)
        check_append(tx, ids, values, number)
        grown: list[tuple[int, ...]] = []
        for done, request_id in enumerate(ids):
            token, start = None if values is None else values[done], len(tx.effects.commands)
            refused = append_one(tx, request_id, token, number)
            if len(tx.effects.commands) > start:
                grown += [(done, *place) for place in places_set(tx.effects.commands[start:])]
            if refused is not None:
                return Appended(done, refused, _to_columns(grown))
        return Appended(len(ids), None, _to_columns(grown))

    return transition(state, change)


def append_one(
    tx: Transaction, request_id: str, token: int | None, batch: int | None
) -> Refused | None:
    """Add and schedule a token, or keep only the window trim and return the refusal."""
    before = tx.request(request_id)
    to_come = before.num_output_placeholders
    if token is not None:
        tx.put(take_output(extend(tx, before, [token]), batch))
    new = int(token is None or to_come > 0)
    slot_request = SlotRequest(request_id=request_id, num_new_tokens=1, num_output_placeholders=new)
    plan = plan_allocation(tx, slot_request)
    if isinstance(plan, Refusal):
        trims = plan_trims(tx, before, visible_from(tx, before, before.num_accepted))
        tx.put(apply_trims(tx, before, trims))
        return plan.refused
    if token is not None and to_come:
        publish_filled(tx, tx.request(request_id), before.tokens.length)
        plan = replace(plan, request=tx.request(request_id))
    commit(tx, plan)
    return None


def _to_columns(rows: list[tuple[int, ...]]) -> bytes:
    """Return rows of numbers as concatenated int32 columns."""
    return b"".join(struct.pack(f"<{len(column)}i", *column) for column in zip(*rows, strict=True))


def read_request_ids(tx: Transaction, rows: list[int]) -> list[str]:
    """Return the ids of the requests in these rows. Raises UnknownRequest."""
    ids = []
    for row in rows:
        request_id = tx.rows[row] if row < len(tx.rows) else None
        if request_id is None:
            raise UnknownRow(row=row)
        ids.append(request_id)
    return ids


def all_own_hashes(tx: Transaction, request_ids: list[str]) -> bool:
    """Return whether all these requests are known and have hashes of their own."""
    found = (tx.requests.get(each) if isinstance(each, str) else None for each in request_ids)
    return all(request is not None and request.own_hashes for request in found)


def check_append(
    tx: Transaction, request_ids: list[str], tokens: list[int] | None, batch: int | None
) -> None:
    """Raise unless each request can have sampled a token and can grow by it."""
    if tokens is not None and len(request_ids) != len(tokens):
        raise LengthMismatch(num_requests=len(request_ids), num_tokens=len(tokens))
    limit, seen = tx.config.length_limit, set()
    for request_id in request_ids:
        request = tx.idle(request_id)
        num_tokens, num_computed = request.tokens.length, request.num_computed
        if request_id in seen:
            raise RepeatedRequest(request=request_id, reason="is named twice in one call")
        seen.add(request_id)
        if not any(request.tables):
            raise NotRunning(request=request_id)
        check_no_drafts(request)
        if tx.scheduled[request.row] is not None:
            raise InOpenBatch(kind="request", value=request_id)
        if num_computed < num_tokens:
            raise NotComputed(request=request_id, num_tokens=num_tokens, num_computed=num_computed)
        check_output(tx, request, batch)
        if num_computed >= limit:
            raise BeyondModelLength(
                request=request_id, requested=num_computed + 1, max_model_len=limit
            )
