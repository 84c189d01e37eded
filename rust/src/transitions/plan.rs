// SPDX-License-Identifier: Apache-2.0
//! Planning an allocation: every check, and what it would take, before anything changes.
//!
//! Invariants: a plan that fails or refuses has changed nothing. Slots along a request: computed |
//! hit | external | new | lookahead. External tokens and lookahead are clipped at the model length,
//! new tokens are not. Blocks that no query sees from the first external or new token on are
//! trimmed before the fit is checked. If the step is refused, only the trim that the computed
//! tokens allow is kept. The full-sequence gate is checked before that. A write goes to
//! blocks with one owner and no key: a shared block is replaced (copied if it holds earlier
//! positions), and a keyed block loses its key unless the write computes exactly the tokens that
//! the key names. Hits in the free queue reduce the capacity, since they leave the queue; so does
//! what the floors of other tenants keep. The steps of state groups are planned in `states.rs`.
//! Source: S000-01 to S000-20, S004-07. Twin: kvcore/transitions/plan.py.

pub mod growth;

use crate::mutants::{Mutant, seeded};
use crate::state::plan_records::{Growth, Lengths, Plan, Refusal, Rewrite, Trim, Trims};
use crate::state::state::{NULL_BLOCK, RequestState, State};
use crate::transitions::plan::growth::{measure, num_held, plan_growth, preallocate};
use crate::transitions::slot_request::{check_slot_request, read_slot_request};
use crate::transitions::states::{num_draft_states, num_steps, plan_steps, states_held};
use crate::transitions::tails::rewrites::{pay_for_all, plan_tailed, writes_same};
use crate::transitions::window::{freed_blocks, plan_trims, visible_from};
use crate::types::errors::Error;
use crate::types::groups::{Group, skipped_blocks};
use crate::types::ids::{BlockId, Row, Table};
use crate::types::slot_request::SlotRequest;
use crate::types::values::{Reason, Refused};

/// Return the plan of an allocation, or its refusal. Changes nothing.
///
/// Fails as `allocate_slots` does.
pub fn plan_allocation(
    state: &State,
    row: Row,
    slot_request: &SlotRequest,
) -> Result<Result<Plan, Refusal>, Error> {
    state.check_idle(row)?;
    let request = &state[row];
    read_slot_request(slot_request)?;
    let mut hits = check_slot_request(state, row, slot_request)?;
    let lengths = measure(state, row, slot_request);
    for (group_id, blocks) in state.config.groups.iter().zip(&mut hits) {
        needed_hits(group_id, blocks, &lengths);
    }
    let mut rewrites = plan_rewrites(state, row, &hits, &lengths);
    let mut reserve = slot_request.reserved_blocks;
    if !request.holds_blocks() {
        reserve += i64::from(state.config.watermark_blocks);
    }
    let queued = if seeded(Mutant::HitsCostNothing) { 0 } else { num_queued(state, &hits) };
    let replaces = |rewrite: &&Rewrite| rewrite.shared && !rewrite.for_key;
    let fixed = queued + rewrites.iter().filter(replaces).count() as i64;
    let num_tokens = (lengths.local, lengths.total, lengths.scheduled);
    let mut steps = plan_steps(state, row, &hits, lengths.seen_from, num_tokens);
    if slot_request.full_sequence_must_fit {
        let (mut needed, most) = gate_need(state, request, slot_request, &hits, &lengths);
        needed += num_steps(&steps, |step| step.replaces() && !step.for_key);
        let available = num_available(state, row, &hits, &[]).into();
        if let Some(refused) = refuse(state, fixed + needed, available, || most, reserve) {
            return Ok(Err(Refusal { row, refused, trims: Trims::new() }));
        }
    }
    let trims = plan_trims(state, row, lengths.seen_from);
    let available = i64::from(num_available(state, row, &hits, &trims));
    let mut growth = plan_growth(state, request, slot_request, &hits, &lengths);
    let num_taken = |each: &Growth| i64::from(each.num_external + each.num_new);
    let mut needed = fixed + growth.iter().map(num_taken).sum::<i64>();
    needed += num_steps(&steps, |step| step.takes && !step.for_key) + num_draft_states(&steps);
    let most = || {
        let stay = num_steps(&steps, |step| step.stays) + num_draft_states(&steps);
        let held = states_held(state, row, &hits, lengths.seen_from);
        stay + held + step_most(state, request, slot_request, &lengths)
    };
    if let Some(refused) = refuse(state, needed, available, most, reserve) {
        let trims = plan_trims(state, row, visible_from(state, row, request.num_accepted()));
        return Ok(Err(Refusal { row, refused, trims }));
    }
    let spare = pay_for_all(&mut steps, &mut rewrites, available - needed - reserve);
    preallocate(state, request, &hits, &mut growth, spare);
    Ok(Ok(Plan {
        row,
        hits,
        num_local: lengths.local,
        num_loaded: lengths.total,
        num_scheduled: lengths.scheduled,
        trims,
        rewrites,
        growth,
        steps,
    }))
}

