// SPDX-License-Identifier: Apache-2.0
//! The free queue: blocks without owner, in the order in which they leave.
//!
//! Invariants: the front leaves first. The queue is a ring of links through one sentinel, the id
//! behind the last block. A block outside the queue links to itself, so no number stands for
//! "none". A block is taken out of the middle in O(1). The caller decides in which order blocks are
//! freed.
//! Source: S001-10 to S001-20. Twin: kvcore/pool/free_queue.py.

use crate::mutants::{Mutant, seeded};
use crate::types::clone_in_place::clone_in_place;
use crate::types::ids::BlockId;

/// The queue: a column of links and the number of blocks in it.
#[derive(Debug, PartialEq, Eq)]
pub struct FreeQueue {
    links: Vec<Links>,
    length: u32,
}

/// What stands before and behind a block: together, since code that reads one needs the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Links {
    before: u32,
    after: u32,
}

clone_in_place!(FreeQueue { links, length });

impl Links {
    /// Those of a block outside the queue.
    fn to_itself(block: u32) -> Self {
        Links { before: block, after: block }
    }
}

impl FreeQueue {
    /// The id that closes the ring.
    pub(crate) fn sentinel(&self) -> u32 {
        (self.links.len() - 1) as u32
    }

    /// Blocks in the queue.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.length
    }

    /// Whether no block is in the queue.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The blocks, front first.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let step = |block: u32| (block != self.sentinel()).then_some(block);
        let first = step(self.links[self.sentinel() as usize].after);
        std::iter::successors(first, move |&block| step(self.links[block as usize].after))
            .map(BlockId)
    }

    /// Whether a block is in the queue.
    #[must_use]
    pub fn contains(&self, block: BlockId) -> bool {
        self.links[block.index()].after != block.0
    }

    /// What stands before and behind a block, or behind the last one and before the first for the
    /// id that closes the ring.
    pub(crate) fn links(&self, block: u32) -> (u32, u32) {
        let Links { before, after } = self.links[block as usize];
        (before, after)
    }

    /// The block that leaves next.
    #[must_use]
    pub fn front(&self) -> Option<BlockId> {
        let block = self.links[self.sentinel() as usize].after;
        (block != self.sentinel()).then_some(BlockId(block))
    }

    /// Take a block out, from wherever it is.
    pub fn remove(&mut self, block: BlockId) {
        debug_assert!(self.contains(block), "FQ-UNIQ: block {block:?} is not in the queue");
        let Links { before, after } = self.links[block.index()];
        self.links[before as usize].after = after;
        self.links[after as usize].before = before;
        self.links[block.index()] = Links::to_itself(block.0);
        self.length -= u32::from(!seeded(Mutant::CounterDrifts));
    }

    /// Take `count` blocks from the front.
    pub(crate) fn take_front(&mut self, count: u32) -> impl Iterator<Item = BlockId> {
        let sentinel = self.sentinel();
        let mut block = self.links[sentinel as usize].after;
        self.length -= if seeded(Mutant::CounterDrifts) { 0 } else { count.min(self.length) };
        (0..count).map_while(move |_| {
            let after = self.links[block as usize].after;
            if block == sentinel {
                return None;
            }
            self.links[block as usize] = Links::to_itself(block);
            self.links[sentinel as usize].after = after;
            self.links[after as usize].before = sentinel;
            Some(BlockId(std::mem::replace(&mut block, after)))
        })
    }

    /// Put a block at the back.
    pub fn append(&mut self, block: BlockId) {
        let sentinel = self.sentinel();
        self.link(self.links[sentinel as usize].before, block, sentinel);
    }

    /// Put a block at the front.
    pub fn prepend(&mut self, block: BlockId) {
        let sentinel = self.sentinel();
        self.link(sentinel, block, self.links[sentinel as usize].after);
    }

    /// Put a block behind another one, or behind the id that closes the ring, which is the front.
    pub(crate) fn insert(&mut self, before: u32, block: BlockId) {
        self.link(before, block, self.links[before as usize].after);
    }

    /// Put a block between two that stand one behind the other.
    fn link(&mut self, before: u32, block: BlockId, after: u32) {
        debug_assert!(!self.contains(block), "FQ-UNIQ: block {block:?} is in the queue already");
        self.links[before as usize].after = block.0;
        self.links[block.index()] = Links { before, after };
        self.links[after as usize].before = block.0;
        self.length += 1;
    }
}

/// A queue over blocks 0 to num_blocks - 1 that holds those of `order`, front first.
#[must_use]
pub fn make_free_queue(num_blocks: u32, order: impl IntoIterator<Item = BlockId>) -> FreeQueue {
    let mut queue =
        FreeQueue { links: (0..=num_blocks).map(Links::to_itself).collect(), length: 0 };
    for block in order {
        queue.append(block);
    }
    queue
}

#[cfg(test)]
mod tests {
    use super::*;

    impl FreeQueue {
        /// Count a block that is not there, for a test of the check that counts again.
        pub(crate) fn miscount(&mut self) {
            self.length += 1;
        }
    }

    fn ids(queue: &FreeQueue) -> Vec<u32> {
        queue.iter().map(|block| block.0).collect()
    }

    #[test]
    fn a_block_leaves_from_the_middle_and_joins_at_either_side() {
        let mut queue = make_free_queue(4, (0..4).map(BlockId));
        queue.remove(BlockId(2));
        queue.remove(BlockId(0));
        assert_eq!(ids(&queue), [1, 3]);
        queue.append(BlockId(0));
        queue.prepend(BlockId(2));
        assert_eq!(ids(&queue), [2, 1, 3, 0]);
        assert_eq!((queue.front(), queue.len()), (Some(BlockId(2)), 4));
    }

    #[test]
    fn an_empty_queue_has_no_front() {
        let mut queue = make_free_queue(1, [BlockId(0)]);
        queue.remove(BlockId(0));
        assert_eq!((queue.front(), queue.is_empty()), (None, true));
        assert!(!queue.contains(BlockId(0)));
        queue.append(BlockId(0));
        assert_eq!(ids(&queue), [0]);
    }
}
