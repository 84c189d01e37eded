// SPDX-License-Identifier: Apache-2.0
//! Slots for tokens.
//!
//! Invariants: the call is planned first (`plan.rs`); a refusal changes nothing except the window
//! trim. All groups' hits are touched before any group allocates, so no allocation evicts a hit.
//! External blocks of all groups come before new ones. The computed count advances by hits,
//! external and new tokens. Full blocks are published by the call that schedules their last token,
//! unless delayed.
//! Source: S000-21 to S000-35, S004-05 to S004-10. Twin: kvcore/transitions/allocate.py.

use crate::mutants::{Mutant, seeded};
use crate::state::open_batch::ScheduledRequest;
use crate::state::plan_records::{Growth, Plan, Rewrite, StateStep};
use crate::state::state::{NULL_BLOCK, State};
use crate::state::table_edit::{TableEdit, first_of};
use crate::transitions::append::fast_path::note_quiet_until;
use crate::transitions::checkpoints::{drop_end, note_end};
use crate::transitions::drain::forget_new;
use crate::transitions::in_flight::{note_published_key, note_request};
use crate::transitions::output::take_output;
use crate::transitions::plan::plan_allocation;
use crate::transitions::publish::publish_blocks;
use crate::transitions::states::{apply_steps, is_stepping};
use crate::transitions::tails::keys::{note_delay, note_same, withdraw_past};
use crate::transitions::unconfirmed_loads::{note_load, note_owner, note_rewritten};
use crate::transitions::window::apply_trims;
use crate::types::commands::Command;
use crate::types::errors::Error;
use crate::types::ids::{BlockId, Row};
use crate::types::slot_request::SlotRequest;
use crate::types::values::{Admitted, KVCacheBlocks, Reason, Verdict};

/// Schedule the next tokens of a request; returns the blocks that its tables grew by, or a refusal.
///
/// External tokens get blocks that are held and not returned. A refusal keeps the window trim.
/// Fails with UnknownRequest, SwappedOut, InvalidCount, TooManyTokens, BeyondModelLength,
/// LoadUnfinished, DraftsPending, TooManyDrafts, InOpenBatch, NoEncoderGroup, NoStateGroup,
/// UnalignedCheckpoint, WrongHit, StaleHits, UnknownBlock, HitsOnRunningRequest, CachingDisabled.
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
        let mut count = plan.growth.get(group_id).map_or(0, |each| each.num_new) as usize;
        for step in plan.steps.iter().filter(|step| step.group_id as usize == group_id) {
            count += usize::from(step.takes && step.source != Some(step.target));
            count += step.num_drafts as usize;
        }
        table[table.len() - count..].to_vec()
    };
    let blocks = state[row].tables.iter().enumerate().map(grown).collect();
    Ok(Ok(KVCacheBlocks { blocks }))
}

/// Return how `allocate_slots` would answer the same arguments. Changes nothing.
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
    if state[row].num_computed == 0 {
        state.epochs[row.index()] = state.epoch;
    }
    if !plan.steps.is_empty() && is_stepping(state, row) {
        drop_end(state, row);
    }
    note_scheduled(state, slot_request, plan);
    note_entry(state, row, !slot_request.delay_cache_blocks || slot_request.loads);
    note_delay(state, row, slot_request.delay_cache_blocks);
    take_output(state, row, None);
    apply_trims(state, row, &plan.trims);
    for (group_id, hits) in (0..).zip(&plan.hits) {
        attach_hits(state, row, group_id, hits, plan.num_local);
    }
    if plan.num_loaded > plan.num_local && !slot_request.loads {
        note_load(state, row, plan.num_local, plan.num_loaded);
    }
    if !(plan.rewrites.is_empty() && plan.growth.is_empty() && plan.steps.is_empty()) {
        let tenant = state.tenant(row);
        let fresh = state.device.take_for(tenant, count_fresh(plan), &mut state.effects);
        forget_new(state, &fresh);
        let mut fresh = &fresh[..];
        for rewrite in &plan.rewrites {
            apply_rewrite(state, row, *rewrite, plan.num_local, &mut fresh);
        }
        for (group_id, &Growth { num_nulls, num_external, .. }) in (0..).zip(&plan.growth) {
            let nulls = vec![NULL_BLOCK; num_nulls as usize];
            TableEdit::of(state, row, group_id).extend(&nulls, false);
            let external = first_of(&mut fresh, num_external);
            TableEdit::of(state, row, group_id).extend(external, !slot_request.loads);
        }
        for (group_id, growth) in (0..).zip(&plan.growth) {
            let grown = first_of(&mut fresh, growth.num_new);
            TableEdit::of(state, row, group_id).extend(grown, true);
        }
        if !plan.steps.is_empty() {
            apply_steps(state, row, &plan.steps, &mut fresh, slot_request.loads);
        }
    }
    let open = state.batch.number;
    state[row].schedule(open, plan.num_scheduled);
    if !slot_request.delay_cache_blocks && state.config.publishes_at_once() {
        publish_blocks(state, row, state[row].num_accepted(), false);
    }
    if !plan.steps.is_empty() {
        let publishes = state.config.enable_caching && !slot_request.delay_cache_blocks;
        note_end(state, row, publishes, slot_request.checkpoint);
    }
    note_quiet_until(state, row);
    state.settle_waiting(row);
}

