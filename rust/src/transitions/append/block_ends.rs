// SPDX-License-Identifier: Apache-2.0
//! The appends at the ends of blocks: a token that fills blocks, or whose slot begins some.
//!
//! Invariants: no plan is made if in each group the slot has one owner and no key, or is the first
//! one behind the table. Then besides only windows move, full blocks get their keys, and states
//! leave checkpoints, as `commit` would do all of it. Debug builds plan each such token and assert
//! that the plan takes as many blocks, and changes no other places.

use crate::mutants::{Mutant, seeded};
use crate::pool::block_pool::Taken;
use crate::state::state::{State, request_mut};
use crate::state::table_edit::{note_new, push};
use crate::transitions::append::fast_path::{
    has_slot, next_full, note_quiet_until, num_grown, plan_next,
};
use crate::transitions::checkpoints::note_whole_end;
use crate::transitions::drain::forget_new;
use crate::transitions::in_flight::note_next_entry;
use crate::transitions::output::{note_output, publish_filled};
use crate::transitions::publish::publish_blocks;
use crate::transitions::requests::hash_new_blocks;
use crate::transitions::states::copy_state;
use crate::transitions::window::{apply_trims, plan_trims};
use crate::types::groups::{Group, skipped_blocks};
use crate::types::ids::{BlockId, Row};

/// What one more token changes in the tables of a request.
#[derive(Default)]
struct Ends {
    /// A bitmap of the groups whose table grows by a new block.
    grown: u64,
    /// The same of those that grow by a copy of the last state.
    copied: u64,
    /// The number of both.
    num_taken: u32,
    /// Whether a window has to be trimmed.
    moves: bool,
}

/// Add and schedule one more token of a request that `append` has checked. Returns false, with no
/// change, if a plan has to tell what that takes.
///
/// batch: the one that sampled the token.
pub(super) fn append_at_ends(
    state: &mut State,
    row: Row,
    token: Option<u32>,
    batch: Option<i64>,
) -> bool {
    let is_held = has_slot(&state[row], state.num_pins);
    let mut ends = Ends::default();
    if !is_held && !find_ends(state, row, token.is_some(), &mut ends) {
        return false;
    }
    let mut fills = false;
    if let Some(token) = token {
        let num_known = state[row].num_tokens();
        fills = state[row].num_computed > num_known;
        extend_by_one(state, row, token);
        if fills {
            publish_filled(state, row, num_known);
        }
    }
    debug_assert!(plan_next(state, row).as_ref().and_then(num_grown) == Some(ends.num_taken));
    if ends.moves {
        apply_trims(state, row, &plan_trims(state, row, state[row].num_accepted()));
    }
    note_next_entry(state, row);
    if ends.num_taken > 0 {
        grow(state, row, &ends);
    }
    let open = state.batch.number;
    let request = &mut state[row];
    if request.num_computed < request.num_tokens() {
        request.samplers.clear(); // it catches up
    }
    note_output(request, batch, open);
    let count = request.num_computed + 1;
    request.num_computed = count;
    let num_accepted = count.min(request.num_tokens());
    let ends_slots = is_held && count >= request.slots_until;
    if !fills && has_full_blocks(state, row, num_accepted) {
        publish_blocks(state, row, num_accepted, false);
    }
    let has_next = !ends_slots && note_quiet_until(state, row);
    if state.has_states && !has_next {
        note_whole_end(state, row, count); // if the next slot is there, no state ends here
    }
    true
}

/// Whether some of a request's blocks are full, and not yet published.
#[inline(always)] // twice in each block of a request
fn has_full_blocks(state: &State, row: Row, num_accepted: u32) -> bool {
    let cached = &state[row].num_cached[..];
    let is_full = |(group, &cached): (&Group, &u32)| {
        !group.is_state() && next_full(group, cached) < num_accepted
    };
    state.config.publishes_at_once() && state.config.groups.iter().zip(cached).any(is_full)
}

