// SPDX-License-Identifier: Apache-2.0
//! Publishing full blocks, which makes them findable, and withdrawing their keys.
//!
//! Invariants: the call that schedules the write of a block's last token publishes the block, so a
//! later request of the same step may hit it. A key whose block the open batch itself writes is
//! remembered in the batch's record, since it is withdrawn if the request leaves the batch. With
//! `Duplicates::Merge` a block whose content is already findable waits for `take_batch` instead
//!
//! Source: S000-29 to 31, 41, 42, 49. Twin: kvcore/transitions/publish.py.

use std::ops::Range;
use std::sync::Arc;

use crate::hashing::block_hash::root_hash;
use crate::mutants::{Mutant, seeded};
use crate::pool::block_pool::{AHEAD, BlockPool};
use crate::state::batch_records::RequestEntry;
use crate::state::open_batch::{Merge, UnwrittenBlock};
use crate::state::state::{RequestState, State, request_mut};
use crate::transitions::checkpoints::cache_state;
use crate::transitions::in_flight::{note_in_writer, note_request, num_finished};
use crate::transitions::tails::keys::{cache_tails, note_delay};
use crate::transitions::unconfirmed_loads::note_keyed;
use crate::types::config::{Config, Duplicates, Publish};
use crate::types::effects::Effects;
use crate::types::errors::{Error, check_count};
use crate::types::events::{News, Stored};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::{Key, make_key};

/// Publish a request's full blocks up to a token count, whose caching was delayed.
///
/// Nothing happens if caching is off. With `Publish::Completed` what batches in flight write
/// waits for their completion. Fails with UnknownRequest, SwappedOut, LoadUnfinished, InvalidCount,
/// BeyondComputed.
pub fn cache_blocks(
    state: &mut State,
    request_id: &str,
    num_computed_tokens: i64,
) -> Result<(), Error> {
    let row = state.idle(request_id)?;
    let num_computed = i64::from(state[row].num_computed);
    check_count("num_computed_tokens", num_computed_tokens, 0)?;
    if num_computed_tokens > num_computed {
        let request = state[row].name();
        return Err(Error::BeyondComputed {
            request,
            num_computed,
            requested: num_computed_tokens,
        });
    }
    if state.config.enable_caching {
        let mut count = state[row].num_tokens().min(num_computed_tokens as u32);
        let finished = count.min(num_finished(state, row));
        publish_blocks(state, row, finished, true);
        if state.config.publish == Publish::Completed {
            count = finished;
        }
        publish_blocks(state, row, count, false);
        if state.has_states {
            cache_state(state, row, num_computed_tokens as u32, stored_bytes);
        }
        cache_tails(state, row, count);
        if num_computed_tokens == num_computed {
            note_delay(state, row, false);
        }
    }
    Ok(())
}

/// Forget the keys of blocks; owners and places in the free queue stay. Fails with UnknownBlock.
pub fn evict_blocks(state: &mut State, block_ids: &[i64]) -> Result<(), Error> {
    let check = |&block: &i64| state.device.check_block(block);
    let blocks: Vec<BlockId> = block_ids.iter().map(check).collect::<Result<_, _>>()?;
    for block in blocks {
        state.device.unpublish(block, &mut state.effects);
    }
    Ok(())
}

/// Forget every key of every tier; returns false, with no change, while any block is used.
pub fn reset_prefix_cache(state: &mut State) -> bool {
    let used = |pool: &BlockPool| pool.num_free() < pool.num_usable();
    let ignored = seeded(Mutant::ResetInUse);
    if !ignored && used(&state.device) || state.host.as_ref().is_some_and(used) {
        return false;
    }
    state.device.clear_index(&mut state.effects);
    state.effects.announce(&News::AllBlocksCleared);
    state.stats.reset = true;
    true
}

/// Publish the full blocks up to a token count that are not yet published.
/// last: their content was written, so no cancel withdraws the keys.
pub(crate) fn publish_blocks(state: &mut State, row: Row, num_tokens: u32, last: bool) {
    if state.is_stale(row) && !seeded(Mutant::StalePublishes) {
        return;
    }
    let is_plain = state.has_plain_keys() && !seeded(Mutant::CacheWholePrompt);
    for group_id in 0..state.config.groups.len() as u32 {
        let (group, request) = (&state.config.groups[group_id as usize], &state[row]);
        let cached = request.num_cached[group_id as usize];
        let (size, next) = (u64::from(group.block_size), u64::from(cached) + 1);
        let fills = u64::from(num_tokens) >= next * size;
        if group.is_state() || !fills && !seeded(Mutant::CacheWholePrompt) {
            continue;
        }
        let scale = state.scales[group_id as usize];
        let is_last = u64::from(num_tokens) < (next + 1) * size;
        let is_new = is_plain && belongs_to_open_batch(state, row, group_id, cached, last);
        if is_last && is_new && request.block_hashes.len() as u64 >= next * u64::from(scale) {
            publish_one(state, row, (group_id, cached), last);
            continue;
        }
        let num_full = if seeded(Mutant::CacheWholePrompt) {
            request.num_hashed(scale).min(request.tables[group_id as usize].len() as u32)
        } else {
            request.num_hashed(scale).min(num_tokens / group.block_size)
        };
        publish_range(state, row, group_id, cached..num_full, last);
        state[row].num_cached[group_id as usize] = cached.max(num_full);
    }
}

