// SPDX-License-Identifier: Apache-2.0
//! Unschedule: shorten what the open batch computes for a request.
//!
//! Invariants: the batch writes nothing from the new count on, lookahead slots included, so keys
//! that it published past the count are withdrawn as if the request left. Hits and external tokens
//! stay. At least one position stays if the batch brings encoder tokens, which would not be written
//! otherwise, or if the request counts no others, since a request without computed tokens holds no
//! blocks (`free` removes it). A request that keeps none of its own positions and took no hit
//! leaves the batch. Blocks stay, for the next slots.
//! Twin: kvcore/transitions/unschedule.py.

use crate::state::batch_records::Samplers;
use crate::state::open_batch::{ScheduledRequest, UnwrittenBlock};
use crate::state::state::State;
use crate::transitions::checkpoints::drop_end;
use crate::transitions::free::{check_shorter, num_cached_after, withdraw};
use crate::transitions::in_flight::note_left_batch;
use crate::transitions::requests::check_no_drafts;
use crate::transitions::states::{shorten_step, step_back};
use crate::transitions::tails::keys::drop_delay;
use crate::transitions::unconfirmed_loads::lower_counted;
use crate::types::errors::{Error, check_count};
use crate::types::ids::Row;

/// Let the open batch compute a request only up to num_tokens; its blocks stay.
///
/// The computed count falls to num_tokens. Fails with UnknownRequest, SwappedOut, LoadUnfinished,
/// DraftsPending, InvalidCount, BeyondComputed, BeforeOpenBatch, HitInOpenBatch.
pub fn unschedule(state: &mut State, request_id: &str, num_tokens: i64) -> Result<(), Error> {
    let row = state.idle(request_id)?;
    check_no_drafts(&state[row])?;
    check_count("num_tokens", num_tokens, 0)?;
    let computed = state[row].num_computed;
    let (num_computed, requested) = (i64::from(computed), num_tokens);
    if num_tokens > num_computed {
        let request = state[row].name();
        return Err(Error::BeyondComputed { request, num_computed, requested });
    }
    let record = state.batch.scheduled.get(row);
    let num_kept = i64::from(record.map_or(computed, |record| record.num_kept));
    if num_tokens < num_kept {
        let request = state[row].name();
        return Err(Error::BeforeOpenBatch { request, num_kept, requested });
    }
    if let Some(record) = record.filter(|_| num_tokens < num_computed).cloned() {
        check_shorter(state, &[row], num_tokens as u32)?;
        shorten(state, row, record, num_tokens as u32);
    }
    Ok(())
}

/// Lower a request, and its record in the open batch, to num_tokens.
fn shorten(state: &mut State, row: Row, record: ScheduledRequest, num_tokens: u32) {
    withdraw(state, row, &record, num_tokens);
    let (batch, before) = (&mut state.batch, record.num_computed_before);
    if num_tokens > record.num_computed_before {
        let config = &state.config;
        let stays = |item: &&_| UnwrittenBlock::end(item, config) <= num_tokens;
        let stay: Vec<UnwrittenBlock> =
            batch.unwritten_of(&record).filter(stays).cloned().collect();
        batch.scheduled.remove(row);
        batch.scheduled.insert_new(row, ScheduledRequest { unwritten: None, ..record });
        for item in stay {
            batch.note_unwritten(row, (item.group_id, item.position), item.block, item.key);
        }
    } else {
        batch.scheduled.remove(row);
        note_left_batch(state, row);
        drop_delay(state, row);
    }
    if !state.loads.is_empty() {
        lower_counted(state, row, num_tokens);
    }
    if state.has_states {
        shorten_states(state, row, before, num_tokens);
    }
    for group_id in 0..state.config.groups.len() {
        let group = &state.config.groups[group_id];
        let cached = num_cached_after(state[row].num_cached[group_id], group, num_tokens);
        state[row].num_cached[group_id] = cached;
    }
    let request = &mut state[row];
    let awaited =
        if num_tokens < request.num_tokens() { Samplers::new() } else { request.awaited() };
    (request.num_computed, request.quiet_until) = (num_tokens, 0);
    request.set_awaited(&awaited);
}

/// Let the request's step end at num_tokens, which leaves no checkpoint; or put its states from
/// before the batch back, if it leaves that. before: its count then.
fn shorten_states(state: &mut State, row: Row, before: u32, num_tokens: u32) {
    drop_end(state, row);
    if num_tokens > before {
        shorten_step(state, row, num_tokens);
    } else {
        step_back(state, row, num_tokens);
    }
}
