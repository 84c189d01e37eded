// SPDX-License-Identifier: Apache-2.0
//! Owners of blocks that are not requests, and checks of the ids that calls name.
//!
//! A part of block_pool.rs.

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use super::BlockPool;
use crate::types::effects::Effects;
use crate::types::errors::Error;
use crate::types::ids::BlockId;

impl BlockPool {
    /// Add an owner that is not a request.
    pub fn pin(&mut self, block: BlockId, effects: &mut Effects) {
        self.touch(block, effects);
        *self.pins.entry(block).or_insert(0) += 1;
    }

    /// Remove an owner that `pin` added.
    pub fn unpin(&mut self, block: BlockId, effects: &mut Effects) {
        let left = self.num_pins(block) - 1;
        if left > 0 {
            self.pins.insert(block, left);
        } else {
            self.pins.remove(&block);
        }
        self.release([block], effects);
    }

    /// The block of this number. Fails with UnknownBlock unless the pool has it and it is not the
    /// null block.
    pub fn check_block(&self, block: i64) -> Result<BlockId, Error> {
        let last = i64::from(self.num_blocks()) - 1;
        if (i64::from(self.first_block)..=last).contains(&block) {
            return Ok(BlockId(block as u32));
        }
        Err(Error::UnknownBlock { block, first: i64::from(self.first_block), last })
    }

    /// The blocks of these numbers. Fails with UnknownBlock or UnusedBlock unless each can be
    /// pinned.
    pub fn check_pins(&self, blocks: &[i64]) -> Result<Vec<BlockId>, Error> {
        let check = |&number: &i64| {
            let block = self.check_block(number)?;
            if self.ref_count(block) == 0 && !self.has_key(block) {
                return Err(Error::UnusedBlock { block: number });
            }
            Ok(block)
        };
        blocks.iter().map(check).collect()
    }

    /// The blocks of these numbers. Fails with UnknownBlock or NotPinned unless each has the pins
    /// that the call removes. held: pins of a block that are not the caller's to remove.
    pub fn check_unpins(
        &self,
        blocks: &[i64],
        held: impl Fn(BlockId) -> u32,
    ) -> Result<Vec<BlockId>, Error> {
        let times = count_blocks(blocks);
        let check = |&number: &i64| {
            let block = self.check_block(number)?;
            let num_pins = i64::from(self.num_pins(block)) - i64::from(held(block));
            let requested = times[&number];
            if num_pins < requested {
                return Err(Error::NotPinned { block: number, num_pins, requested });
            }
            Ok(block)
        };
        blocks.iter().map(check).collect()
    }
}

/// Count how often each number occurs.
pub(crate) fn count_blocks(blocks: &[i64]) -> HashMap<i64, i64, FxBuildHasher> {
    let mut times = HashMap::default();
    for &block in blocks {
        *times.entry(block).or_insert(0) += 1;
    }
    times
}
