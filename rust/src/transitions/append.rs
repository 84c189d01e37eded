// SPDX-License-Identifier: Apache-2.0
//! Append: one more token and one more slot for each request of a decode step.
//!
//! Invariants: every misuse is found before the first request changes. A request is valid if it can
//! have sampled a token: it holds blocks, and all its tokens are computed, not only scheduled in
//! the open batch. The token fills the first position to come, if any, so the number of these is
//! unchanged.
//! The open batch notes all requests before the first one changes, which also finds those that are
//! named twice; requests that do not get their slots are taken out again.
//! Source: S000-21, S004-05 to S004-10. Twin: kvcore/transitions/append.py.

mod block_ends;
pub(crate) mod fast_path;
mod once_trimmed;

use smallvec::SmallVec;

use crate::pool::prefetch::prefetch;
use crate::state::open_batch::ScheduledRequest;
use crate::state::state::{RequestState, State};
use crate::transitions::allocate::commit;
use crate::transitions::append::block_ends::{append_at_ends, extend_by_one};
use crate::transitions::append::fast_path::{append_quietly, is_quiet};
use crate::transitions::append::once_trimmed::append_once_trimmed;
use crate::transitions::output::{check_output, publish_filled, take_output};
use crate::transitions::plan::plan_allocation;
use crate::transitions::requests::check_no_drafts;
use crate::transitions::window::{apply_trims, plan_trims, visible_from};
use crate::types::commands::places_set;
use crate::types::errors::{Error, check_count};
use crate::types::ids::Row;
use crate::types::slot_request::SlotRequest;
use crate::types::values::{Appended, Output, Refused};

/// The requests of an `append`: ids, or rows as a buffer holds them.
#[derive(Debug, Clone, Copy)]
pub enum Requests<'a> {
    /// Ids, known or not.
    Ids(&'a [&'a str]),
    /// Rows, each in use or not.
    Rows(&'a [u32]),
}

/// Add one token to each request and schedule one slot for each, in order. Without tokens, the slot
/// is for a token to come.
/// Requests from the first refused one on are unchanged, except for the refused one's window trim.
/// Fails with UnknownRequest, InvalidCount, LengthMismatch, SwappedOut, LoadUnfinished,
/// RepeatedRequest, NotRunning, DraftsPending, InOpenBatch, NotComputed, BatchNotTaken,
/// StaleOutput, OutputOutOfOrder, BeyondModelLength.
pub fn append<'a>(
    state: &mut State,
    requests: Requests<'_>,
    output: impl Into<Output<'a>>,
) -> Result<Appended, Error> {
    let (output, num_records) = (output.into(), state.batch.scheduled.num_entries());
    let found;
    let rows = match requests {
        Requests::Rows(rows) => rows,
        Requests::Ids(ids) => {
            found = find_rows(state, ids, &output)?;
            &found[..]
        }
    };
    if !schedule_all(state, rows, &output) {
        state.batch.scheduled.truncate(num_records);
        let wrong = read_request_ids(state, rows).and_then(|()| check_append(state, rows, &output));
        return Err(wrong.expect_err("NOCRASH: what may not grow has a reason"));
    }
    let mut done = 0;
    while let Some(&row) = rows.get(done) {
        let (row, token) = (Row(row), output.tokens.map(|tokens| tokens[done]));
        let (since, num_pins) = (state[row].quiet_since, state.num_pins);
        let is_quiet = is_quiet(&state[row]);
        if is_quiet && since == num_pins {
            let tokens = output.tokens.map(|tokens| &tokens[done..]);
            done += append_quietly(state, &rows[done..], tokens, output.batch);
            continue;
        }
        if is_quiet && since == !num_pins {
            append_once_trimmed(state, row, token, output.batch);
        } else if let Err(refused) = append_one(state, row, token, output.batch) {
            state.batch.scheduled.truncate(num_records + done);
            return Ok(Appended { done: done as u64, refused: Some(refused) });
        }
        done += 1;
    }
    Ok(Appended { done: done as u64, refused: None })
}

