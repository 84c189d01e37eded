// SPDX-License-Identifier: Apache-2.0
//! The hash index: key to the ordered blocks that hold that content.
//!
//! Rules: the block that was published first answers a look-up; when it loses the key the next one
//! answers (S001-82). A key without blocks has no entry. The keys lie in a column by block, and the
//! table has only a part of their hash and the first block: eviction, which knows both, finds its
//! entry without a look at a key. The blocks of a key that has several are a ring of links, so that
//! each step is O(1) however many there are; the links of a block that is alone are not read. Twin:
//! kvcore/hash_index.py.

use std::hash::BuildHasher;

use hashbrown::HashTable;
use rustc_hash::FxBuildHasher;

use crate::hashing::{KEY_SIZE, Key};
use crate::ids::BlockId;
use crate::mutants::{Mutant, seeded};
use crate::reuse::clone_in_place;

/// Set in the hash of an entry whose key has several blocks.
const SEVERAL: u32 = 1 << 31;
/// Odd, so that it spreads the part of a hash over all bits: 2 to the 64 over the golden ratio.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The first block of a key, with a part of the key's hash.
#[derive(Debug, Clone, Copy)]
struct Entry {
    hash: u32,
    block: BlockId,
}

impl Entry {
    fn has_several(self) -> bool {
        self.hash & SEVERAL != 0
    }
}

/// Key to blocks.
#[derive(Debug)]
pub struct HashIndex {
    /// The last key of each block.
    keys: Vec<Key>,
    entries: HashTable<Entry>,
    /// The ring of the blocks of each key that has several, in order of publication; the first one
    /// follows the last. Zeros, not `BlockId`s: an allocator gives zeros without touching memory.
    following: Vec<u32>,
    preceding: Vec<u32>,
}

clone_in_place!(HashIndex { keys, entries, following, preceding });

impl HashIndex {
    /// An empty index for so many blocks.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        HashIndex {
            keys: vec![Key([0; KEY_SIZE]); num_blocks as usize],
            entries: HashTable::new(),
            following: vec![0; num_blocks as usize],
            preceding: vec![0; num_blocks as usize],
        }
    }

    /// The key of a block that has one.
    #[must_use]
    pub fn key(&self, block: BlockId) -> &Key {
        &self.keys[block.index()]
    }

    /// The block that answers for a key.
    #[must_use]
    pub fn first(&self, key: &Key) -> Option<BlockId> {
        self.find(key).map(|entry| entry.block)
    }

    /// The blocks under a key, first published first; empty where there is none.
    #[must_use]
    pub fn get(&self, key: &Key) -> Vec<BlockId> {
        self.find(key).map(|&entry| self.blocks(entry).collect()).unwrap_or_default()
    }

    /// Keys that have a block.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is findable.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The place of each block among those of its key, 0 for the one that answers and for a block
    /// without a key. O(blocks).
    #[must_use]
    pub fn ranks(&self) -> Vec<u32> {
        let mut ranks = vec![0; self.keys.len()];
        for &entry in &self.entries {
            for (rank, block) in (0..).zip(self.blocks(entry)) {
                ranks[block.index()] = rank;
            }
        }
        ranks
    }

    /// Add a block behind those that hold the same content.
    pub fn insert(&mut self, key: Key, block: BlockId) {
        self.keys[block.index()] = key;
        let (hash, keys) = (part(&key), &self.keys);
        let found = self.entries.find_mut(spread(hash), |entry| holds(keys, *entry, hash, &key));
        let Some(entry) = found else {
            let entry = Entry { hash, block };
            self.entries.insert_unique(spread(hash), entry, |entry| spread(entry.hash));
            return;
        };
        let first = entry.block.0;
        let last = if entry.has_several() { self.preceding[first as usize] } else { first };
        entry.hash |= SEVERAL;
        self.link(last, block.0);
        self.link(block.0, first);
    }

    /// Take a block from under its key. True: it was the last one.
    pub fn remove(&mut self, key: &Key, block: BlockId) -> bool {
        let hash = part(key);
        match self.entries.find_entry(spread(hash), |entry| entry.block == block) {
            Ok(found) if !found.get().has_several() || seeded(Mutant::EvictDropsDups) => {
                found.remove();
                return true;
            }
            _ => {}
        }
        self.unlink(hash, block);
        seeded(Mutant::EventPerCopy)
    }

    /// Forget every key.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// The first block of each key, and whether the key has several.
    pub(crate) fn firsts(&self) -> impl Iterator<Item = (BlockId, bool)> + '_ {
        self.entries.iter().map(|entry| (entry.block, entry.has_several()))
    }

    /// The blocks before and behind one of several that have one key.
    pub(crate) fn links(&self, block: BlockId) -> (u32, u32) {
        (self.preceding[block.index()], self.following[block.index()])
    }

    fn find(&self, key: &Key) -> Option<&Entry> {
        let hash = part(key);
        self.entries.find(spread(hash), |entry| holds(&self.keys, *entry, hash, key))
    }

    /// The blocks of an entry, first published first.
    fn blocks(&self, entry: Entry) -> impl Iterator<Item = BlockId> + '_ {
        let first = entry.block;
        std::iter::successors(Some(first), move |block| {
            let after = BlockId(self.following[block.index()]);
            (entry.has_several() && after != first).then_some(after)
        })
    }

    /// Take a block out of the ring of those that have a key of this hash.
    fn unlink(&mut self, hash: u32, block: BlockId) {
        let (before, after) = (self.preceding[block.index()], self.following[block.index()]);
        debug_assert!(self.following[before as usize] == block.0, "IDX-SOUND: {block:?} is alone");
        self.link(before, after);
        // The entry changes where it names this block, or is that of the only one left.
        let is_alone = before == after;
        let found = self.entries.find_mut(spread(hash), |entry| {
            entry.block == block || is_alone && entry.block.0 == after
        });
        if let Some(entry) = found {
            let hash = if is_alone { hash } else { hash | SEVERAL };
            *entry = Entry { hash, block: BlockId(after) };
        }
    }

    fn link(&mut self, before: u32, after: u32) {
        self.following[before as usize] = after;
        self.preceding[after as usize] = before;
    }
}

