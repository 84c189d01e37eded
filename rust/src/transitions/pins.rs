// SPDX-License-Identifier: Apache-2.0
//! Pins: owners of blocks that are not requests, to keep content.
//!
//! A pin of a prefix has a name and outlives the request. It holds what a later request must find
//! to hit that prefix, each block once, and only what no unfinished batch computes for the request.
//! After `advance_epoch` it still holds its blocks, which are not findable any more.
//! Twin: kvcore/transitions/pins.py.

use std::collections::HashSet;

use crate::state::state::State;
use crate::state::state::named_pins::{NamedPin, named_blocks};
use crate::transitions::in_flight::{num_finished, unfinished_keys};
use crate::transitions::prefix_lookup::{found_length, needed, needed_tails};
use crate::transitions::unconfirmed_loads::is_unconfirmed;
use crate::types::errors::{Error, check_count};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;

/// Hold blocks that have an owner or a key, once per occurrence in the list.
///
/// Fails with UnknownBlock, UnusedBlock.
pub fn pin(state: &mut State, block_ids: &[i64]) -> Result<(), Error> {
    let blocks = state.device.check_pins(block_ids)?;
    state.num_pins += 1;
    for block in blocks {
        state.device.pin(block, &mut state.effects);
    }
    Ok(())
}

/// Undo `pin`; blocks that an unfinished operation or a pin of a prefix holds stay held.
///
/// Fails with UnknownBlock, NotPinned.
pub fn unpin(state: &mut State, block_ids: &[i64]) -> Result<(), Error> {
    let mut held = state.num_held();
    named_blocks(&state.named_pins).for_each(|block| *held.entry(block).or_insert(0) += 1);
    let num_held = |block: BlockId| held.get(&block).copied().unwrap_or(0);
    for block in state.device.check_unpins(block_ids, num_held)? {
        state.device.unpin(block, &mut state.effects);
    }
    Ok(())
}

/// Hold the blocks that a hit on a request's first tokens needs, until `unpin_prefix`; returns the
/// number of tokens that they cover.
/// It covers what finished batches have computed and a look-up finds now, whole blocks as a rule.
/// The request's own blocks are preferred to others of the same content. Fails with EmptyPinName,
/// RepeatedPin, UnknownRequest, SwappedOut, LoadUnfinished, InvalidCount, StaleRequest,
/// NothingToPin, LoadUnconfirmed, TooManyPinned.
pub fn pin_prefix(
    state: &mut State,
    name: &str,
    request_id: &str,
    num_tokens: i64,
) -> Result<u32, Error> {
    let pin = name.to_owned();
    if name.is_empty() {
        return Err(Error::EmptyPinName { value: pin });
    }
    if state.named_pins.contains_key(name) {
        return Err(Error::RepeatedPin { pin });
    }
    let row = state.idle(request_id)?;
    check_count("num_tokens", num_tokens, 1)?;
    if state.is_stale(row) {
        let (request, epoch) = (request_id.to_owned(), i64::from(state.epoch_of(row)));
        return Err(Error::StaleRequest { request, epoch, current: i64::from(state.epoch) });
    }
    let (covered, blocks) = prefix(state, row, num_tokens)?;
    let named = named_blocks(&state.named_pins).chain(blocks.iter().copied());
    let (num_blocks, most) = (named.collect::<HashSet<_>>().len(), state.config.most_pinned());
    if num_blocks > most as usize {
        let (num_blocks, most) = (num_blocks as i64, i64::from(most));
        return Err(Error::TooManyPinned { pin, num_blocks, most });
    }
    for &block in &blocks {
        state.device.pin(block, &mut state.effects);
    }
    state.named_pins.insert(pin, NamedPin { epoch: state.epoch, blocks });
    Ok(covered)
}

/// Undo `pin_prefix`: its blocks lose an owner, the last one first. Fails with UnknownPin.
pub fn unpin_prefix(state: &mut State, name: &str) -> Result<(), Error> {
    let known = state.named_pins.remove(name);
    let pin = known.ok_or_else(|| Error::UnknownPin { pin: name.to_owned() })?;
    for &block in pin.blocks.iter().rev() {
        state.device.unpin(block, &mut state.effects);
    }
    Ok(())
}

/// Find the longest prefix of at most `count` tokens that is finished and findable: its number of
/// tokens, and the blocks that a hit on it needs, group by group. Fails with NothingToPin,
/// LoadUnconfirmed.
fn prefix(state: &State, row: Row, count: i64) -> Result<(u32, Vec<BlockId>), Error> {
    let (config, request, mut finished) = (&state.config, &state[row], 0);
    if config.enable_caching {
        let before = state.batch.scheduled.get(row).map(|record| record.num_computed_before);
        finished = num_finished(state, row).min(before.unwrap_or(u32::MAX));
    }
    let mut most = u32::try_from(count).unwrap_or(u32::MAX).min(finished);
    let part = if state.has_tails { "part of a block" } else { "whole block" };
    let mut reason = format!("{finished} are computed, and no {part} of them is found");
    let unfinished = unfinished_keys(state);
    let (length, found) = loop {
        let length = found_length(state, request, most);
        let found = needed_blocks(state, row, length);
        let is_late = |&&(block, key, _): &&(BlockId, Key, u32)| unfinished.contains(&(block, key));
        let late = found.iter().filter(is_late).map(|&(block, _, end)| (end, block)).min();
        let Some((end, BlockId(block))) = late else { break (length, found) };
        most = length.min(end) - 1;
        reason = format!("block {block} is found, but an unfinished batch may withdraw its key");
    };
    if !config.enable_caching {
        "prefix caching is off".clone_into(&mut reason);
    } else if length > 0 {
        // A chunk begins at their end.
        reason = format!("a hit of {length} needs no block");
    }
    if found.is_empty() {
        return Err(Error::NothingToPin { request: request.name(), requested: count, reason });
    }
    let mut blocks = Vec::with_capacity(found.len());
    for (block, ..) in found {
        if is_unconfirmed(state, block) {
            return Err(Error::LoadUnconfirmed { block: i64::from(block.0) });
        }
        if !blocks.contains(&block) {
            blocks.push(block);
        }
    }
    Ok((length, blocks))
}

/// The blocks that a hit of a request's first tokens needs, each with the key under which it is
/// found and the number of tokens that the key names.
fn needed_blocks(state: &State, row: Row, length: u32) -> Vec<(BlockId, Key, u32)> {
    let (config, request, mut found) = (&state.config, &state[row], Vec::new());
    for (index, table) in (0..).zip(&request.tables).filter(|_| length > 0) {
        let size = config.groups[index as usize].block_size;
        for position in needed(config, index, length).range() {
            let end = match config.groups[index as usize].is_state() {
                true => length,
                false => (position + 1) * size,
            };
            let key = request.key_at(state.hash_block_size, index, end);
            let own = table[position as usize];
            let is_own = state.device.key(own) == Some(&key);
            let block = if is_own { Some(own) } else { state.device.index.first(&key) };
            found.push((block.expect("IDX-COMPLETE: the look-up has found it"), key, end));
        }
        for end in needed_tails(config, index, length) {
            let key = request.key_at(state.hash_block_size, index, end);
            let own = table.get((end / size) as usize).copied();
            let own = own.filter(|&own| state.device.tail_keys(own).contains(&key));
            let block = own.or_else(|| state.device.first_tail(&key));
            found.push((block.expect("IDX-COMPLETE: the look-up has found it"), key, end));
        }
    }
    found
}
