// SPDX-License-Identifier: Apache-2.0
//! Giving blocks back: free, and leaving the open batch.
//!
//! Invariants: tail blocks are released first, so they are evicted first. A request that leaves the
//! open batch (freed, swapped out or cut in mid-step) will not be computed: the keys that the batch
//! published for content it would have written are withdrawn, the computed count falls back, and
//! the blocks past it are released. If a cut needs a window that was given back, the request starts
//! again from 0. If another request counts tokens in such a block, the call is misuse. Merges of
//! blocks that older batches wrote do not wait for `take_batch`: the blocks behind them stay
//! cached.
//! Source: S000-37, 38; row 72 of kvcore/check/mutants/catalogue.py.
//! Twin: kvcore/transitions/free.py.

use std::collections::BTreeSet;

use crate::mutants::{Mutant, seeded};
use crate::state::open_batch::{Merge, ScheduledRequest, UnwrittenBlock};
use crate::state::state::{NO_HOST_BLOCK, State, request_mut};
use crate::state::table_edit::TableEdit;
use crate::transitions::batches::settle_own_merges;
use crate::transitions::checkpoints::drop_end;
use crate::transitions::in_flight::note_left_batch;
use crate::transitions::states::{num_left, step_back};
use crate::transitions::tails::keys::drop_delay;
use crate::transitions::unconfirmed_loads::lower_counted;
use crate::types::config::Config;
use crate::types::errors::Error;
use crate::types::groups::Group;
use crate::types::ids::{BlockId, Row};

/// Give back a request's blocks, tail first; it keeps its tokens and hashes, and its count becomes
/// 0.
///
/// A request that holds nothing is unchanged. Fails with UnknownRequest, HitInOpenBatch.
pub fn free(state: &mut State, request_id: &str) -> Result<(), Error> {
    let row = state.request(request_id)?;
    check_leaving(state, &[row])?;
    if !state[row].host_tables.is_empty() {
        drop_host(state, row);
    } else if state[row].holds_blocks() {
        abandon_loads(state, row);
        settle_own_merges(state, row);
        leave_open_batch(state, row);
        cut_tables(state, row, 0, 0);
        state[row].preempted = true;
    }
    Ok(())
}

/// Leave a request's unfinished loads, which go on without it.
pub(crate) fn abandon_loads(state: &mut State, row: Row) {
    if state[row].num_loading == 0 {
        return;
    }
    for operation in state.operations.values_mut() {
        if operation.request == Some(row) {
            operation.request = None;
        }
    }
    let request = &mut state[row];
    (request.num_loading, request.load_end) = (0, 0);
}

/// Fails with HitInOpenBatch if other requests count tokens that these would leave unwritten.
pub(crate) fn check_leaving(state: &State, leaving: &[Row]) -> Result<(), Error> {
    check_shorter(state, leaving, 0)
}

/// The same check if each of them keeps num_tokens tokens.
pub(crate) fn check_shorter(state: &State, leaving: &[Row], num_tokens: u32) -> Result<(), Error> {
    let mut blocks: BTreeSet<BlockId> = BTreeSet::new();
    let mut others: BTreeSet<&str> = BTreeSet::new();
    let scheduled = leaving.iter().filter_map(|&row| state.batch.scheduled.get(row));
    for item in scheduled.flat_map(|record| state.batch.unwritten_of(record)) {
        if item.end(&state.config) <= num_tokens || state.device.ref_count(item.block) < 2 {
            continue;
        }
        for row in state.batch.scheduled.keys().filter(|row| !leaving.contains(row)) {
            if counts_on(state, row, item) {
                blocks.insert(item.block);
                others.insert(&state[row].request_id);
            }
        }
    }
    if others.is_empty() {
        return Ok(());
    }
    Err(Error::HitInOpenBatch {
        blocks: blocks.into_iter().map(i64::from).collect(),
        requests: others.into_iter().map(str::to_owned).collect(),
    })
}

/// Whether a request counts the tokens of a published block at its position.
fn counts_on(state: &State, row: Row, item: &UnwrittenBlock) -> bool {
    let request = &state[row];
    let table = &request.tables[item.group_id as usize];
    request.num_computed >= item.end(&state.config)
        && table.get(item.position as usize) == Some(&item.block)
}

