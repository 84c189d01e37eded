// SPDX-License-Identifier: Apache-2.0
//! Properties of the end of an epoch: older blocks are evicted first.
//!
//! No transition calls anything here. Twin: kvcore/check/properties/epochs.py.

use std::collections::BTreeSet;

use smallvec::SmallVec;

use crate::check::properties::published::Made;
use crate::pool::block_pool::BlockPool;
use crate::pool::free_queue::num_older;
use crate::types::commands::Command;
use crate::types::config::Eviction;
use crate::types::ids::BlockId;
use crate::types::violation::Finding;

/// The free queue of a pool, followed by the commands of a call.
pub(crate) struct Followed<'a> {
    before: &'a BlockPool,
    pub(crate) blocks: SmallVec<[BlockId; 16]>,
    /// The first ones, which are of older epochs.
    num_first: usize,
}

impl<'a> Followed<'a> {
    /// Begin with the queue before the call.
    pub(crate) fn new(before: &'a BlockPool) -> Self {
        let num_first = num_older(&before.queue) as usize;
        Followed { before, blocks: before.queue.iter().collect(), num_first }
    }

    /// Take a block, which must be the front unless any may be taken; false if it is not.
    pub(crate) fn take(&mut self, block: BlockId, any: bool) -> bool {
        let place = self.blocks.iter().position(|&each| each == block);
        let Some(place) = place.filter(|&place| any || place == 0) else { return false };
        self.blocks.remove(place);
        self.num_first -= usize::from(place < self.num_first);
        true
    }

    /// Put a freed block into its place.
    pub(crate) fn join(&mut self, block: BlockId, cached: bool) {
        if self.before.is_older(block) {
            self.blocks.insert(self.num_first, block);
            self.num_first += 1;
        } else if self.before.eviction() == Eviction::UncachedFirst && !cached {
            self.blocks.insert(0, block);
            self.num_first += usize::from(self.num_first > 0);
        } else {
            self.blocks.push(block);
        }
    }
}

/// EPOCH-FIRST: when an epoch ends, its free blocks and its blocks with keys become older blocks,
/// and leave before blocks with keys of the new epoch.
pub(crate) fn epoch_first(made: &Made<'_>) -> Finding {
    let (old, pool, name) = (&made.before.device, &made.after.device, made.call.transition());
    if made.after.epoch == 0 {
        return Ok(());
    }
    let mut held: BTreeSet<BlockId> = old.older().into_iter().collect();
    let first: Vec<BlockId> = pool.queue.iter().take(num_older(&pool.queue) as usize).collect();
    if made.after.epoch > made.before.epoch {
        let blocks = (0..old.num_blocks()).map(BlockId);
        held.extend(blocks.filter(|&block| old.has_key(block)));
        if !old.queue.iter().eq(first.iter().copied()) {
            return Err(format!("{name} puts {first:?} first, but others were free"));
        }
    }
    for command in made.outcome.commands(made.after) {
        if let Command::Allocate { block } = command {
            held.remove(&block);
        }
    }
    let older: BTreeSet<BlockId> = pool.older().into_iter().collect();
    let (late, held): (BTreeSet<BlockId>, BTreeSet<BlockId>) =
        held.into_iter().partition(|&block| pool.queue.contains(block));
    if older != held {
        return Err(format!("{name} leaves {older:?} as older blocks, not {held:?}"));
    }
    match late.iter().find(|block| !first.contains(block)) {
        Some(block) => Err(format!("{name} lets older {block:?} leave among others")),
        None => Ok(()),
    }
}
