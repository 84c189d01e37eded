// SPDX-License-Identifier: Apache-2.0
//! The hash index: maps a key to the ordered blocks that hold its content.
//!
//! Invariants: a look-up returns the block that was published first; when it loses the key, the
//! next one is returned (S001-82). When an epoch ends, the blocks of its keys stay in their buckets
//! until they are removed, and no look-up returns them. A key without blocks has no entry. If a key
//! has several blocks, they form a ring of links, so each step is O(1) however many there are; the
//! links of a block that is alone are not read.
//! Why: everything is in columns by block: the keys, and the chain of the first blocks whose keys
//! fall into one bucket. There are twice as many buckets as blocks, so nothing is rehashed, and
//! nothing grows but the memory for keys in a large pool. The bits of a link above the block id
//! hold a tag of the block's key, so most blocks of a bucket are ruled out without reading their
//! keys. Buckets and chains are one column, so that a link is followed, or replaced, without a
//! branch on where it stands: such a branch would be mispredicted for every third key.
//! Twin: kvcore/pool/hash_index.py.

use crate::mutants::{Mutant, seeded};
use crate::types::clone_in_place::{clone_in_place, touched_zeros};
use crate::types::ids::BlockId;
use crate::types::keys::{KEY_SIZE, Key};

pub(crate) mod runs;

/// Set in the chain's link of a block whose key has several.
const SEVERAL: u32 = 1 << 31;
/// Blocks whose keys have mapped memory from the start, so that no step waits for its pages. The
/// largest column is not mapped further before blocks get keys.
const NUM_TOUCHED: usize = 1 << 17;
/// The place of a key before the first.
pub(crate) const NO_KEY: Key = Key([0; KEY_SIZE]);
/// Odd, so that it spreads a key over all bits: 2 to the 64 over the golden ratio.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Where the links to the blocks of a key stand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Place {
    bucket: u32,
    /// What its links have above the block's number.
    tag: u32,
}

/// Key to blocks.
#[derive(Debug)]
pub struct HashIndex {
    /// The last key of each block; beyond `NUM_TOUCHED`, only up to the last block that had one.
    keys: Vec<Key>,
    /// For each bucket the link to its newest block: the block's number plus one, below its tag; 0
    /// for none. Behind these a 0, which follows the link 0, and for each first block of a key the
    /// link to the next one in its bucket.
    links: Vec<u32>,
    num_buckets: usize,
    /// The mask of the bits of a link that name the block.
    named: u32,
    /// The rings of the blocks of keys with several blocks, in order of publication; the first
    /// block follows the last.
    following: Vec<u32>,
    preceding: Vec<u32>,
    /// Keys that have a block.
    length: u32,
    /// Number of epochs that have ended, and how many had ended when each block got its key.
    num_ended: u32,
    ended_before: Vec<u32>,
}

clone_in_place!(HashIndex {
    keys,
    links,
    num_buckets,
    named,
    following,
    preceding,
    length,
    num_ended,
    ended_before
});

