// SPDX-License-Identifier: Apache-2.0
//! The state of a pool's levels; changed in retention.rs. Twin: kvcore/pool/retention_state.py.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::pool::free_queue::CURRENT;
use crate::types::ids::BlockId;
use crate::types::retention::LEVEL_MAX;

/// The retention of a block. until: when its level ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kept {
    pub(crate) base: u8,
    pub(crate) level: u8,
    pub(crate) until: u64,
}

/// Rings of a free queue with levels: the first has the blocks without content, then those of older
/// epochs; each other ring is a level.
pub(crate) const NUM_RINGS: u32 = CURRENT + LEVEL_MAX as u32 + 1;

/// The end of a level: the time, the level, when its block joined, and the block.
type End = Reverse<(u64, u8, u64, BlockId)>;

/// The state of a pool's levels.
#[derive(Debug, Clone, Default)]
pub struct RetentionState {
    /// The time in ms.
    pub(crate) now: u64,
    /// The retention of each block; meaningless for a free block without a key.
    pub(crate) kept: Vec<Kept>,
    /// For each block, the number of the move that put it into its present ring.
    pub(crate) joined: Vec<u64>,
    pub(crate) num_joined: u64,
    pub(crate) ends: BinaryHeap<End>,
}

impl RetentionState {
    /// Forget the retention of a block.
    pub(crate) fn forget(&mut self, block: BlockId) {
        self.kept[block.index()] = Kept::default();
        self.joined[block.index()] = 0;
    }

    /// Note that a block joins the queue; returns its present level.
    pub(crate) fn note_joined(&mut self, block: BlockId) -> u8 {
        let kept = self.kept[block.index()];
        self.num_joined += 1;
        self.joined[block.index()] = self.num_joined;
        if self.now < kept.until && kept.base < kept.level {
            self.ends.push(Reverse((kept.until, kept.level, self.num_joined, block)));
        }
        level_of(kept, self.now)
    }

    /// Drop outdated ends of levels if there are many.
    pub(crate) fn sweep(&mut self) {
        if self.ends.len() > 2 * self.kept.len() {
            let joined = &self.joined;
            self.ends.retain(|Reverse((_, _, number, block))| joined[block.index()] == *number);
        }
    }
}

/// Return the level of a block now.
#[must_use]
pub fn level_of(kept: Kept, now: u64) -> u8 {
    if now < kept.until { kept.base.max(kept.level) } else { kept.base }
}