/// Return the shared or keyed blocks that the new slots will write, in table order.
#[must_use]
pub fn plan_rewrites(
    state: &State,
    row: Row,
    hits: &[Vec<BlockId>],
    lengths: &Lengths,
) -> Vec<Rewrite> {
    if state.has_tails {
        return plan_tailed(state, row, hits, lengths);
    }
    let (mut rewrites, request) = (Vec::new(), &state[row]);
    for ((index, group), table) in (0..).zip(&state.config.groups).zip(&request.tables) {
        let size = group.block_size;
        let held = table.len() as u64 * u64::from(size);
        if group.is_cross() || group.is_state() || held <= u64::from(lengths.local) {
            continue;
        }
        let first = (lengths.local / size).max(skipped_blocks(group, lengths.seen_from));
        let last = lengths.slots.div_ceil(size).min(table.len() as u32);
        for position in first..last {
            let block = table[position as usize];
            if state.device.is_writable(block) {
                continue;
            }
            let shared = state.device.ref_count(block) > 1;
            let copied = shared && lengths.local > position * size;
            let same = !shared && writes_same(state, request, (index, position), lengths);
            let for_key = false;
            rewrites.push(Rewrite { group_id: index, position, shared, copied, same, for_key });
        }
    }
    rewrites
}

/// Return the free blocks after the trims, less what the floors of others keep once the hits have
/// owners.
#[must_use]
pub fn num_available(state: &State, row: Row, hits: &[Vec<BlockId>], trims: &[Trim]) -> u32 {
    let num_freed = if trims.is_empty() { 0 } else { freed_blocks(state, row, trims).count() };
    let num_free = state.device.num_free() + num_freed as u32;
    if state.device.floors.is_none() {
        return num_free;
    }
    let touched = hits.iter().flatten().copied().filter(|&block| !state.is_null(block));
    num_free - state.device.num_kept(state.tenant(row), touched, freed_blocks(state, row, trims))
}

/// Put the null block where no query sees one of the hit blocks of a group.
pub fn needed_hits(group: &Group, blocks: &mut [BlockId], lengths: &Lengths) {
    let skipped = skipped_blocks(group, lengths.seen_from) as usize;
    let end = skipped.min(blocks.len());
    blocks[..end].fill(NULL_BLOCK);
}

/// Return the fresh blocks for the whole request, and the most that it ever holds at once.
///
/// A windowed group recycles blocks that leave its window, so its need is capped.
#[must_use]
pub fn gate_need(
    state: &State,
    request: &RequestState,
    slot_request: &SlotRequest,
    hits: &[Vec<BlockId>],
    lengths: &Lengths,
) -> (i64, i64) {
    let num_full = request.num_tokens().min(state.config.length_limit()).max(lengths.slots);
    let num_to_come = lengths.scheduled.saturating_sub(request.num_tokens());
    let (mut needed, mut most) = (0, 0);
    for (index, group) in (0..).zip(&state.config.groups) {
        let held = i64::from(num_held(request, hits, index as usize));
        let num_tokens =
            if group.is_cross() { slot_request.num_encoder_tokens() } else { num_full };
        let mut blocks = i64::from(num_tokens.div_ceil(group.block_size) + group.draft_states);
        if group.is_cross() {
            blocks = blocks.max(held);
        }
        let skipped = i64::from(skipped_blocks(group, lengths.seen_from));
        let mut fresh = (blocks - held.max(skipped)).max(0);
        if let Some(cap) = state.config.cap(index, num_to_come).map(i64::from) {
            let table = request.tables[index as usize].iter();
            let live = table.chain(hits.get(index as usize).into_iter().flatten());
            let num_live = live.filter(|&&block| !state.is_null(block)).count() as i64;
            blocks = blocks.min(cap);
            fresh = fresh.min((cap - num_live).max(0));
        }
        needed += fresh;
        most += blocks;
    }
    (needed, most)
}

/// Return how many blocks the request would hold after this call, without states.
#[must_use]
pub fn step_most(
    state: &State,
    request: &RequestState,
    slot_request: &SlotRequest,
    lengths: &Lengths,
) -> i64 {
    let most = |(group, table): (&Group, &Table)| {
        if group.is_cross() {
            let blocks = slot_request.num_encoder_tokens().div_ceil(group.block_size);
            return (table.len() as i64).max(i64::from(blocks));
        }
        if group.is_state() {
            return 0;
        }
        let skipped = skipped_blocks(group, lengths.total.min(request.num_tokens()));
        i64::from(lengths.slots.div_ceil(group.block_size)) - i64::from(skipped)
    };
    state.config.groups.iter().zip(&request.tables).map(most).sum()
}

/// Return the refusal of `needed` blocks if `reserve` blocks must stay free; None if they fit.
/// A call that needs no blocks is not refused. most: blocks that it would hold in an empty pool.
#[must_use]
pub fn refuse(
    state: &State,
    needed: i64,
    available: i64,
    most: impl FnOnce() -> i64,
    reserve: i64,
) -> Option<Refused> {
    if needed == 0 || needed + reserve <= available {
        return None;
    }
    let never = most() + reserve > i64::from(state.device.num_usable());
    let reason = if never { Reason::Never } else { Reason::Later };
    let available = (available - reserve).max(0) as u32;
    Some(Refused::new(reason, needed as u64, available).while_pending(state.num_pending()))
}

/// Number of hit blocks that would leave the free queue.
fn num_queued(state: &State, hits: &[Vec<BlockId>]) -> i64 {
    let queued = |&&block: &&BlockId| !state.is_null(block) && state.device.is_queued(block);
    hits.iter().flatten().filter(queued).count() as i64
}