/// Take a request out of the open batch.
/// Its keys and merges are withdrawn, its count falls back, and its blocks past that are released.
/// Positions to come of batches before stay.
pub(crate) fn leave_open_batch(state: &mut State, row: Row) {
    let Some(record) = state.batch.scheduled.remove(row) else { return };
    let mut num_tokens = record.num_computed_before;
    note_left_batch(state, row);
    drop_delay(state, row);
    withdraw(state, row, &record, num_tokens);
    if state.has_states {
        drop_end(state, row);
        num_tokens = num_left(&record);
        if num_tokens > 0 {
            step_back(state, row, num_tokens);
        }
    }
    let num_to_come = state[row].num_output_placeholders();
    cut_tables(state, row, num_tokens, num_to_come);
}

/// Withdraw keys and merges of what the open batch writes for a request past num_tokens.
pub(crate) fn withdraw(state: &mut State, row: Row, record: &ScheduledRequest, num_tokens: u32) {
    let State { config, device, effects, batch, .. } = state;
    for item in batch.unwritten_of(record).filter(|item| item.end(config) > num_tokens) {
        let ours = device.key(item.block) == Some(&item.key);
        if ours && !seeded(Mutant::LeavingKeepsKeys) {
            device.unpublish_full(item.block, effects);
        }
    }
    drop_merges(state, row, num_tokens);
}

/// Forget the merges of a request's blocks past num_tokens, which are not written, or leave.
fn drop_merges(state: &mut State, row: Row, num_tokens: u32) {
    let State { config, requests, batch, .. } = state;
    if !batch.merges.is_empty() {
        let request_id = &request_mut(requests, row).request_id;
        batch.merges.retain(|merge| !is_unwritten(config, merge, num_tokens, request_id));
    }
}

/// Whether a merge waits for a block that a request will not write, or gives back, if it keeps
/// num_tokens tokens.
fn is_unwritten(config: &Config, merge: &Merge, num_tokens: u32, request_id: &str) -> bool {
    let end = (merge.position + 1) * config.groups[merge.group_id as usize].block_size;
    *merge.request_id == *request_id && end > num_tokens
}

/// Keep the blocks of `num_tokens` tokens and release the rest, tail first.
///
/// Drafts go, and positions to come from num_to_come on. The computed count falls to num_tokens if
/// it is above, and to 0, with all blocks, if the window that it needs was given back.
pub(crate) fn cut_tables(state: &mut State, row: Row, mut num_tokens: u32, num_to_come: u32) {
    let (before, open) = (state[row].num_computed, state.batch.number);
    if state.has_states && state[row].num_scheduled_drafts() > 0 {
        num_tokens = num_tokens.min(state[row].num_tokens());
    }
    let mut num_computed = (state[row].num_accepted() + num_to_come).min(num_tokens);
    if state.resumable(row, num_computed) < num_computed {
        (num_computed, num_tokens) = (0, 0);
    }
    if !state.loads.is_empty() {
        lower_counted(state, row, num_computed);
    }
    drop_merges(state, row, num_computed);
    for group_id in 0..state.config.groups.len() as u32 {
        let table = &state[row].tables[group_id as usize];
        let keep = state.num_kept(group_id, table, num_tokens);
        if table.len() > keep {
            TableEdit::of(state, row, group_id).cut(keep as u32);
        }
        let group = &state.config.groups[group_id as usize];
        let cached =
            num_cached_after(state[row].num_cached[group_id as usize], group, num_computed);
        state[row].num_cached[group_id as usize] = cached;
    }
    let request = &mut state[row];
    request.drafts.clear();
    request.num_computed = num_computed;
    request.quiet_until = 0;
    request.await_older(open, before);
    state.settle_waiting(row);
}

/// Return how many leading blocks of a table with num_tokens tokens need no publication, or are
/// null blocks in a state group. cached: of the table so far.
pub(crate) fn num_cached_after(cached: u32, group: &Group, num_tokens: u32) -> u32 {
    let last = if group.is_state() { num_tokens.saturating_sub(1) } else { num_tokens };
    cached.min(last / group.block_size)
}

/// Give back a request's host blocks, tail first. It waits again.
pub(crate) fn release_host(state: &mut State, row: Row) {
    let request = &mut state[row];
    request.num_computed = 0;
    let tables = std::mem::take(&mut request.host_tables);
    let (host, effects) = state.host_parts();
    for table in tables {
        let held = table.into_iter().rev().filter(|&block| block != NO_HOST_BLOCK);
        host.release(held, effects);
    }
}

/// Give back a swapped request's host blocks; it waits, as after a preemption.
pub(crate) fn drop_host(state: &mut State, row: Row) {
    let awaited = state[row].awaited();
    release_host(state, row);
    state[row].set_awaited(&awaited);
    lower_counted(state, row, 0);
    state[row].preempted = true;
    state.settle_waiting(row);
}
