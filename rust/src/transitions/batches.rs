// SPDX-License-Identifier: Apache-2.0
//! The life of a batch: taken, and completed.
//!
//! Invariants: with `max_in_flight=0` a taken batch counts as executed, so what it wrote is
//! available to the next one. Otherwise it is in flight until it is completed, in the order of the
//! numbers; then blocks that only it used join the free queue, and rows that were held back for it
//! are free. With `Publish::Completed` the blocks
//! that a batch wrote become findable when it is completed, up to the first one that a later batch
//! or the open one begins. With `Duplicates::Merge` a block whose content was already findable when
//! it was filled is looked up again at completion: the table's move to the older block, and the
//! `Free`, open the next batch.
//! Twin: kvcore/transitions/batches.py.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::mutants::{Mutant, seeded};
use crate::state::batch_records::{BatchInFlight, in_order};
use crate::state::open_batch::Merge;
use crate::state::state::{State, request_mut};
use crate::state::table_edit::TableEdit;
use crate::transitions::checkpoints::{publish_owed, settle_ends};
use crate::transitions::in_flight::{lower_restored, note_written_key, num_finished};
use crate::transitions::publish::{announce_stored, publish_blocks, stored_bytes};
use crate::transitions::tails::keys::{complete_tails, move_tails, settle_tails, tails_to_come};
use crate::transitions::unconfirmed_loads::{confirm_loads, note_keyed, note_owner};
use crate::types::commands::{Batch, close_into, named_rows};
use crate::types::config::Publish;
use crate::types::errors::Error;
use crate::types::ids::Row;
use crate::types::values::Status;

/// Close and number the open batch and give its commands; pending merges open the next one.
///
/// Fails with TooManyInFlight.
pub fn take_batch(state: &mut State) -> Result<Batch, Error> {
    let mut batch = Batch::default();
    take_batch_into(state, &mut batch)?;
    Ok(batch)
}

/// Do the same in the memory of a batch that is not needed any more, without an allocation.
pub fn take_batch_into(state: &mut State, batch: &mut Batch) -> Result<(), Error> {
    let (limit, num_in_flight) = (state.config.max_in_flight as usize, state.in_flight.len());
    if limit > 0 && num_in_flight >= limit {
        let (num_in_flight, max_in_flight) = (num_in_flight as i64, limit as i64);
        return Err(Error::TooManyInFlight { num_in_flight, max_in_flight });
    }
    close_into(batch, state.batch.number, &state.effects.commands);
    batch.epoch = state.epoch;
    if let Some(before) = state.batch.number.checked_sub(1)
        && limit == 0
    {
        confirm_loads(&mut state.loads, before);
    }
    let closed = state.config.tracks_batches().then(|| close_entries(state));
    let merges = std::mem::take(&mut state.batch.merges);
    let ends = std::mem::take(&mut state.batch.ends);
    let marked = std::mem::take(&mut state.batch.marked);
    let tailed = tails_to_come(state);
    state.effects.commands.clear();
    state.batch.advance();
    state.device.set_batch(state.batch.number);
    if let Some(closed) = closed {
        if limit > 0 {
            state.in_flight.push(Arc::new(closed));
        } else {
            publish_written(state, &closed);
        }
    }
    if limit == 0 {
        release_rows(state, batch.number);
    }
    settle_merges(state, merges);
    settle_ends(state, ends, &marked, stored_bytes);
    settle_tails(state, &tailed);
    Ok(())
}

/// Finish the oldest batch in flight: its forward pass has run.
///
/// Fails with NotInFlight, BatchOutOfOrder.
pub fn complete(state: &mut State, batch: i64) -> Result<(), Error> {
    check_in_flight(state, batch)?;
    let oldest = state.in_flight[0].number;
    if oldest != batch as u64 {
        return Err(Error::BatchOutOfOrder { batch, oldest: oldest as i64 });
    }
    let finished = state.in_flight.remove(0);
    confirm_loads(&mut state.loads, oldest);
    for pool in [Some(&mut state.device), state.host.as_mut()].into_iter().flatten() {
        pool.end_use(|user| user == oldest || seeded(Mutant::FirstBatchEndsAllUses));
        if !seeded(Mutant::QuarantineNeverEnds) {
            pool.end_quarantine();
        }
    }
    release_rows(state, oldest);
    if state.config.publish == Publish::Completed {
        publish_written(state, &finished);
        publish_owed(state, &finished);
    }
    Ok(())
}

/// Free the rows that were held until this batch was finished.
pub(crate) fn release_rows(state: &mut State, number: u64) {
    let end = state.held_rows.partition_point(|&(_, batch)| batch <= number);
    state.free_rows.extend(state.held_rows.drain(..end).map(|(row, _)| row));
}

/// Fails with NotInFlight unless a batch with this number is in flight.
pub fn check_in_flight(state: &State, number: i64) -> Result<(), Error> {
    let numbers = || state.in_flight.iter().map(|batch| batch.number);
    if numbers().any(|each| Ok(each) == u64::try_from(number)) {
        return Ok(());
    }
    let in_flight = numbers().map(|each| each as i64).collect();
    Err(Error::NotInFlight { batch: number, in_flight })
}

/// Make the record of the open batch as it is taken: what its forward pass uses, and its rows.
fn close_entries(state: &mut State) -> BatchInFlight {
    let mut entries = std::mem::take(&mut state.batch.entries);
    entries.hold(state.config.groups.len(), |row, held| {
        if state.batch.scheduled.get(row).is_some() {
            let tables = held.iter_mut().zip(&state[row].tables);
            tables.for_each(|(length, table)| *length = table.len() as u32);
        }
    });
    BatchInFlight {
        number: state.batch.number,
        entries,
        published_keys: std::mem::take(&mut state.batch.published_keys),
        rows: named_rows(&state.effects.commands),
        replaced: BTreeSet::new(),
        starts_epoch: state.batch.starts_epoch,
        owed: Vec::new(),
    }
}

