// SPDX-License-Identifier: Apache-2.0
//! Questions to a state. None of them changes it.
//!
//! Source: S000-43, 48, 54, 56. Twin: kvcore/queries.py.

use crate::errors::Error;
use crate::ids::BlockId;
use crate::state::{RequestState, State};
use crate::values::{Hit, KVCacheBlocks};

/// The request of this id. Fails with UnknownRequest.
pub fn find_request<'a>(state: &'a State, request_id: &str) -> Result<&'a RequestState, Error> {
    Ok(&state[state.request(request_id)?])
}

/// The longest cached prefix that leaves at least one token to compute.
///
/// Nothing where caching is off. Fails with UnknownRequest.
pub fn get_computed_blocks(state: &State, request_id: &str) -> Result<Hit, Error> {
    let request = find_request(state, request_id)?;
    let size = state.config.block_size();
    let most = (request.num_tokens().saturating_sub(1) / size) as usize;
    let most = most.min(request.block_hashes.len()) as u32;
    let num_groups = state.config.groups.len() as u32;
    let first = |position, group| state.device.index.first(&request.key(position, group));
    let mut blocks: Vec<Vec<BlockId>> = vec![Vec::new(); num_groups as usize];
    for position in 0..most {
        let found: Option<Vec<BlockId>> =
            (0..num_groups).map(|group| first(position, group)).collect();
        let Some(found) = found else { break };
        blocks.iter_mut().zip(found).for_each(|(group, block)| group.push(block));
    }
    let num_tokens = blocks[0].len() as u32 * size;
    Ok(Hit { blocks: KVCacheBlocks { blocks }, num_tokens })
}

/// The device blocks of a request; empty while it waits or is swapped out.
///
/// Fails with UnknownRequest.
pub fn get_blocks(state: &State, request_id: &str) -> Result<KVCacheBlocks, Error> {
    Ok(KVCacheBlocks { blocks: find_request(state, request_id)?.tables.clone() })
}

/// Leading blocks of a request that every request with device blocks holds, a group.
///
/// Fails with UnknownRequest.
pub fn get_num_common_prefix_blocks(state: &State, request_id: &str) -> Result<Vec<u32>, Error> {
    let request = find_request(state, request_id)?;
    let holders = state.requests().filter(|request| request.holds_blocks()).count() as u32;
    let by_all = |&&block: &&BlockId| {
        state.device.ref_count(block) - state.device.num_pins(block) == holders
    };
    let common = |table: &Vec<BlockId>| table.iter().take_while(by_all).count() as u32;
    Ok(request.tables.iter().map(common).collect())
}

/// Share of the usable device blocks that have an owner, 0.0 to 1.0.
#[must_use]
pub fn usage(state: &State) -> f64 {
    1.0 - f64::from(state.device.num_free()) / f64::from(state.device.num_usable())
}
