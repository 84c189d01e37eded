// SPDX-License-Identifier: Apache-2.0
//! The blocks that full-attention groups got and that were not drained yet (tuples in Python).

use hashbrown::HashSet;

use crate::types::clone_in_place::clone_in_place;
use crate::types::ids::BlockId;

/// Device blocks per group that were allocated and not yet drained.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NewBlocks {
    groups: Vec<Vec<BlockId>>,
    /// The number in all groups, for a quick check.
    known: HashSet<BlockId>,
}

clone_in_place!(NewBlocks { groups, known });

impl NewBlocks {
    /// No new blocks in any group.
    pub(crate) fn new(num_groups: usize) -> Self {
        Self { groups: vec![Vec::new(); num_groups], known: HashSet::new() }
    }

    /// The blocks of each group, in the order of their allocation.
    pub(crate) fn groups(&self) -> &[Vec<BlockId>] {
        &self.groups
    }

    /// Add a block of a group.
    pub(crate) fn push(&mut self, group_id: u32, block: BlockId) {
        self.groups[group_id as usize].push(block);
        self.known.insert(block);
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Take all blocks, group by group.
    pub(crate) fn take(&mut self) -> Vec<BlockId> {
        let taken = self.groups.concat();
        self.groups.iter_mut().for_each(Vec::clear);
        self.known.clear();
        taken
    }

    pub(crate) fn remove(&mut self, blocks: &[BlockId]) {
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