/// Whether a cancel of the open batch loses the content of the blocks from a position on, if any
/// cancel does. last: none does.
#[inline(always)] // once in each block of a request
fn belongs_to_open_batch(
    state: &State,
    row: Row,
    group_id: u32,
    position: u32,
    last: bool,
) -> bool {
    let end = (position + 1) * state.config.groups[group_id as usize].block_size;
    let loses = |entry: &RequestEntry| entry.restore < end;
    last || state.config.max_in_flight == 0 || state.batch.entries.get(row).is_some_and(loses)
}

/// Publish the block at a position of a group, of a state in which nothing has to be noted.
#[inline(always)] // once in each block of a request
fn publish_one(state: &mut State, row: Row, (group_id, position): (u32, u32), last: bool) {
    let State { config, scales, requests, device, batch, effects, epoch, .. } = state;
    let request = request_mut(requests, row);
    request.num_cached[group_id as usize] = position + 1;
    let block = request.tables[group_id as usize][position as usize];
    if device.is_null(block) || device.key(block).is_some() {
        return;
    }
    let key = request.key(scales[group_id as usize], group_id, position);
    device.publish(block, key);
    if !last && config.max_in_flight > 0 {
        batch.published_keys.push((block, key));
    }
    let end = (position + 1) * config.groups[group_id as usize].block_size;
    if batch.scheduled.get(row).is_some_and(|record| end > record.num_computed_before) {
        batch.note_unwritten(row, (group_id, position), block, key);
    }
    if config.enable_events {
        announce(effects, request, (config, scales), group_id, (position, position + 1), *epoch);
    }
}

/// Publish blocks from the first position on, many at a time, as long as each of them can get a key
/// and nothing else has to be noted. Returns the position behind them.
fn publish_runs(
    state: &mut State,
    (row, group_id): (Row, u32),
    positions: Range<u32>,
    last: bool,
) -> u32 {
    let is_plain = state.has_plain_keys()
        && state.device.is_plain()
        && belongs_to_open_batch(state, row, group_id, positions.start, last);
    // None if a window has left more blocks behind than have hashes.
    let is_behind = positions.is_empty() && !seeded(Mutant::RunsNeedNoHashes);
    if !is_plain || state.scales[group_id as usize] != 1 || is_behind {
        return positions.start;
    }
    let State { config, requests, device, batch, .. } = state;
    let request = &*request_mut(requests, row);
    let (table, hashes) = (&request.tables[group_id as usize], &request.block_hashes);
    let size = config.groups[group_id as usize].block_size;
    let record = batch.scheduled.get(row);
    let num_written = record.map_or(u32::MAX, |record| record.num_computed_before / size);
    let mut places = device.index.places_of(&hashes[positions.start as usize..], group_id);
    for first in positions.clone().step_by(AHEAD) {
        let end = positions.end.min(first + AHEAD as u32);
        let place = first as usize..end as usize;
        let (blocks, keyed) = (&table[place.clone()], &hashes[place.clone()]);
        let next = device.index.places_of(&hashes[end as usize..], group_id);
        if !device.publish_run(&places, blocks, keyed, group_id) {
            return first;
        }
        places = next;
        if !last && config.max_in_flight > 0 {
            let noted = blocks.iter().zip(keyed);
            let noted = noted.map(|(&block, hash)| (block, make_key(hash, group_id)));
            batch.published_keys.extend(noted);
        }
        let first = first.max(num_written).min(end);
        let place = first as usize..end as usize;
        let keyed = table[place.clone()].iter().zip(&hashes[place]).enumerate();
        batch.unwritten.extend(keyed.map(|(number, (&block, hash))| {
            let (position, key) = (first + number as u32, make_key(hash, group_id));
            UnwrittenBlock { group_id, position, block, key, next: None }
        }));
    }
    positions.end
}

