// SPDX-License-Identifier: Apache-2.0
//! Checkpoints: states that other requests may start from, and when they get their keys.
//!
//! Invariants: the state at the end of a step is a checkpoint if its tokens are a multiple of the
//! group's block size, or if the call marked it; then no event names it. It gets its key when its
//! batch is taken, or completed with `Publish::Completed`, never by the call: a hit copies the
//! block, and the open batch has not yet written it. Until a batch in flight publishes a
//! checkpoint, it owns the block, so that the key comes even if the request goes on or leaves. A
//! state whose last token is to come gets its key with that token, and is lost if the request
//! leaves before; until then the table of the request keeps it (`window.rs`). With
//! `Duplicates::Merge` a state that is already findable gets no second key. Twin:
//! kvcore/transitions/checkpoints.py.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::state::batch_records::{BatchInFlight, OwedCheckpoint};
use crate::state::state::{State, request_mut};
use crate::transitions::in_flight::{give_back, note_written_key, num_finished};
use crate::transitions::unconfirmed_loads::note_keyed;
use crate::types::config::{Duplicates, Publish};
use crate::types::groups::Group;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::{Key, make_key};

/// Makes the bytes of the event that a request's blocks became findable: `publish::stored_bytes`,
/// which imports this.
pub(crate) type StoredBytes = fn(&State, Row, u32, (u32, u32)) -> Option<Vec<u8>>;

/// Note whether the state after a request's step in the open batch is a checkpoint. publishes:
/// whether it may get a key. marked: whether it is one in all groups. No earlier end of the request
/// may be noted.
#[inline]
pub(crate) fn note_end(state: &mut State, row: Row, publishes: bool, marked: bool) {
    let count = state[row].state_count();
    let mut groups = state.config.groups.iter().filter(|group| group.is_state());
    let ends = |group: &Group| count.is_multiple_of(group.block_size);
    let is_rest = marked && !groups.clone().all(ends);
    if publishes && (marked || groups.any(ends)) {
        state.batch.ends.push(row);
        if is_rest {
            state.batch.marked.insert(row);
        }
    }
}

/// The same for a step without a mark, and without drafts, up to a count.
#[inline(always)] // once in each block of a request
pub(crate) fn note_whole_end(state: &mut State, row: Row, count: u32) {
    let ends = |group: &Group| group.is_state() && count.is_multiple_of(group.block_size);
    let mut groups = state.config.groups.iter().rev(); // states are mostly the last ones
    if state.config.enable_caching && groups.any(ends) {
        state.batch.ends.push(row);
    }
}

/// Forget the checkpoint of a request that the open batch does not write any more.
pub(crate) fn drop_end(state: &mut State, row: Row) {
    state.batch.ends.retain(|&each| each != row);
    state.batch.marked.remove(&row);
}

/// Give the checkpoints of the batch just taken their keys, or their blocks to the batch until it
/// is completed.
pub(crate) fn settle_ends(
    state: &mut State,
    mut ends: Vec<Row>,
    marked: &BTreeSet<Row>,
    stored: StoredBytes,
) {
    let in_flight = state.config.max_in_flight > 0;
    let waits = state.config.publish == Publish::Completed && in_flight;
    let is_plain = state.has_plain_keys() && !in_flight && !state.config.enable_events;
    if is_plain && marked.is_empty() {
        settle_whole(state, &ends);
        ends.clear();
    }
    for row in ends.drain(..) {
        let count = state[row].state_count();
        let marked = !marked.is_empty() && marked.contains(&row);
        for group_id in 0..state.config.groups.len() as u32 {
            if !state.config.groups[group_id as usize].is_state() {
                continue;
            }
            let Some((block, key)) = keyless(state, row, count, (group_id, marked)) else {
                continue;
            };
            let event = event_of(state, row, count, group_id, stored);
            if waits {
                let owed = OwedCheckpoint { block, key, event };
                owe(state, (row, count), state.in_flight.len() - 1, owed);
            } else if publish_of(state, row, count, (block, &key, event.as_deref()))
                && let Some(batch) = state.in_flight.last_mut()
            {
                Arc::make_mut(batch).published_keys.push((block, key));
            }
        }
    }
    state.batch.ends = ends; // keeps its memory
}

