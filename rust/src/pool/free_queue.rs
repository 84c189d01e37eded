// SPDX-License-Identifier: Apache-2.0
//! The free queue: blocks without owner, in the order in which they are taken.
//!
//! Invariants: the front leaves first. The queue is several rings of links, and all blocks of a
//! ring leave before those of the next. Each ring is closed by its own sentinel, an id above the
//! last block, so removing a block from the middle takes O(1) and ends are no special case. A block
//! outside the queue links to itself, so no number stands for "none". The caller decides which ring
//! a freed block joins, and in which order. A bitmap tells which rings have blocks.
//! Source: S001-10 to S001-20. Twin: kvcore/pool/free_queue.py.

use crate::mutants::{Mutant, seeded};
use crate::types::clone_in_place::clone_in_place;
use crate::types::ids::BlockId;

/// The ring of blocks of older epochs.
pub(crate) const OLDER: u32 = 0;
/// The ring of blocks of this epoch; in the first epoch, all blocks.
pub(crate) const CURRENT: u32 = 1;
/// The number of rings of a queue without levels.
const NUM_RINGS: u32 = 2;

/// The queue: a column of links, and the number of blocks in it.
#[derive(Debug, PartialEq, Eq)]
pub struct FreeQueue {
    links: Vec<Links>,
    /// Blocks that can be in the queue; the sentinel of the first ring.
    num_blocks: u32,
    length: u32,
    /// A bitmap of the rings that have blocks, the first one in the lowest bit.
    filled: u128,
}

/// The ids before and behind a block: together, since code that reads one needs the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Links {
    before: u32,
    after: u32,
}

clone_in_place!(FreeQueue { links, num_blocks, length, filled });

impl Links {
    /// The links of a block outside the queue.
    fn to_itself(block: u32) -> Self {
        Links { before: block, after: block }
    }
}

impl FreeQueue {
    /// The id that closes a ring.
    pub(crate) fn sentinel(&self, ring: u32) -> u32 {
        self.num_blocks + ring
    }

    /// The number of rings.
    pub(crate) fn num_rings(&self) -> u32 {
        self.links.len() as u32 - self.num_blocks
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
        let skip = |mut next: u32| {
            while next >= self.num_blocks {
                next = self.links.get(next as usize + 1)?.after;
            }
            Some(next)
        };
        let first = skip(self.links[self.num_blocks as usize].after);
        std::iter::successors(first, move |&block| skip(self.links[block as usize].after))
            .map(BlockId)
    }

    /// Whether a block is in the queue.
    #[must_use]
    pub fn contains(&self, block: BlockId) -> bool {
        self.links[block.index()].after != block.0
    }

    /// The ids before and behind a block. For a ring's sentinel these are its last and first block.
    pub(crate) fn links(&self, block: u32) -> (u32, u32) {
        let Links { before, after } = self.links[block as usize];
        (before, after)
    }

    /// The block behind another one of its ring.
    pub(crate) fn behind(&self, block: BlockId) -> Option<BlockId> {
        let after = self.links[block.index()].after;
        (after < self.num_blocks).then_some(BlockId(after))
    }

    /// The ring whose front leaves next: the first that is not empty, or the last ring.
    pub(crate) fn first_ring(&self) -> u32 {
        match self.filled as u64 {
            0 => self.filled.trailing_zeros().min(self.num_rings() - 1),
            low => low.trailing_zeros(),
        }
    }

    /// The block that leaves next.
    #[must_use]
    pub fn front(&self) -> Option<BlockId> {
        let block = self.links[self.sentinel(self.first_ring()) as usize].after;
        (block < self.num_blocks).then_some(BlockId(block))
    }

    /// Remove a block from any place.
    pub fn remove(&mut self, block: BlockId) {
        debug_assert!(self.contains(block), "FQ-UNIQ: block {block:?} is not in the queue");
        let Links { before, after } = self.links[block.index()];
        self.links[before as usize].after = after;
        self.links[after as usize].before = before;
        self.links[block.index()] = Links::to_itself(block.0);
        self.length -= u32::from(!seeded(Mutant::CounterDrifts));
        if before == after {
            self.note_empty(before);
        }
    }

