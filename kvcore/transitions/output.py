# SPDX-License-Identifier: Apache-2.0
"""Output of batches: whether it belongs to a request, and which positions its tokens fill.

Invariants: a position to come is computed and has slots, but no token, so no key covers it. A block
becomes findable when its last token is known and its write is scheduled (or completed), whichever
is last. A request takes the output of a batch once, and never output from before it was cut or
rescheduled.
Twin: rust/src/transitions/output.rs.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions.in_flight import num_finished
from kvcore.transitions.publish import publish_blocks, stored
from kvcore.transitions.tails.keys import fill_tails
from kvcore.types.errors import BatchNotTaken, InOpenBatch, OutputOutOfOrder, StaleOutput


def check_sampled(tx: Transaction, request: RequestState) -> None:
    """Raise InOpenBatch if the open batch computes the position from which the next token to come
    is sampled.
    """
    record = tx.scheduled[request.row]
    if record is None or not request.num_output_placeholders:
        return
    if record.num_computed_before < request.tokens.length:
        raise InOpenBatch(kind="request", value=request.request_id)


def check_output(tx: Transaction, request: RequestState, batch: int | None) -> None:
    """Raise unless this batch was taken, and is the oldest one whose output the request awaits."""
    if batch is None:
        return
    if batch >= tx.batch.number:
        raise BatchNotTaken(batch=batch, open_batch=tx.batch.number)
    if batch < request.output_from:
        raise StaleOutput(request=request.request_id, batch=batch, output_from=request.output_from)
    oldest = next((number for number, _ in request.awaited), None)
    if batch != oldest:
        out_of_date = oldest is not None and oldest < request.output_from
        raise OutputOutOfOrder(
            request=request.request_id,
            batch=batch,
            num_tokens=request.tokens.length,
            expected=None if out_of_date else oldest,
        )


def check_surplus(
    tx: Transaction, request: RequestState, batch: int | None, num_tokens: int, rejected: int
) -> None:
    """Raise if the last of these tokens is sampled from a position of a later batch, or of none.

    rejected: drafts among the positions to come that were rejected. Raises InOpenBatch,
    OutputOutOfOrder.
    """
    num_known = request.tokens.length

    def num_sampled(before: int) -> int:
        """Return the number of the request's tokens when a batch begins, from the batch's first
        position.
        """
        return 1 + (before if before <= num_known else max(num_known, before - rejected))

    record = tx.scheduled[request.row] if request.num_output_placeholders else None
    if record is not None and num_sampled(record.num_computed_before) < num_known + num_tokens:
        raise InOpenBatch(kind="request", value=request.request_id)
    if batch is None:
        return
    (_, end), *later = request.awaited
    most = num_sampled(end)
    if most < num_known + num_tokens:
        raise OutputOutOfOrder(
            request=request.request_id,
            batch=batch,
            num_tokens=most,
            expected=later[0][0] if later else None,
        )


def take_output(request: RequestState, batch: int | None) -> RequestState:
    """Return the request after it took the output of a batch, which it can take only once."""
    if batch is not None:
        request = replace(request, output_from=batch + 1)
    return request.awaiting(request.samplers) if request.samplers else request


def drop_positions(request: RequestState, rejected: int) -> RequestState:
    """Return the request without its last positions to come. The ends of later batches fall, also
    if the request has left.
    """
    known, dropped = request.tokens.length, min(rejected, request.num_output_placeholders)
    moved = [(batch, max(known, end - rejected)) for batch, end in request.awaited]
    return replace(request, num_computed=request.num_computed - dropped).awaiting(moved)


def publish_filled(tx: Transaction, request: RequestState, num_known: int) -> None:
    """Make blocks findable that new tokens have filled, as far as their write is scheduled.

    num_known: the tokens that were known before.
    """
    if not tx.config.enable_caching:
        return
    count = request.num_accepted
    if tx.config.publish == "completed":
        count = num_finished(tx, request)
    publish_blocks(tx, request, count)
    if tx.config.has_states:
        from kvcore.transitions.checkpoints import publish_reached  # few models have states

        publish_reached(tx, tx.request(request.request_id), num_known, stored)
    fill_tails(tx, tx.request(request.request_id), num_known)