/// Give the states of requests after whole blocks their keys, if nothing else has to be noted.
#[inline(never)] // its loop has the registers for itself
fn settle_whole(state: &mut State, rows: &[Row]) {
    let State { config, device, requests, scales, epochs, epoch, .. } = state;
    for &row in rows {
        let request = &*request_mut(requests, row);
        let count = request.state_count();
        if epochs[row.index()] < *epoch {
            continue; // as `is_stale`, of a request that counts tokens
        }
        for (group_id, group) in config.groups.iter().enumerate() {
            if !group.is_state() {
                continue;
            }
            let full = count / group.block_size;
            if full * group.block_size != count {
                continue;
            }
            let last = (full * scales[group_id]).wrapping_sub(1) as usize;
            let Some(hash) = request.block_hashes.get(last) else { continue };
            let block = request.tables[group_id][full as usize - 1];
            if !device.is_null(block) && device.key(block).is_none() {
                device.publish(block, make_key(hash, group_id as u32));
            }
        }
    }
}

/// Publish the state at a request's count, if it is a checkpoint among its first num_tokens tokens
/// and no unfinished batch writes it; the open batch publishes what it writes.
pub(crate) fn cache_state(state: &mut State, row: Row, num_tokens: u32, stored: StoredBytes) {
    if state[row].state_count() != num_tokens {
        return;
    }
    if state.batch.scheduled.get(row).is_some() {
        if !state.batch.ends.contains(&row) {
            note_end(state, row, true, false);
        }
    } else if state.config.publish == Publish::Scheduled || num_finished(state, row) == num_tokens {
        publish_now(state, row, num_tokens, stored);
    }
}

/// Publish the checkpoints behind the first num_known tokens whose tokens are known now, as far as
/// taken batches write them; one that is not yet written belongs to its batch until then.
pub(crate) fn publish_reached(state: &mut State, row: Row, num_known: u32, stored: StoredBytes) {
    let record = state.batch.scheduled.get(row);
    let taken = record.map_or(state[row].num_computed, |record| record.num_computed_before);
    let waits = state.config.publish == Publish::Completed && state.config.max_in_flight > 0;
    for count in num_known + 1..=state[row].num_tokens().min(taken) {
        if !waits || num_finished(state, row) >= count {
            publish_now(state, row, count, stored);
            continue;
        }
        let writes = |batch: &Arc<BatchInFlight>| {
            batch.entries.get(row).is_some_and(|entry| entry.before < count)
        };
        let index = state.in_flight.iter().rposition(writes).expect("IN-FLIGHT: one computes it");
        for group_id in 0..state.config.groups.len() as u32 {
            if let Some(owed) = checkpoint(state, row, count, (group_id, false), stored) {
                owe(state, (row, count), index, owed);
            }
        }
    }
}

/// Make a request's checkpoints after `count` tokens findable, outside the taking of a batch.
fn publish_now(state: &mut State, row: Row, count: u32, stored: StoredBytes) {
    for group_id in 0..state.config.groups.len() as u32 {
        if let Some(owed) = checkpoint(state, row, count, (group_id, false), stored)
            && publish_of(state, row, count, (owed.block, &owed.key, owed.event.as_deref()))
        {
            note_written_key(state, row, count, owed.block, owed.key);
        }
    }
}

/// Return the checkpoint of a group after a request's first `count` tokens, if there is one without
/// a key. marked: whether one may also lie inside a block.
fn checkpoint(
    state: &State,
    row: Row,
    count: u32,
    (group_id, marked): (u32, bool),
    stored: StoredBytes,
) -> Option<OwedCheckpoint> {
    let (block, key) = keyless(state, row, count, (group_id, marked))?;
    let event = event_of(state, row, count, group_id, stored);
    Some(OwedCheckpoint { block, key, event })
}