/// Publish the blocks at these positions, or note their merges.
fn publish_range(state: &mut State, row: Row, group_id: u32, positions: Range<u32>, last: bool) {
    let start = state.batch.unwritten.len() as u32;
    let rest = publish_runs(state, (row, group_id), positions.clone(), last)..positions.end;
    let State { config, scales, requests, device, batch, effects, loads, epoch, in_flight, .. } =
        state;
    let (epoch, said) = (*epoch, (&*config, &scales[..]));
    let request = &*request_mut(requests, row);
    let table = &request.tables[group_id as usize];
    let (size, scale) = (config.groups[group_id as usize].block_size, scales[group_id as usize]);
    let before = batch.scheduled.get(row).map_or(u32::MAX, |record| record.num_computed_before);
    let merges = config.duplicates == Duplicates::Merge;
    let can_be_cancelled = !last && config.max_in_flight > 0;
    let mut first = positions.start;
    let (mut keyed, num_merges) = (Vec::new(), batch.merges.len());
    for position in rest {
        let ahead = (position as usize + AHEAD + 1) * scale as usize - 1;
        if let Some(ahead) = request.block_hashes.get(ahead) {
            device.index.prefetch_bucket(Key::head_of(ahead, group_id));
        }
        let block = table[position as usize];
        let mut publishes = !device.is_null(block) && device.key(block).is_none();
        if publishes {
            let key = request.key(scale, group_id, position);
            if merges && device.index.first(&key).is_some() {
                let request_id = Arc::clone(&request.request_id);
                batch.merges.push(Merge { request_id, group_id, position, block, key });
                publishes = false;
            } else {
                device.publish(block, key);
                if device.policy.is_some() {
                    device.note_computed(block, position);
                }
                if !loads.is_empty() {
                    keyed.push((block, (position + 1) * size));
                }
                let end = (position + 1) * size;
                if can_be_cancelled {
                    note_in_writer(batch, in_flight, (row, end), (block, key));
                }
                if end > before {
                    let unwritten = UnwrittenBlock { group_id, position, block, key, next: None };
                    batch.unwritten.push(unwritten);
                }
            }
        }
        if !publishes {
            announce(effects, request, said, group_id, (first, position), epoch);
            first = position + 1;
        }
    }
    announce(effects, request, said, group_id, (first, positions.end), epoch);
    batch.chain_unwritten(row, start);
    if batch.merges.len() > num_merges && config.publishes_at_once() {
        let computed = request.num_computed;
        note_request(state, row, computed, computed, None);
    }
    if !keyed.is_empty() {
        note_keyed(state, row, &keyed);
    }
}

/// Emit the event that a request's blocks at positions [first, end) became findable.
pub(crate) fn announce_stored(state: &mut State, row: Row, group_id: u32, blocks: (u32, u32)) {
    let State { config, scales, effects, requests, epoch, .. } = state;
    announce(effects, request_mut(requests, row), (config, scales), group_id, blocks, *epoch);
}

/// Return the bytes of the event that a request's blocks became findable; None if no events are
/// wanted.
pub(crate) fn stored_bytes(
    state: &State,
    row: Row,
    group_id: u32,
    blocks: (u32, u32),
) -> Option<Vec<u8>> {
    if !state.effects.events_enabled() {
        return None;
    }
    let mut effects = Effects::new(true);
    let said = (&state.config, &state.scales[..]);
    announce(&mut effects, &state[row], said, group_id, blocks, state.epoch);
    Some(effects.events.as_bytes().to_vec())
}

fn announce(
    effects: &mut Effects,
    request: &RequestState,
    (config, scales): (&Config, &[u32]),
    group_id: u32,
    blocks: (u32, u32),
    epoch: u32,
) {
    if effects.events_enabled() && blocks.0 < blocks.1 {
        let hidden;
        let mut said = stored(request, config, scales, group_id, blocks);
        said.epoch = epoch;
        if config.hide_salts {
            hidden = said.extra_keys.hide_salt(&root_hash(&config.hash_seed, config.hashing));
            said.extra_keys = &hidden;
        }
        effects.announce(&News::BlockStored(said));
    }
}

/// Make the event that a request's blocks at positions [first, end) became findable.
fn stored<'a>(
    request: &'a RequestState,
    config: &Config,
    scales: &[u32],
    group_id: u32,
    blocks: (u32, u32),
) -> Stored<'a> {
    Stored {
        blocks,
        tokens: &request.tokens,
        hashes: &request.block_hashes,
        scale: scales[group_id as usize],
        block_size: config.groups[group_id as usize].block_size,
        group_id,
        extra_keys: request.extra_keys(),
        epoch: 0,
    }
}

#[cfg(test)]
mod tests {
    use crate::transitions::tests::*;

    #[test]
    fn what_a_cancel_withdraws_is_noted_if_batches_can_be_in_flight() {
        for (max_in_flight, num_noted) in [(0, 0), (1, 2)] {
            let mut config = Config::new(5, 2, b"seed");
            config.max_in_flight = max_in_flight;
            let mut state = make_state(config).unwrap();
            admit(&mut state, "a", &[1, 2, 3, 4, 5], 5);
            assert_eq!(state.batch.published_keys.len(), num_noted);
        }
    }
}
