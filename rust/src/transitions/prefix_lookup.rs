// SPDX-License-Identifier: Apache-2.0
//! Finds the longest cached prefix of a request, over all groups at once.
//!
//! Invariants: every group resumes at the same token, so the length is a multiple of all block
//! sizes, except of state groups, which find the state at exactly this length. It is the largest at
//! which each group finds what its next query would see: full attention the whole prefix, a sliding
//! window the blocks before the length (at least one), a chunk those from its start. If a group
//! drops its last hit, the block after the length must be found too. A miss in one group shortens
//! the length for all, until no group misses. If hits may end inside blocks, the length is a
//! multiple of the hash unit, a part of a block is found under its tail key, and a group that drops
//! its last hit must find one unit more.
//! Source: S000-54, 57, 58; S001-79, 81. Twin: kvcore/transitions/prefix_lookup.py.

use std::ops::Range;

use smallvec::SmallVec;

use crate::mutants::{Mutant, seeded};
use crate::state::state::{NULL_BLOCK, RequestState, State};
use crate::types::config::Config;
use crate::types::groups::{Kind, skipped_blocks};
use crate::types::ids::BlockId;
use crate::types::values::{Hit, KVCacheBlocks};

/// Return the longest hit that leaves at least one token to compute; an empty one if caching is
/// off.
#[must_use]
pub fn longest_hit(state: &State, request: &RequestState) -> Hit {
    let mut search = Search { state, request, most: 0, found: Vec::new() };
    search.found.resize(state.config.groups.len(), Vec::new());
    let (mut length, mut num_common) = (0, 0);
    if state.config.enable_caching && !request.skip_reading {
        let num_hashed = request.block_hashes.len() as u32 * state.hash_block_size;
        let left = u32::from(!seeded(Mutant::FullHit));
        search.most = request.num_tokens().saturating_sub(left).min(num_hashed);
        length = aligned(state, search.most);
        if state.has_states {
            num_common = common_length(&mut search, length, false);
            length = num_common;
        }
        length = common_length(&mut search, length, true);
    }
    let blocks = KVCacheBlocks { blocks: hit_blocks(search, length) };
    Hit { blocks, num_tokens: length, num_common }
}

/// A search, and what it has found.
#[derive(Debug)]
pub struct Search<'a> {
    state: &'a State,
    request: &'a RequestState,
    /// Tokens that may match.
    most: u32,
    /// Leading blocks per group, if blocks are looked up in that order.
    found: Vec<Vec<BlockId>>,
}

/// The largest length up to this one that every group finds. states: whether state groups count.
fn common_length(search: &mut Search<'_>, mut length: u32, states: bool) -> u32 {
    let groups = &search.state.config.groups;
    let counts = |&group: &u32| states || !groups[group as usize].is_state();
    let mut order: SmallVec<[u32; 8]> = (0..groups.len() as u32).filter(counts).collect();
    order.sort_by_key(|&group| groups[group as usize].is_windowed());
    let mut agreed = 0;
    let mut group = 0;
    while agreed < order.len() && length > 0 {
        let found = group_length(search, order[group], length);
        agreed = if found == length { agreed + 1 } else { 1 };
        length = found;
        group = (group + 1) % order.len();
    }
    length
}

/// Return the largest length up to `length` that one group finds.
fn group_length(search: &mut Search<'_>, group_id: u32, mut length: u32) -> u32 {
    let state = search.state;
    if state.config.groups[group_id as usize].is_state() {
        while length > 0 && search.look_at(group_id, length).is_none() {
            length -= state.hit_alignment;
        }
        return length;
    }
    if state.has_tails {
        return tailed_length(search, group_id, length);
    }
    let size = state.config.groups[group_id as usize].block_size;
    let dropped = u32::from(state.config.drops_last_hit(group_id));
    let most = (search.most / size).saturating_sub(dropped) * size;
    length = aligned(state, length.min(most));
    while length > 0 {
        let positions = needed(&state.config, group_id, length);
        let Some(missing) = first_missing(search, group_id, positions) else {
            return length;
        };
        length = aligned(state, missing.saturating_sub(dropped) * size);
        if !state.config.groups[group_id as usize].is_windowed() {
            return length;
        }
    }
    0
}