/// Return the block of that checkpoint, and the key for it.
#[inline(always)] // once in each block of a request
fn keyless(
    state: &State,
    row: Row,
    count: u32,
    (group_id, marked): (u32, bool),
) -> Option<(BlockId, Key)> {
    let (group, request) = (&state.config.groups[group_id as usize], &state[row]);
    if !group.is_state() || count == 0 {
        return None;
    }
    let (full, rest) = (count / group.block_size, count % group.block_size);
    if rest > 0 && !marked || state.is_stale(row) {
        return None;
    }
    let last = (count / state.hash_block_size).checked_sub(1)?;
    let hash = request.block_hashes.get(last as usize)?;
    let place = if rest > 0 { full } else { full - 1 };
    let block = request.tables[group_id as usize][place as usize];
    let is_free = !state.is_null(block) && state.device.key(block).is_none();
    is_free.then(|| (block, make_key(hash, group_id)))
}

/// Return the event of a state after `count` tokens; None if it lies inside a block, or if no
/// events are wanted.
#[inline(always)] // once in each block of a request
fn event_of(
    state: &State,
    row: Row,
    count: u32,
    group_id: u32,
    stored: StoredBytes,
) -> Option<Vec<u8>> {
    if !state.effects.events_enabled() {
        return None;
    }
    let size = state.config.groups[group_id as usize].block_size;
    let place = (count - 1) / size;
    count.is_multiple_of(size).then(|| stored(state, row, group_id, (place, place + 1))).flatten()
}

/// Make a state after `count` tokens of a request findable. True: it has its key now.
#[inline(always)] // once in each block of a request
fn publish_of(
    state: &mut State,
    row: Row,
    count: u32,
    (block, key, event): (BlockId, &Key, Option<&[u8]>),
) -> bool {
    let is_keyed = publish(state, block, key, event);
    if is_keyed && !state.loads.is_empty() {
        note_keyed(state, row, &[(block, count)]);
    }
    is_keyed
}

/// Let a batch in flight own a request's checkpoint after `count` tokens until it publishes it.
fn owe(state: &mut State, (row, count): (Row, u32), index: usize, owed: OwedCheckpoint) {
    let block = owed.block;
    state.device.touch(block, &mut state.effects);
    Arc::make_mut(&mut state.in_flight[index]).owed.push(owed);
    if !state.loads.is_empty() {
        note_keyed(state, row, &[(block, count)]);
    }
}

/// Make the checkpoints of a completed batch findable, and give back its blocks.
pub(crate) fn publish_owed(state: &mut State, batch: &BatchInFlight) {
    for owed in &batch.owed {
        publish(state, owed.block, &owed.key, owed.event.as_deref());
    }
    state.device.release(batch.owed.iter().map(|owed| owed.block), &mut state.effects);
}

/// Withdraw the keys of a request's states after more than num_tokens tokens, wherever they are:
/// checkpoints have left its table.
pub(crate) fn withdraw_states(state: &mut State, row: Row, num_tokens: u32) {
    let (mut keys, request) = (Vec::<Key>::new(), &state[row]);
    let size = state.hash_block_size;
    let end = (request.num_computed / size).min(request.block_hashes.len() as u32);
    for (group_id, _) in (0..).zip(&state.config.groups).filter(|(_, each)| each.is_state()) {
        let counts = (num_tokens / size + 1..=end).map(|hash| hash * size);
        keys.extend(counts.map(|count| request.key_at(size, group_id, count)));
    }
    for key in &keys {
        while let Some(block) = state.device.index.first(key) {
            state.device.unpublish(block, &mut state.effects);
        }
    }
    give_back(state, |owed| keys.contains(&owed.key));
}

/// Make a state findable. True: it has its key now.
#[inline(always)] // once in each block of a request
fn publish(state: &mut State, block: BlockId, key: &Key, event: Option<&[u8]>) -> bool {
    let State { config, device, effects, .. } = state;
    if config.duplicates == Duplicates::Merge && device.index.first(key).is_some() {
        return false;
    }
    device.publish(block, *key);
    if device.policy.is_some() {
        device.note_computed(block, 0);
    }
    if let Some(event) = event {
        effects.announce_bytes(event);
    } else if config.enable_events {
        device.silent.insert(block);
    }
    true
}