    /// Take the block at the front.
    #[inline]
    pub(crate) fn take_first(&mut self) -> Option<BlockId> {
        let sentinel = self.sentinel(self.first_ring());
        let block = self.links[sentinel as usize].after;
        if block == sentinel {
            return None;
        }
        let after = self.links[block as usize].after;
        self.links[block as usize] = Links::to_itself(block);
        self.links[sentinel as usize].after = after;
        self.links[after as usize].before = sentinel;
        self.length -= u32::from(!seeded(Mutant::CounterDrifts));
        if after == sentinel {
            self.note_empty(sentinel);
        }
        Some(BlockId(block))
    }

    /// Fill the places with blocks from the front; returns how many there were. The links of a ring
    /// are closed once for all of them.
    pub(crate) fn take_front(&mut self, places: &mut [BlockId]) -> usize {
        let count = places.len().min(self.length as usize);
        self.length -= if seeded(Mutant::CounterDrifts) { 0 } else { count as u32 };
        let mut filled = 0;
        while filled < count {
            let sentinel = self.sentinel(self.first_ring());
            let mut block = self.links[sentinel as usize].after;
            if block == sentinel {
                break;
            }
            for place in &mut places[filled..count] {
                let after = self.links[block as usize].after;
                self.links[block as usize] = Links::to_itself(block);
                *place = BlockId(block);
                (block, filled) = (after, filled + 1);
                if block == sentinel {
                    break;
                }
            }
            self.links[sentinel as usize].after = block;
            self.links[block as usize].before = sentinel;
            if block == sentinel {
                self.note_empty(sentinel);
            }
        }
        filled
    }

    /// Put a block at the back of a ring.
    pub fn append(&mut self, block: BlockId, ring: u32) {
        let sentinel = self.sentinel(ring);
        self.link(self.links[sentinel as usize].before, block, sentinel);
    }

    /// Put some blocks at the back of a ring, in order: their links are written once.
    pub(crate) fn append_all(&mut self, blocks: &[BlockId], ring: u32) {
        let sentinel = self.sentinel(ring);
        let mut last = self.links[sentinel as usize].before;
        for &block in blocks {
            debug_assert!(!self.contains(block), "FQ-UNIQ: {block:?} is in the queue already");
            self.links[last as usize].after = block.0;
            self.links[block.index()].before = last;
            last = block.0;
        }
        self.links[last as usize].after = sentinel;
        self.links[sentinel as usize].before = last;
        self.length += blocks.len() as u32;
        if last != sentinel {
            self.filled |= self.bit(sentinel);
        }
    }

    /// Put a block at the front of the queue.
    pub fn prepend(&mut self, block: BlockId) {
        self.insert(self.sentinel(self.first_ring()), block);
    }

    /// Put a block behind another one, or at a ring's front, which is behind its sentinel.
    pub(crate) fn insert(&mut self, before: u32, block: BlockId) {
        self.link(before, block, self.links[before as usize].after);
    }

    /// Move all blocks of a ring to the back of another.
    pub fn splice(&mut self, ring: u32, behind: u32) {
        let (source, target) = (self.sentinel(ring), self.sentinel(behind));
        let Links { before: back, after: front } = self.links[source as usize];
        if front == source {
            return;
        }
        let last = self.links[target as usize].before;
        self.links[last as usize].after = front;
        self.links[front as usize].before = last;
        self.links[back as usize].after = target;
        self.links[target as usize].before = back;
        self.links[source as usize] = Links::to_itself(source);
        self.filled = self.filled & !self.bit(source) | self.bit(target);
    }

    /// Note that the ring of this sentinel has no blocks any more.
    #[cold]
    fn note_empty(&mut self, sentinel: u32) {
        self.filled &= !self.bit(sentinel);
    }

    /// The bit of the ring that a sentinel closes.
    fn bit(&self, sentinel: u32) -> u128 {
        1 << (sentinel - self.num_blocks)
    }

    /// Put a block between two neighbours.
    fn link(&mut self, before: u32, block: BlockId, after: u32) {
        debug_assert!(!self.contains(block), "FQ-UNIQ: block {block:?} is in the queue already");
        self.links[before as usize].after = block.0;
        self.links[block.index()] = Links { before, after };
        self.links[after as usize].before = block.0;
        self.length += 1;
        if before == after {
            self.filled |= self.bit(before);
        }
    }
}