/// Publish the blocks that a finished batch wrote.
fn publish_written(state: &mut State, batch: &BatchInFlight) {
    let before = std::mem::take(&mut state.batch.merges);
    for (row, made) in in_order(&batch.entries) {
        if made.publishes && state[row].status() == Status::Running && state[row].num_loading == 0 {
            let num_tokens = num_finished(state, row);
            let late = u32::from(seeded(Mutant::PublishedLate)).min(num_tokens);
            publish_blocks(state, row, num_tokens - late, true);
            complete_tails(state, row, made.before, num_tokens, batch);
        }
    }
    let merges = std::mem::replace(&mut state.batch.merges, before);
    settle_merges(state, merges);
}

/// Look up again the contents that were filled although they were findable.
fn settle_merges(state: &mut State, merges: Vec<Merge>) {
    for merge in merges {
        apply_merge(state, &merge);
    }
}

/// Settle the merges of a request that is about to give its blocks back, if they were written
/// before the open batch. Else a block behind them would stay cached without its parent.
pub(crate) fn settle_own_merges(state: &mut State, row: Row) {
    if state.batch.merges.is_empty() {
        return;
    }
    let State { config, batch, requests, .. } = state;
    let request = request_mut(requests, row);
    let record = batch.scheduled.get(row);
    let num_written = record.map_or(request.num_computed, |record| record.num_computed_before);
    let is_own = |merge: &Merge| {
        let end = (merge.position + 1) * config.groups[merge.group_id as usize].block_size;
        merge.request_id == request.request_id && end <= num_written
    };
    let merges = std::mem::take(&mut batch.merges);
    let (own, others) = merges.into_iter().partition(is_own);
    batch.merges = others;
    settle_merges(state, own);
}

/// Move a table to the older block of a content, or publish its own block if that is gone.
///
/// Does nothing for a stale request: its own block has content of older weights.
fn apply_merge(state: &mut State, merge: &Merge) {
    let Some(&row) = state.rows.get(&merge.request_id) else { return };
    let request = &state[row];
    let (group_id, position) = (merge.group_id as usize, merge.position as usize);
    let same = request.tables[group_id].get(position) == Some(&merge.block);
    let size = state.config.groups[group_id].block_size;
    let computed = request.num_accepted() >= (merge.position + 1) * size;
    let waits = same && computed && state.device.key(merge.block).is_none();
    if !waits || state.is_stale(row) {
        return;
    }
    let scale = state.scales[group_id];
    if merge.position >= request.num_hashed(scale)
        || request.key(scale, merge.group_id, merge.position) != merge.key
    {
        return;
    }
    let (group_id, position) = (merge.group_id, merge.position);
    let Some(older) = state.device.index.first(&merge.key) else {
        let end = (position + 1) * size;
        state.device.publish(merge.block, merge.key);
        state.device.note_computed(merge.block, 0);
        if !state.loads.is_empty() {
            note_keyed(state, row, &[(merge.block, end)]);
        }
        if state.config.publish == Publish::Scheduled {
            note_written_key(state, row, end, merge.block, merge.key);
        }
        announce_stored(state, row, group_id, (position, position + 1));
        return;
    };
    state.device.touch(older, &mut state.effects);
    note_owner(state, row, &[older], u32::MAX);
    if state.config.publish == Publish::Scheduled {
        lower_restored(state, row, position * size);
    }
    move_tails(state, row, (group_id, position), (merge.block, older));
    TableEdit::of(state, row, group_id).replace(position, older, false);
    if seeded(Mutant::MergeNoRemap) {
        state[row].tables[group_id as usize][position as usize] = merge.block;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::encode::encode;
    use crate::transitions::free::free;
    use crate::transitions::tests::*;

    /// Four usable blocks; batch 0 computes four tokens of a request and is in flight.
    fn one_in_flight(publish: Publish) -> State {
        let config = Config { max_in_flight: 1, publish, ..Config::new(5, 2, b"seed") };
        let mut state = make_state(config).unwrap();
        admit(&mut state, "a", &[1, 2, 3, 4], 4);
        take_batch(&mut state).unwrap();
        state
    }

    #[test]
    fn a_released_block_waits_for_the_batch_that_reads_it() {
        let mut state = one_in_flight(Publish::Scheduled);
        free(&mut state, "a").unwrap();
        assert_eq!((state.device.num_free(), state.device.num_quarantined()), (2, 2));
        complete(&mut state, 0).unwrap();
        let order: Vec<BlockId> = state.device.queue.iter().collect();
        assert_eq!(order, [3, 4, 2, 1].map(BlockId));
    }

    #[test]
    fn what_a_batch_wrote_is_findable_once_it_is_completed() {
        let mut state = one_in_flight(Publish::Completed);
        assert_eq!(state.device.index.len(), 0);
        complete(&mut state, 0).unwrap();
        assert_eq!(state.device.index.len(), 2);
    }

    #[test]
    fn batches_are_completed_once_and_no_more_are_taken_than_may_be() {
        let mut state = one_in_flight(Publish::Scheduled);
        let before = encode(&state);
        let many = Error::TooManyInFlight { num_in_flight: 1, max_in_flight: 1 };
        assert_eq!(take_batch(&mut state), Err(many));
        let unknown = |batch, in_flight| Err(Error::NotInFlight { batch, in_flight });
        assert_eq!(complete(&mut state, -1), unknown(-1, vec![0]));
        assert_eq!(encode(&state), before);
        complete(&mut state, 0).unwrap();
        assert_eq!(complete(&mut state, 0), unknown(0, vec![]));
    }
}
