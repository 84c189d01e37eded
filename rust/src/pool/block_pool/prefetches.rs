// SPDX-License-Identifier: Apache-2.0
//! What is prefetched while many blocks are taken. A part of block_pool.rs.

use super::{AHEAD, BlockPool};
use crate::pool::prefetch::prefetch;
use crate::types::ids::BlockId;

/// As many blocks are taken before anything that is prefetched for them could arrive.
const FEW: usize = 2;

impl BlockPool {
    /// Prefetch for the first of many blocks, which are taken now.
    #[inline(always)]
    pub(super) fn prefetch_first(&self, blocks: &[BlockId]) {
        if blocks.len() > FEW {
            blocks.iter().take(2 * AHEAD).for_each(|&block| self.prefetch(block));
        }
    }

    /// Prefetch what is read when a block is taken.
    #[inline]
    pub(super) fn prefetch(&self, block: BlockId) {
        prefetch(&self.owners, block.index());
        self.index.prefetch_key(block);
    }
}