/// Make a queue for blocks 0 to num_blocks - 1 that holds those of `order`, front first: the first
/// `num_older` in the ring of older epochs, the others in that of this epoch.
#[must_use]
pub fn make_free_queue(
    num_blocks: u32,
    order: impl IntoIterator<Item = BlockId>,
    num_older: u32,
) -> FreeQueue {
    let mut queue = make_rings(num_blocks, NUM_RINGS);
    for (place, block) in (0..).zip(order) {
        queue.append(block, if place < num_older { OLDER } else { CURRENT });
    }
    queue
}

/// Blocks in the ring of older epochs.
pub(crate) fn num_older(queue: &FreeQueue) -> u32 {
    let (sentinel, mut count) = (queue.sentinel(OLDER), 0);
    let mut block = queue.links(sentinel).1;
    while block != sentinel {
        (block, count) = (queue.links(block).1, count + 1);
    }
    count
}

/// An empty queue over blocks 0 to num_blocks - 1 with this many rings, at most 128.
pub(crate) fn make_rings(num_blocks: u32, num_rings: u32) -> FreeQueue {
    let links = (0..num_blocks + num_rings).map(Links::to_itself).collect();
    FreeQueue { links, num_blocks, length: 0, filled: 0 }
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
        let mut queue = make_free_queue(4, (0..4).map(BlockId), 0);
        queue.remove(BlockId(2));
        queue.remove(BlockId(0));
        assert_eq!(ids(&queue), [1, 3]);
        queue.append(BlockId(0), CURRENT);
        queue.prepend(BlockId(2));
        assert_eq!(ids(&queue), [2, 1, 3, 0]);
        assert_eq!((queue.front(), queue.len()), (Some(BlockId(2)), 4));
    }

    #[test]
    fn a_block_leaves_from_the_middle_by_its_own_links_alone() {
        let mut queue = make_free_queue(9, (0..9).map(BlockId), 0);
        for block in (0..11).filter(|block| !(3..=5).contains(block)) {
            queue.links[block as usize] = Links::to_itself(block); // a walk would end here
        }
        queue.remove(BlockId(4));
        assert_eq!((queue.links(3), queue.links(5)), ((2, 5), (3, 6)));
        assert_eq!((queue.contains(BlockId(4)), queue.len()), (false, 8));
    }

    #[test]
    fn an_empty_queue_has_no_front() {
        let mut queue = make_free_queue(1, [BlockId(0)], 0);
        queue.remove(BlockId(0));
        assert_eq!((queue.front(), queue.is_empty()), (None, true));
        assert!(!queue.contains(BlockId(0)));
        queue.append(BlockId(0), CURRENT);
        assert_eq!(ids(&queue), [0]);
    }

    #[test]
    fn rings_leave_one_after_the_other_and_join_each_other_whole() {
        let mut queue = make_free_queue(5, [3, 1, 0, 4].map(BlockId), 2);
        assert_eq!((ids(&queue), queue.first_ring()), (vec![3, 1, 0, 4], OLDER));
        queue.append(BlockId(2), OLDER);
        queue.remove(BlockId(1));
        assert_eq!(ids(&queue), [3, 2, 0, 4]);
        queue.splice(CURRENT, OLDER);
        queue.splice(CURRENT, OLDER); // a ring without blocks: no change
        queue.append(BlockId(1), CURRENT);
        assert_eq!(ids(&queue), [3, 2, 0, 4, 1]);
        let mut taken = [BlockId(9); 6];
        assert_eq!(queue.take_front(&mut taken[..3]), 3);
        assert_eq!((ids(&queue), queue.len()), (vec![4, 1], 2));
        assert_eq!(queue.take_front(&mut taken[3..]), 2);
        assert_eq!((taken, queue.front()), ([3, 2, 0, 4, 1, 9].map(BlockId), None));
        queue.prepend(BlockId(4));
        assert_eq!((queue.first_ring(), queue.front()), (CURRENT, Some(BlockId(4))));
    }
}
