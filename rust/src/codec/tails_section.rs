// SPDX-License-Identifier: Apache-2.0
//! The section of canonical bytes for hits inside blocks: the hash unit and the tail keys.
//!
//! Twin: kvcore/codec/tails_section.py.

use std::collections::BTreeMap;

use crate::state::state::State;
use crate::types::errors::Error;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;
use crate::types::wire::{Reader, Writer};

/// Write the tokens of a block hash, the rows of the open batch whose keys are delayed, and for
/// each block with tail keys these, each with the block's place among those of the key.
pub(crate) fn write_tails(out: &mut Writer, state: &State) {
    out.u32(state.hash_block_size);
    out.numbers(&state.batch.delayed.iter().map(|row| row.0).collect::<Vec<u32>>());
    let Some(tails) = &state.device.tails else { return out.count(0) };
    out.count(tails.iter().count());
    for (block, keys) in tails.iter() {
        out.u32(block.0);
        out.count(keys.len());
        for key in keys {
            let rank = tails.blocks(key).iter().position(|&each| each == block);
            out.sized(&key.0);
            out.u32(rank.map_or(u32::MAX, |rank| rank as u32));
        }
    }
}

/// Read the hash unit and the tail keys of the next bytes. Fails with DamagedState.
pub(crate) fn read_tails(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    read_unit(source, state)?;
    let delayed = source.ids(state.requests.len() as u32)?;
    let is_there = |&row: &u32| state.batch.scheduled.get(Row(row)).is_some();
    let rises = delayed.is_sorted_by(|one, next| one < next);
    if !rises || !delayed.iter().all(is_there) || !(state.has_tails || delayed.is_empty()) {
        return Err(source.damaged("a delayed row is not in the open batch"));
    }
    state.batch.delayed = delayed.into_iter().map(Row).collect();
    let (mut ranked, mut last) = (BTreeMap::<(Key, u32), BlockId>::new(), None);
    let mut held: Vec<(BlockId, Vec<Key>)> = Vec::new();
    for _ in 0..source.u32()? {
        let block = BlockId(source.u32()?);
        let keys = source.list(|source| Ok((source.key()?, source.u32()?)))?;
        let is_known = block.0 < state.config.num_blocks && !state.is_null(block);
        let is_once = keys.iter().all(|&place| ranked.insert(place, block).is_none());
        if !state.has_tails || !is_known || !is_once || last >= Some(block) || keys.is_empty() {
            return Err(source.damaged("the tail keys are not in canonical form"));
        }
        last = Some(block);
        held.push((block, keys.into_iter().map(|(key, _)| key).collect()));
    }
    let mut before: Option<(Key, u32)> = None;
    for &(key, rank) in ranked.keys() {
        let expected = before.filter(|&(last, _)| last == key).map_or(0, |(_, last)| last + 1);
        if rank != expected {
            return Err(source.damaged("the blocks of a tail key are not ranked from 0"));
        }
        before = Some((key, rank));
    }
    state.device.restore_tails(held, ranked.into_iter().map(|((key, _), block)| (key, block)));
    Ok(())
}

/// Read the tokens of a block hash, and derive what depends on it.
fn read_unit(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let unit = source.u32()?;
    state.config.set_hash_block_size(unit);
    if state.config.hash_unit.is_none() {
        return Err(source.damaged("a section holds nothing"));
    }
    state.config.check().map_err(|error| source.damaged(error.to_string()))?;
    state.derive();
    state.device.tails = state.has_tails.then(Box::default);
    Ok(())
}