/// Return the same length if it may end inside a block.
#[cold]
#[inline(never)]
fn tailed_length(search: &Search<'_>, group_id: u32, length: u32) -> u32 {
    let state = search.state;
    let (size, unit) = (state.config.groups[group_id as usize].block_size, state.hit_alignment);
    let dropped = unit * u32::from(state.config.drops_last_hit(group_id));
    let mut length = aligned(state, length.min(search.most.saturating_sub(dropped)));
    while length > 0 {
        let is_missing = |&position: &u32| search.look(group_id, position).is_none();
        let missing = match needed(&state.config, group_id, length) {
            Needed::Forward(first, end) => (first..end).find(is_missing),
            Needed::Backward(first, end) => (first..end).rev().find(is_missing),
        };
        if let Some(missing) = missing {
            length = ((missing + 1) * size - unit).saturating_sub(dropped);
        } else if needed_tails(&state.config, group_id, length)
            .any(|end| find_tail(state, search.request, group_id, end).is_none())
        {
            length -= unit;
        } else {
            return length;
        }
    }
    0
}

/// Return the largest length up to `num_tokens` tokens at which all groups can resume.
pub(crate) fn aligned(state: &State, num_tokens: u32) -> u32 {
    num_tokens / state.hit_alignment * state.hit_alignment
}

/// The positions of a group's table that a hit needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needed {
    /// A range [first, end), in this order.
    Forward(u32, u32),
    /// The same range, the last one first.
    Backward(u32, u32),
}

impl Needed {
    /// The positions, rising.
    pub(crate) fn range(self) -> Range<u32> {
        let (Needed::Forward(first, end) | Needed::Backward(first, end)) = self;
        first..end
    }
}

/// Whether a look-up can find this many tokens of a request in all groups.
pub(crate) fn is_found(state: &State, request: &RequestState, length: u32) -> bool {
    let search = Search { state, request, most: 0, found: Vec::new() };
    (0..state.config.groups.len() as u32).all(|group| {
        if state.config.groups[group as usize].is_state() {
            return search.look_at(group, length).is_some();
        }
        let mut positions = needed(&state.config, group, length).range();
        positions.all(|position| search.look(group, position).is_some())
            && needed_tails(&state.config, group, length)
                .all(|end| find_tail(state, request, group, end).is_some())
    })
}

/// The most tokens up to this many that a look-up finds of a request.
pub(crate) fn found_length(state: &State, request: &RequestState, most: u32) -> u32 {
    let most = most.min(request.block_hashes.len() as u32 * state.hash_block_size);
    let found = vec![Vec::new(); state.config.groups.len()];
    common_length(&mut Search { state, request, most, found }, aligned(state, most), true)
}

/// Return the positions of the whole blocks that a group must find to resume at a length, in the
/// order of look-up.
pub(crate) fn needed(config: &Config, group_id: u32, length: u32) -> Needed {
    let rule = &config.groups[group_id as usize];
    let num_blocks = length.div_ceil(rule.block_size);
    let dropped = u32::from(config.drops_last_hit(group_id));
    let end = match config.hash_unit {
        Some(unit) if config.enable_caching && !rule.is_state() => {
            (length + dropped * unit) / rule.block_size
        }
        _ => num_blocks + dropped,
    };
    let first = skipped_blocks(rule, length);
    if rule.kind == Kind::SlidingWindow {
        return Needed::Backward(first.min(num_blocks - 1), end);
    }
    Needed::Forward(first, end)
}

/// Return the ends of the parts of blocks that a group must find to resume at a length.
pub(crate) fn needed_tails(
    config: &Config,
    group_id: u32,
    length: u32,
) -> impl Iterator<Item = u32> + use<> {
    let group = &config.groups[group_id as usize];
    let (size, unit) = (group.block_size, config.hash_block_size());
    let has_tails = config.has_tails() && !group.is_state();
    let ends = [Some(length), config.drops_last_hit(group_id).then_some(length + unit)];
    ends.into_iter().flatten().filter(move |end| has_tails && !end.is_multiple_of(size))
}

/// Find the block of the tail key at a number of tokens.
fn find_tail(
    state: &State,
    request: &RequestState,
    group_id: u32,
    num_tokens: u32,
) -> Option<BlockId> {
    if num_tokens > request.block_hashes.len() as u32 * state.hash_block_size {
        return None;
    }
    state.device.first_tail(&request.key_at(state.hash_block_size, group_id, num_tokens))
}

/// Return the first of these positions whose block is not findable.
fn first_missing(search: &mut Search<'_>, group_id: u32, positions: Needed) -> Option<u32> {
    match positions {
        Needed::Backward(first, end) => {
            (first..end).rev().find(|&position| search.look(group_id, position).is_none())
        }
        Needed::Forward(0, end) => {
            for position in search.found[group_id as usize].len() as u32..end {
                match search.look(group_id, position) {
                    Some(block) => search.found[group_id as usize].push(block),
                    None => return Some(position),
                }
            }
            None
        }
        Needed::Forward(first, end) => {
            (first..end).find(|&position| search.look(group_id, position).is_none())
        }
    }
}

