// SPDX-License-Identifier: Apache-2.0
//! Queries of a state. None of them changes it.
//!
//! Source: S000-43, 48, 54, 56. Twin: kvcore/transitions/queries.py.

use crate::pool::transitions::lookup;
use crate::state::state::{NULL_BLOCK, RequestState, State};
use crate::transitions::prefix_lookup::{aligned, longest_hit};
use crate::types::errors::{Error, check_count};
use crate::types::groups::Group;
use crate::types::ids::{BlockId, Table};
use crate::types::keys::Key;
use crate::types::values::{Hit, KVCacheBlocks};

/// The request of this id. Fails with UnknownRequest.
pub fn find_request<'a>(state: &'a State, request_id: &str) -> Result<&'a RequestState, Error> {
    Ok(&state[state.request(request_id)?])
}

/// Return the longest cached prefix that leaves at least one token to compute.
///
/// Empty if caching is off. Fails with UnknownRequest.
pub fn get_computed_blocks(state: &State, request_id: &str) -> Result<Hit, Error> {
    Ok(longest_hit(state, find_request(state, request_id)?))
}

/// Return how many of these tokens to schedule behind a hit of (num_tokens, num_common) so that the
/// state after them is worth keeping, and whether the call should mark a checkpoint.
///
/// In this order: up to the end of what other groups find, where prompts part; up to the last place
/// where a hit on all tokens can end; with tokens left, up to the last whole block of all groups.
/// Else all, without a mark. Fails with UnknownRequest, InvalidCount.
pub fn checkpoint_stop(
    state: &State,
    request_id: &str,
    num_new_tokens: i64,
    hit: Option<(i64, i64)>,
) -> Result<(i64, bool), Error> {
    let request = find_request(state, request_id)?;
    check_count("num_new_tokens", num_new_tokens, 1)?;
    if !(state.has_states && state.config.enable_caching) {
        return Ok((num_new_tokens, false));
    }
    let (mut start, mut stops) = (i64::from(request.num_computed), Vec::new());
    if let Some((num_tokens, num_common)) = hit {
        check_count("num_tokens", num_tokens, 0)?;
        check_count("num_common", num_common, 0)?;
        start += num_tokens;
        stops.push(num_common);
    }
    let known = request.num_tokens();
    stops.push(i64::from(aligned(state, known.saturating_sub(1))));
    let end = start + num_new_tokens;
    if end < i64::from(known) {
        let whole = i64::from(state.config.block_alignment());
        stops.push(end / whole * whole);
    }
    let found = stops.into_iter().find(|&stop| start < stop && stop <= end);
    Ok(found.map_or((num_new_tokens, false), |stop| (stop - start, true)))
}

/// Return the device blocks of a request; empty while it waits or is swapped out.
///
/// Fails with UnknownRequest.
pub fn get_blocks(state: &State, request_id: &str) -> Result<KVCacheBlocks, Error> {
    Ok(KVCacheBlocks { blocks: find_request(state, request_id)?.tables.to_vec() })
}

/// Return the keys of a request's full blocks, per group; an external store names blocks by them.
///
/// Fails with UnknownRequest.
pub fn get_block_keys(state: &State, request_id: &str) -> Result<Vec<Vec<Key>>, Error> {
    let request = find_request(state, request_id)?;
    let keys = |(group_id, &scale): (u32, &u32)| {
        (0..request.num_hashed(scale)).map(|at| request.key(scale, group_id, at)).collect()
    };
    Ok((0..).zip(&state.scales).map(keys).collect())
}

/// Count, per group, the leading blocks of a request that every request with device blocks holds.
///
/// 0 for groups that are windowed or cross-attention, and if caching is off. Fails with
/// UnknownRequest.
pub fn get_num_common_prefix_blocks(state: &State, request_id: &str) -> Result<Vec<u32>, Error> {
    let request = find_request(state, request_id)?;
    let holders = state.requests().filter(|request| request.holds_blocks()).count() as u32;
    let by_all = |&&block: &&BlockId| {
        state.device.ref_count(block) - state.device.num_pins(block) == holders
    };
    let common = |(group, table): (&Group, &Table)| {
        if !state.config.enable_caching || group.is_windowed() || group.is_cross() {
            return 0;
        }
        table.iter().take_while(by_all).count() as u32
    };
    Ok(state.config.groups.iter().zip(&request.tables).map(common).collect())
}

/// Whether a device block is findable; the null block counts as found. Fails with UnknownBlock.
pub fn has_key(state: &State, block: i64) -> Result<bool, Error> {
    let found = find_block(state, block)?;
    Ok(found.is_none_or(|block| state.device.has_key(block)))
}

/// Return the key of a device block, or else its longest tail key; None if it has neither, like the
/// null block. Fails with UnknownBlock.
pub fn get_block_key(state: &State, block: i64) -> Result<Option<Key>, Error> {
    let key = |block| state.device.key(block).or_else(|| state.device.tail_keys(block).last());
    Ok(find_block(state, block)?.and_then(key).copied())
}

/// Return the keys of a device block: that of the whole block, then its tail keys, shortest first;
/// none for the null block. Fails with UnknownBlock.
pub fn get_own_keys(state: &State, block: i64) -> Result<Vec<&Key>, Error> {
    let keys = |block| state.device.key(block).into_iter().chain(state.device.tail_keys(block));
    Ok(find_block(state, block)?.map_or_else(Vec::new, |block| keys(block).collect()))
}

/// Return the device block that a look-up of a key finds, the first of several.
#[must_use]
pub fn get_cached_block(state: &State, key: &Key) -> Option<BlockId> {
    lookup(&state.device, key).or_else(|| state.device.first_tail(key))
}

/// Count the tables, pins and operations that hold a device block; the null block has none. Fails
/// with UnknownBlock.
pub fn num_owners(state: &State, block: i64) -> Result<u32, Error> {
    Ok(find_block(state, block)?.map_or(0, |block| state.device.ref_count(block)))
}

/// A device block, None for the null block. Fails with UnknownBlock.
fn find_block(state: &State, block: i64) -> Result<Option<BlockId>, Error> {
    if block == 0 && state.is_null(NULL_BLOCK) {
        return Ok(None);
    }
    state.device.check_block(block).map(Some)
}

/// Return the share of the usable device blocks that have an owner, 0.0 to 1.0.
#[must_use]
pub fn usage(state: &State) -> f64 {
    1.0 - f64::from(state.device.num_free()) / f64::from(state.device.num_usable())
}
