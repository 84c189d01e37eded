# SPDX-License-Identifier: Apache-2.0
"""Unschedule: shorten what the open batch computes for a request.

Invariants: the batch writes nothing from the new count on, lookahead slots included, so keys that
it published past the count are withdrawn as if the request left. Hits and external tokens stay. At
least one position stays if the batch brings encoder tokens, which would not be written otherwise,
or if the request counts no others, since a request without computed tokens holds no blocks (`free`
removes it). A request that keeps none of its own positions and took no hit leaves the batch. Blocks
stay, for the next slots.
Twin: rust/src/transitions/unschedule.rs.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvcore.state.open_batch import ScheduledRequest
from kvcore.state.state import RequestState, State
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions.free import check_leaving, num_cached_after, withdraw
from kvcore.transitions.in_flight import note_left_batch
from kvcore.transitions.requests import check_no_drafts
from kvcore.transitions.tails.keys import drop_delay
from kvcore.transitions.unconfirmed_loads import lower_counted
from kvcore.types.arguments import read_count
from kvcore.types.errors import BeforeOpenBatch, BeyondComputed
from kvcore.types.values import Outcome


def unschedule(state: State, request_id: str, num_tokens: int) -> Outcome[State, None]:
    """Let the open batch compute a request only up to num_tokens; its blocks stay.

    The computed count falls to num_tokens. Raises UnknownRequest, SwappedOut, LoadUnfinished,
    DraftsPending, InvalidCount, BeyondComputed, BeforeOpenBatch, HitInOpenBatch.
    """

    def change(tx: Transaction) -> None:
        request = tx.idle(request_id)
        check_no_drafts(request)
        count = read_count("num_tokens", num_tokens)
        if count > request.num_computed:
            raise BeyondComputed(
                request=request_id, num_computed=request.num_computed, requested=count
            )
        record = tx.scheduled[request.row]
        kept = request.num_computed if record is None else record.num_kept
        if count < kept:
            raise BeforeOpenBatch(request=request_id, num_kept=kept, requested=count)
        if record is not None and count < request.num_computed:
            check_leaving(tx, [request], count)
            shorten(tx, request, record, count)

    return transition(state, change)


def shorten(
    tx: Transaction, request: RequestState, record: ScheduledRequest, num_tokens: int
) -> None:
    """Lower a request, and its record in the open batch, to num_tokens."""
    record = replace(record, unwritten=withdraw(tx, request, record, num_tokens))
    if num_tokens > record.num_computed_before:
        tx.scheduled = tx.scheduled.set(request.row, record)
    else:
        tx.scheduled = tx.scheduled.set(request.row, None)
        note_left_batch(tx, request.request_id)
        drop_delay(tx, request.request_id)
    if tx.loads:
        lower_counted(tx, request.request_id, num_tokens)
    if tx.config.has_states:
        request = shorten_states(tx, request, record, num_tokens)
    num_cached = [
        num_cached_after(request, index, group, num_tokens)
        for index, group in enumerate(tx.config.groups)
    ]
    shorter = replace(request, num_computed=num_tokens, num_cached=tuple(num_cached))
    tx.put(shorter.awaiting(request.awaited if num_tokens >= request.tokens.length else ()))


def shorten_states(
    tx: Transaction, request: RequestState, record: ScheduledRequest, num_tokens: int
) -> RequestState:
    """Return the request whose step ends at num_tokens, which leaves no checkpoint; or with its
    states from before the batch, if it leaves that.
    """
    from kvcore.transitions.checkpoints import drop_end  # few models have states
    from kvcore.transitions.states import shorten_step, step_back

    drop_end(tx, request.request_id)
    if num_tokens > record.num_computed_before:
        return shorten_step(tx, request, num_tokens)
    return step_back(tx, request, num_tokens)