/// Find which tables grow; false unless each slot can be written in place, or is the first one
/// behind its table, to which a state group copies its last state.
#[inline(always)] // twice in each block of a request
fn find_ends(state: &State, row: Row, brings_token: bool, ends: &mut Ends) -> bool {
    let State { config, device, .. } = state;
    let request = &state[row];
    let num_computed = request.num_computed;
    let seen_from = num_computed.min(request.num_tokens() + u32::from(brings_token));
    for (group_id, group) in config.groups.iter().enumerate() {
        let table = &request.tables[group_id];
        let position = (num_computed / group.block_size) as usize;
        let grows = position == table.len();
        if !grows && !table.get(position).is_some_and(|&block| device.is_writable(block)) {
            return false;
        }
        if group.is_state() {
            if grows && table.last().is_none_or(|&last| device.is_null(last)) {
                return false;
            }
            ends.copied |= u64::from(grows) << group_id;
            let held = request.num_cached[group_id];
            let has_older = held as usize + 1 < table.len();
            ends.moves |= has_older && held < skipped_blocks(group, seen_from);
        } else {
            if grows && group.is_cross() {
                return false;
            }
            ends.grown |= u64::from(grows) << group_id;
            ends.moves |= group.is_windowed() && falls_behind(state, table, group, seen_from);
        }
        ends.num_taken += u32::from(grows);
    }
    let only_grows = || config.num_preallocate_tokens == 0 && device.floors.is_none();
    ends.num_taken == 0 || ends.num_taken <= device.num_free() && only_grows()
}

/// Whether a held block falls behind a window.
fn falls_behind(state: &State, table: &[BlockId], group: &Group, seen_from: u32) -> bool {
    let end = skipped_blocks(group, seen_from).min(table.len() as u32);
    end > 0 && !state.is_null(table[end as usize - 1])
}

/// Add a block to each of these tables: a new one, or a copy of the last state.
#[inline(always)] // once in each block of a request
fn grow(state: &mut State, row: Row, &Ends { mut grown, mut copied, num_taken: count, .. }: &Ends) {
    let mut taken = Taken::new();
    state.device.take_few(count, &mut taken, &mut state.effects);
    forget_new(state, &taken);
    let State { config, device, effects, requests, new_blocks, batch, .. } = state;
    let mut news = config.record_new_blocks.then_some(new_blocks);
    let tables = &mut request_mut(requests, row).tables[..];
    let mut taken = taken.iter().copied();
    let mut next = || taken.next().expect("ADMIT-EXACT: a block was counted");
    while grown > 0 {
        let group_id = grown.trailing_zeros();
        let (group, block) = (&config.groups[group_id as usize], next());
        note_new((group_id, group), news.as_deref_mut(), block, effects);
        push((row, group_id), &mut tables[group_id as usize], block, effects);
        grown = without_first(grown);
    }
    while copied > 0 {
        let group_id = copied.trailing_zeros();
        let (table, block) = (&mut tables[group_id as usize], next());
        let last = *table.last().expect("STATE-LIVE: there is a state before the step");
        copy_state((device, effects), batch.number, (last, block));
        push((row, group_id), table, block, effects);
        copied = without_first(copied);
    }
}

/// The bitmap without its lowest bit; with a seeded bug, without any.
fn without_first(bitmap: u64) -> u64 {
    if seeded(Mutant::EndsGrowOneTable) { 0 } else { bitmap & (bitmap - 1) }
}

/// Add one token, and the hash of the block that it fills.
#[inline(always)] // twice in each block of a request
pub(super) fn extend_by_one(state: &mut State, row: Row, token: u32) {
    let size = state.hash_block_size as usize;
    let request = &mut state[row];
    request.tokens.push(token);
    if request.tokens.len() >= (request.block_hashes.len() + 1) * size {
        hash_new_blocks(state, row);
    }
}
