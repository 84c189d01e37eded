// SPDX-License-Identifier: Apache-2.0
//! Tail keys: which parts of blocks become findable, and when.
//!
//! Invariants: a tail key is given to a multiple of the hash unit inside a block of an attention
//! group, once the batch that writes its last token is taken, or completed with
//! `Publish::Completed`, never by the call: a hit copies the block, and the open batch has not yet
//! written it. Keys that the most recent call of a batch delayed are given by `cache_blocks`. With
//! `Duplicates::Merge` a part of a block that is already findable gets no second key. No event
//! names a tail key.
//! Twin: kvcore/transitions/tails/keys.py.

use std::sync::Arc;

use crate::state::batch_records::PublishedKey;
use crate::state::state::State;
use crate::transitions::in_flight::{note_published_key, num_finished};
use crate::transitions::unconfirmed_loads::note_tail;
use crate::types::config::{Duplicates, Publish};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;

/// Note whether the most recent call of the open batch for a request delays its tail keys.
pub(crate) fn note_delay(state: &mut State, row: Row, delayed: bool) {
    if !state.has_tails {
        return;
    }
    if delayed {
        state.batch.delayed.insert(row);
    } else {
        state.batch.delayed.remove(&row);
    }
}

/// Forget the delay of a request that leaves the open batch.
pub(crate) fn drop_delay(state: &mut State, row: Row) {
    state.batch.delayed.remove(&row);
}

/// Return the requests whose tail keys come when the open batch is taken, rising, each with its
/// count before the batch.
pub(crate) fn tails_to_come(state: &State) -> Vec<(Row, u32)> {
    if !state.has_tails || state.config.publish == Publish::Completed {
        return Vec::new();
    }
    let batch = &state.batch;
    let mut rows: Vec<Row> = batch.scheduled.keys().collect();
    rows.retain(|row| !batch.delayed.contains(row));
    rows.sort_unstable();
    let before = |row: &Row| batch.scheduled.get(*row).map(|each| each.num_computed_before);
    rows.into_iter().filter_map(|row| Some((row, before(&row)?))).collect()
}

/// Give the tail keys of the batch just taken.
pub(crate) fn settle_tails(state: &mut State, rows: &[(Row, u32)]) {
    for &(row, before) in rows {
        let given = publish_tails(state, row, before, state[row].num_accepted());
        if let Some(batch) = state.in_flight.last_mut()
            && !given.is_empty()
        {
            Arc::make_mut(batch).published_keys.extend(given);
        }
    }
}

/// Give the tail keys behind the first num_known tokens whose tokens are known now, as far as taken
/// batches write them, or completed ones.
pub(crate) fn fill_tails(state: &mut State, row: Row, num_known: u32) {
    if state.has_tails {
        let finished = match state.config.publish {
            Publish::Scheduled => u32::MAX,
            Publish::Completed => num_finished(state, row),
        };
        give_tails(state, row, num_known, finished);
    }
}

/// Give the tail keys of a request's first `count` tokens, as far as the open batch does not write
/// them.
pub(crate) fn cache_tails(state: &mut State, row: Row, count: u32) {
    if state.has_tails {
        give_tails(state, row, 0, count);
    }
}

/// Give tail keys outside the taking of a batch.
fn give_tails(state: &mut State, row: Row, start: u32, end: u32) {
    let record = state.batch.scheduled.get(row);
    let taken = record.map_or(u32::MAX, |record| record.num_computed_before);
    for (block, key) in publish_tails(state, row, start, end.min(taken)) {
        note_published_key(state, block, key);
    }
}

/// Make the parts of a request's blocks findable that end behind `start` tokens, up to `end`, at
/// most its computed ones; return the new keys.
pub(crate) fn publish_tails(
    state: &mut State,
    row: Row,
    start: u32,
    end: u32,
) -> Vec<PublishedKey> {
    let mut given = Vec::new();
    if !state.has_tails || state.is_stale(row) {
        return given;
    }
    let unit = state.hash_block_size;
    let num_hashed = state[row].block_hashes.len() as u32;
    let last = (end.min(state[row].num_accepted()) / unit).min(num_hashed);
    for group_id in 0..state.config.groups.len() as u32 {
        if state.config.groups[group_id as usize].is_state() {
            continue;
        }
        for count in (start / unit + 1..=last).map(|hash| hash * unit) {
            given.extend(publish_tail(state, row, group_id, count));
        }
    }
    given
}

