// SPDX-License-Identifier: Apache-2.0
//! Updates the records of batches in flight: entries of requests, and published keys.
//!
//! Invariants: a batch has an entry for each request that it changes, in the order of the first
//! change. An entry is kept when the request leaves the open batch, and dropped when the request is
//! removed. Nothing is kept if batches finish as they are taken. Beside states a cancel restores
//! the count from before the batch or none, since inside a step there is no state. Blocks in use
//! are noted by the code that changes tables, `state/table_edit.rs`. Twin:
//! kvcore/transitions/in_flight.py.

use std::sync::Arc;

use hashbrown::HashSet;
use smallvec::SmallVec;

use crate::mutants::{Mutant, seeded};
use crate::state::batch_records::{
    BatchInFlight, OwedCheckpoint, PublishedKey, RequestEntries, RequestEntry, TableCell,
    next_order,
};
use crate::state::open_batch::OpenBatch;
use crate::state::state::State;
use crate::state::table_edit::remove_places;
use crate::types::errors::Error;
use crate::types::groups::Group;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;

/// Note in the open batch its effect on a request; noted counts only fall.
///
/// publishes: whether the most recent call that set this flag allows publication.
pub(crate) fn note_request(
    state: &mut State,
    row: Row,
    before: u32,
    restore: u32,
    publishes: Option<bool>,
) {
    if !state.config.tracks_batches() {
        return;
    }
    let has_states = state.has_states;
    let entries = &mut state.batch.entries;
    if let Some(known) = entries.rows.get_mut(row) {
        known.before = known.before.min(before);
        known.restore = restored(has_states, known.before, known.restore.min(restore));
        known.publishes = publishes.unwrap_or(known.publishes);
        return;
    }
    let publishes = publishes.unwrap_or(false);
    let order = next_order(entries);
    let restore = restored(has_states, before, restore);
    entries.insert_new(row, RequestEntry { order, before, restore, publishes });
}

/// Return the count that a cancel restores: beside states none inside what the batch computes.
#[inline(always)] // of each request in each step
fn restored(has_states: bool, before: u32, restore: u32) -> u32 {
    if has_states && restore < before { 0 } else { restore }
}

/// Note in the open batch one more token of a request; a state that does not move on to a new
/// block is overwritten.
#[inline(always)] // of each request in each step
pub(crate) fn note_next_entry(state: &mut State, row: Row) {
    if !state.config.tracks_batches() {
        return;
    }
    let before = state[row].num_computed;
    let overwrites = |group: &Group| group.is_state() && !before.is_multiple_of(group.block_size);
    let is_lost = state.has_states && state.config.groups.iter().any(overwrites);
    let restore = if is_lost { 0 } else { before };
    note_request(state, row, before, restore, Some(state.config.enable_caching));
}

/// Note a key that cancelling the open batch withdraws.
pub(crate) fn note_published_key(state: &mut State, block: BlockId, key: Key) {
    if state.config.max_in_flight > 0 {
        state.batch.published_keys.push((block, key));
    }
}

/// Note the key of a content that ends after a request's first `num_tokens` tokens in the last
/// batch whose cancel loses some of them. Without one, no cancel withdraws it.
pub(crate) fn note_written_key(
    state: &mut State,
    row: Row,
    num_tokens: u32,
    block: BlockId,
    key: Key,
) {
    if state.config.max_in_flight > 0 {
        note_in_writer(&mut state.batch, &mut state.in_flight, (row, num_tokens), (block, key));
    }
}

/// The same where batches can be in flight.
pub(crate) fn note_in_writer(
    open: &mut OpenBatch,
    in_flight: &mut [Arc<BatchInFlight>],
    (row, num_tokens): (Row, u32),
    noted: PublishedKey,
) {
    let loses =
        |entries: &RequestEntries| entries.get(row).is_some_and(|entry| entry.restore < num_tokens);
    if loses(&open.entries) {
        open.published_keys.push(noted);
    } else if let Some(batch) = in_flight.iter_mut().rfind(|batch| loses(&batch.entries)) {
        Arc::make_mut(batch).published_keys.push(noted);
    }
}

/// Note that a request left the open batch: its entry stays, but publishes nothing.
pub(crate) fn note_left_batch(state: &mut State, row: Row) {
    if let Some(known) = state.batch.entries.rows.get_mut(row) {
        known.publishes = false;
    }
}

/// Limit what cancelling the batch just taken restores of a request.
pub(crate) fn lower_restored(state: &mut State, row: Row, num_tokens: u32) {
    let has_states = state.has_states;
    let Some(taken) = state.in_flight.last_mut() else { return };
    if taken.entries.get(row).is_none_or(|known| known.restore <= num_tokens) {
        return;
    }
    if let Some(known) = Arc::make_mut(taken).entries.rows.get_mut(row) {
        known.restore = restored(has_states, known.before, num_tokens);
    }
}

