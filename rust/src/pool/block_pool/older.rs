// SPDX-License-Identifier: Apache-2.0
//! Blocks outside the free queue that had a key of an older epoch.

use crate::pool::block_pool::{BlockPool, KEYED};
use crate::types::ids::BlockId;

impl BlockPool {
    /// Whether a block is outside the free queue and had a key of an older epoch.
    pub(crate) fn is_older(&self, block: BlockId) -> bool {
        let is_held = self.owners[block.index()] >= KEYED && !self.queue.contains(block);
        is_held && self.index.is_older(block)
    }

    /// These blocks, rising.
    pub(crate) fn older(&self) -> Vec<BlockId> {
        (0..self.num_blocks()).map(BlockId).filter(|&block| self.is_older(block)).collect()
    }

    /// Forget that a block had a key of an older epoch.
    #[cold]
    pub(crate) fn forget_older(&mut self, block: BlockId) {
        self.owners[block.index()] &= !KEYED;
        self.index.remove(block);
    }

    /// Let blocks that have none be those that had a key of an older epoch.
    pub(crate) fn restore_older(&mut self, blocks: &[BlockId]) {
        self.index.restore_older(blocks);
        blocks.iter().for_each(|block| self.owners[block.index()] |= KEYED);
    }
}
