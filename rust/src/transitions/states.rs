// SPDX-License-Identifier: Apache-2.0
//! Steps of state groups: the block to which the next state is written.
//!
//! Invariants: the state after n tokens stands at position (n - 1) / block_size, the last place of
//! the table. The forward pass reads the state before the step from the block that it overwrites,
//! so the commands put it there: a new block is filled by a copy or by zeros. A block that is
//! shared or has a key is never overwritten. The states after scheduled drafts stand in the places
//! behind, in the order of the drafts; `accept` moves the one after the last accepted draft to its
//! place. If a step reaches a later position, its source stays
//! in the table until the next trim, so that the step can be taken back. All calls of one batch are
//! one step: the later ones move the block that the first one wrote to. In a state group,
//! `num_cached` counts the null blocks at the start of the table.
//! Twin: kvcore/transitions/states.py.

use crate::pool::block_pool::BlockPool;
use crate::state::open_batch::ScheduledRequest;
use crate::state::plan_records::StateStep;
use crate::state::state::{NULL_BLOCK, State};
use crate::state::table_edit::{TableEdit, first_of};
use crate::transitions::in_flight::note_request;
use crate::types::commands::Command;
use crate::types::effects::Effects;
use crate::types::groups::skipped_blocks;
use crate::types::ids::{BlockId, Row};

/// Return the step of each state group; none if the call only takes a hit, or if there is no state
/// group. Changes nothing.
///
/// seen_from: the first query of which the trim keeps the state. The numbers: tokens computed or
/// hit, those loaded behind them, and those after the step, drafts included.
#[must_use]
pub fn plan_steps(
    state: &State,
    row: Row,
    hits: &[Vec<BlockId>],
    seen_from: u32,
    (local, total, scheduled): (u32, u32, u32),
) -> Vec<StateStep> {
    if !state.has_states || scheduled <= local {
        return Vec::new();
    }
    let (mut steps, in_batch) = (Vec::new(), is_stepping(state, row));
    let request = &state[row];
    let has_drafts = !request.drafts.is_empty();
    let num_drafts = if has_drafts { scheduled.saturating_sub(request.num_tokens()) } else { 0 };
    for (index, group) in state.config.groups.iter().enumerate() {
        if !group.is_state() {
            continue;
        }
        let hit = hits.get(index).map_or(&[][..], |hit| hit);
        let held = held_or_hit(state, row, hit, index);
        let (group_id, target) = (index as u32, (scheduled - num_drafts - 1) / group.block_size);
        let skipped = skipped_blocks(group, seen_from) as usize;
        let Some(&block) =
            held.last().filter(|&&last| held.len() > skipped && !state.is_null(last))
        else {
            let takes = true;
            steps.push(StateStep { group_id, target, takes, num_drafts, ..StateStep::default() });
            continue;
        };
        let source = held.len() as u32 - 1;
        let keyed = state.device.key(block).is_some();
        let shared = state.device.ref_count(block) + u32::from(!hit.is_empty()) > 1;
        let stays = target > source && !in_batch;
        let takes = keyed || shared || stays;
        steps.push(StateStep {
            group_id,
            source: Some(source),
            target,
            takes,
            copies: takes && local == total,
            stays,
            begun: in_batch && !takes,
            for_key: keyed && !(shared || stays),
            num_drafts,
        });
    }
    steps
}

/// Return the step of the token behind the last place of a table, whose state is copied.
pub(crate) fn next_step(group_id: u32, length: u32) -> StateStep {
    let source = length.checked_sub(1);
    let step = StateStep { group_id, source, target: length, ..StateStep::default() };
    StateStep { takes: true, copies: true, stays: true, ..step }
}

/// Whether an earlier call of the open batch began the step of a request. An `append` notes its
/// requests before it plans their slots.
pub(crate) fn is_stepping(state: &State, row: Row) -> bool {
    let record = state.batch.scheduled.get(row);
    record.is_some_and(|record| record.num_computed_before < state[row].num_computed)
}

