// SPDX-License-Identifier: Apache-2.0
//! Checkpoints: states that other requests may start from, and when they get their keys.
//!
//! Invariants: the state at the end of a step is a checkpoint if its tokens are a multiple of the
//! group's block size. It gets its key when its batch is taken, or completed with
//! `Publish::Completed`, never by the call: a hit copies the block, and the open batch has not yet
//! written it. Until a batch in flight publishes a checkpoint, it owns the block, so that the key
//! comes even if the request goes on or leaves. A state whose last token is to come gets its key
//! with that token, and is lost if the request leaves before; until then the table of the request
//! keeps it (`window.rs`). With `Duplicates::Merge` a state that is already findable gets no second
//! key. Twin: kvcore/transitions/checkpoints.py.

use std::sync::Arc;

use crate::state::batch_records::{BatchInFlight, OwedCheckpoint, PublishedKey};
use crate::state::state::State;
use crate::transitions::in_flight::{note_published_key, num_finished};
use crate::transitions::unconfirmed_loads::note_keyed;
use crate::types::config::{Duplicates, Publish};
use crate::types::groups::Group;
use crate::types::ids::Row;
use crate::types::keys::Key;

/// Makes the bytes of the event that a request's blocks became findable: `publish::stored_bytes`,
/// which imports this.
pub(crate) type StoredBytes = fn(&State, Row, u32, (u32, u32)) -> Option<Vec<u8>>;

/// Note whether the state after a request's step in the open batch is a checkpoint. publishes:
/// whether it may get a key. No earlier end of the request may be noted.
pub(crate) fn note_end(state: &mut State, row: Row, publishes: bool) {
    let count = state[row].num_computed;
    let ends = |group: &Group| group.is_state() && count.is_multiple_of(group.block_size);
    if publishes && state.config.groups.iter().any(ends) {
        state.batch.ends.push(row);
    }
}

/// Forget the checkpoint of a request that the open batch does not write any more.
pub(crate) fn drop_end(state: &mut State, row: Row) {
    state.batch.ends.retain(|&each| each != row);
}

/// Give the checkpoints of the batch just taken their keys, or their blocks to the batch until it
/// is completed.
pub(crate) fn settle_ends(state: &mut State, ends: Vec<Row>, stored: StoredBytes) {
    let in_flight = state.config.max_in_flight > 0;
    let waits = state.config.publish == Publish::Completed && in_flight;
    for row in ends {
        let count = state[row].num_computed;
        let found = checkpoints(state, row, count, stored);
        if !waits {
            let keys = publish_states(state, row, count, found);
            if let Some(batch) = state.in_flight.last_mut().filter(|_| !keys.is_empty()) {
                Arc::make_mut(batch).published_keys.extend(keys);
            }
            continue;
        }
        owe(state, state.in_flight.len() - 1, found);
    }
}

/// Publish the state at a request's count, if it is a checkpoint among its first num_tokens tokens
/// and no unfinished batch writes it; the open batch publishes what it writes.
pub(crate) fn cache_state(state: &mut State, row: Row, num_tokens: u32, stored: StoredBytes) {
    if state[row].num_computed != num_tokens {
        return;
    }
    if state.batch.scheduled.get(row).is_some() {
        if !state.batch.ends.contains(&row) {
            note_end(state, row, true);
        }
    } else if state.config.publish == Publish::Scheduled || num_finished(state, row) == num_tokens {
        let found = checkpoints(state, row, num_tokens, stored);
        for (block, key) in publish_states(state, row, num_tokens, found) {
            note_published_key(state, block, key);
        }
    }
}

/// Publish the checkpoints behind the first num_known tokens whose tokens are known now, as far as
/// taken batches write them; one that is not yet written belongs to its batch until then.
pub(crate) fn publish_reached(state: &mut State, row: Row, num_known: u32, stored: StoredBytes) {
    let record = state.batch.scheduled.get(row);
    let taken = record.map_or(state[row].num_computed, |record| record.num_computed_before);
    let waits = state.config.publish == Publish::Completed && state.config.max_in_flight > 0;
    for count in num_known + 1..=state[row].num_tokens().min(taken) {
        let found = checkpoints(state, row, count, stored);
        if waits && num_finished(state, row) < count {
            let writes = |batch: &Arc<BatchInFlight>| {
                batch.entries.get(row).is_some_and(|entry| entry.before < count)
            };
            let index = state.in_flight.iter().rposition(writes);
            owe(state, index.expect("IN-FLIGHT: a batch computes it"), found);
            continue;
        }
        for (block, key) in publish_states(state, row, count, found) {
            note_published_key(state, block, key);
        }
    }
}

