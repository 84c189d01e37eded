// SPDX-License-Identifier: Apache-2.0
//! Rewind: tokens that requests count were not written, since a load failed or was incomplete.
//!
//! Invariants: the tokens stay and are computed again. The keys of the requests' blocks past the
//! count are withdrawn, so no request hits them; any other request that counts tokens in such a
//! block must be named in the same call. While a load is unconfirmed (`unconfirmed_loads.rs`), the
//! rewind of a request that started it or ever rested on it reports that the load failed.
//! All keys that rest on the load are then withdrawn, and every request that counts its tokens
//! falls back to the count; a swapped request waits again. An unfinished load of a named request is
//! given up, and the count falls to what was loaded.
//! Twin: kvcore/transitions/rewind.py.

use std::collections::BTreeSet;

use crate::state::state::{RequestState, State};
use crate::transitions::checkpoints::withdraw_states;
use crate::transitions::free::{
    abandon_loads, check_leaving, cut_tables, drop_host, leave_open_batch,
};
use crate::transitions::tails::keys::withdraw_past;
use crate::transitions::unconfirmed_loads::{
    first_reported, most_loaded, reached_requests, spoil_loads, spoilt_requests,
};
use crate::types::errors::{Error, check_count};
use crate::types::ids::{BlockId, Row};

/// Let requests count no more than num_computed_tokens; returns the rows of those that fell.
///
/// They leave the open batch. A failed load that is still unconfirmed reaches every request that
/// rests on it, named or not. Fails with UnknownRequest, RepeatedRequest, SwappedOut,
/// LoadUnfinished, InvalidCount, BeyondComputed, HitInOpenBatch, HeldByOthers.
pub fn rewind(
    state: &mut State,
    request_ids: &[&str],
    num_computed_tokens: i64,
) -> Result<Vec<Row>, Error> {
    let rows = state.distinct(request_ids)?;
    check_count("num_computed_tokens", num_computed_tokens, 0)?;
    for &row in &rows {
        check_rewound(state, row, num_computed_tokens)?;
    }
    let count = num_computed_tokens as u32;
    let mut kept: Vec<(Row, u32)> = rows.iter().map(|&row| (row, count)).collect();
    kept.extend(spoilt_requests(state, &rows, count));
    let falling: Vec<Row> = kept.iter().map(|&(row, _)| row).collect();
    check_leaving(state, &falling)?;
    check_held(state, &kept, &rows, count)?;
    for &row in &rows {
        let blocks = unwritten(state, row, count);
        let cut = if state.has_tails { withdraw_tails(state, row, count) } else { Vec::new() };
        for block in blocks.into_iter().filter(|block| !cut.contains(block)) {
            state.device.unpublish(block, &mut state.effects);
        }
    }
    if state.has_states {
        falling.iter().for_each(|&row| withdraw_states(state, row, count));
    }
    let left = reached_requests(state, &rows, count).into_iter();
    let left = left.filter(|&row| state[row].num_computed == 0);
    let stale: Vec<Row> = falling.iter().copied().chain(left).collect();
    spoil_loads(state, &rows, count);
    let before: Vec<u32> = falling.iter().map(|&row| state[row].num_computed).collect();
    for (row, num_tokens) in kept {
        fall(state, row, num_tokens);
    }
    for row in stale {
        let open = state.batch.number;
        state[row].await_none(open);
    }
    let fell = falling.into_iter().zip(before);
    Ok(fell.filter(|&(row, count)| state[row].num_computed < count).map(|(row, _)| row).collect())
}

/// Fails unless a request counts or loads at least num_tokens tokens, and can be cut.
///
/// A request that reports a load may be swapped out, may wait, or may have loads of its own.
fn check_rewound(state: &State, row: Row, num_tokens: i64) -> Result<(), Error> {
    let loaded = most_loaded(state, row);
    if num_tokens >= i64::from(loaded) {
        state.check_idle(row)?;
    }
    let num_computed = i64::from(state[row].num_computed.max(loaded));
    if num_tokens > num_computed {
        let request = state[row].name();
        return Err(Error::BeyondComputed { request, num_computed, requested: num_tokens });
    }
    Ok(())
}

/// Take a request out of the open batch and lower its count to at most num_tokens.
fn fall(state: &mut State, row: Row, num_tokens: u32) {
    if !state[row].host_tables.is_empty() {
        drop_host(state, row);
        return;
    }
    let num_tokens = num_tokens.min(num_loaded(state, row));
    abandon_loads(state, row);
    leave_open_batch(state, row);
    cut_tables(state, row, num_tokens, 0);
}

/// Return the tokens that a request counts, without those still being loaded.
fn num_loaded(state: &State, row: Row) -> u32 {
    let request = &state[row];
    if request.num_loading == 0 {
        return request.num_computed;
    }
    let operations = state.operations.values().filter(|each| each.request == Some(row));
    operations.map(|each| each.first_token).fold(request.load_end, u32::min)
}