/// Return how many blocks of state groups the request holds after the trim, at least one of each.
#[must_use]
pub fn states_held(state: &State, row: Row, hits: &[Vec<BlockId>], seen_from: u32) -> i64 {
    if !state.has_states {
        return 0;
    }
    let mut most = 0;
    for (index, group) in state.config.groups.iter().enumerate().filter(|each| each.1.is_state()) {
        let hit = hits.get(index).map_or(&[][..], |hit| hit);
        let held = held_or_hit(state, row, hit, index);
        let skipped = skipped_blocks(group, seen_from) as usize;
        let live = held.iter().skip(skipped).filter(|&&block| !state.is_null(block));
        most += (live.count() as i64).max(1);
    }
    most
}

/// Return the table of a group, or the hit that becomes it.
fn held_or_hit<'a>(state: &'a State, row: Row, hit: &'a [BlockId], index: usize) -> &'a [BlockId] {
    let table = &state[row].tables[index];
    if table.is_empty() { hit } else { table }
}

/// Return the blocks that are left of the spare ones after the copies for keys alone, which are
/// given up if there are too few.
pub(crate) fn pay_for_keys(steps: &mut [StateStep], spare: i64) -> i64 {
    let for_keys = num_steps(steps, |step| step.for_key);
    if for_keys <= spare.max(0) {
        return spare - for_keys;
    }
    steps.iter_mut().for_each(|step| *step = step.without_copy());
    spare
}

/// Number of blocks that steps take for the states after drafts.
pub(crate) fn num_draft_states(steps: &[StateStep]) -> i64 {
    steps.iter().map(|step| i64::from(step.num_drafts)).sum()
}

/// Number of steps that have a property.
pub(crate) fn num_steps(steps: &[StateStep], has: impl Fn(&StateStep) -> bool) -> i64 {
    steps.iter().filter(|&step| has(step)).count() as i64
}

/// Execute the steps, and set `num_cached`. loads: a load fills new blocks.
pub(crate) fn apply_steps(
    state: &mut State,
    row: Row,
    steps: &[StateStep],
    fresh: &mut &[BlockId],
    loads: bool,
) {
    if !steps.iter().all(|step| step.source.is_none() || step.stays || step.begun) {
        note_request(state, row, state[row].num_computed, 0, None);
    }
    for step in steps {
        let new = step.takes.then(|| first_of(fresh, 1)[0]);
        fill_state(state, row, step, new, loads);
        put_state(state, row, step, new.unwrap_or(NULL_BLOCK));
        let drafts = first_of(fresh, step.num_drafts);
        TableEdit::of(state, row, step.group_id).extend(drafts, false);
        let num_cached = &mut state[row].num_cached[step.group_id as usize];
        if step.source.is_none() || (step.source == Some(*num_cached) && !step.stays) {
            *num_cached = step.target;
        }
    }
}

/// Copy the state before a step into its new block, or make the first state there.
fn fill_state(state: &mut State, row: Row, step: &StateStep, new: Option<BlockId>, loads: bool) {
    let Some(block) = new else { return };
    if let Some(position) = step.source.filter(|_| step.copies) {
        let source = state[row].tables[step.group_id as usize][position as usize];
        let State { device, effects, batch, .. } = state;
        copy_state((device, effects), batch.number, (source, block));
    } else if !loads {
        state.effects.emit(Command::Zero { block });
    }
}

/// Copy a state to a new block, which the step of the open batch overwrites.
#[inline(always)] // once in each block of a request
pub(crate) fn copy_state(
    (device, effects): (&mut BlockPool, &mut Effects),
    open: u64,
    (source, target): (BlockId, BlockId),
) {
    effects.emit(Command::CopyOnWrite { source, target });
    device.note_use(source, open);
    device.note_use(target, open);
}

