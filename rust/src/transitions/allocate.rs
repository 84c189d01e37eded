// SPDX-License-Identifier: Apache-2.0
//! Slots for tokens: `allocate_slots`, and `append` for a whole decode step.
//!
//! Invariants: the call is planned first (`plan.rs`); a refusal changes nothing but the window's
//! trim. All groups' hits are touched before any group allocates, so no allocation evicts a hit.
//! External blocks of all groups come before new ones. The computed count advances by hits,
//! external and new tokens. Full blocks are published by the call that schedules their last token,
//! unless delayed.
//! Source: S000-21 to S000-35, S004-05 to S004-10. Twin: kvcore/transitions/allocate.py.

use smallvec::SmallVec;

use crate::mutants::{Mutant, seeded};
use crate::state::open_batch::BatchRecord;
use crate::state::state::{NULL_BLOCK, RequestState, State, request_mut};
use crate::state::table_edit::TableEdit;
use crate::transitions::drain::forget_new;
use crate::transitions::fast_path::{is_known_quiet, is_quiet, settle};
use crate::transitions::in_flight::{note_published_key, note_request};
use crate::transitions::plan::{Growth, Plan, Rewrite, fits_in_place, plan_allocation};
use crate::transitions::publish::publish_blocks;
use crate::transitions::requests::{check_no_drafts, extend};
use crate::transitions::slot_request::SlotRequest;
use crate::transitions::unconfirmed_loads::{note_load, note_rewritten, rest};
use crate::transitions::window::{apply_trims, moves_on, plan_trims, visible_from};
use crate::types::commands::Command;
use crate::types::errors::Error;
use crate::types::ids::{BlockId, Row};
use crate::types::values::{Admitted, Appended, KVCacheBlocks, Reason, Verdict};

/// The requests of an `append`: ids, or rows as a buffer holds them.
#[derive(Debug, Clone, Copy)]
pub enum Requests<'a> {
    /// Ids, each known or not.
    Ids(&'a [&'a str]),
    /// Rows, each in use or not.
    Rows(&'a [u32]),
}

/// Schedule the next tokens of a request; returns the blocks that its tables grew by, or a refusal.
///
/// External tokens get blocks that are held and not returned. A refusal keeps the window trim.
/// Fails with UnknownRequest, SwappedOut, InvalidCount, TooManyTokens, BeyondModelLength,
/// LoadUnfinished, DraftsPending, NoEncoderGroup, WrongHit, StaleHits, UnknownBlock,
/// HitsOnRunningRequest, CachingDisabled.
pub fn allocate_slots(
    state: &mut State,
    request_id: &str,
    slot_request: &SlotRequest,
) -> Result<Admitted<KVCacheBlocks>, Error> {
    let row = state.request(request_id)?;
    let plan = match plan_allocation(state, row, slot_request)? {
        Ok(plan) => plan,
        Err(refusal) => {
            apply_trims(state, row, &refusal.trims);
            return Ok(Err(refusal.refused));
        }
    };
    commit(state, slot_request, &plan);
    let grown = |(group_id, table): (usize, &Vec<BlockId>)| {
        let count = plan.growth.get(group_id).map_or(0, |each| each.grown) as usize;
        table[table.len() - count..].to_vec()
    };
    let blocks = state[row].tables.iter().enumerate().map(grown).collect();
    Ok(Ok(KVCacheBlocks { blocks }))
}

/// The answer that `allocate_slots` would give to the same arguments. Changes nothing.
pub fn can_allocate(state: &State, id: &str, slot_request: &SlotRequest) -> Result<Verdict, Error> {
    let row = state.request(id)?;
    Ok(match plan_allocation(state, row, slot_request)? {
        Ok(_) => Verdict::Ok,
        Err(refusal) => match refusal.refused.reason {
            Reason::Later => Verdict::Later,
            Reason::Never => Verdict::Never,
        },
    })
}

/// Add one token to each request and schedule one slot for each, in order.
///
/// Requests from the first refused one on are untouched, but for the refused one's window trim.
/// Fails with UnknownRequest, SwappedOut, LoadUnfinished, LengthMismatch, DraftsPending,
/// BeyondModelLength.
pub fn append(
    state: &mut State,
    requests: Requests<'_>,
    tokens: &[u32],
) -> Result<Appended, Error> {
    let found;
    let rows = match requests {
        Requests::Rows(rows) => {
            check_rows(state, rows, tokens.len())?;
            rows
        }
        Requests::Ids(ids) => {
            found = check_append(state, ids, tokens.len())?;
            &found[..]
        }
    };
    let slot_request = SlotRequest::new(1);
    for (done, (&row, &token)) in (0..).zip(rows.iter().zip(tokens)) {
        let row = Row(row);
        if append_quietly(state, row, token) {
            continue;
        }
        let num_hashed = state[row].block_hashes.len();
        extend(state, row, &[token]);
        if is_quiet(state, row) {
            note_scheduled(state, row, true);
            state[row].num_computed += 1;
            continue;
        }
        if fits_in_place(state, row) {
            commit_in_place(state, row);
            continue;
        }
        let planned = plan_allocation(state, row, &slot_request);
        match planned.expect("NOCRASH: check_append has checked every call of the append") {
            Ok(plan) => commit(state, &slot_request, &plan),
            Err(refusal) => {
                let request = &mut state[row];
                request.tokens.pop();
                request.block_hashes.truncate(num_hashed);
                apply_trims(state, row, &refusal.trims);
                return Ok(Appended { done, refused: Some(refusal.refused) });
            }
        }
    }
    Ok(Appended { done: rows.len() as u64, refused: None })
}

