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
from kvcore.transitions.publish import publish_blocks
from kvcore.types.errors import BatchNotTaken, InOpenBatch, OutputOutOfOrder, StaleOutput


def check_sampled(tx: Transaction, request: RequestState) -> None:
    """Raise InOpenBatch if the open batch computes the position from which the next token to come
    is sampled.
    """
    record = tx.scheduled.get(request.request_id)
    if record is None or not request.num_output_placeholders:
        return
    if record.num_computed_before < len(request.tokens):
        raise InOpenBatch(kind="request", value=request.request_id)


def check_output(tx: Transaction, request: RequestState, batch: int | None) -> None:
    """Raise unless this batch was taken, and the request waits for its output.

    The positions that a batch samples are known while it is in flight.
    """
    if batch is None:
        return
    if batch >= tx.batch.number:
        raise BatchNotTaken(batch=batch, open_batch=tx.batch.number)
    if batch < request.output_from:
        raise StaleOutput(request=request.request_id, batch=batch, output_from=request.output_from)
    num_tokens, to_come = len(request.tokens), request.num_output_placeholders
    for each in tx.in_flight:
        if each.number != batch:
            continue
        entry = each.entries.get(request.request_id)
        if entry is None or (to_come and entry.before >= num_tokens):
            raise OutputOutOfOrder(request=request.request_id, batch=batch, num_tokens=num_tokens)


def check_surplus(
    tx: Transaction, request: RequestState, batch: int | None, num_tokens: int, dropped: int
) -> None:
    """Raise if a later batch computes the position from which the last of these tokens is sampled.

    dropped: positions to come that were rejected. Raises InOpenBatch, OutputOutOfOrder.
    """
    num_known = len(request.tokens)

    def num_sampled(before: int) -> int:
        """Return the number of the request's tokens when a batch begins, from the batch's first
        position.
        """
        return 1 + (before if before <= num_known else max(num_known, before - dropped))

    record = tx.scheduled.get(request.request_id)
    if record is not None and num_sampled(record.num_computed_before) < num_known + num_tokens:
        raise InOpenBatch(kind="request", value=request.request_id)
    if batch is None:
        return
    for each in tx.in_flight:
        entry = each.entries.get(request.request_id)
        if entry is None or each.number <= batch:
            continue
        most = num_sampled(entry.before)
        if most < num_known + num_tokens:
            raise OutputOutOfOrder(request=request.request_id, batch=batch, num_tokens=most)


def take_output(request: RequestState, batch: int | None) -> RequestState:
    """Return the request after it took the output of a batch, which it can take only once."""
    return request if batch is None else replace(request, output_from=batch + 1)


def publish_filled(tx: Transaction, request: RequestState) -> None:
    """Make blocks findable that new tokens have filled, as far as their write is scheduled."""
    if not tx.config.enable_caching:
        return
    count = request.num_accepted
    if tx.config.publish == "completed":
        count = num_finished(tx, request)
    publish_blocks(tx, request, count)
