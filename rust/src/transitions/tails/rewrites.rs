// SPDX-License-Identifier: Apache-2.0
//! The blocks that an allocation is about to write although they are shared or have keys.
//!
//! Invariants: a shared block is replaced (copied if it holds earlier positions), and a keyed block
//! loses its key unless the write computes exactly the tokens that the key names. If blocks may
//! have tail keys, a block with a key past the computed or hit tokens is replaced too, whether it
//! is in the table or is the last block of the hit, so that its content stays; such copies are
//! given up if the call does not fit with all of them.
//! Twin: kvcore/transitions/tails/rewrites.py.

use hashbrown::HashSet;

use crate::state::plan_records::{Lengths, Rewrite, StateStep};
use crate::state::state::{RequestState, State};
use crate::transitions::states::{num_steps, pay_for_keys};
use crate::transitions::tails::keys::{keys_between, tails_past};
use crate::types::groups::skipped_blocks;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;

/// Whether the key of a block equals that of the content which the new slots will hold.
///
/// Loaded tokens may fail, and lookahead tokens are unknown, so these never count as the same.
pub(crate) fn writes_same(
    state: &State,
    request: &RequestState,
    (index, position): (u32, u32),
    lengths: &Lengths,
) -> bool {
    let scale = state.scales[index as usize];
    if lengths.local < lengths.total || position >= request.num_hashed(scale) {
        return false;
    }
    let end = (position + 1) * state.config.groups[index as usize].block_size;
    if lengths.scheduled < lengths.slots.min(end) {
        return false;
    }
    let block = request.tables[index as usize][position as usize];
    state.device.key(block) == Some(&request.key(scale, index, position))
}

/// The same if blocks may have tail keys: also for the last block of a hit.
pub(crate) fn plan_tailed(
    state: &State,
    row: Row,
    hits: &[Vec<BlockId>],
    lengths: &Lengths,
) -> Vec<Rewrite> {
    let mut rewrites = Vec::new();
    for (group_id, group) in (0..).zip(&state.config.groups) {
        let (table, hit) = (&state[row].tables[group_id as usize], hits.get(group_id as usize));
        let hit = hit.filter(|_| table.is_empty());
        let held = hit.unwrap_or(table);
        if group.is_cross() || group.is_state() {
            continue;
        }
        let first =
            (lengths.local / group.block_size).max(skipped_blocks(group, lengths.seen_from));
        let last = lengths.slots.div_ceil(group.block_size).min(held.len() as u32);
        if lengths.slots > lengths.local {
            for position in first..last {
                let place = (group_id, position, held[position as usize]);
                rewrites.extend(plan_block(state, row, place, hit.is_some(), lengths));
            }
        }
    }
    rewrites
}

/// Return the rewrite of one block; None if it is written in place.
fn plan_block(
    state: &State,
    row: Row,
    (group_id, position, block): (u32, u32, BlockId),
    is_hit: bool,
    lengths: &Lengths,
) -> Option<Rewrite> {
    if state.device.is_writable(block) {
        return None;
    }
    let is_shared = state.device.ref_count(block) + u32::from(is_hit) > 1;
    let past = tails_past(state, row, (group_id, position), block, lengths.local);
    if !is_shared && past.is_empty() && state.device.key(block).is_none() {
        return None;
    }
    let same = !is_shared && writes_tails(state, row, (group_id, position, block), lengths);
    let shared = is_shared || !same;
    let size = state.config.groups[group_id as usize].block_size;
    let copied = shared && lengths.local > position * size;
    let for_key = shared && !is_shared;
    Some(Rewrite { group_id, position, shared, copied, same, for_key })
}

/// Whether the keys of a block past what is computed or hit are those of the content which the new
/// slots will hold.
///
/// Loaded tokens may fail, and lookahead tokens are unknown, so these never count as the same.
fn writes_tails(
    state: &State,
    row: Row,
    (group_id, position, block): (u32, u32, BlockId),
    lengths: &Lengths,
) -> bool {
    let size = state.config.groups[group_id as usize].block_size;
    let end = (position + 1) * size;
    if lengths.local < lengths.total || lengths.scheduled < lengths.slots.min(end) {
        return false;
    }
    let own = keys_between(state, row, group_id, (position * size, end));
    let tails = state.device.tail_keys(block);
    let is_own = state.device.key(block).is_none_or(|key| {
        position < state[row].num_hashed(state.scales[group_id as usize]) && own.last() == Some(key)
    });
    let own: HashSet<Key> = own.into_iter().collect();
    is_own && tails.iter().all(|key| own.contains(key))
}

/// Return the blocks that are left of the spare ones after the copies for keys alone, of states and
/// of other blocks, all of which are given up if there are too few.
pub(crate) fn pay_for_all(steps: &mut [StateStep], rewrites: &mut [Rewrite], spare: i64) -> i64 {
    let num_copies = rewrites.iter().filter(|rewrite| rewrite.for_key).count() as i64;
    if num_copies == 0 {
        return pay_for_keys(steps, spare);
    }
    let for_keys = num_copies + num_steps(steps, |step| step.for_key);
    if for_keys <= spare.max(0) {
        return spare - for_keys;
    }
    rewrites.iter_mut().for_each(|rewrite| *rewrite = rewrite.without_copy());
    steps.iter_mut().for_each(|step| *step = step.without_copy());
    spare
}