/// Do the same for one group and length; None if it ends a block, or its block is given back or has
/// the key.
fn publish_tail(state: &mut State, row: Row, group_id: u32, count: u32) -> Option<PublishedKey> {
    let size = state.config.groups[group_id as usize].block_size;
    if count.is_multiple_of(size) {
        return None;
    }
    let request = &state[row];
    let block = request.tables[group_id as usize][(count / size) as usize];
    let key = request.key_at(state.hash_block_size, group_id, count);
    let merges = state.config.duplicates == Duplicates::Merge;
    if state.is_null(block)
        || state.device.tail_keys(block).contains(&key)
        || (merges && state.device.first_tail(&key).is_some())
    {
        return None;
    }
    let shorter = keys_between(state, row, group_id, (count / size * size, count - 1));
    let held = state.device.tail_keys(block);
    let place = held.iter().filter(|key| shorter.contains(key)).count();
    let had_key = state.device.has_key(block);
    state.device.publish_tail(block, key, place);
    if !state.loads.is_empty() {
        note_tail(state, row, (block, count), had_key);
    }
    Some((block, key))
}

/// A request's keys at multiples of the hash unit in (start, end], as far as it has hashes.
pub(crate) fn keys_between(
    state: &State,
    row: Row,
    group_id: u32,
    (start, end): (u32, u32),
) -> Vec<Key> {
    let (unit, request) = (state.hash_block_size, &state[row]);
    let last = (end / unit).min(request.block_hashes.len() as u32);
    let counts = (start / unit + 1..=last).map(|hash| hash * unit);
    counts.map(|count| request.key_at(unit, group_id, count)).collect()
}

/// The tail keys of a block at a place of a request's table that end behind its first num_tokens
/// tokens, or are not the request's.
pub(crate) fn tails_past(
    state: &State,
    row: Row,
    (group_id, position): (u32, u32),
    block: BlockId,
    num_tokens: u32,
) -> Vec<Key> {
    let tails = state.device.tail_keys(block);
    if tails.is_empty() {
        return Vec::new();
    }
    let first = position * state.config.groups[group_id as usize].block_size;
    let kept = keys_between(state, row, group_id, (first, num_tokens));
    tails.iter().filter(|key| !kept.contains(key)).copied().collect()
}

/// Note that a request writes a block again whose keys past num_tokens name what is written.
pub(crate) fn note_same(
    state: &mut State,
    row: Row,
    (group_id, position): (u32, u32),
    num_tokens: u32,
) {
    let size = state.config.groups[group_id as usize].block_size;
    let block = state[row].tables[group_id as usize][position as usize];
    let full = state.device.key(block).copied();
    let past = tails_past(state, row, (group_id, position), block, num_tokens);
    let own = keys_between(state, row, group_id, (position * size, (position + 1) * size));
    let last =
        full.as_ref().or(past.last()).and_then(|last| own.iter().position(|key| key == last));
    for key in full.into_iter().chain(past) {
        note_published_key(state, block, key);
    }
    if let Some(last) = last.filter(|_| !state.loads.is_empty()) {
        let end = position * size + (last as u32 + 1) * state.hash_block_size;
        note_tail(state, row, (block, end), true);
    }
}

/// Forget the keys of a block of a request that end behind its first num_tokens tokens.
pub(crate) fn withdraw_past(
    state: &mut State,
    row: Row,
    (group_id, position): (u32, u32),
    num_tokens: u32,
) {
    let block = state[row].tables[group_id as usize][position as usize];
    let past = tails_past(state, row, (group_id, position), block, num_tokens);
    let State { device, effects, .. } = state;
    device.unpublish_full(block, effects);
    device.withdraw_tails(block, &past, effects);
}
