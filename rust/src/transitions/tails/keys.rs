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

use hashbrown::HashSet;

use crate::state::batch_records::{BatchInFlight, PublishedKey};
use crate::state::state::State;
use crate::transitions::in_flight::{note_published_key, note_written_key, num_finished};
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
        let given = publish_tails(state, row, before, state[row].num_accepted(), None);
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
    let end = end.min(taken);
    for (block, key) in publish_tails(state, row, start, end, None) {
        note_written_key(state, row, end, block, key);
    }
}

/// Give the tail keys of a completed batch in (start, end] to the blocks that it wrote: a copy that
/// a later batch makes may be cancelled.
pub(crate) fn complete_tails(
    state: &mut State,
    row: Row,
    start: u32,
    end: u32,
    batch: &BatchInFlight,
) {
    let taken = state.in_flight.iter().map(|batch| &batch.entries);
    let is_later = taken.chain([&state.batch.entries]).any(|entries| entries.get(row).is_some());
    publish_tails(state, row, start, end, is_later.then_some(batch));
}

/// Make the parts of a request's blocks findable that end behind `start` tokens, up to `end`, at
/// most its computed ones; return the new keys. wrote: only of blocks that its forward pass used.
pub(crate) fn publish_tails(
    state: &mut State,
    row: Row,
    start: u32,
    end: u32,
    wrote: Option<&BatchInFlight>,
) -> Vec<PublishedKey> {
    let mut given = Vec::new();
    if !state.has_tails || state.is_stale(row) {
        return given;
    }
    let unit = state.hash_block_size;
    let num_hashed = state[row].block_hashes.len() as u32;
    let last = (end.min(state[row].num_accepted()) / unit).min(num_hashed) * unit;
    for group_id in 0..state.config.groups.len() as u32 {
        let group = &state.config.groups[group_id as usize];
        let size = group.block_size;
        if group.is_state() {
            continue;
        }
        for position in start / size..last.div_ceil(size) {
            let ends = (start.max(position * size), last.min((position + 1) * size - 1));
            let is_used = wrote.is_none_or(|batch| batch.uses(row, group_id, position));
            if ends.0 / unit < ends.1 / unit && is_used {
                let block = state[row].tables[group_id as usize][position as usize];
                publish_parts(state, row, (group_id, position, block), ends, &mut given);
            }
        }
    }
    given
}

/// Do the same for the parts of one block, with the content at a place of the request's table, that
/// end in a range (start, end]; nothing if the block is given back.
fn publish_parts(
    state: &mut State,
    row: Row,
    (group_id, position, block): (u32, u32, BlockId),
    (start, end): (u32, u32),
    given: &mut Vec<PublishedKey>,
) {
    if state.is_null(block) {
        return;
    }
    let keys = keys_between(state, row, group_id, (start, end));
    let first = position * state.config.groups[group_id as usize].block_size;
    let had_key = state.device.has_key(block);
    let merges = state.config.duplicates == Duplicates::Merge;
    let mut known: HashSet<Key> = state.device.tail_keys(block).iter().copied().collect();
    let mut rank = num_shorter(state, row, (group_id, first), block, start);
    let (mut last, mut writes) = (None, false);
    for (count, key) in (start / state.hash_block_size + 1..).zip(keys) {
        if known.contains(&key) {
            rank += usize::from(state.device.tail_keys(block).get(rank) == Some(&key));
        } else if !(merges && state.device.first_tail(&key).is_some()) {
            let is_last = rank == state.device.tail_keys(block).len();
            writes = is_last && state.device.key(block).is_none();
            state.device.publish_tail(block, key, rank);
            known.insert(key);
            given.push((block, key));
            rank += 1;
            last = Some(count * state.hash_block_size);
        }
    }
    if let Some(last) = last.filter(|_| !state.loads.is_empty()) {
        let place = (group_id, position);
        let shares = if writes { sharers(state, row, place, block, last) } else { Vec::new() };
        note_tail(state, row, (block, last), had_key, |load| {
            writes && shares.iter().all(|&other| load.reporter(other).counted > 0)
        });
    }
}

/// The other requests that hold a block at a place and count this many tokens: of a block that lost
/// keys, they may have written the content.
fn sharers(
    state: &State,
    row: Row,
    (group_id, position): (u32, u32),
    block: BlockId,
    num_tokens: u32,
) -> Vec<Row> {
    let shares = |&other: &Row| {
        let held = state[other].tables[group_id as usize].get(position as usize);
        other != row && held == Some(&block) && state[other].num_accepted() >= num_tokens
    };
    match state.device.ref_count(block) {
        0 | 1 => Vec::new(),
        _ => state.rows.values().copied().filter(shares).collect(),
    }
}

/// Count the tail keys of a block whose parts end at or before num_tokens tokens of a request.
/// The block begins behind `first` tokens.
fn num_shorter(
    state: &State,
    row: Row,
    (group_id, first): (u32, u32),
    block: BlockId,
    num_tokens: u32,
) -> usize {
    let (unit, held) = (state.hash_block_size, state.device.tail_keys(block));
    if held.is_empty() {
        return 0;
    }
    let last = (num_tokens / unit).min(state[row].block_hashes.len() as u32);
    let shorter = (first / unit + 1..=last).rev();
    let mut keys = shorter.map(|hash| state[row].key_at(unit, group_id, hash * unit));
    keys.find_map(|key| held.iter().rposition(|each| *each == key)).map_or(0, |at| at + 1)
}

/// Give the tail keys of a block at a place of a request's table to the older block with the same
/// content, unless the block has other owners, such as pins.
pub(crate) fn move_tails(
    state: &mut State,
    row: Row,
    (group_id, position): (u32, u32),
    (block, older): (BlockId, BlockId),
) {
    if !state.has_tails || state.device.ref_count(block) > 1 {
        return;
    }
    let size = state.config.groups[group_id as usize].block_size;
    let tails = state.device.tail_keys(block).to_vec();
    state.device.withdraw_tails(block, &tails, &mut state.effects);
    let mut given = Vec::new();
    let ends = (position * size, (position + 1) * size - 1);
    publish_parts(state, row, (group_id, position, older), ends, &mut given);
    if state.config.publish == Publish::Scheduled {
        given.into_iter().for_each(|(block, key)| note_published_key(state, block, key));
    }
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
    let first = position * state.config.groups[group_id as usize].block_size;
    let num_kept = num_shorter(state, row, (group_id, first), block, num_tokens);
    state.device.tail_keys(block)[num_kept..].to_vec()
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
        note_tail(state, row, (block, end), true, |_| true);
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