/// Let batches begin earlier for a request that dropped positions to come before their first one.
/// above: the known tokens, before which nothing moves. Fails with BeforeOpenBatch if the open
/// batch keeps more positions than are left.
pub(crate) fn shift_starts(
    state: &mut State,
    row: Row,
    above: u32,
    num_tokens: u32,
) -> Result<(), Error> {
    let moved = |before: u32| above.max(before.saturating_sub(num_tokens));
    let entries = |known: &mut RequestEntry| {
        if known.before > above {
            known.before = moved(known.before);
            known.restore = known.restore.min(known.before);
        }
    };
    if let Some(record) = state.batch.scheduled.get(row) {
        let before = moved(record.num_computed_before);
        let kept = record.num_kept - record.num_computed_before + before;
        let left = state[row].num_computed - num_tokens;
        if left < kept {
            let request = state[row].name();
            let (num_kept, requested) = (i64::from(kept), i64::from(left));
            return Err(Error::BeforeOpenBatch { request, num_kept, requested });
        }
        if let Some(record) = state.batch.scheduled.get_mut(row) {
            (record.num_computed_before, record.num_kept) = (before, kept);
        }
    }
    for batch in &mut state.in_flight {
        if batch.entries.get(row).is_some_and(|known| known.before > above) {
            Arc::make_mut(batch).entries.rows.get_mut(row).into_iter().for_each(entries);
        }
    }
    state.batch.entries.rows.get_mut(row).into_iter().for_each(entries);
    Ok(())
}

/// Give a forked child its parent's entries, although no batch schedules it. A batch in flight uses
/// the blocks that they share.
pub(crate) fn inherit_entries(state: &mut State, parent: Row, child: Row) {
    let shared: SmallVec<[u32; 4]> =
        state[child].tables.iter().map(|table| table.len() as u32).collect();
    for batch in &mut state.in_flight {
        if batch.entries.get(parent).is_some() {
            let batch = Arc::make_mut(batch);
            inherit_one(&mut batch.entries, parent, child, &shared);
            let held = |group_id: u32| batch.entries.held_in(child, group_id);
            let kept = batch.replaced_of(parent).filter(|&(group_id, at)| at < held(group_id));
            let kept: Vec<TableCell> = kept.map(|(group_id, at)| (child, group_id, at)).collect();
            batch.replaced.extend(kept);
        }
    }
    inherit_one(&mut state.batch.entries, parent, child, &shared);
}

fn inherit_one(entries: &mut RequestEntries, parent: Row, child: Row, shared: &[u32]) {
    let order = next_order(entries);
    let Some(&known) = entries.get(parent) else { return };
    let held: SmallVec<[u32; 4]> =
        entries.held(parent).iter().zip(shared).map(|(one, other)| *one.min(other)).collect();
    entries.insert_new(child, RequestEntry { order, ..known });
    entries.held.extend(held);
}

/// Drop a request's entries in all batches; those in flight keep its row.
pub(crate) fn forget_entries(state: &mut State, row: Row) {
    for batch in &mut state.in_flight {
        if batch.entries.get(row).is_some() && !seeded(Mutant::RemovedStaysMarked) {
            let batch = Arc::make_mut(batch);
            batch.entries.rows.remove(row);
            remove_places(&mut batch.replaced, (row, 0, 0)..=(row, u32::MAX, u32::MAX));
            if let Err(place) = batch.rows.binary_search(&row) {
                batch.rows.insert(place, row);
            }
        }
    }
    state.batch.entries.rows.remove(row);
}

/// What unfinished batches published, and may yet withdraw.
pub(crate) fn unfinished_keys(state: &State) -> HashSet<PublishedKey> {
    let batch = &state.batch;
    let taken = state.in_flight.iter().map(|batch| &batch.published_keys);
    let unwritten = batch.scheduled.values().flat_map(|record| batch.unwritten_of(record));
    let published = taken.chain([&batch.published_keys]).flatten().copied();
    published.chain(unwritten.map(|item| (item.block, item.key))).collect()
}

/// Let the batches in flight give back checkpoints that they will not publish.
pub(crate) fn give_back(state: &mut State, is_lost: impl Fn(&OwedCheckpoint) -> bool) {
    let State { in_flight, device, effects, .. } = state;
    for batch in in_flight.iter_mut().filter(|batch| batch.owed.iter().any(&is_lost)) {
        let owed = &mut Arc::make_mut(batch).owed;
        let lost = owed.iter().filter(|&owed| is_lost(owed)).map(|owed| owed.block);
        device.release(lost, effects);
        owed.retain(|owed| !is_lost(owed));
    }
}

/// Tokens of a request, drafts aside, that no batch computes any more.
pub(crate) fn num_finished(state: &State, row: Row) -> u32 {
    if seeded(Mutant::PublishesInFlight) {
        return state[row].num_accepted();
    }
    let taken = state.in_flight.iter().map(|batch| &batch.entries);
    let entries = taken.chain([&state.batch.entries]).filter_map(|entries| entries.get(row));
    entries.map(|entry| entry.before).fold(state[row].num_accepted(), u32::min)
}