/// Add and schedule a token; if it is refused, only the window trim is kept.
fn append_one(
    state: &mut State,
    row: Row,
    token: Option<u32>,
    batch: Option<i64>,
) -> Result<(), Refused> {
    if append_at_ends(state, row, token, token.and(batch)) {
        return Ok(());
    }
    let (num_hashed, num_tokens) = (state[row].block_hashes.len(), state[row].tokens.len());
    let fills = token.is_some() && state[row].num_output_placeholders() > 0;
    let known = fills.then_some(num_tokens as u32);
    if let Some(token) = token {
        extend_by_one(state, row, token);
    }
    let slot_request = SlotRequest::next(&state[row]);
    let planned = plan_allocation(state, row, &slot_request);
    match planned.expect("NOCRASH: check_append has checked every call of the append") {
        Ok(plan) => {
            // The output comes before the open batch schedules the next token.
            if let Some(num_known) = known {
                publish_filled(state, row, num_known);
            }
            take_output(state, row, token.and(batch));
            commit(state, &slot_request, &plan);
            Ok(())
        }
        Err(refusal) => {
            let request = &mut state[row];
            request.tokens.truncate(num_tokens);
            request.block_hashes.truncate(num_hashed);
            let seen_from = visible_from(state, row, state[row].num_accepted());
            apply_trims(state, row, &plan_trims(state, row, seen_from));
            Err(refusal.refused)
        }
    }
}

/// Check the rows of a buffer. Fails with UnknownRequest if a row has no request.
pub fn read_request_ids(state: &State, rows: &[u32]) -> Result<(), Error> {
    let is_free = |&&row: &&u32| !matches!(state.requests.get(row as usize), Some(Some(_)));
    match rows.iter().find(is_free) {
        Some(row) => Err(Error::UnknownRow { row: (*row).into() }),
        None => Ok(()),
    }
}

/// Whether all these requests are known and have hashes of their own.
#[must_use]
pub fn all_own_hashes(state: &State, requests: &Requests<'_>) -> bool {
    let is_own = |row: u32| {
        let request = state.requests.get(row as usize).and_then(Option::as_ref);
        request.is_some_and(|request| request.own_hashes)
    };
    match requests {
        Requests::Ids(ids) => ids.iter().all(|id| state.request(id).is_ok_and(|row| is_own(row.0))),
        Requests::Rows(rows) => rows.iter().all(|row| is_own(*row)),
    }
}

/// Return the places of tables that an `append` of requests in these rows set, in order, each as
/// index in the call's list, group, position, block. first: number of commands before it.
#[must_use]
pub fn places_grown(state: &State, rows: &[u32], first: usize) -> Vec<[u32; 4]> {
    let mut at = 0;
    let place = |[row, group_id, position, block]: [u32; 4]| {
        at += rows[at..].iter().position(|&each| each == row).unwrap_or(0);
        [at as u32, group_id, position, block]
    };
    places_set(&state.effects.commands, first).map(place).collect()
}

/// Return these places as four columns of little-endian numbers, one behind the other.
#[must_use]
pub fn columns_grown(places: &[[u32; 4]]) -> Vec<u8> {
    let mut columns = Vec::with_capacity(4 * places.len());
    (0..4).for_each(|at| columns.extend(places.iter().map(|row| row[at].to_le_bytes())));
    columns.into_flattened()
}

/// Find the rows of ids. Fails as the append would for the requests before the first unknown one.
fn find_rows(
    state: &State,
    ids: &[&str],
    output: &Output<'_>,
) -> Result<SmallVec<[u32; 4]>, Error> {
    let mut rows: SmallVec<[u32; 4]> = SmallVec::new();
    for &id in ids {
        match state.request(id) {
            Ok(row) => rows.push(row.0),
            Err(unknown) => {
                check_output_number(output)?;
                check_lengths(ids.len(), output)?;
                check_each(state, &rows, output)?;
                return Err(unknown);
            }
        }
    }
    Ok(rows)
}

/// Note that the open batch schedules these requests; returns false, with some noted, if one may
/// not grow.
#[inline(always)] // of each request in each step
fn schedule_all(state: &mut State, rows: &[u32], output: &Output<'_>) -> bool {
    if output.tokens.is_some_and(|tokens| tokens.len() != rows.len()) {
        return false;
    }
    let Some(batch) = output.batch else { return schedule_each(state, rows, |_| true) };
    let number = batch as u64;
    let is_taken = rows.is_empty() || number < state.batch.number;
    batch >= 0 && is_taken && schedule_each(state, rows, |each| each.awaits_next(number))
}