/// Return the blocks of a request for positions from num_tokens on, up to the first load that it
/// reports; none if that load begins at or before num_tokens.
fn unwritten(state: &State, row: Row, num_tokens: u32) -> Vec<BlockId> {
    let mut blocks = Vec::new();
    let loaded = first_reported(state, row, num_tokens);
    if loaded.is_some_and(|loaded| loaded <= num_tokens) {
        return blocks;
    }
    for (group, table) in state.config.groups.iter().zip(&state[row].tables) {
        if !(group.is_cross() || group.is_state()) {
            let end = loaded.map_or(u32::MAX, |loaded| loaded.div_ceil(group.block_size));
            let first = (num_tokens / group.block_size) as usize;
            let past = table.iter().take(end as usize).skip(first);
            blocks.extend(past.filter(|&&block| !state.is_null(block)));
        }
    }
    blocks
}

/// Withdraw the keys past num_tokens of the unwritten blocks that contain this count, and none
/// before; returns these blocks.
fn withdraw_tails(state: &mut State, row: Row, num_tokens: u32) -> Vec<BlockId> {
    let mut cut = Vec::new();
    let blocks = unwritten(state, row, num_tokens);
    for group_id in 0..state.config.groups.len() as u32 {
        let group = &state.config.groups[group_id as usize];
        if group.is_state() || num_tokens.is_multiple_of(group.block_size) {
            continue;
        }
        let position = num_tokens / group.block_size;
        let block = state[row].tables[group_id as usize].get(position as usize).copied();
        if let Some(block) = block.filter(|block| blocks.contains(block)) {
            withdraw_past(state, row, (group_id, position), num_tokens);
            cut.push(block);
        }
    }
    cut
}

/// Fails with HeldByOthers if a request goes on counting tokens that these leave unwritten.
///
/// kept: the tokens that those which fall keep at most.
fn check_held(
    state: &State,
    kept: &[(Row, u32)],
    rewound: &[Row],
    num_tokens: u32,
) -> Result<(), Error> {
    let shared: BTreeSet<BlockId> = rewound
        .iter()
        .flat_map(|&row| unwritten(state, row, num_tokens))
        .filter(|&block| state.device.ref_count(block) > 1)
        .collect();
    if shared.is_empty() {
        return Ok(());
    }
    let mut blocks: BTreeSet<BlockId> = BTreeSet::new();
    let mut others: BTreeSet<&str> = BTreeSet::new();
    for (row, other) in (0..).map(Row).zip(&state.requests) {
        let Some(other) = other else { continue };
        let most = kept.iter().find(|(each, _)| *each == row).map_or(u32::MAX, |&(_, most)| most);
        let count = other.num_computed.min(most);
        if count <= num_tokens {
            continue;
        }
        for block in counted(state, other, num_tokens, count) {
            if shared.contains(&block) {
                blocks.insert(block);
                others.insert(&other.request_id);
            }
        }
    }
    if others.is_empty() {
        return Ok(());
    }
    Err(Error::HeldByOthers {
        blocks: blocks.into_iter().map(i64::from).collect(),
        requests: others.into_iter().map(str::to_owned).collect(),
    })
}

/// The blocks in which a request's tokens from num_tokens up to an end are.
fn counted<'a>(
    state: &'a State,
    request: &'a RequestState,
    num_tokens: u32,
    end: u32,
) -> impl Iterator<Item = BlockId> + 'a {
    let tables = state.config.groups.iter().zip(&request.tables);
    tables.filter(|(group, _)| !group.is_cross()).flat_map(move |(group, table)| {
        let first = (num_tokens / group.block_size) as usize;
        let end = end.div_ceil(group.block_size) as usize;
        table.iter().take(end).skip(first).copied()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transitions::queries::get_computed_blocks;
    use crate::transitions::tests::*;
    use crate::types::slot_request::RequestedHit;

    /// Request a wrote four tokens of five, and b hit them and wrote the fifth.
    fn hit_by_another(block_size: u32) -> State {
        let mut state = make_state(Config::new(6, block_size, b"seed")).unwrap();
        admit(&mut state, "a", &[1, 2, 3, 4, 5], 4);
        add_request(&mut state, Request::new("b", &[1, 2, 3, 4, 5])).unwrap();
        let hit = Some(RequestedHit::from(&get_computed_blocks(&state, "b").unwrap()));
        let slot_request = SlotRequest { hit, ..SlotRequest::new(1) };
        allocate_slots(&mut state, "b", &slot_request).unwrap().unwrap();
        take_batch(&mut state).unwrap();
        state
    }

    #[test]
    fn who_counts_what_was_not_written_is_named() {
        let mut state = hit_by_another(2);
        let held = Error::HeldByOthers { blocks: vec![2], requests: vec!["b".to_owned()] };
        assert_eq!(rewind(&mut state, &["a"], 2), Err(held));
        rewind(&mut state, &["a", "b"], 2).unwrap();
        assert_eq!(state.device.key(BlockId(2)), None);
        assert!(state.device.key(BlockId(1)).is_some());
        assert!(state.requests().all(|each| each.num_computed == 2 && each.tables[0].len() == 1));
    }

    #[test]
    fn a_rewind_into_a_block_leaves_the_whole_block_unwritten() {
        let mut state = hit_by_another(4);
        let held = Error::HeldByOthers { blocks: vec![1], requests: vec!["b".to_owned()] };
        assert_eq!(rewind(&mut state, &["a"], 3), Err(held));
    }
}