/// Whether an entry is the one of a key.
fn holds(keys: &[Key], entry: Entry, hash: u32, key: &Key) -> bool {
    entry.hash & !SEVERAL == hash && keys[entry.block.index()] == *key
}

/// The part of a key's hash that its entry has.
fn part(key: &Key) -> u32 {
    (FxBuildHasher.hash_one(key) >> 32) as u32 & !SEVERAL
}

fn spread(hash: u32) -> u64 {
    u64::from(hash & !SEVERAL).wrapping_mul(SPREAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key([1; KEY_SIZE]);
    const OTHER: Key = Key([2; KEY_SIZE]);

    /// An index for six blocks that were published under one key in this order.
    fn published(blocks: &[u32]) -> HashIndex {
        let mut index = HashIndex::new(6);
        blocks.iter().for_each(|&block| index.insert(KEY, BlockId(block)));
        index
    }

    fn ids(index: &HashIndex) -> Vec<u32> {
        index.get(&KEY).into_iter().map(|block| block.0).collect()
    }

    #[test]
    fn the_next_block_answers_when_the_first_loses_its_key() {
        let mut index = published(&[5, 3, 4]);
        assert_eq!(ids(&index), [5, 3, 4]);
        assert!(!index.remove(&KEY, BlockId(5)));
        assert_eq!(index.first(&KEY), Some(BlockId(3)));
        assert!(!index.remove(&KEY, BlockId(4)));
        assert!(index.remove(&KEY, BlockId(3)), "the last one");
        assert_eq!((index.first(&KEY), index.is_empty()), (None, true));
    }

    #[test]
    fn blocks_leave_from_the_middle_and_come_back_at_the_end() {
        let mut index = published(&[2, 0, 3, 1]);
        assert!(!index.remove(&KEY, BlockId(0)));
        assert_eq!(ids(&index), [2, 3, 1]);
        index.insert(KEY, BlockId(0));
        assert_eq!(ids(&index), [2, 3, 1, 0]);
        assert_eq!(index.ranks(), [3, 2, 0, 1, 0, 0]);
        assert!(!index.remove(&KEY, BlockId(2)));
        index.insert(KEY, BlockId(2));
        assert_eq!(ids(&index), [3, 1, 0, 2]);
    }

    #[test]
    fn the_only_one_left_may_be_joined_by_others_again() {
        for left in [1, 4] {
            let mut index = published(&[1, 4]);
            assert!(!index.remove(&KEY, BlockId(5 - left)));
            assert_eq!(ids(&index), [left]);
            index.insert(OTHER, BlockId(5 - left));
            index.insert(KEY, BlockId(0));
            assert_eq!((ids(&index), index.len()), (vec![left, 0], 2));
            assert!(!index.remove(&KEY, BlockId(left)));
            assert!(index.remove(&KEY, BlockId(0)));
            assert_eq!(index.get(&OTHER), [BlockId(5 - left)]);
        }
    }

    #[test]
    fn a_cleared_index_forgets_its_rings() {
        let mut index = published(&[1, 2, 3]);
        index.clear();
        assert_eq!((ids(&index), index.ranks()), (vec![], vec![0; 6]));
        index.insert(KEY, BlockId(2));
        assert_eq!(ids(&index), [2]);
        assert!(index.remove(&KEY, BlockId(2)));
    }
}