/// Add and schedule a token that changes counts alone; false, with nothing done, if it may do more.
#[inline(always)] // of each request in each step
fn append_quietly(state: &mut State, row: Row, token: u32) -> bool {
    let State { requests, hash_block_size, num_pins, .. } = state;
    let request = request_mut(requests, row);
    let end = (request.block_hashes.len() + 1) * *hash_block_size as usize;
    if !is_known_quiet(request, *num_pins) || request.tokens.len() + 1 >= end {
        return false;
    }
    request.tokens.push(token);
    debug_assert!(is_quiet(state, row));
    note_scheduled(state, row, true);
    state[row].num_computed += u32::from(!seeded(Mutant::QuietStepNotCounted));
    true
}

/// The rows of a buffer. Fails with UnknownRequest if a row has no request.
pub fn read_request_ids(state: &State, rows: &[u32]) -> Result<(), Error> {
    let is_free = |&&row: &&u32| !matches!(state.requests.get(row as usize), Some(Some(_)));
    match rows.iter().find(is_free) {
        Some(row) => Err(Error::UnknownRow { row: (*row).into() }),
        None => Ok(()),
    }
}

/// Fails as any call of the append would, before the first one changes anything.
fn check_rows(state: &State, rows: &[u32], num_tokens: usize) -> Result<(), Error> {
    let limit = state.config.length_limit();
    let known = |row: u32| state.requests.get(row as usize).and_then(Option::as_ref);
    let fits = |(times, &row)| known(row).is_some_and(|each| can_grow(each, times, limit));
    if rows.len() == num_tokens && (1..).zip(rows).all(fits) {
        return Ok(());
    }
    read_request_ids(state, rows)?;
    check_lengths(rows.len(), num_tokens)?;
    (1..=rows.len()).try_for_each(|end| check_one(state, &rows[..end], limit))
}

/// The same; returns the rows of the requests.
fn check_append(
    state: &State,
    ids: &[&str],
    num_tokens: usize,
) -> Result<SmallVec<[u32; 4]>, Error> {
    check_lengths(ids.len(), num_tokens)?;
    let limit = state.config.length_limit();
    let mut rows = SmallVec::new();
    for id in ids {
        rows.push(state.request(id)?.0);
        check_one(state, &rows, limit)?;
    }
    Ok(rows)
}

/// Fails with LengthMismatch unless there is a token for each request.
fn check_lengths(num_requests: usize, num_tokens: usize) -> Result<(), Error> {
    if num_requests == num_tokens {
        return Ok(());
    }
    let (num_requests, num_tokens) = (num_requests as i64, num_tokens as i64);
    Err(Error::LengthMismatch { num_requests, num_tokens })
}

/// Whether a request can grow by `times` tokens, as far as a quick look shows.
#[inline(always)] // of each request in each step
fn can_grow(request: &RequestState, times: u64, limit: u32) -> bool {
    let is_idle = request.host_tables.is_empty() && request.num_loading == 0;
    let is_ready = is_idle && request.drafts.is_empty();
    let is_quiet = request.num_computed < request.quiet_until;
    debug_assert!(!is_quiet || is_ready, "a quiet request has no drafts, loads or host blocks");
    (is_quiet || is_ready) && u64::from(request.num_computed) + times <= u64::from(limit)
}

/// Fails with SwappedOut, LoadUnfinished, DraftsPending or BeyondModelLength unless the last of
/// these can grow by a token, once for each time that it is among them.
fn check_one(state: &State, rows: &[u32], limit: u32) -> Result<(), Error> {
    let Some(&row) = rows.last() else { return Ok(()) };
    if can_grow(&state[Row(row)], rows.len() as u64, limit) {
        return Ok(());
    }
    check_closely(state, rows, row, limit)
}

/// The same if something is wrong, or may be.
fn check_closely(state: &State, rows: &[u32], row: u32, limit: u32) -> Result<(), Error> {
    let times = rows.iter().filter(|&&each| each == row).count() as u64;
    let row = Row(row);
    state.check_idle(row)?;
    check_no_drafts(&state[row])?;
    let computed = u64::from(state[row].num_computed);
    if computed + times > u64::from(limit) {
        let (requested, max_model_len) = ((computed + times) as i64, i64::from(limit));
        return Err(Error::BeyondModelLength {
            request: state[row].name(),
            requested,
            max_model_len,
        });
    }
    Ok(())
}

