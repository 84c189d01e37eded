// SPDX-License-Identifier: Apache-2.0
//! The records of external loads that may still fail, and of what rests on them.
//!
//! Invariants: a request that becomes an owner of a block that rests on a load rests on the load,
//! too. A request whose count falls to the start of the load no longer rests on it, but can report
//! it until the request is removed. The part of a load that no request can report any more is
//! dropped, and the keys that rest on it are withdrawn. A load is confirmed when the batch after
//! its own is taken (`max_in_flight=0`), or when its own batch completes. `rewind` reports a failed
//! load. Requests are in the order in which they first rested on the load, so that no outcome
//! depends on a name. A block that lost its key stays in the list until it gets another one; it is
//! ignored. Twin: kvcore/transitions/unconfirmed_loads.py.

use hashbrown::HashSet;

use crate::state::batch_records::{Reporter, UnconfirmedLoad};
use crate::state::state::State;
use crate::transitions::in_flight::give_back;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;

/// Note that the open batch loads tokens [first, end) of a request from outside.
pub(crate) fn note_load(state: &mut State, row: Row, first: u32, end: u32) {
    state.loads.push(UnconfirmedLoad {
        batch: state.batch.number,
        first,
        end,
        reporters: vec![Reporter { row, counted: end, most: end }],
        blocks: Vec::new(),
    });
}

/// Note that a request became an owner of blocks, of which it counts at most num_tokens tokens.
pub(crate) fn note_owner(state: &mut State, row: Row, blocks: &[BlockId], num_tokens: u32) {
    let State { loads, device, .. } = state;
    let keyed = |&block: &BlockId| device.has_key(block);
    let held: HashSet<BlockId> = blocks.iter().copied().filter(keyed).collect();
    for load in loads {
        let own = load.blocks.iter().filter(|(block, _)| held.contains(block));
        let most = own.map(|&(_, end)| end).max();
        if let Some(most) = most {
            load.count(row, most.min(load.end).min(num_tokens));
        }
    }
}

/// Note that blocks of a request got their keys, or that a batch owes them; each with the position
/// behind its last token.
pub(crate) fn note_keyed(state: &mut State, row: Row, keyed: &[(BlockId, u32)]) {
    let has_tails = |pair: &(BlockId, u32)| !state.device.tail_keys(pair.0).is_empty();
    let (tailed, keyed): (Vec<_>, Vec<_>) = keyed.iter().copied().partition(has_tails);
    tailed.into_iter().for_each(|pair| note_tail(state, row, pair, true, |_| true));
    let names: HashSet<BlockId> = keyed.iter().map(|&(block, _)| block).collect();
    for load in &mut state.loads {
        load.blocks.retain(|(block, _)| !names.contains(block));
        if load.reporter(row).counted > 0 {
            let first = load.first;
            load.blocks.extend(keyed.iter().filter(|&&(_, end)| end > first));
        }
    }
}

/// Note that a block of a request got a tail key, with the position behind its last token. Of a
/// block that had a key already, the greatest such position counts. rests_on: whether what the key
/// names rests on a load on which the request rests, if the block is not noted: the request must
/// have written it.
pub(crate) fn note_tail(
    state: &mut State,
    row: Row,
    (block, end): (BlockId, u32),
    had_key: bool,
    rests_on: impl Fn(&UnconfirmedLoad) -> bool,
) {
    for load in &mut state.loads {
        let rests = load.reporter(row).counted > 0 && end > load.first;
        if !had_key {
            load.blocks.retain(|&(each, _)| each != block);
        }
        let is_new = rests && rests_on(load);
        match load.blocks.iter_mut().find(|(each, _)| *each == block) {
            Some((_, known)) if rests => *known = end.max(*known),
            None if is_new => load.blocks.push((block, end)),
            _ => {}
        }
    }
}

/// Note that a request rewrites a block that keeps its key.
pub(crate) fn note_rewritten(state: &mut State, row: Row, block: BlockId, end: u32) {
    for load in &mut state.loads {
        let rests = load.reporter(row).counted > 0 && end > load.first;
        if rests && !load.blocks.contains(&(block, end)) {
            load.blocks.push((block, end));
        }
    }
}

/// Let a forked child, which counts num_tokens tokens, rest on what its parent rests on.
pub(crate) fn inherit_loads(state: &mut State, parent: Row, child: Row, num_tokens: u32) {
    for load in &mut state.loads {
        load.count(child, load.reporter(parent).counted.min(num_tokens));
    }
}

/// Note that a request counts at most num_tokens tokens.
///
/// A load of the open batch is dropped if no request rests on it any more.
pub(crate) fn lower_counted(state: &mut State, row: Row, num_tokens: u32) {
    let open = state.batch.number;
    state.loads.retain_mut(|load| {
        if let Some(known) = load.reporters.iter_mut().find(|each| each.row == row) {
            let counted = known.counted.min(num_tokens);
            known.counted = if counted > load.first { counted } else { 0 };
        }
        load.batch != open || load.reporters.iter().any(|each| each.counted > 0)
    });
}