/// Put the block of a step at its place: a new one, or that of the source, without its key.
fn put_state(state: &mut State, row: Row, step: &StateStep, new: BlockId) {
    let &StateStep { group_id, target, takes, .. } = step;
    let table = &state[row].tables[group_id as usize];
    let Some(source) = step.source.filter(|_| !step.stays) else {
        let gap = (target as usize).saturating_sub(table.len());
        if gap > 0 {
            TableEdit::of(state, row, group_id).extend(&vec![NULL_BLOCK; gap], false);
        }
        TableEdit::of(state, row, group_id).extend(&[new], false);
        return;
    };
    let block = table[source as usize];
    if takes {
        TableEdit::of(state, row, group_id).replace(source, new, false);
    } else {
        state.device.unpublish(block, &mut state.effects);
    }
    TableEdit::of(state, row, group_id).move_last(target);
}

/// Put the request's states from before the open batch, which does not run, in place.
///
/// num_tokens: its count then, above 0.
pub(crate) fn step_back(state: &mut State, row: Row, num_tokens: u32) {
    move_back(state, row, num_tokens, true);
}

/// Let the request's step in the open batch end at num_tokens.
pub(crate) fn shorten_step(state: &mut State, row: Row, num_tokens: u32) {
    move_back(state, row, num_tokens, false);
}

/// Move the last block of each state group to the place of the state after num_tokens tokens.
///
/// keeps_source: it is given back instead, if that place has a block.
fn move_back(state: &mut State, row: Row, num_tokens: u32, keeps_source: bool) {
    for index in 0..state.config.groups.len() {
        let group = &state.config.groups[index];
        if !group.is_state() {
            continue;
        }
        let (group_id, place) = (index as u32, (num_tokens - 1) / group.block_size);
        let num_drafts = state[row].num_scheduled_drafts();
        if num_drafts > 0 {
            let length = state[row].tables[index].len() as u32 - num_drafts;
            TableEdit::of(state, row, group_id).cut(length);
        }
        let table = &state[row].tables[index];
        let has_source = place as usize + 1 < table.len() && !state.is_null(table[place as usize]);
        if has_source && keeps_source {
            TableEdit::of(state, row, group_id).cut(place + 1);
            continue;
        }
        if has_source {
            note_request(state, row, state[row].num_computed, 0, None);
        }
        TableEdit::of(state, row, group_id).move_last(place);
        let num_cached = &mut state[row].num_cached[index];
        *num_cached = place.min(*num_cached);
    }
    state[row].num_computed = num_tokens;
}

/// Keep the state after a request's last accepted draft, and those before it where a block ends;
/// the other states after its tokens are released.
pub(crate) fn keep_accepted(state: &mut State, row: Row, num_accepted: u32) {
    if !state.has_states || state[row].num_scheduled_drafts() == 0 {
        return;
    }
    let known = state[row].num_tokens();
    let count = known + num_accepted;
    for index in 0..state.config.groups.len() {
        if !state.config.groups[index].is_state() {
            continue;
        }
        let (group_id, size) = (index as u32, state.config.groups[index].block_size);
        let begun = state[row].num_cached[index];
        let (first, last) = ((known - 1) / size, (count - 1) / size);
        if last > first && first > begun + 1 {
            // More than a step may keep: its source goes, too.
            note_request(state, row, state[row].num_computed, 0, None);
            TableEdit::of(state, row, group_id).blank(begun, begun + 1);
            state[row].num_cached[index] = first;
        }
        let end_of = |place: u32| ((place + 1) * size).min(count) - known;
        let ends: Vec<u32> = (first..=last).map(end_of).collect();
        TableEdit::of(state, row, group_id).keep_of_end(first, &ends);
    }
}

/// Return the tokens of which a request has the state when it leaves the open batch: those from
/// before it, 0 if hits or external tokens came in it.
#[must_use]
pub fn num_left(record: &ScheduledRequest) -> u32 {
    let before = record.num_computed_before;
    if record.num_kept > before.max(1) { 0 } else { before }
}
