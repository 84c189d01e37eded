// SPDX-License-Identifier: Apache-2.0
//! What a request still has of the blocks and states that a shorter count needs.
//!
//! Twin: kvcore/oracle/schedule.py.

use crate::oracle::calls::Name;
use crate::state::batch_records::UnconfirmedLoad;
use crate::state::state::State;
use crate::types::groups::skipped_blocks;
use crate::types::ids::Row;

/// Whether a request still has, in every group, the blocks that the query after this many tokens
/// sees or shares.
pub(crate) fn resumes(state: &State, row: Row, num_tokens: u32) -> bool {
    let groups = state.config.groups.iter().zip(&state[row].tables);
    let mut windowed = groups.filter(|(group, _)| group.is_windowed() && !group.is_state());
    windowed.all(|(group, table)| {
        let first = skipped_blocks(group, num_tokens) as usize;
        let end = (num_tokens.div_ceil(group.block_size) as usize).min(table.len());
        first >= end || !table[first..end].iter().any(|&block| state.is_null(block))
    })
}

/// Whether the state before the open batch, in each state group, is in a block that the batch does
/// not overwrite, and of known tokens. num_tokens: those before the batch.
pub(crate) fn keeps_state(state: &State, row: Row, num_tokens: u32) -> bool {
    let mut groups = state.config.groups.iter().zip(&state[row].tables);
    groups.all(|(group, table)| {
        let place = num_tokens.checked_sub(1).map(|last| (last / group.block_size) as usize);
        let is_before = |place: usize| place + 1 < table.len() && !state.is_null(table[place]);
        let known = num_tokens <= state[row].num_tokens();
        !group.is_state() || known && place.is_some_and(is_before)
    })
}

/// Return how many tokens a rewind leaves a request. A request that it does not name keeps those
/// before the first load that it rests on and that is reported, unless the rewind also takes back
/// what stands in front of all reported loads.
pub(crate) fn kept_by(state: &State, row: Row, named: &[Name], num_tokens: u32) -> u32 {
    let is_named = |row: Row| named.iter().any(|name| name.row(state) == Some(row));
    if is_named(row) {
        return num_tokens;
    }
    let is_reported = |load: &&UnconfirmedLoad| {
        load.end > num_tokens && load.reporters.iter().any(|each| is_named(each.row))
    };
    let rests = |load: &&UnconfirmedLoad| {
        load.reporters.iter().any(|each| each.row == row && each.counted > 0)
    };
    let reported = state.loads.iter().filter(is_reported);
    let first = reported.clone().map(|load| load.first).min().unwrap_or(0);
    let mine = reported.filter(rests).map(|load| load.first).min().unwrap_or(0);
    if first > num_tokens { num_tokens } else { num_tokens.max(mine) }
}
