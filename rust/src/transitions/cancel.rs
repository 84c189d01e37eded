// SPDX-License-Identifier: Apache-2.0
//! Cancel: batches in flight are taken back, executed or not.
//!
//! Invariants: a batch is cancelled together with all later ones and the open one; their numbers
//! are not used again. The keys of what they write are withdrawn, each request falls back to the
//! least count that they remember, and the blocks behind it are released. What they evicted stays
//! evicted, and what they freed stays freed. The new open batch begins with the blocks given back
//! and with the whole tables of every row that the cancelled commands name, so it is right whether
//! or not those had been applied. If an epoch began in one of the batches, it stays begun, and its
//! `EvictAll` follows: a block whose `Touch` was cancelled has its owner by the tables alone. What
//! waits to be merged, and stays, goes on waiting. A row that was held back for a cancelled batch
//! is free, unless a remaining batch has it.
//! Twin: kvcore/transitions/cancel.py.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::mutants::{Mutant, seeded};
use crate::state::batch_records::{BatchInFlight, in_order};
use crate::state::open_batch::{Merge, OpenBatch};
use crate::state::row_map::RowMap;
use crate::state::state::{State, request_mut};
use crate::state::table_edit::rebuild;
use crate::transitions::batches::check_in_flight;
use crate::transitions::free::{cut_tables, drop_host};
use crate::transitions::in_flight::note_request;
use crate::types::commands::{Command, named_rows};
use crate::types::config::Publish;
use crate::types::errors::Error;
use crate::types::ids::{BlockId, Row};

/// Take back a batch in flight, all later ones and the open one. Fails with NotInFlight.
pub fn cancel(state: &mut State, batch: i64) -> Result<(), Error> {
    check_in_flight(state, batch)?;
    let number = batch as u64;
    let first = state.in_flight.partition_point(|each| each.number < number);
    let mut cancelled = state.in_flight.split_off(first);
    let rows = named_rows(&state.effects.commands);
    state.effects.commands.clear();
    let next = OpenBatch { number: state.batch.number + 1, ..OpenBatch::default() };
    let OpenBatch { number: open, entries, published_keys, starts_epoch, merges, .. } =
        std::mem::replace(&mut state.batch, next);
    state.batch.starts_epoch = starts_epoch || cancelled.iter().any(|each| each.starts_epoch);
    cancelled.push(Arc::new(BatchInFlight {
        number: open,
        entries,
        published_keys,
        rows,
        ..BatchInFlight::default()
    }));
    hold_rows(state, number);
    state.loads.retain(|load| load.batch < number);
    let lost = take_back(state, &cancelled, number);
    uncount(state, lost);
    keep_merges(state, merges);
    let rows: BTreeSet<Row> = cancelled.iter().flat_map(|each| &each.rows).copied().collect();
    let announced = rows.into_iter().filter(|_| !seeded(Mutant::CancelLeavesTables));
    announced.for_each(|row| rebuild(state, row));
    if state.batch.starts_epoch {
        state.effects.emit(Command::EvictAll);
    }
    state.device.set_batch(state.batch.number);
    Ok(())
}

/// Withdraw keys, end uses, and lower each request to its remaining count. Returns the blocks whose
/// keys were withdrawn.
fn take_back(
    state: &mut State,
    cancelled: &[Arc<BatchInFlight>],
    number: u64,
) -> BTreeSet<BlockId> {
    let mut lost = BTreeSet::new();
    let State { device, host, effects, .. } = state;
    device.end_use(|user| user >= number);
    for batch in cancelled {
        for &(block, key) in &batch.published_keys {
            if device.key(block) == Some(&key) && !seeded(Mutant::CancelKeepsKeys) {
                device.unpublish_full(block, effects);
                lost.insert(block);
            } else if device.tail_keys(block).contains(&key) {
                device.withdraw_tails(block, &[key], effects);
            }
        }
        device.release(batch.owed.iter().map(|owed| owed.block), effects);
    }
    device.end_quarantine();
    if let Some(host) = host {
        host.end_use(|user| user >= number);
        host.end_quarantine();
    }
    let mut counts: RowMap<u32> = RowMap::default();
    for (row, entry) in cancelled.iter().flat_map(|batch| in_order(&batch.entries)) {
        match counts.get_mut(row) {
            Some(count) => *count = entry.restore.min(*count),
            None => counts.insert_new(row, entry.restore),
        }
    }
    // Nothing is removed from this map, so its order is that of the first entries.
    for (row, &count) in counts.iter().filter(|_| !seeded(Mutant::CancelKeepsCounts)) {
        fall(state, row, count, number);
    }
    lost
}

