// SPDX-License-Identifier: Apache-2.0
//! Output of batches: whether it belongs to a request, and which positions its tokens fill.
//!
//! Invariants: a position to come is computed and has slots, but no token, so no key covers it. A
//! block becomes findable when its last token is known and its write is scheduled (or completed),
//! whichever is last. A request takes the output of a batch once, and never output from before it
//! was cut or rescheduled. Twin: kvcore/transitions/output.py.

use crate::mutants::{Mutant, seeded};
use crate::state::open_batch::ScheduledRequest;
use crate::state::state::{RequestState, State};
use crate::transitions::checkpoints::publish_reached;
use crate::transitions::in_flight::num_finished;
use crate::transitions::publish::{publish_blocks, stored_bytes};
use crate::transitions::tails::keys::fill_tails;
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

/// Fails unless this batch was taken, and is the oldest one whose output the request awaits.
pub(crate) fn check_output(state: &State, row: Row, batch: Option<i64>) -> Result<(), Error> {
    let Some(batch) = batch else { return Ok(()) };
    if batch as u64 >= state.batch.number {
        return Err(Error::BatchNotTaken { batch, open_batch: state.batch.number as i64 });
    }
    let (request, output_from) = (&state[row], state[row].output_from);
    if (batch as u64) < output_from {
        let (request, output_from) = (request.name(), output_from as i64);
        return Err(Error::StaleOutput { request, batch, output_from });
    }
    let oldest = request.awaited().first().map(|oldest| oldest.batch);
    if oldest == Some(batch as u64) {
        return Ok(());
    }
    let expected = oldest.filter(|&oldest| oldest >= output_from).map(|oldest| oldest as i64);
    let (request, num_tokens) = (request.name(), i64::from(request.num_tokens()));
    Err(Error::OutputOutOfOrder { request, batch, num_tokens, expected })
}

/// Fails with InOpenBatch or OutputOutOfOrder if a later batch computes what the last of these
/// tokens would be sampled from, or none does.
///
/// rejected: drafts among the positions to come that were rejected.
pub(crate) fn check_surplus(
    state: &State,
    row: Row,
    batch: Option<i64>,
    num_tokens: usize,
    rejected: u32,
) -> Result<(), Error> {
    let request = &state[row];
    let (known, name) = (request.num_tokens(), request.name());
    let total = known as usize + num_tokens;
    // Return the number of the request's tokens when a batch begins, from the batch's first
    // position.
    let num_sampled = |before: u32| {
        1 + if before <= known { before } else { known.max(before.saturating_sub(rejected)) }
    };
    let record = state.batch.scheduled.get(row).filter(|_| request.num_output_placeholders() > 0);
    if record.is_some_and(|record| (num_sampled(record.num_computed_before) as usize) < total) {
        return Err(Error::InOpenBatch { kind: "request", value: name.into() });
    }
    let Some(batch) = batch else { return Ok(()) };
    if let [oldest, later @ ..] = &request.awaited()[..] {
        let most = num_sampled(oldest.end);
        if (most as usize) < total {
            let expected = later.first().map(|next| next.batch as i64);
            let num_tokens = i64::from(most);
            return Err(Error::OutputOutOfOrder { request: name, batch, num_tokens, expected });
        }
    }
    Ok(())
}

/// Note the output of a batch, which a request takes once, before the open batch schedules it; one
/// that catches up by a known token takes none of older batches any more.
pub(crate) fn take_output(state: &mut State, row: Row, batch: Option<i64>) {
    let open = state.batch.number;
    let request = &mut state[row];
    if request.num_computed < request.num_tokens() {
        request.output_from = open;
    } else if let Some(batch) = batch {
        request.output_from = batch as u64 + 1;
    }
}

/// Do the same for a request of which the open batch schedules one more position, and await the
/// output of that position.
#[inline(always)] // of each request in each step
pub(crate) fn note_output(request: &mut RequestState, batch: Option<i64>, open: u64) {
    if request.num_computed < request.num_tokens() {
        debug_assert!(request.samplers.is_empty(), "a quiet request waits for no other batch");
        request.output_from = open;
        return;
    }
    if !seeded(Mutant::QuietStepNotAwaited) {
        request.await_next(open);
    }
    if let Some(batch) = batch {
        request.output_from = batch as u64 + 1;
    }
}

/// Drop the last positions to come. The ends of later batches fall, also if the request has left.
pub(crate) fn drop_positions(state: &mut State, row: Row, rejected: u32) {
    let request = &mut state[row];
    let (mut samplers, known) = (request.awaited(), request.num_tokens());
    samplers.iter_mut().for_each(|each| each.end = known.max(each.end.saturating_sub(rejected)));
    let dropped = rejected.min(request.num_output_placeholders());
    request.num_computed -= dropped;
    if !seeded(Mutant::RejectionKeepsSlots) {
        request.quiet_until = 0;
    }
    request.set_awaited(&samplers);
}

/// Make the states findable behind the first num_known tokens whose tokens are known now.
#[inline]
pub(crate) fn publish_accepted(state: &mut State, row: Row, num_known: u32) {
    if state.has_states && state.config.enable_caching {
        publish_reached(state, row, num_known, stored_bytes);
    }
}

/// Make blocks findable that new tokens have filled, as far as their write is scheduled.
///
/// num_known: the tokens that were known before.
#[inline(always)] // of each block that tokens to come fill
pub(crate) fn publish_filled(state: &mut State, row: Row, num_known: u32) {
    if !state.config.enable_caching {
        return;
    }
    let at_once = state.config.publishes_at_once();
    let count = if at_once { state[row].num_accepted() } else { num_finished(state, row) };
    publish_blocks(state, row, count, false);
    publish_accepted(state, row, num_known);
    fill_tails(state, row, num_known);
}