impl HashIndex {
    /// An empty index for `num_blocks` blocks.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        let named = u32::MAX >> num_blocks.max(1).leading_zeros();
        let num_blocks = num_blocks as usize;
        let num_buckets = (2 * num_blocks).next_power_of_two().max(2);
        let mut keys = Vec::with_capacity(num_blocks);
        keys.resize(num_blocks.min(NUM_TOUCHED), NO_KEY);
        HashIndex {
            named,
            keys,
            links: touched_zeros(num_buckets + 1 + num_blocks),
            num_buckets,
            following: vec![0; num_blocks],
            preceding: vec![0; num_blocks],
            length: 0,
            num_ended: 0,
            ended_before: vec![0; num_blocks],
        }
    }

    /// The key of a block that has one.
    #[must_use]
    #[inline]
    pub fn key(&self, block: BlockId) -> &Key {
        &self.keys[block.index()]
    }

    /// Return the block that a look-up of a key finds.
    #[must_use]
    #[inline]
    pub fn first(&self, key: &Key) -> Option<BlockId> {
        let Place { bucket, tag } = self.place_of(key);
        self.find(self.links[bucket as usize], tag, key)
    }

    /// The same, for keys that rarely have a block.
    pub(crate) fn first_if_any(&self, key: &Key) -> Option<BlockId> {
        let Place { bucket, tag } = self.place_of(key);
        let head = self.links[bucket as usize];
        if self.may_hold(head, tag) { self.find(head, tag, key) } else { None }
    }

    /// The blocks under a key, first published first; empty if there is none.
    #[must_use]
    pub fn get(&self, key: &Key) -> Vec<BlockId> {
        self.first(key).map(|first| self.blocks(first).collect()).unwrap_or_default()
    }

    /// Keys that have a block.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length as usize
    }

    /// Whether nothing is findable.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The place of each block among those of its key, 0 for the one that answers and for a block
    /// without a key. O(blocks).
    #[must_use]
    pub fn ranks(&self) -> Vec<u32> {
        let mut ranks = vec![0; self.following.len()];
        for (first, _) in self.firsts() {
            for (rank, block) in (0..).zip(self.blocks(first)) {
                ranks[block.index()] = rank;
            }
        }
        ranks
    }

    /// Add a block after those that hold the same content.
    #[inline(always)] // of each block that is filled; the key is not copied on its way
    pub fn insert(&mut self, key: Key, block: BlockId) {
        let place @ Place { bucket, tag } = self.place_of(&key);
        let head = self.links[bucket as usize];
        if self.keys.len() <= block.index() {
            self.extend_keys(block);
        }
        self.keys[block.index()] = key;
        if self.num_ended > 0 {
            self.ended_before[block.index()] = self.num_ended;
        }
        if self.may_hold(head, tag)
            && let Some(first) = self.find(head, tag, &key)
        {
            return self.join(first, block);
        }
        self.put_first(block, place);
    }

    /// Add a block as the first of its key, apart from others; its epoch is not noted.
    pub(crate) fn insert_new(&mut self, key: &Key, block: BlockId) {
        let place = self.place_of(key);
        if self.keys.len() <= block.index() {
            self.extend_keys(block);
        }
        self.keys[block.index()] = *key;
        self.put_first(block, place);
    }

    /// Let a block be the first of its key, at the head of its bucket.
    #[inline(always)]
    fn put_first(&mut self, block: BlockId, Place { bucket, tag }: Place) {
        let behind = self.behind(block.0 + 1);
        self.links[behind] = self.links[bucket as usize];
        self.links[bucket as usize] = tag | (block.0 + 1);
        self.length += 1;
    }

    /// Map memory for the keys up to that of a block.
    #[cold]
    fn extend_keys(&mut self, block: BlockId) {
        self.keys.resize(block.index() + 1, NO_KEY);
    }

    /// Put a block behind the others of the key whose first one is given.
    #[cold]
    fn join(&mut self, BlockId(first): BlockId, block: BlockId) {
        let has_several = self.has_several(BlockId(first));
        let last = if has_several { self.preceding[first as usize] } else { first };
        let behind = self.behind(first + 1);
        self.links[behind] |= SEVERAL;
        self.link(last, block.0);
        self.link(block.0, first);
    }

    /// Remove a block from its key. True: it was the last one.
    #[inline]
    pub fn remove(&mut self, block: BlockId) -> bool {
        self.remove_at(self.place_of(self.key(block)), block)
    }

    /// Do so for a key whose place is known.
    #[inline(always)] // of each block that is evicted alone
    fn remove_at(&mut self, Place { bucket, tag }: Place, block: BlockId) -> bool {
        let own = tag | (block.0 + 1);
        let head = self.links[bucket as usize];
        let mut place = if head == own { bucket as usize } else { self.behind(head) };
        if self.links[place] & !SEVERAL != own {
            match self.place_in_chain(place, own) {
                Some(found) => place = found,
                None => return self.leave(block, tag, None),
            }
        }
        let next = self.links[self.behind(own)];
        if next & SEVERAL != 0 && !seeded(Mutant::EvictDropsDups) {
            return self.leave(block, tag, Some(place));
        }
        self.point(place, next & !SEVERAL);
        self.length -= u32::from(!self.is_older(block));
        true
    }

    /// The place of this link in the chain that goes on at a place, if it is there.
    #[cold]
    fn place_in_chain(&self, mut place: usize, own: u32) -> Option<usize> {
        while self.links[place] & !SEVERAL != own {
            if self.links[place] & !SEVERAL == 0 {
                return None;
            }
            place = self.behind(self.links[place]);
        }
        Some(place)
    }

    /// Take a block out of the ring of its key; returns false. place: that of its link, if it is
    /// the first of its key.
    #[cold]
    fn leave(&mut self, block: BlockId, tag: u32, place: Option<usize>) -> bool {
        let (behind, after) = (self.preceding[block.index()], self.following[block.index()]);
        debug_assert!(self.following[behind as usize] == block.0, "IDX-SOUND: {block:?} is alone");
        self.link(behind, after);
        let (own, next) = (self.behind(block.0 + 1), self.behind(after + 1));
        if let Some(place) = place {
            self.links[next] = self.links[own];
            self.point(place, tag | (after + 1));
        }
        if behind == after {
            self.links[next] &= !SEVERAL;
        }
        seeded(Mutant::EventPerCopy)
    }

    /// Forget every key.
    pub fn clear(&mut self) {
        self.links[..self.num_buckets].fill(0);
        self.length = 0;
    }

    /// Let no present key be found any more; its blocks stay until each is removed.
    pub(crate) fn start_epoch(&mut self) {
        self.num_ended += 1;
        self.length = 0;
    }

    /// Whether an epoch has ended, whose keys may be there still.
    pub(crate) fn has_ended(&self) -> bool {
        self.num_ended > 0
    }

    /// Whether the last key of a block is of an epoch that ended.
    #[inline]
    pub(crate) fn is_older(&self, block: BlockId) -> bool {
        self.num_ended > 0 && self.ended_before[block.index()] < self.num_ended
    }

    /// Mark blocks as those whose epoch ended, under any key.
    pub(crate) fn restore_older(&mut self, blocks: &[BlockId]) {
        self.num_ended = 1;
        self.ended_before.fill(1);
        for &block in blocks {
            self.insert_new(&NO_KEY, block); // not behind one that has this key now
            self.ended_before[block.index()] = 0;
            self.length -= 1;
        }
    }

    /// The first block of each key, and whether the key has several.
    pub(crate) fn firsts(&self) -> impl Iterator<Item = (BlockId, bool)> + '_ {
        let mut buckets = 0..if self.is_empty() { 0 } else { self.num_buckets };
        let mut link = 0;
        let next = move || {
            while link == 0 {
                link = self.links[buckets.next()?];
            }
            let block = self.block_of(link);
            link = self.links[self.behind(link)] & !SEVERAL;
            Some(block)
        };
        let blocks = std::iter::from_fn(next).filter(|&block| !self.is_older(block));
        blocks.map(|block| (block, self.has_several(block)))
    }

    /// The blocks before and behind one of several that have one key.
    pub(crate) fn links(&self, block: BlockId) -> (u32, u32) {
        (self.preceding[block.index()], self.following[block.index()])
    }

    /// The place of a key. The first bytes of a key are those of a hash already: no need to hash
    /// the rest.
    #[inline]
    fn place_of(&self, key: &Key) -> Place {
        self.place_of_head(key.head())
    }

    #[inline]
    fn place_of_head(&self, head: u64) -> Place {
        let spread = head.wrapping_mul(SPREAD);
        let bucket = spread >> (u64::BITS - self.num_buckets.trailing_zeros());
        Place { bucket: bucket as u32, tag: spread as u32 & !(SEVERAL | self.named) }
    }

    /// The place of the link that follows this one in its bucket.
    #[inline(always)]
    fn behind(&self, link: u32) -> usize {
        self.num_buckets + (link & self.named) as usize
    }

    /// Whether a key of this tag may be in the bucket of this head; true if the bucket has many
    /// blocks.
    /// No branch depends on the number of blocks in the bucket, usually 0 to 2.
    #[inline(always)]
    fn may_hold(&self, head: u32, tag: u32) -> bool {
        let second = self.links[self.behind(head)];
        let third = self.links[self.behind(second)];
        let fits = |link: u32| (link ^ tag) & !(SEVERAL | self.named) == 0;
        fits(head) | fits(second) | (third & self.named != 0)
    }

    /// The block that answers for a key, in the bucket of this head.
    fn find(&self, head: u32, tag: u32, key: &Key) -> Option<BlockId> {
        let fits = |link: &u32| {
            let block = self.block_of(*link);
            (link & !self.named == tag && self.keys[block.index()] == *key && !self.is_older(block))
                || seeded(Mutant::IndexComparesBuckets)
        };
        self.links_from(head).find(fits).map(|link| self.block_of(link))
    }

    /// The links of a bucket from this one on.
    #[inline]
    fn links_from(&self, head: u32) -> impl Iterator<Item = u32> + '_ {
        let step = |link: u32| (link != 0).then_some(link);
        let next = move |&link: &u32| step(self.links[self.behind(link)] & !SEVERAL);
        std::iter::successors(step(head), next)
    }

    #[inline]
    fn block_of(&self, link: u32) -> BlockId {
        BlockId((link & self.named) - 1)
    }

    /// Replace the link at a place, and keep what it says of the block there.
    fn point(&mut self, place: usize, link: u32) {
        self.links[place] = self.links[place] & SEVERAL | link;
    }

    fn has_several(&self, first: BlockId) -> bool {
        self.links[self.behind(first.0 + 1)] & SEVERAL != 0
    }

    /// The blocks of the key of a first one, first published first.
    pub(crate) fn blocks(&self, first: BlockId) -> impl Iterator<Item = BlockId> + '_ {
        let has_several = self.has_several(first);
        std::iter::successors(Some(first), move |block| {
            let next = || BlockId(self.following[block.index()]);
            has_several.then(next).filter(|&after| after != first)
        })
    }

    fn link(&mut self, before: u32, after: u32) {
        self.following[before as usize] = after;
        self.preceding[after as usize] = before;
    }
}

#[cfg(test)]
mod tests;
