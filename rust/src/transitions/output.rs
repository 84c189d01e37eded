// SPDX-License-Identifier: Apache-2.0
//! Output of batches: whether it belongs to a request, and which positions its tokens fill.
//!
//! Invariants: a position to come is computed and has slots, but no token, so no key covers it. A
//! block becomes findable when its last token is known and its write is scheduled (or completed),
//! whichever is last. A request takes the output of a batch once, and never output from before it
//! was cut or rescheduled. Twin: kvcore/transitions/output.py.

use std::sync::Arc;

use crate::state::batch_records::{BatchInFlight, RequestEntry};
use crate::state::open_batch::ScheduledRequest;
use crate::state::state::{RequestState, State, request_mut};
use crate::transitions::in_flight::num_finished;
use crate::transitions::publish::publish_blocks;
use crate::types::errors::Error;
use crate::types::ids::Row;

/// Fails with InOpenBatch if the open batch computes the position from which the next token to come
/// is sampled.
pub(crate) fn check_sampled(state: &State, row: Row) -> Result<(), Error> {
    let request = &state[row];
    let record = state.batch.scheduled.get(row);
    let is_late = |record: &ScheduledRequest| record.num_computed_before < request.num_tokens();
    if request.num_output_placeholders() > 0 && record.is_some_and(is_late) {
        return Err(Error::InOpenBatch { kind: "request", value: request.name().into() });
    }
    Ok(())
}

/// A batch that is in flight.
pub(crate) fn find_batch(in_flight: &[Arc<BatchInFlight>], number: i64) -> Option<&BatchInFlight> {
    in_flight.iter().find(|batch| batch.number == number as u64).map(Arc::as_ref)
}

/// Whether a batch in flight has a request, and samples its next position to come if it has one.
#[inline]
pub(crate) fn samples_next(batch: &BatchInFlight, request: &RequestState, row: Row) -> bool {
    let is_next = |entry: &RequestEntry| {
        request.num_output_placeholders() == 0 || entry.before < request.num_tokens()
    };
    batch.entries.get(row).is_some_and(is_next)
}

/// Fails unless this batch was taken, and its output is what the request waits for.
///
/// Which position of which requests a batch samples is known while it is in flight.
pub(crate) fn check_output(state: &State, row: Row, batch: Option<i64>) -> Result<(), Error> {
    let Some(batch) = batch else { return Ok(()) };
    if batch as u64 >= state.batch.number {
        return Err(Error::BatchNotTaken { batch, open_batch: state.batch.number as i64 });
    }
    let output_from = state.output_from[row.index()];
    if (batch as u64) < output_from {
        let (request, output_from) = (state[row].name(), output_from as i64);
        return Err(Error::StaleOutput { request, batch, output_from });
    }
    let sampler = find_batch(&state.in_flight, batch);
    if sampler.is_some_and(|sampler| !samples_next(sampler, &state[row], row)) {
        let (request, num_tokens) = (state[row].name(), i64::from(state[row].num_tokens()));
        return Err(Error::OutputOutOfOrder { request, batch, num_tokens });
    }
    Ok(())
}

/// Fails with InOpenBatch or OutputOutOfOrder if a later batch computes what the last of these
/// tokens would be sampled from.
///
/// dropped: positions to come that were rejected.
pub(crate) fn check_surplus(
    state: &State,
    row: Row,
    batch: Option<i64>,
    num_tokens: usize,
    dropped: u32,
) -> Result<(), Error> {
    let request = &state[row];
    let (known, name) = (request.num_tokens(), request.name());
    let total = known as usize + num_tokens;
    // Return the number of the request's tokens when a batch begins, from the batch's first
    // position.
    let num_sampled = |before: u32| {
        1 + if before <= known { before } else { known.max(before.saturating_sub(dropped)) }
    };
    let record = state.batch.scheduled.get(row);
    if record.is_some_and(|record| (num_sampled(record.num_computed_before) as usize) < total) {
        return Err(Error::InOpenBatch { kind: "request", value: name.into() });
    }
    let Some(batch) = batch else { return Ok(()) };
    for later in state.in_flight.iter().filter(|each| each.number > batch as u64) {
        let most = later.entries.get(row).map(|entry| num_sampled(entry.before));
        if let Some(most) = most.filter(|most| (*most as usize) < total) {
            let num_tokens = i64::from(most);
            return Err(Error::OutputOutOfOrder { request: name, batch, num_tokens });
        }
    }
    Ok(())
}

/// Note the output of a batch, which a request takes once; one that catches up by a known token
/// takes none of older batches any more.
pub(crate) fn take_output(state: &mut State, row: Row, batch: Option<i64>) {
    let State { requests, output_from, batch: open, .. } = state;
    note_output(request_mut(requests, row), &mut output_from[row.index()], batch, open.number);
}

/// Do the same for a request, given the first batch whose output belongs to it.
#[inline(always)] // of each request in each step
pub(crate) fn note_output(request: &RequestState, from: &mut u64, batch: Option<i64>, open: u64) {
    if (request.num_computed as usize) < request.tokens.len() {
        *from = open;
    } else if let Some(batch) = batch {
        *from = batch as u64 + 1;
    }
}

/// Make blocks findable that new tokens have filled, as far as their write is scheduled.
pub(crate) fn publish_filled(state: &mut State, row: Row) {
    if !state.config.enable_caching {
        return;
    }
    let at_once = state.config.publishes_at_once();
    let count = if at_once { state[row].num_accepted() } else { num_finished(state, row) };
    publish_blocks(state, row, count, false);
}