/// Note that a request is removed and can no longer report loads.
///
/// Each load then ends after the last token whose failure another request can report. Keys that
/// rest on later tokens are withdrawn.
pub(crate) fn forget_reporter(state: &mut State, row: Row) {
    let mut loads = std::mem::take(&mut state.loads);
    loads.retain_mut(|load| {
        let left = load.reporters.iter().filter(|each| each.row != row);
        let end = left.map(|each| each.most).max().unwrap_or(load.first);
        if end < load.end {
            load.end = end;
            withdraw(state, load);
        }
        load.reporters.retain(|each| each.row != row);
        !load.reporters.is_empty()
    });
    state.loads = loads;
}

/// Forget the loads of batches up to this one.
pub(crate) fn confirm_loads(loads: &mut Vec<UnconfirmedLoad>, number: u64) {
    loads.retain(|load| load.batch > number);
}

/// Whether a block with a key rests on a load.
pub(crate) fn is_unconfirmed(state: &State, block: BlockId) -> bool {
    state.loads.iter().flat_map(|load| &load.blocks).any(|&(each, _)| each == block)
}

/// Return the end of the last load that a request started or ever rested on, 0 if there is none.
pub(crate) fn most_loaded(state: &State, row: Row) -> u32 {
    state.loads.iter().map(|load| load.reporter(row).most).max().unwrap_or(0)
}

/// Return the start of the first load that a rewind of a request to num_tokens tokens reports, or
/// None.
pub(crate) fn first_reported(state: &State, row: Row, num_tokens: u32) -> Option<u32> {
    let reported = state.loads.iter().filter(|load| load.is_reported(&[row], num_tokens));
    reported.map(|load| load.first).min()
}

/// Return the requests that a report reaches, without those that make it, each with the tokens that
/// it keeps.
pub(crate) fn spoilt_requests(state: &State, rows: &[Row], num_tokens: u32) -> Vec<(Row, u32)> {
    let mut kept: Vec<(Row, u32)> = Vec::new();
    for load in state.loads.iter().filter(|load| load.is_reported(rows, num_tokens)) {
        let end = num_tokens.max(load.first);
        let spoilt = load.reporters.iter().filter(|each| each.counted > end);
        for row in spoilt.map(|each| each.row) {
            match kept.iter_mut().find(|(each, _)| *each == row) {
                Some((_, known)) => *known = end.min(*known),
                None => kept.push((row, end)),
            }
        }
    }
    kept.retain(|(row, _)| !rows.contains(row));
    kept
}

/// Return the requests that ever counted tokens which a report says were not loaded, even if they
/// left.
///
/// If such a request counts tokens again, it was rescheduled, and takes only later output.
pub(crate) fn reached_requests(state: &State, rows: &[Row], num_tokens: u32) -> Vec<Row> {
    let reported = state.loads.iter().filter(|load| load.is_reported(rows, num_tokens));
    let counted = |load: &UnconfirmedLoad| {
        let end = num_tokens.max(load.first);
        let reporters = load.reporters.iter().filter(move |each| each.most > end);
        reporters.map(|each| each.row).collect::<Vec<Row>>()
    };
    reported.flat_map(counted).collect()
}

/// Withdraw the keys of what rests on the reported loads, and shorten these.
pub(crate) fn spoil_loads(state: &mut State, rows: &[Row], num_tokens: u32) {
    let mut loads = std::mem::take(&mut state.loads);
    loads.retain_mut(|load| {
        if load.is_reported(rows, num_tokens) {
            load.cut(num_tokens.max(load.first));
            withdraw(state, load);
        }
        load.end > load.first
    });
    state.loads = loads;
}

/// Withdraw the keys of what rests on a load past its end, also those that batches owe.
///
/// Parts of a block that end at or before the end stay findable.
fn withdraw(state: &mut State, load: &mut UnconfirmedLoad) {
    let (mut left, mut met) = (Vec::new(), HashSet::new());
    if state.has_states {
        let is_spoilt = |&(block, end): &(BlockId, u32), at| block == at && end > load.end;
        give_back(state, |owed| load.blocks.iter().any(|pair| is_spoilt(pair, owed.block)));
    }
    for (block, mut end) in std::mem::take(&mut load.blocks) {
        if end > load.end {
            let kept = kept_tails(state, load, (block, end));
            let State { device, effects, .. } = &mut *state;
            let tails = device.tail_keys(block).iter().copied();
            let spoilt: Vec<Key> = tails.filter(|key| !kept.contains(key)).collect();
            device.unpublish_full(block, effects);
            device.withdraw_tails(block, &spoilt, effects);
            end = load.end / state.hash_block_size * state.hash_block_size;
        }
        if end > load.first && state.rests(block) && met.insert((block, end)) {
            left.push((block, end));
        }
    }
    load.blocks = left;
}

/// Return the tail keys up to the end of a load, in the block that a position `end` is in or
/// behind, of the requests that can report the load.
fn kept_tails(state: &State, load: &UnconfirmedLoad, (block, end): (BlockId, u32)) -> HashSet<Key> {
    let Some(group_id) = state.device.tail_keys(block).first().map(Key::group_id) else {
        return HashSet::new();
    };
    let (size, unit) = (state.config.groups[group_id as usize].block_size, state.hash_block_size);
    let first = (end - 1) / size * size;
    let mut kept = HashSet::new();
    for request in load.reporters.iter().map(|each| &state[each.row]) {
        let last = (load.end / unit).min(request.block_hashes.len() as u32);
        let counts = (first / unit + 1..=last).map(|hash| hash * unit);
        kept.extend(counts.map(|count| request.key_at(unit, group_id, count)));
    }
    kept
}
