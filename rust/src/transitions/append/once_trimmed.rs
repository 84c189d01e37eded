// SPDX-License-Identifier: Apache-2.0
//! The token with which the states before the last ones are given back: the second in each block.
//!
//! A part of fast_path.rs. Usually each of them stands right before the last one, and nothing else
//! has to be noted; otherwise a plan tells what is given back.

use crate::pool::block_pool::BlockPool;
use crate::state::state::{RequestState, State, request_mut};
use crate::state::table_edit::{blank_one, has_notes};
use crate::transitions::append::fast_path::{count_next, has_source, is_nothing};
use crate::transitions::in_flight::note_next_entry;
use crate::transitions::window::{apply_trims, plan_trims};
use crate::types::effects::Effects;
use crate::types::groups::Group;
use crate::types::ids::Row;

/// Add and schedule a token with which besides only the states before the last ones are given back.
pub(crate) fn append_once_trimmed(
    state: &mut State,
    row: Row,
    token: Option<u32>,
    batch: Option<i64>,
) {
    let is_noted = state.config.tracks_batches() || has_notes(state);
    let State { config, device, effects, requests, num_pins, batch: open, .. } = &mut *state;
    let request = request_mut(requests, row);
    if let Some(token) = token {
        request.tokens.push(token);
    }
    if is_noted || !give_back_sources(request, row, &config.groups, (device, effects)) {
        return append_trimmed_by_plan(state, row, token.and(batch));
    }
    request.quiet_since = *num_pins;
    count_next(request, open.number, token.and(batch));
}

/// Do so for a request whose token was added, with a plan of what is given back.
#[inline(never)] // the usual case keeps its registers
fn append_trimmed_by_plan(state: &mut State, row: Row, batch: Option<i64>) {
    apply_trims(state, row, &plan_trims(state, row, state[row].num_accepted()));
    let (request, groups) = (&state[row], &state.config.groups);
    let mut tables = groups.iter().zip(&request.tables).zip(&request.num_cached);
    let has_older = tables.any(|((group, table), &held)| has_source(group, table, held));
    let num_pins = state.num_pins;
    state[row].quiet_since = if has_older { !num_pins } else { num_pins };
    note_next_entry(state, row);
    debug_assert!(is_nothing(state, row));
    let State { requests, batch: open, .. } = state;
    count_next(request_mut(requests, row), open.number, batch);
}

/// Give back the states right before the last ones. Returns false if there is one to give back that
/// is not such a state, or that a query still needs: then a plan has to tell about it.
#[inline(always)] // its only caller reads the same request
fn give_back_sources(
    request: &mut RequestState,
    row: Row,
    groups: &[Group],
    (device, effects): (&mut BlockPool, &mut Effects),
) -> bool {
    let seen_from = request.num_accepted();
    for (index, group) in groups.iter().enumerate() {
        if !group.is_state() {
            continue;
        }
        let (table, held) = (&mut request.tables[index], &mut request.num_cached[index]);
        let (position, next) = (*held as usize, *held + 1);
        if position + 1 == table.len() {
            continue;
        }
        if position + 2 != table.len() || next * group.block_size >= seen_from {
            return false;
        }
        blank_one((row, index as u32, *held), &mut table[position], device, effects);
        *held = next;
    }
    true
}