/// Carry out a plan.
pub(crate) fn commit(state: &mut State, slot_request: &SlotRequest, plan: &Plan) {
    let row = plan.row;
    let request = &state[row];
    if let Some(hit) = &slot_request.hit
        && !request.holds_blocks()
    {
        let queries = if request.skip_reading { 0 } else { request.tokens.len() as u64 };
        state.stats.observe(queries, hit.num_tokens as u64, request.preempted);
    }
    note_scheduled(state, row, !slot_request.delay_cache_blocks || slot_request.loads);
    apply_trims(state, row, &plan.trims);
    (0..).zip(&plan.hits).for_each(|(group_id, hits)| attach_hits(state, row, group_id, hits));
    if plan.num_loaded > plan.num_local && !slot_request.loads {
        note_load(state, row, plan.num_local, plan.num_loaded);
    }
    if !(plan.rewrites.is_empty() && plan.growth.is_empty()) {
        let num_shared = plan.rewrites.iter().filter(|rewrite| rewrite.shared).count() as u32;
        let grown = |each: &Growth| each.external + each.grown;
        let grown: u32 = plan.growth.iter().map(grown).sum();
        let fresh = state.device.take(num_shared + grown, &mut state.effects);
        forget_new(state, &fresh);
        let mut fresh = fresh.into_iter();
        for rewrite in &plan.rewrites {
            apply_rewrite(state, row, *rewrite, &mut fresh);
        }
        for (group_id, &Growth { nulls, external, .. }) in (0..).zip(&plan.growth) {
            let nulls = std::iter::repeat_n(NULL_BLOCK, nulls as usize);
            TableEdit::of(state, row, group_id).extend(nulls, false);
            let external = fresh.by_ref().take(external as usize);
            TableEdit::of(state, row, group_id).extend(external, !slot_request.loads);
        }
        for (group_id, growth) in (0..).zip(&plan.growth) {
            let grown = fresh.by_ref().take(growth.grown as usize);
            TableEdit::of(state, row, group_id).extend(grown, true);
        }
    }
    state[row].num_computed = plan.num_scheduled;
    if !slot_request.delay_cache_blocks && state.config.publishes_at_once() {
        publish_blocks(state, row, state[row].num_accepted(), false);
    }
    settle(state, row);
}

/// Schedule one more token of a request whose slot is there.
fn commit_in_place(state: &mut State, row: Row) {
    if state.has_windows {
        let seen_from = visible_from(state, row, state[row].num_computed);
        if moves_on(state, row, seen_from) {
            apply_trims(state, row, &plan_trims(state, row, seen_from));
        }
    }
    note_scheduled(state, row, true);
    state[row].num_computed += 1;
    if state.config.publishes_at_once() {
        publish_blocks(state, row, state[row].num_computed, false);
    }
    settle(state, row);
}

/// Remember what a request had computed before its first slots in the open batch.
///
/// publishes: the batch's completion may publish them.
#[inline(always)] // of each request in each step
fn note_scheduled(state: &mut State, row: Row, publishes: bool) {
    let before = state[row].num_computed;
    state.batch.records.insert_missing(row, BatchRecord::new(before));
    if !state.config.tracks_batches() {
        return;
    }
    note_request(state, row, before, before, Some(publishes && state.config.enable_caching));
}

/// Add the request as an owner of its hits, at the start of its table.
fn attach_hits(state: &mut State, row: Row, group_id: u32, hits: &[BlockId]) {
    if hits.is_empty() {
        return;
    }
    TableEdit::of(state, row, group_id).share(hits.to_vec());
    state[row].num_cached[group_id as usize] = hits.len() as u32;
    if !state.loads.is_empty() {
        rest(state, row, hits);
    }
}

/// Make one block of a table fit to be written.
fn apply_rewrite(
    state: &mut State,
    row: Row,
    rewrite: Rewrite,
    fresh: &mut impl Iterator<Item = BlockId>,
) {
    let Rewrite { group_id, position, shared, copied, same } = rewrite;
    let block = state[row].tables[group_id as usize][position as usize];
    if same {
        let key = state[row].key(state.scales[group_id as usize], group_id, position);
        note_published_key(state, block, key);
        let end = (position + 1) * state.config.groups[group_id as usize].block_size;
        note_rewritten(state, row, block, end);
        return;
    }
    if !shared {
        if !seeded(Mutant::KeyedWrittenInPlace) {
            state.device.unpublish(block, &mut state.effects);
        }
        return;
    }
    let target = fresh.next().expect("ADMIT-EXACT: the plan counts a block for each rewrite");
    let restore = position * state.config.groups[group_id as usize].block_size;
    note_request(state, row, state[row].num_computed, restore, None);
    let copies = copied && !seeded(Mutant::CowNoCopy);
    if copies {
        state.effects.emit(Command::CopyOnWrite { source: block, target });
        state.device.note_use(block, state.batch.number);
        state.device.note_use(target, state.batch.number);
    }
    TableEdit::of(state, row, group_id).replace(position, target, !copies);
}

#[cfg(test)]
mod tests;
