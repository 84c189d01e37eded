// SPDX-License-Identifier: Apache-2.0
//! The policy "retention": a pool whose free blocks leave by level.
//!
//! Invariants: free blocks without a key leave first, the one freed last before the others; then
//! come those of older epochs, then those with a key, level by level. A block joins the back of its
//! level when it is freed; when time lowers its level, it joins the back of the lower one. Nothing
//! raises it while it is free. A block's wish combines the wishes of the requests that released it
//! since it was taken; a free block without a key has none.
//! Why: each level is a ring of the free queue, so joining and leaving need no search. A heap has
//! the times at which the levels of free blocks end; an entry counts while its block has not moved
//! since.
//! Twin: kvcore/pool/retention.py.

use std::cmp::Reverse;

use crate::pool::block_pool::BlockPool;
use crate::pool::free_queue::{CURRENT, OLDER, make_rings};
use crate::pool::retention_state::{Kept, NUM_RINGS, RetentionState};
use crate::types::ids::BlockId;
use crate::types::retention::Wish;

impl BlockPool {
    /// The retention of a block that has owners or a key.
    pub(crate) fn kept(&self, block: BlockId) -> Kept {
        let counts = self.key(block).is_some() || !self.queue.contains(block);
        let known = self.retention.as_ref().filter(|_| counts);
        known.map_or_else(Kept::default, |retention| retention.kept[block.index()])
    }

    /// The time.
    pub(crate) fn now(&self) -> u64 {
        self.retention.as_ref().map_or(0, |retention| retention.now)
    }

    /// Add the wish of a request that is about to release a block.
    pub(crate) fn note_wish(&mut self, block: BlockId, wish: Wish) {
        let Some(retention) = &mut self.retention else { return };
        let ends = if wish.duration > 0 { retention.now + wish.duration } else { 0 };
        let kept = &mut retention.kept[block.index()];
        *kept = Kept {
            base: kept.base.max(wish.base),
            level: kept.level.max(wish.level),
            until: kept.until.max(ends),
        };
    }

    /// Advance the time: free blocks whose duration has ended move to their base level, in the
    /// order of ending.
    pub(crate) fn tick(&mut self, now: u64) {
        let Some(mut retention) = self.retention.take() else { return };
        retention.now = now;
        while retention.ends.peek().is_some_and(|end| end.0.0 <= now) {
            let Some(Reverse((_, _, number, block))) = retention.ends.pop() else { break };
            if retention.joined[block.index()] == number && self.queue.contains(block) {
                self.queue.remove(block);
                let level = retention.note_joined(block);
                self.queue.append(block, CURRENT + u32::from(level));
            }
        }
        self.retention = Some(retention);
    }

    /// Put a block without owner at the back of its level; if it has no key, at the front of the
    /// queue; if it is of an older epoch, after the blocks without content.
    pub(crate) fn enqueue_by_level(&mut self, block: BlockId) {
        let (is_keyed, is_older) = (self.key(block).is_some(), self.is_older(block));
        let Some(retention) = &mut self.retention else { return };
        if is_keyed {
            retention.sweep();
            let level = retention.note_joined(block);
            self.queue.append(block, CURRENT + u32::from(level));
            return;
        }
        retention.forget(block);
        if is_older {
            self.forget_older(block);
            self.queue.append(block, OLDER);
        } else {
            self.queue.insert(self.queue.sentinel(OLDER), block);
        }
    }

    /// Move a free block that lost its key to the front of the queue.
    pub(crate) fn lower(&mut self, block: BlockId) {
        if self.retention.is_some() && self.queue.contains(block) {
            self.queue.remove(block);
            self.enqueue_by_level(block);
        }
    }

    /// Move the blocks of all levels after those without a key.
    pub(crate) fn lower_all(&mut self) {
        let Some(retention) = &mut self.retention else { return };
        retention.ends.clear();
        (CURRENT..NUM_RINGS).for_each(|ring| self.queue.splice(ring, OLDER));
    }

    /// Forget what was wished for blocks that were taken.
    pub(crate) fn forget_wishes(&mut self, blocks: &[BlockId]) {
        if let Some(retention) = &mut self.retention {
            blocks.iter().for_each(|&block| retention.forget(block));
        }
    }

    /// The blocks for which something was wished, rising.
    pub(crate) fn all_kept(&self) -> impl Iterator<Item = (BlockId, Kept)> + '_ {
        let all = (0..self.num_blocks()).map(|block| (BlockId(block), self.kept(BlockId(block))));
        all.filter(|(_, kept)| *kept != Kept::default())
    }

    /// Set the time and what was wished for blocks; the free ones have no places yet.
    pub(crate) fn set_kept(&mut self, now: u64, kept: &[(BlockId, Kept)]) {
        let size = self.num_blocks() as usize;
        let mut retention = RetentionState {
            now,
            kept: vec![Kept::default(); size],
            joined: vec![0; size],
            ..RetentionState::default()
        };
        kept.iter().for_each(|&(block, kept)| retention.kept[block.index()] = kept);
        self.retention = Some(Box::new(retention));
    }

    /// Put the free blocks into the rings of their levels; those of a ring stay in their order.
    pub(crate) fn place_by_level(&mut self) {
        let Some(mut retention) = self.retention.take() else { return };
        let mut queue = make_rings(self.num_blocks(), NUM_RINGS);
        for block in self.queue.iter() {
            let is_keyed = self.key(block).is_some();
            let level = is_keyed.then(|| u32::from(retention.note_joined(block)));
            queue.append(block, level.map_or(OLDER, |level| CURRENT + level));
        }
        (self.queue, self.retention) = (queue, Some(retention));
    }
}