/// Return the checkpoints of a request after `count` tokens that have no key, group by group.
fn checkpoints(state: &State, row: Row, count: u32, stored: StoredBytes) -> Vec<OwedCheckpoint> {
    let request = &state[row];
    let num_hashed = request.block_hashes.len() as u64 * u64::from(state.hash_block_size);
    if count == 0 || state.is_stale(row) || u64::from(count) > num_hashed {
        return Vec::new();
    }
    let checkpoint = |(group_id, group): (u32, &Group)| {
        if !group.is_state() || !count.is_multiple_of(group.block_size) {
            return None;
        }
        let place = count / group.block_size - 1;
        let block = request.tables[group_id as usize][place as usize];
        if state.is_null(block) || state.device.key(block).is_some() {
            return None;
        }
        let key = request.key(state.scales[group_id as usize], group_id, place);
        let event = stored(state, row, group_id, (place, place + 1));
        Some(OwedCheckpoint { block, key, event })
    };
    (0..).zip(&state.config.groups).filter_map(checkpoint).collect()
}

/// Make the states of a request after `count` tokens findable; return their blocks and keys.
fn publish_states(
    state: &mut State,
    row: Row,
    count: u32,
    found: Vec<OwedCheckpoint>,
) -> Vec<PublishedKey> {
    let mut published = Vec::new();
    for each in found {
        if publish(state, &each) {
            published.push((each.block, each.key));
        }
    }
    if !published.is_empty() && !state.loads.is_empty() {
        let keyed: Vec<_> = published.iter().map(|&(block, _)| (block, count)).collect();
        note_keyed(state, row, &keyed);
    }
    published
}

/// Let a batch in flight own checkpoints until it publishes them.
fn owe(state: &mut State, index: usize, found: Vec<OwedCheckpoint>) {
    for owed in &found {
        state.device.touch(owed.block, &mut state.effects);
    }
    Arc::make_mut(&mut state.in_flight[index]).owed.extend(found);
}

/// Make the checkpoints of a completed batch findable, and give back its blocks.
pub(crate) fn publish_owed(state: &mut State, batch: &BatchInFlight) {
    for owed in &batch.owed {
        publish(state, owed);
    }
    state.device.release(batch.owed.iter().map(|owed| owed.block), &mut state.effects);
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

/// Withdraw the keys of a request's states after more than num_tokens tokens, wherever they are:
/// checkpoints have left its table.
pub(crate) fn withdraw_states(state: &mut State, row: Row, num_tokens: u32) {
    let (mut keys, request) = (Vec::<Key>::new(), &state[row]);
    for (group_id, group) in (0..).zip(&state.config.groups).filter(|(_, each)| each.is_state()) {
        let (scale, size) = (state.scales[group_id as usize], group.block_size);
        let end = (request.num_computed / size).min(request.num_hashed(scale));
        let places = num_tokens / size..end;
        keys.extend(places.map(|place| request.key(scale, group_id, place)));
    }
    for key in &keys {
        while let Some(block) = state.device.index.first(key) {
            state.device.unpublish(block, &mut state.effects);
        }
    }
    give_back(state, |owed| keys.contains(&owed.key));
}

/// Make a state findable. True: it has its key now.
fn publish(state: &mut State, found: &OwedCheckpoint) -> bool {
    let State { config, device, effects, .. } = state;
    if config.duplicates == Duplicates::Merge && device.index.first(&found.key).is_some() {
        return false;
    }
    device.publish(found.block, found.key);
    device.note_computed(found.block, 0);
    if let Some(event) = &found.event {
        effects.announce_bytes(event);
    }
    true
}
