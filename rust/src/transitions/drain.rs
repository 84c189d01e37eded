// SPDX-License-Identifier: Apache-2.0
//! Draining: events, statistics and new blocks leave the state once.
//!
//! Rules: a new block is named if nothing but the forward pass fills it. A block that is taken
//! again is what its last taking says; a block that a command fills is not new. Source: S000-50,
//! 51. Twin: kvcore/transitions/drain.py.

use hashbrown::HashSet;

use crate::state::state::State;
use crate::types::clone_in_place::clone_in_place;
use crate::types::events::EventLog;
use crate::types::ids::BlockId;
use crate::types::values::PrefixCacheStats;

/// Device blocks that were allocated, a group, not yet drained.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NewBlocks {
    groups: Vec<Vec<BlockId>>,
    /// All of them, for a quick look.
    known: HashSet<BlockId>,
}

clone_in_place!(NewBlocks { groups, known });

impl NewBlocks {
    /// None of so many groups.
    pub(crate) fn new(num_groups: usize) -> Self {
        Self { groups: vec![Vec::new(); num_groups], known: HashSet::new() }
    }

    /// The blocks of each group, in the order of their allocation.
    pub(crate) fn groups(&self) -> &[Vec<BlockId>] {
        &self.groups
    }

    /// Add a block of a group.
    pub(crate) fn push(&mut self, group: u32, block: BlockId) {
        self.groups[group as usize].push(block);
        self.known.insert(block);
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Hand them out, group by group.
    pub(crate) fn take(&mut self) -> Vec<BlockId> {
        let taken = self.groups.concat();
        self.groups.iter_mut().for_each(Vec::clear);
        self.known.clear();
        taken
    }

    fn remove(&mut self, blocks: &[BlockId]) {
        let mut found = false;
        for block in blocks {
            found |= self.known.remove(block);
        }
        if found {
            let known = &self.known;
            self.groups.iter_mut().for_each(|new| new.retain(|block| known.contains(block)));
        }
    }
}

/// Hand out the events since the last call, in order; none where events are disabled.
pub fn take_events(state: &mut State) -> EventLog {
    state.effects.events.take()
}

/// Hand out the look-up statistics since the last call.
pub fn take_stats(state: &mut State) -> PrefixCacheStats {
    std::mem::take(&mut state.stats)
}

/// Hand out the blocks that full-attention groups got since the last call, group by group.
///
/// A block that a command fills is not among them. Empty where `record_new_blocks` is off.
pub fn take_new_block_ids(state: &mut State) -> Vec<BlockId> {
    state.new_blocks.take()
}

/// Do not name these blocks as new: they are taken again, or a command fills them.
pub(crate) fn forget_new(state: &mut State, blocks: &[BlockId]) {
    if state.config.record_new_blocks {
        state.new_blocks.remove(blocks);
    }
}

/// Say that a scheduling step begins; no kind of group needs it yet.
pub fn new_step_starts(_state: &mut State) {}
