// SPDX-License-Identifier: Apache-2.0
//! The properties of state groups: who holds states, and who will publish them.
//!
//! Twin: kvcore/invariants/states.py.

use crate::invariants::requests::{Scratch, held_tables, is_null};
use crate::state::state::{RequestState, State};
use crate::types::ids::Row;
use crate::types::violation::Finding;

/// STATE-LIVE: a request has the state at its count, and of the states before it the one that a
/// step began with and the newest ones; null blocks stand in the other places.
pub(crate) fn live_states(state: &State, _: &mut Scratch) -> Finding {
    if !state.has_states {
        return Ok(());
    }
    let groups = state.config.groups.iter().enumerate().filter(|(_, group)| group.is_state());
    for (index, group) in groups {
        for request in state.requests() {
            let end = request.state_count().div_ceil(group.block_size);
            let end = (end + request.num_scheduled_drafts()) as usize;
            check_table(state, request, index, end)?;
        }
    }
    Ok(())
}

/// Fails unless a table of states has this many places, with a state in the last one.
fn check_table(state: &State, request: &RequestState, index: usize, end: usize) -> Finding {
    let (name, blocks) = (request.name(), &held_tables(request)[index]);
    let null = |at: &usize| is_null(state, request, blocks[*at]);
    let live: Vec<usize> = (0..blocks.len()).filter(|at| !null(at)).collect();
    let has_last = live.last().map_or(0, |at| at + 1) == end;
    if blocks.len() != end || !has_last {
        return Err(format!("{name} has states at {live:?} of group {index}, not before {end}"));
    }
    let on_device = request.host_tables.is_empty();
    let first = if on_device { request.num_cached[index] as usize } else { 0 };
    let is_run = live.iter().skip(1).rev().enumerate().all(|(back, &at)| at + 1 + back == end);
    if !is_run || live.first().is_some_and(|&at| on_device && at != first) {
        return Err(format!("{name} has states at {live:?} of group {index}, from {first} on"));
    }
    Ok(())
}

/// STATE-OWN: a checkpoint without a key is written by the open batch, or owned by the batch in
/// flight that will publish it.
pub(crate) fn checkpoints(state: &State, _: &mut Scratch) -> Finding {
    let ends = &state.batch.ends;
    for (at, &row) in ends.iter().enumerate() {
        check_end(state, row)?;
        if ends[..at].contains(&row) {
            return Err(format!("the open batch writes a checkpoint twice: {ends:?}"));
        }
    }
    if let Some(row) = state.batch.marked.iter().find(|row| !ends.contains(row)) {
        return Err(format!("row {} is marked", row.0));
    }
    for batch in &state.in_flight {
        for owed in &batch.owed {
            if state.device.key(owed.block).is_some() {
                let (number, block) = (batch.number, owed.block.0);
                return Err(format!("batch {number} owes block {block}, which has a key"));
            }
        }
    }
    Ok(())
}

/// Fails unless the open batch leaves a checkpoint of a request.
fn check_end(state: &State, row: Row) -> Finding {
    let request = state.requests.get(row.index()).and_then(Option::as_ref);
    let count = request.map_or(0, RequestState::state_count);
    let mut groups = state.config.groups.iter().filter(|group| group.is_state());
    let whole = groups.clone().all(|group| count.is_multiple_of(group.block_size));
    let is_marked = state.batch.marked.contains(&row);
    let ends = is_marked || groups.any(|group| count.is_multiple_of(group.block_size));
    if is_marked && (whole || !count.is_multiple_of(state.hash_block_size)) {
        return Err(format!("the state of row {} at {count} is marked", row.0));
    }
    if state.batch.scheduled.get(row).is_none() || !ends {
        return Err(format!("the state of row {} at {count} is to become findable", row.0));
    }
    Ok(())
}