impl Search<'_> {
    /// Find the state after a number of tokens that have hashes.
    fn look_at(&self, group_id: u32, num_tokens: u32) -> Option<BlockId> {
        let key = self.request.key_at(self.state.hash_block_size, group_id, num_tokens);
        self.state.device.index.first(&key)
    }

    /// Find the block for a position.
    fn look(&self, group_id: u32, position: u32) -> Option<BlockId> {
        let scale = self.state.scales[group_id as usize];
        if position >= self.request.num_hashed(scale) {
            return None;
        }
        self.state.device.index.first(&self.request.key(scale, group_id, position))
    }
}

/// Add the blocks of a group's hit that may end inside the last of them.
#[cold]
#[inline(never)]
fn extend_tailed(
    search: &Search<'_>,
    group_id: u32,
    length: u32,
    num_blocks: u32,
    ids: &mut Vec<BlockId>,
) {
    let num_whole = length / search.state.config.groups[group_id as usize].block_size;
    for position in ids.len() as u32..num_blocks {
        let block = match position < num_whole {
            true => search.look(group_id, position),
            false => find_tail(search.state, search.request, group_id, length),
        };
        ids.push(block.expect("IDX-COMPLETE: the group has found each block of the length"));
    }
}

/// Return the blocks of a hit per group, with the null block where no query sees one.
fn hit_blocks(mut search: Search<'_>, length: u32) -> Vec<Vec<BlockId>> {
    let mut blocks = std::mem::take(&mut search.found); // those that were found in order
    let look = |group, position| {
        let is_state = search.state.config.groups[group as usize].is_state();
        let block = match is_state {
            true => search.look_at(group, length),
            false => search.look(group, position),
        };
        block.expect("IDX-COMPLETE: the group has found each block of the length")
    };
    for ((index, group), ids) in (0..).zip(&search.state.config.groups).zip(&mut blocks) {
        let num_blocks = if group.is_cross() { 0 } else { length.div_ceil(group.block_size) };
        let first = skipped_blocks(group, length).min(num_blocks);
        let tailed = search.state.has_tails && !group.is_state();
        if !tailed && first == 0 && ids.len() >= num_blocks as usize {
            ids.truncate(num_blocks as usize);
            continue;
        }
        ids.clear();
        ids.resize(first as usize, NULL_BLOCK);
        if tailed {
            extend_tailed(&search, index, length, num_blocks, ids);
        } else {
            ids.extend((first..num_blocks).map(|position| look(index, position)));
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transitions::publish::evict_blocks;
    use crate::transitions::tests::*;
    use crate::types::groups::Group;

    /// A full group in blocks of 2 and a window of 3 tokens in blocks of 4; eight tokens cached.
    fn two_groups() -> State {
        let mut config = Config::new(12, 2, b"seed");
        config.groups.push(Group::windowed(4, Kind::SlidingWindow, 3));
        let mut state = make_state(config).unwrap();
        admit(&mut state, "a", &[1, 2, 3, 4, 5, 6, 7, 8, 9], 8);
        add_request(&mut state, Request::new("b", &[1, 2, 3, 4, 5, 6, 7, 8, 9])).unwrap();
        state
    }

    fn found(state: &State) -> (Vec<Vec<u32>>, u32) {
        let hit = longest_hit(state, &state[state.request("b").unwrap()]);
        (hit.blocks.get_block_ids(), hit.num_tokens)
    }

    #[test]
    fn a_window_needs_only_what_the_next_query_sees() {
        let mut state = two_groups();
        assert_eq!(found(&state), (vec![vec![1, 2, 3, 4], vec![0, 6]], 8));
        evict_blocks(&mut state, &[5]).unwrap();
        assert_eq!(found(&state), (vec![vec![1, 2, 3, 4], vec![0, 6]], 8));
    }

    #[test]
    fn one_groups_miss_shortens_the_hit_for_all() {
        let mut state = two_groups();
        evict_blocks(&mut state, &[4]).unwrap();
        assert_eq!(found(&state), (vec![vec![1, 2], vec![5]], 4));
        evict_blocks(&mut state, &[5]).unwrap();
        assert_eq!(found(&state), (vec![vec![], vec![]], 0));
    }
}
