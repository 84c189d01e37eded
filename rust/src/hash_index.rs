// SPDX-License-Identifier: Apache-2.0
//! The hash index: key to the ordered blocks that hold that content.
//!
//! Rules: the block that was published first answers a look-up; when it loses the key the next one
//! answers (S001-82). A key without blocks has no entry. Most keys have one block, which is kept
//! inside the map; only duplicates cost an allocation. Twin: kvcore/hash_index.py.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use rustc_hash::FxBuildHasher;

use crate::hashing::Key;
use crate::ids::BlockId;

/// The blocks under one key, in the order of their publication.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Blocks {
    One(BlockId),
    /// At least two.
    Many(Vec<BlockId>),
}

impl Blocks {
    fn as_slice(&self) -> &[BlockId] {
        match self {
            Blocks::One(block) => std::slice::from_ref(block),
            Blocks::Many(blocks) => blocks,
        }
    }
}

/// Key to blocks.
#[derive(Debug, Clone, Default)]
pub struct HashIndex {
    entries: HashMap<Key, Blocks, FxBuildHasher>,
}

impl HashIndex {
    /// The block that answers for a key.
    #[must_use]
    pub fn first(&self, key: &Key) -> Option<BlockId> {
        self.get(key).first().copied()
    }

    /// The blocks under a key, first published first; empty where there is none.
    #[must_use]
    pub fn get(&self, key: &Key) -> &[BlockId] {
        self.entries.get(key).map_or(&[], Blocks::as_slice)
    }

    /// Keys with their blocks, in no order that means anything.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &[BlockId])> {
        self.entries.iter().map(|(key, blocks)| (key, blocks.as_slice()))
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
        match self.entries.entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(Blocks::One(block));
            }
            Entry::Occupied(mut entry) => match entry.get_mut() {
                Blocks::One(first) => *entry.get_mut() = Blocks::Many(vec![*first, block]),
                Blocks::Many(blocks) => blocks.push(block),
            },
        }
    }

    /// Take a block from under its key. True: it was the last one.
    pub fn remove(&mut self, key: &Key, block: BlockId) -> bool {
        let Some(blocks) = self.entries.get_mut(key) else {
            debug_assert!(false, "IDX-COMPLETE: {key:?} of {block:?} has no entry");
            return false;
        };
        if let Blocks::Many(many) = blocks {
            many.retain(|each| *each != block);
            if let [last] = many[..] {
                *blocks = Blocks::One(last);
            }
            return false;
        }
        self.entries.remove(key);
        true
    }

    /// Forget every key.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_block_answers_when_the_first_loses_its_key() {
        let key = Key([1; 36]);
        let blocks = [BlockId(5), BlockId(3), BlockId(4)];
        let mut index = HashIndex::default();
        blocks.into_iter().for_each(|block| index.insert(key, block));
        assert_eq!(index.get(&key), blocks);
        assert!(!index.remove(&key, BlockId(5)));
        assert_eq!(index.first(&key), Some(BlockId(3)));
        assert!(!index.remove(&key, BlockId(4)));
        assert!(index.remove(&key, BlockId(3)), "the last one");
        assert_eq!((index.first(&key), index.is_empty()), (None, true));
    }
}
