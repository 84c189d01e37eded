// SPDX-License-Identifier: Apache-2.0
//! Windows: blocks that no later query sees are given back, and the null block takes their places.
//!
//! Invariants: a table's null blocks are a prefix of it, but in a state group there are also null
//! blocks behind its first state. Blocks are given back from the highest
//! skipped one down to the first null block, so the newest is evicted first. Blocks that the open
//! batch's forward pass sees are kept until the batch is taken.
//! Source: S000-15, 16, 39, 40; S001-80. Twin: kvcore/transitions/window.py.

use crate::state::plan_records::{Trim, Trims};
use crate::state::state::{RequestState, State};
use crate::state::table_edit::{TableEdit, users};
use crate::transitions::in_flight::note_request;
use crate::types::errors::{Error, check_count};
use crate::types::groups::skipped_blocks;
use crate::types::ids::{BlockId, Row, Table};

/// Give back the blocks that no query at total_computed_tokens or later sees.
///
/// Drafts do not count as computed here: they may be dropped. Fails with UnknownRequest,
/// SwappedOut, LoadUnfinished, InvalidCount, BeyondComputed.
pub fn remove_skipped_blocks(
    state: &mut State,
    request_id: &str,
    total_computed_tokens: i64,
) -> Result<(), Error> {
    let row = state.idle(request_id)?;
    let num_computed = i64::from(state[row].num_accepted());
    check_count("total_computed_tokens", total_computed_tokens, 0)?;
    if total_computed_tokens > num_computed {
        let request = state[row].name();
        return Err(Error::BeyondComputed {
            request,
            num_computed,
            requested: total_computed_tokens,
        });
    }
    let trims = plan_trims(state, row, visible_from(state, row, total_computed_tokens as u32));
    apply_trims(state, row, &trims);
    Ok(())
}

/// Return the first query whose window must stay: the open batch's if that is earlier.
#[must_use]
pub fn visible_from(state: &State, row: Row, num_computed: u32) -> u32 {
    let record = state.batch.scheduled.get(row);
    record.map_or(num_computed, |record| num_computed.min(record.num_computed_before))
}

/// Return the held blocks that no query at seen_from or later sees. Changes nothing.
#[must_use]
pub fn plan_trims(state: &State, row: Row, seen_from: u32) -> Trims {
    let mut trims = Trims::new();
    if !state.has_windows {
        return trims;
    }
    let request = &state[row];
    for (index, group) in (0..).zip(&state.config.groups) {
        if !group.is_windowed() {
            continue;
        }
        let table = &request.tables[index as usize];
        let end = skipped_blocks(group, seen_from).min(table.len() as u32);
        if group.is_state() {
            let first = request.num_cached[index as usize];
            if first < end {
                let (next, last) = (first + 1, last_state(request, table));
                let is_gap = next < end && state.is_null(table[next as usize]);
                if is_gap && end > last {
                    trims.push(Trim { group_id: index, first: last, end });
                }
                let end = if is_gap { next } else { end };
                trims.push(Trim { group_id: index, first, end });
            }
            continue;
        }
        let held = table[..end as usize].iter().rev().take_while(|&&block| !state.is_null(block));
        let first = end - held.count() as u32;
        if first < end {
            trims.push(Trim { group_id: index, first, end });
        }
    }
    trims
}

/// Return the place of a request's state in a table, before those after drafts.
pub(crate) fn last_state(request: &RequestState, table: &Table) -> u32 {
    table.len() as u32 - 1 - request.num_scheduled_drafts()
}

/// Return the blocks that the trims would add to the free queue.
pub(crate) fn freed_blocks<'a>(
    state: &'a State,
    row: Row,
    trims: &'a [Trim],
) -> impl Iterator<Item = BlockId> + 'a {
    trims.iter().flat_map(move |&Trim { group_id, first, end }| {
        let places = first..end;
        let back = places.filter(move |&position| comes_back(state, row, group_id, position));
        back.map(move |position| state[row].tables[group_id as usize][position as usize])
    })
}

/// Whether a block that a table drops would join the free queue at once.
fn comes_back(state: &State, row: Row, group_id: u32, position: u32) -> bool {
    let block = state[row].tables[group_id as usize][position as usize];
    state.device.ref_count(block) == 1
        && !state.device.is_busy(block)
        && users(state, row, group_id, position).next().is_none()
}

/// Put the null block into these places and release their blocks, highest first.
pub fn apply_trims(state: &mut State, row: Row, trims: &[Trim]) {
    if !trims.is_empty() {
        note_request(state, row, state[row].num_computed, 0, None);
    }
    for &Trim { group_id, first, end } in trims {
        TableEdit::of(state, row, group_id).blank(first, end);
        if state.config.groups[group_id as usize].is_state() {
            let table = &state[row].tables[group_id as usize];
            let last = last_state(&state[row], table); // external tokens may bring one behind it
            let next = end.min(last);
            let first = if state.is_null(table[next as usize]) { last } else { next };
            state[row].num_cached[group_id as usize] = first;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transitions::tests::*;
    use crate::types::groups::{Group, Kind};

    /// A window of 3 tokens in blocks of 2: a query at 6 sees positions 4 to 6.
    fn six_of_eight() -> (State, Row) {
        let mut config = Config::new(9, 2, b"seed");
        config.groups = vec![Group::windowed(2, Kind::SlidingWindow, 3)];
        let mut state = make_state(config).unwrap();
        let row = admit(&mut state, "a", &[1, 2, 3, 4, 5, 6, 7, 8], 6);
        (state, row)
    }

    #[test]
    fn blocks_behind_the_window_are_given_back_highest_first() {
        let (mut state, row) = six_of_eight();
        take_batch(&mut state).unwrap();
        remove_skipped_blocks(&mut state, "a", 6).unwrap();
        assert_eq!(state[row].tables[..], [[0, 0, 3].map(BlockId)]);
        let commands = commands(&state);
        let free = |block| Command::Free { block: BlockId(block), cached: true };
        assert_eq!(commands[..2], [free(2), free(1)]);
        take_batch(&mut state).unwrap();
        remove_skipped_blocks(&mut state, "a", 6).unwrap();
        assert!(state.effects.commands.is_empty());
    }

    #[test]
    fn what_the_open_batch_reads_stays() {
        let (mut state, row) = six_of_eight();
        remove_skipped_blocks(&mut state, "a", 6).unwrap();
        assert_eq!(state[row].tables[..], [[1, 2, 3].map(BlockId)]);
        let beyond = remove_skipped_blocks(&mut state, "a", 7);
        let request = "a".to_owned();
        assert_eq!(beyond, Err(Error::BeyondComputed { request, num_computed: 6, requested: 7 }));
    }
}
