// SPDX-License-Identifier: Apache-2.0
//! Forgetting all keys of a pool, and the blocks whose keys belong to an older epoch.
//!
//! A part of block_pool.rs. A block of an older epoch keeps the mark of a key, and its entry in the
//! index, which no look-up returns, until it is taken, or freed if it has owners when the epoch
//! ends.

use super::{BlockPool, KEYED};
use crate::mutants::{Mutant, seeded};
use crate::pool::free_queue::{CURRENT, OLDER};
use crate::pool::hash_index::NO_KEY;
use crate::types::commands::Command;
use crate::types::effects::Effects;
use crate::types::ids::BlockId;

impl BlockPool {
    /// Whether a block is outside the free queue and had a key of an older epoch.
    pub(crate) fn is_older(&self, block: BlockId) -> bool {
        let is_keyed = || self.owners[block.index()] >= KEYED;
        self.index.is_older(block) && is_keyed() && !self.queue.contains(block)
    }

    /// The blocks outside the free queue that had a key of an older epoch, rising.
    pub(crate) fn older(&self) -> Vec<BlockId> {
        (0..self.num_blocks()).map(BlockId).filter(|&block| self.is_older(block)).collect()
    }

    /// Forget that a block had a key of an older epoch.
    #[cold]
    pub(crate) fn forget_older(&mut self, block: BlockId) {
        self.owners[block.index()] &= !KEYED;
        self.index.remove(block);
    }

    /// Let a block without a key have one of the epoch that is about to end.
    pub(super) fn mark_older(&mut self, block: BlockId) {
        self.index.insert(NO_KEY, block);
        self.owners[block.index()] |= KEYED;
    }

    /// Mark blocks without a key as those that had a key of an older epoch.
    pub(crate) fn restore_older(&mut self, blocks: &[BlockId]) {
        self.index.restore_older(blocks);
        blocks.iter().for_each(|block| self.owners[block.index()] |= KEYED);
    }

    /// Forget which keys no event named; a set without any is not touched.
    #[inline]
    fn forget_silent(&mut self) {
        if !self.silent.is_empty() {
            self.clear_silent();
        }
    }

    #[cold]
    fn clear_silent(&mut self) {
        self.silent.clear();
    }

    /// Forget every key.
    pub fn clear_index(&mut self, effects: &mut Effects) {
        let orders = self.policy.is_some();
        let is_cached = |block: &BlockId| orders && self.key(*block).is_some();
        let cached: Vec<BlockId> = self.queue.iter().filter(is_cached).collect();
        self.owners.iter_mut().for_each(|owners| *owners &= !KEYED);
        self.index.clear();
        if self.tails.is_some() {
            self.clear_tails(false);
        }
        self.forget_silent();
        self.policy.iter_mut().for_each(|policy| policy.history.clear());
        cached.into_iter().for_each(|block| self.move_by_policy(block));
        self.lower_all();
        if self.floors.is_some() {
            self.recount_all();
        }
        effects.emit(Command::EvictAll);
    }

    /// Forget every key, in O(1) unless a policy orders the queue or there are floors; blocks that
    /// are free now are taken before those freed later.
    #[inline]
    pub fn start_epoch(&mut self, effects: &mut Effects) {
        if self.tails.is_some() {
            self.clear_tails(true);
        }
        self.index.start_epoch();
        self.forget_silent();
        if !seeded(Mutant::EpochsAge) {
            self.queue.splice(CURRENT, OLDER);
        }
        if let Some(policy) = &mut self.policy {
            policy.start_epoch();
        }
        self.lower_all();
        if self.floors.is_some() {
            self.recount_all();
        }
        effects.emit(Command::EvictAll);
    }
}