/// Do so for requests that await the output.
#[inline(always)] // of each request in each step
fn schedule_each(state: &mut State, rows: &[u32], awaited: impl Fn(&RequestState) -> bool) -> bool {
    let limit = state.config.length_limit();
    let State { requests, batch, .. } = state;
    rows.iter().all(|&row| {
        let Some(Some(request)) = requests.get(row as usize) else { return false };
        prefetch(&request.tokens, request.tokens.len()); // the next one's place
        if !is_quiet(request) {
            prefetch_ends(request);
        }
        let record = ScheduledRequest::new(request.num_computed);
        awaited(request)
            && can_grow(request, limit)
            && batch.scheduled.insert_once(Row(row), record)
    })
}

/// Prefetch what a token reads that fills or begins blocks.
#[inline(never)] // the check of each request keeps its registers
fn prefetch_ends(request: &RequestState) {
    let tables = request.tables.iter();
    tables.for_each(|table| prefetch(table, table.len().saturating_sub(1)));
    prefetch(&request.block_hashes, request.block_hashes.len());
}

/// Fails unless each request can have sampled a token and can grow by it.
fn check_append(state: &State, rows: &[u32], output: &Output<'_>) -> Result<(), Error> {
    check_output_number(output)?;
    check_lengths(rows.len(), output)?;
    check_each(state, rows, output)
}

/// Fails with InvalidCount unless the batch number, if any, is valid.
fn check_output_number(output: &Output<'_>) -> Result<(), Error> {
    output.batch.map_or(Ok(()), |batch| check_count("batch", batch, 0))
}

/// Fails with LengthMismatch unless there is a token for each request, or none at all.
fn check_lengths(num_requests: usize, output: &Output<'_>) -> Result<(), Error> {
    match output.tokens {
        Some(tokens) if tokens.len() != num_requests => {
            let (num_requests, num_tokens) = (num_requests as i64, tokens.len() as i64);
            Err(Error::LengthMismatch { num_requests, num_tokens })
        }
        _ => Ok(()),
    }
}

/// Whether a quick check shows that a request can grow by a token.
#[inline(always)] // of each request in each step
fn can_grow(request: &RequestState, limit: u32) -> bool {
    let is_ready = || {
        let is_idle = request.host_tables.is_empty() && request.num_loading == 0;
        is_idle && request.drafts.is_empty() && request.holds_blocks()
    };
    let is_known = request.num_computed < request.quiet_until;
    debug_assert!(!is_known || is_ready(), "a quiet request has no drafts, loads or host blocks");
    let is_computed = request.num_computed as usize >= request.tokens.len();
    (is_known || is_ready()) && is_computed && request.num_computed < limit
}

/// Fails with the first reason why one of these requests cannot grow by a token.
fn check_each(state: &State, rows: &[u32], output: &Output<'_>) -> Result<(), Error> {
    let limit = state.config.length_limit();
    for (index, &row) in rows.iter().enumerate() {
        let (row, request) = (Row(row), &state[Row(row)]);
        state.check_idle(row)?;
        if rows[..index].contains(&row.0) {
            let (request, reason) = (request.name(), "is named twice in one call");
            return Err(Error::RepeatedRequest { request, reason });
        }
        if !request.holds_blocks() {
            return Err(Error::NotRunning { request: request.name() });
        }
        check_no_drafts(request)?;
        if state.batch.scheduled.get(row).is_some() {
            return Err(Error::InOpenBatch { kind: "request", value: request.name().into() });
        }
        let (num_tokens, num_computed) = (request.num_tokens(), request.num_computed);
        if num_computed < num_tokens {
            let (num_tokens, num_computed) = (i64::from(num_tokens), i64::from(num_computed));
            return Err(Error::NotComputed { request: request.name(), num_tokens, num_computed });
        }
        check_output(state, row, output.batch)?;
        if num_computed >= limit {
            let (requested, max_model_len) = (i64::from(num_computed) + 1, i64::from(limit));
            let request = request.name();
            return Err(Error::BeyondModelLength { request, requested, max_model_len });
        }
    }
    Ok(())
}