/// Count the blocks that a plan takes.
fn count_fresh(plan: &Plan) -> u32 {
    let num_shared = plan.rewrites.iter().filter(|rewrite| rewrite.shared).count();
    let num_states = |step: &StateStep| u32::from(step.takes) + step.num_drafts;
    let num_states = plan.steps.iter().map(num_states).sum::<u32>();
    let grown = |each: &Growth| each.num_external + each.num_new;
    num_shared as u32 + num_states + plan.growth.iter().map(grown).sum::<u32>()
}

/// Note what the open batch schedules of a request, and how much of that cannot be taken back.
fn note_scheduled(state: &mut State, slot_request: &SlotRequest, plan: &Plan) {
    let before = state[plan.row].num_computed;
    state.batch.scheduled.insert_missing(plan.row, ScheduledRequest::new(before));
    let brings = slot_request.num_encoder_tokens > 0;
    if plan.num_loaded > before || brings {
        let record = state.batch.scheduled.get_mut(plan.row).expect("it was just noted");
        record.num_kept = (plan.num_loaded + u32::from(brings)).min(plan.num_scheduled);
    }
}

/// Note for batches in flight that the open batch schedules a request.
///
/// publishes: the batch's completion may publish its blocks.
#[inline(always)] // of each request in each step
pub(crate) fn note_entry(state: &mut State, row: Row, publishes: bool) {
    if !state.config.tracks_batches() {
        return;
    }
    let before = state[row].num_computed;
    note_request(state, row, before, before, Some(publishes && state.config.enable_caching));
}

/// Add the request as an owner of its hits, at the start of its table.
fn attach_hits(state: &mut State, row: Row, group_id: u32, hits: &[BlockId], num_tokens: u32) {
    if hits.is_empty() {
        return;
    }
    TableEdit::of(state, row, group_id).share(hits.to_vec());
    let group = &state.config.groups[group_id as usize];
    let num_whole = num_tokens / group.block_size;
    let cached = if group.is_state() { hits.len() as u32 - 1 } else { num_whole };
    state[row].num_cached[group_id as usize] = cached;
    if !state.loads.is_empty() {
        note_owner(state, row, hits, num_tokens);
    }
}

/// Make one block of a table writable.
fn apply_rewrite(
    state: &mut State,
    row: Row,
    rewrite: Rewrite,
    local: u32,
    fresh: &mut &[BlockId],
) {
    let Rewrite { group_id, position, shared, copied, same, .. } = rewrite;
    let block = state[row].tables[group_id as usize][position as usize];
    if same && state.has_tails {
        return note_same(state, row, (group_id, position), local);
    }
    if same {
        let key = state[row].key(state.scales[group_id as usize], group_id, position);
        note_published_key(state, block, key);
        let end = (position + 1) * state.config.groups[group_id as usize].block_size;
        note_rewritten(state, row, block, end);
        return;
    }
    if !shared {
        if state.has_tails {
            withdraw_past(state, row, (group_id, position), local);
        } else if !seeded(Mutant::KeyedWrittenInPlace) {
            state.device.unpublish(block, &mut state.effects);
        }
        return;
    }
    let target = first_of(fresh, 1)[0];
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
