// SPDX-License-Identifier: Apache-2.0
//! Giving blocks back: free, and leaving the open batch.
//!
//! Rules: tail blocks are released first, so that they are evicted first. A request that leaves the
//! open batch (freed, swapped out or cut in mid-step) will not be computed: the keys that the batch
//! published for content it would have written are withdrawn, the computed count falls back, the
//! blocks past it go. If another request counts tokens in such a block, the call is misuse. Source:
//! S000-37, 38; bug catalogue, row 72. Twin: kvcore/release.py.

use std::collections::BTreeSet;

use crate::commands::Command;
use crate::errors::Error;
use crate::ids::{BlockId, Row};
use crate::state::{Published, State, request_mut};

/// Give back a request's blocks, tail first; its tokens and hashes stay, its computed count is 0.
///
/// A request that holds nothing is left as it is. Fails with UnknownRequest, HitInOpenBatch.
pub fn free(state: &mut State, request_id: &str) -> Result<(), Error> {
    let row = state.request(request_id)?;
    check_leaving(state, &[row])?;
    if !state[row].host_tables.is_empty() {
        release_host(state, row);
    } else if state[row].holds_blocks() {
        leave_open_batch(state, row);
        cut_tables(state, row, 0);
    } else {
        return Ok(());
    }
    state[row].preempted = true;
    Ok(())
}

/// Fails with HitInOpenBatch if requests outside count tokens that these would leave unwritten.
pub(crate) fn check_leaving(state: &State, leaving: &[Row]) -> Result<(), Error> {
    let mut blocks: BTreeSet<BlockId> = BTreeSet::new();
    let mut others: BTreeSet<&str> = BTreeSet::new();
    let records = leaving.iter().filter_map(|row| state.batch.records.get(row));
    for item in records.flat_map(|record| &record.published) {
        if state.device.ref_count(item.block) < 2 {
            continue;
        }
        for row in state.batch.records.keys().filter(|row| !leaving.contains(row)) {
            if counts_on(state, *row, item) {
                blocks.insert(item.block);
                others.insert(&state[*row].request_id);
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
fn counts_on(state: &State, row: Row, item: &Published) -> bool {
    let request = &state[row];
    let end = (item.position + 1) * state.config.block_size();
    let table = &request.tables[item.group as usize];
    request.num_computed >= end && table.get(item.position as usize) == Some(&item.block)
}

/// Take a request out of the open batch.
///
/// Its keys are withdrawn, its count falls back, its blocks past that are released.
pub(crate) fn leave_open_batch(state: &mut State, row: Row) {
    let Some(record) = state.batch.records.remove(&row) else { return };
    for item in &record.published {
        if state.device.key(item.block) == Some(&item.key) {
            state.device.unpublish(item.block, &mut state.effects);
        }
    }
    cut_tables(state, row, record.num_computed_before);
}

/// Keep the blocks of so many tokens and release the rest, tail first.
///
/// The computed count falls to num_tokens where it is above.
pub(crate) fn cut_tables(state: &mut State, row: Row, num_tokens: u32) {
    let State { config, device, effects, requests, .. } = state;
    let request = request_mut(requests, row);
    let size = config.block_size();
    let keep = num_tokens.div_ceil(size);
    for (group, table) in (0..).zip(&mut request.tables) {
        if table.len() > keep as usize {
            device.release(table.drain(keep as usize..).rev(), effects);
            effects.emit(Command::CutTable { row, group, length: keep });
        }
    }
    request.num_computed = request.num_computed.min(num_tokens);
    let num_full = request.num_computed / size;
    request.num_cached.iter_mut().for_each(|cached| *cached = num_full.min(*cached));
}

/// Give back a request's host blocks, tail first; it waits again.
pub(crate) fn release_host(state: &mut State, row: Row) {
    let request = &mut state[row];
    request.num_computed = 0;
    let tables = std::mem::take(&mut request.host_tables);
    let (host, effects) = state.host_parts();
    for table in tables {
        host.release(table.into_iter().rev(), effects);
    }
}
