// SPDX-License-Identifier: Apache-2.0
//! The lengths of an allocation, and how the tables of its request grow; `plan.rs` plans the rest.
//!
//! Twin: kvcore/transitions/plan.py.

use smallvec::SmallVec;

use crate::state::plan_records::{Growth, Lengths};
use crate::state::state::{RequestState, State};
use crate::transitions::window::visible_from;
use crate::types::groups::{Group, skipped_blocks};
use crate::types::ids::{BlockId, Row, Table};
use crate::types::slot_request::SlotRequest;

/// Compute the lengths of a checked allocation.
#[must_use]
pub fn measure(state: &State, row: Row, slot_request: &SlotRequest) -> Lengths {
    let limit = i64::from(state.config.length_limit());
    let local = i64::from(state[row].num_computed) + slot_request.num_hit_tokens();
    let total = (local + slot_request.num_external_computed_tokens).min(limit);
    let scheduled = total + slot_request.num_new_tokens;
    let slots = (scheduled + slot_request.num_lookahead_tokens).min(limit);
    let total = total as u32;
    Lengths {
        local: local as u32,
        total,
        scheduled: scheduled as u32,
        slots: slots as u32,
        seen_from: if state.has_windows {
            visible_from(state, row, total.min(state[row].num_tokens()))
        } else {
            total
        },
    }
}

/// Return the growth of each table without preallocation; empty if none grows.
#[must_use]
pub fn plan_growth(
    state: &State,
    request: &RequestState,
    slot_request: &SlotRequest,
    hits: &[Vec<BlockId>],
    lengths: &Lengths,
) -> SmallVec<[Growth; 4]> {
    let covers = |(group, table): (&Group, &Table)| {
        let num_tokens =
            if group.is_cross() { slot_request.num_encoder_tokens() } else { lengths.slots };
        let length = table.len() as u64 * u64::from(group.block_size);
        group.is_state() || length >= u64::from(num_tokens)
    };
    if state.config.groups.iter().zip(&request.tables).all(covers) {
        return SmallVec::new();
    }
    let mut growth = SmallVec::new();
    for (index, group) in state.config.groups.iter().enumerate() {
        let (size, held) = (group.block_size, num_held(request, hits, index));
        if group.is_cross() {
            let needed = slot_request.num_encoder_tokens().div_ceil(size);
            growth.push(Growth { num_new: needed.saturating_sub(held), ..Growth::default() });
            continue;
        }
        if group.is_state() {
            growth.push(Growth::default());
            continue;
        }
        let num_total = lengths.total.div_ceil(size);
        let skipped = skipped_blocks(group, lengths.seen_from).min(num_total);
        let num_nulls = skipped.saturating_sub(held);
        let num_external = num_total.saturating_sub(held + num_nulls);
        let needed = lengths.slots.div_ceil(size);
        let num_new = needed.saturating_sub(held + num_nulls + num_external);
        growth.push(Growth { num_nulls, num_external, num_new });
    }
    growth
}

/// Add room for more tokens to the growth, as far as spare blocks go (S004-07).
pub fn preallocate(
    state: &State,
    request: &RequestState,
    hits: &[Vec<BlockId>],
    growth: &mut [Growth],
    spare: i64,
) {
    let num_preallocate = state.config.num_preallocate_tokens;
    if num_preallocate == 0 {
        return;
    }
    let groups = &state.config.groups;
    let of = |(index, each): (usize, &Growth)| {
        num_held(request, hits, index) + each.num_nulls + each.num_external + each.num_new
    };
    let held: SmallVec<[u32; 4]> = growth.iter().enumerate().map(of).collect();
    let reach = reached(groups, &held, spare.max(0) as u64, state.config.length_limit());
    for (index, (group, each)) in groups.iter().zip(growth).enumerate() {
        let takes_none = group.is_cross() || group.is_state();
        if takes_none || (!request.tables[index].is_empty() && each.num_new == 0) {
            continue;
        }
        let room = reach.div_ceil(group.block_size).saturating_sub(held[index]);
        each.num_new += num_preallocate.div_ceil(group.block_size).min(room);
    }
}

/// Return the most tokens, up to a limit, that all groups can hold with this many blocks more.
fn reached(groups: &[Group], held: &[u32], spare: u64, limit: u32) -> u32 {
    let needed = |num_tokens: u32| -> u64 {
        let attended = groups.iter().zip(held).filter(|(group, _)| !group.is_cross());
        let more = |(group, &held): (&Group, &u32)| {
            u64::from(num_tokens.div_ceil(group.block_size).saturating_sub(held))
        };
        attended.map(more).sum()
    };
    let (mut fits, mut end) = (0, u64::from(limit) + 1);
    while fits + 1 < end {
        let middle = u64::midpoint(fits, end);
        match needed(middle as u32) <= spare {
            true => fits = middle,
            false => end = middle,
        }
    }
    fits as u32
}

/// Number of blocks of a group's table, including its hits.
pub(crate) fn num_held(request: &RequestState, hits: &[Vec<BlockId>], group_id: usize) -> u32 {
    (request.tables[group_id].len() + hits.get(group_id).map_or(0, Vec::len)) as u32
}
