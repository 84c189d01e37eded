// SPDX-License-Identifier: Apache-2.0
//! The property of tail keys.

use std::collections::HashMap;

use crate::invariants::requests::Scratch;
use crate::state::state::{RequestState, State};
use crate::types::ids::BlockId;
use crate::types::keys::Key;
use crate::types::violation::Finding;

/// TAIL-SOUND: a block's tail keys end inside it, and are in order, shortest first.
pub(super) fn tail_sound(state: &State, _: &mut Scratch) -> Finding {
    let Some(tails) = &state.device.tails else { return Ok(()) };
    let (mut num_held, num_found) =
        (0, tails.keyed().map(|(_, blocks)| blocks.len()).sum::<usize>());
    for (block, keys) in tails.iter() {
        num_held += keys.len();
        check_keys(state, block, keys)?;
        if let Some(key) = keys.iter().find(|key| !tails.blocks(key).contains(&block)) {
            let group = key.group_id();
            return Err(format!("block {} is not found under its tail of group {group}", block.0));
        }
    }
    if num_held != num_found {
        return Err(format!("{num_found} blocks are found under tail keys, {num_held} have them"));
    }
    state.requests().try_for_each(|request| check_request(state, request))
}

/// Fails unless a block has tail keys of one attention group, each once, and not too many.
fn check_keys(state: &State, block: BlockId, keys: &[Key]) -> Finding {
    let Some(key) = keys.first() else {
        return Err(format!("block {} has an empty list of tail keys", block.0));
    };
    let group = state.config.groups.get(key.group_id() as usize).filter(|each| !each.is_state());
    let most = group.map_or(0, |group| group.block_size / state.hash_block_size - 1);
    let is_one =
        |(at, each): (usize, &Key)| each.group_id() == key.group_id() && !keys[..at].contains(each);
    let has_full = state.device.key(block).is_none_or(|full| full.group_id() == key.group_id());
    if keys.len() > most as usize || !keys.iter().enumerate().all(is_one) || !has_full {
        let (block, count) = (block.0, keys.len());
        return Err(format!("block {block} has {count} tail keys, at most {most} are possible"));
    }
    Ok(())
}

/// Fails unless the tail keys of a request's blocks that are its own rise, and end inside their
/// blocks.
fn check_request(state: &State, request: &RequestState) -> Finding {
    let unit = state.hash_block_size;
    let groups = (0..).zip(&state.config.groups).zip(&request.tables);
    for ((index, group), table) in groups.filter(|((_, group), _)| !group.is_state()) {
        let counts = (1..=request.block_hashes.len() as u32).map(|hash| hash * unit);
        let own: HashMap<Key, u32> =
            counts.map(|count| (request.key_at(unit, index, count), count)).collect();
        for (position, &block) in (0..).zip(table) {
            let keys = state.device.tail_keys(block).iter();
            let ends: Vec<u32> = keys.filter_map(|key| own.get(key).copied()).collect();
            let inside = position * group.block_size + 1..(position + 1) * group.block_size;
            if !ends.is_sorted() || !ends.iter().all(|end| inside.contains(end)) {
                let name = request.name();
                return Err(format!("{name}: block {} has tail keys at {ends:?}", block.0));
            }
        }
    }
    Ok(())
}
