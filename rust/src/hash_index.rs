// SPDX-License-Identifier: Apache-2.0
//! The hash index: key to the ordered blocks that hold that content.
//!
//! Rules: the block that was published first answers a look-up; when it loses the key the next one
//! answers (S001-82). A key without blocks has no entry. The keys lie in a column by block, and the
//! table has only a part of their hash and the first block: eviction, which knows both, finds its
//! entry without a look at a key. Only duplicates cost an allocation. Twin: kvcore/hash_index.py.

use std::hash::BuildHasher;

use hashbrown::{HashMap, HashTable};
use rustc_hash::FxBuildHasher;

use crate::hashing::{KEY_SIZE, Key};
use crate::ids::BlockId;

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
#[derive(Debug, Clone)]
pub struct HashIndex {
    /// The last key of each block.
    keys: Vec<Key>,
    entries: HashTable<Entry>,
    /// All blocks of a key that has several, in order, by the first of them.
    several: HashMap<BlockId, Vec<BlockId>, FxBuildHasher>,
}

impl HashIndex {
    /// An empty index for so many blocks.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        HashIndex {
            keys: vec![Key([0; KEY_SIZE]); num_blocks as usize],
            entries: HashTable::new(),
            several: HashMap::default(),
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
    pub fn get(&self, key: &Key) -> &[BlockId] {
        match self.find(key) {
            None => &[],
            Some(entry) if entry.has_several() => &self.several[&entry.block],
            Some(entry) => std::slice::from_ref(&entry.block),
        }
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
        entry.hash |= SEVERAL;
        self.several.entry(entry.block).or_insert_with(|| vec![entry.block]).push(block);
    }

    /// Take a block from under its key. True: it was the last one.
    pub fn remove(&mut self, key: &Key, block: BlockId) -> bool {
        let hash = part(key);
        match self.entries.find_entry(spread(hash), |entry| entry.block == block) {
            Ok(found) if !found.get().has_several() => {
                found.remove();
                return true;
            }
            _ => {}
        }
        let keys = &self.keys;
        let found = self.entries.find_mut(spread(hash), |entry| holds(keys, *entry, hash, key));
        let Some(entry) = found else {
            debug_assert!(false, "IDX-COMPLETE: {key:?} of {block:?} has no entry");
            return false;
        };
        let mut blocks = self.several.remove(&entry.block).unwrap_or_default();
        blocks.retain(|each| *each != block);
        if let Some(&first) = blocks.first() {
            *entry = Entry { hash, block: first };
            if blocks.len() > 1 {
                entry.hash |= SEVERAL;
                self.several.insert(first, blocks);
            }
        }
        false
    }

    /// Forget every key.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.several.clear();
    }

    fn find(&self, key: &Key) -> Option<&Entry> {
        let hash = part(key);
        self.entries.find(spread(hash), |entry| holds(&self.keys, *entry, hash, key))
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

    #[test]
    fn the_next_block_answers_when_the_first_loses_its_key() {
        let key = Key([1; 36]);
        let blocks = [BlockId(5), BlockId(3), BlockId(4)];
        let mut index = HashIndex::new(6);
        blocks.into_iter().for_each(|block| index.insert(key, block));
        assert_eq!(index.get(&key), blocks);
        assert!(!index.remove(&key, BlockId(5)));
        assert_eq!(index.first(&key), Some(BlockId(3)));
        assert!(!index.remove(&key, BlockId(4)));
        assert!(index.remove(&key, BlockId(3)), "the last one");
        assert_eq!((index.first(&key), index.is_empty()), (None, true));
    }
}