/// Let requests that go on counting blocks whose keys were withdrawn publish them again: they share
/// what a request that fell had published.
fn uncount(state: &mut State, mut lost: BTreeSet<BlockId>) {
    lost.retain(|&block| state.device.ref_count(block) > 0);
    if lost.is_empty() {
        return;
    }
    for request in state.requests.iter_mut().flatten() {
        for (table, num_cached) in request.tables.iter().zip(&mut request.num_cached) {
            let mut counted = table.iter().take(*num_cached as usize);
            if let Some(first) = counted.position(|block| lost.contains(block)) {
                *num_cached = first as u32;
                request.quiet_until = 0;
            }
        }
    }
}

/// Let blocks that waited to be merged in the open batch wait in the new one, if their requests go
/// on counting them.
fn keep_merges(state: &mut State, merges: Vec<Merge>) {
    for merge in merges {
        let Some(&row) = state.rows.get(&merge.request_id) else { continue };
        let request = &state[row];
        if merge.position >= request.num_cached[merge.group_id as usize] {
            continue;
        }
        let computed = request.num_computed;
        state.batch.merges.push(merge);
        if state.config.publish == Publish::Scheduled {
            note_request(state, row, computed, computed, None);
        }
    }
}

/// Free the rows that were held for cancelled batches and that no other batch has.
fn hold_rows(state: &mut State, number: u64) {
    let State { held_rows, free_rows, in_flight, .. } = state;
    held_rows.retain_mut(|(row, batch)| {
        if *batch < number {
            return true;
        }
        let is_left = in_flight.iter().any(|each| each.rows.contains(row));
        match in_flight.last().filter(|_| is_left) {
            Some(last) => *batch = last.number,
            None => free_rows.push(*row),
        }
        is_left
    });
}

/// Lower a request to `num_tokens` tokens, without the cancelled loads.
///
/// Positions to come may be lost with the copy of their block, though older batches computed them.
/// Then the last known token is computed again, since the device has gone on from the lost ones.
fn fall(state: &mut State, row: Row, mut num_tokens: u32, number: u64) {
    let awaited = state[row].awaited_before(number);
    let known = state[row].num_tokens();
    if num_tokens >= known && awaited.iter().any(|each| each.end > num_tokens) {
        num_tokens = known - 1;
    }
    let State { operations, requests, .. } = state;
    let request = request_mut(requests, row);
    for operation in operations.values_mut() {
        if operation.request == Some(row) && operation.batch >= number {
            operation.request = None;
            (request.num_loading, request.load_end) = (0, 0);
        }
    }
    if state.has_states && request.host_tables.is_empty() {
        request.num_computed = request.state_count().min(num_tokens);
    }
    if request.host_tables.is_empty() {
        let to_come = state[row].num_output_placeholders();
        cut_tables(state, row, num_tokens, to_come);
    } else if num_tokens < request.num_computed {
        drop_host(state, row);
    }
    state[row].set_awaited(&awaited);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transitions::tests::*;

    #[test]
    fn a_cancelled_batch_leaves_the_request_where_it_was() {
        let config = Config { max_in_flight: 2, ..Config::new(5, 2, b"seed") };
        let mut state = make_state(config).unwrap();
        let row = admit(&mut state, "a", &[1, 2, 3], 3);
        take_batch(&mut state).unwrap();
        append(&mut state, Requests::Ids(&["a"]), &[4]).unwrap();
        take_batch(&mut state).unwrap();
        append(&mut state, Requests::Ids(&["a"]), &[5]).unwrap();
        assert!(state.device.key(BlockId(2)).is_some());
        cancel(&mut state, 1).unwrap();
        assert_eq!((state[row].num_computed, state.batch.number), (3, 3));
        assert!(state.device.key(BlockId(1)).is_some() && state.device.key(BlockId(2)).is_none());
        let commands = commands(&state);
        let (group_id, at) = (0, |position: u32| BlockId(position + 1));
        let set = |position| Command::SetTable { row, group_id, position, block: at(position) };
        let cut = Command::CutTable { row, group_id, length: 0 };
        assert_eq!(commands[commands.len() - 3..], [cut, set(0), set(1)]);
        complete(&mut state, 0).unwrap();
        assert_eq!((state.in_flight().count(), state.device.num_quarantined()), (0, 0));
    }
}
