// SPDX-License-Identifier: Apache-2.0
//! A pool whose blocks may have tail keys, under which their first tokens are found.
//!
//! A part of block_pool.rs.

use super::{BlockPool, COUNT, KEYED, TAILED};
use crate::pool::quarantine::Quarantine;
use crate::types::commands::Command;
use crate::types::effects::Effects;
use crate::types::ids::BlockId;
use crate::types::keys::Key;

impl BlockPool {
    /// Whether a block has a key, be it a tail key.
    #[must_use]
    #[inline]
    pub fn has_key(&self, block: BlockId) -> bool {
        let owners = self.owners[block.index()];
        owners >= TAILED && (owners & TAILED > 0 || !self.index.is_older(block))
    }

    /// Free blocks whose content can be hit. O(blocks), with a word read of each.
    #[must_use]
    pub fn num_cached(&self) -> u32 {
        if self.index.has_ended() {
            return self.queue.iter().filter(|&block| self.has_key(block)).count() as u32;
        }
        let is_idle = |&&word: &&u32| word >= TAILED && word & COUNT == 0;
        let waiting = self.quarantine.as_ref().map_or_else(Vec::new, Quarantine::blocks);
        let num_waiting = waiting.into_iter().filter(|&block| self.has_key(block)).count();
        (self.owners.iter().filter(is_idle).count() - num_waiting) as u32
    }

    /// The tail keys of a block, shortest first.
    #[must_use]
    pub fn tail_keys(&self, block: BlockId) -> &[Key] {
        self.tails.as_ref().map_or(&[], |tails| tails.keys(block))
    }

    /// The block that a look-up of a tail key finds.
    #[must_use]
    pub fn first_tail(&self, key: &Key) -> Option<BlockId> {
        self.tails.as_ref().and_then(|tails| tails.blocks(key).first().copied())
    }

    /// Make the first tokens of a block findable under a tail key, at its place among those of the
    /// block.
    pub(crate) fn publish_tail(&mut self, block: BlockId, key: Key, place: usize) {
        if let Some(tails) = &mut self.tails {
            tails.insert(block, key, place);
            self.owners[block.index()] |= TAILED;
        }
    }

    /// Forget tail keys of a block, in this order.
    pub(crate) fn withdraw_tails(&mut self, block: BlockId, keys: &[Key], effects: &mut Effects) {
        let Some(tails) = &mut self.tails else { return };
        for &key in keys {
            effects.emit(Command::Evict { block, key });
            if tails.remove(block, &key) {
                self.owners[block.index()] &= !TAILED;
            }
        }
    }

    /// Forget all tail keys of a block, shortest first.
    #[cold]
    #[inline(never)]
    pub(super) fn withdraw_all_tails(&mut self, block: BlockId, effects: &mut Effects) {
        let keys = self.tail_keys(block).to_vec();
        self.withdraw_tails(block, &keys, effects);
    }

    /// Set the tail keys of blocks, and the order of the blocks of each key.
    pub(crate) fn restore_tails(
        &mut self,
        held: Vec<(BlockId, Vec<Key>)>,
        ranked: impl Iterator<Item = (Key, BlockId)>,
    ) {
        let Some(tails) = &mut self.tails else { return };
        held.iter().for_each(|(block, _)| self.owners[block.index()] |= TAILED);
        tails.restore(held, ranked);
    }

    /// Forget all tail keys without a command. is_older: blocks that had only these count as blocks
    /// of an epoch that ends now.
    #[cold]
    #[inline(never)]
    pub(super) fn clear_tails(&mut self, is_older: bool) {
        let Some(tails) = &mut self.tails else { return };
        let blocks: Vec<BlockId> = tails.iter().map(|(block, _)| block).collect();
        tails.clear();
        for block in blocks {
            self.owners[block.index()] &= !TAILED;
            if is_older && self.owners[block.index()] < KEYED {
                self.mark_older(block);
            }
        }
    }
}
