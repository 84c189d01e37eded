// SPDX-License-Identifier: Apache-2.0
//! Tail keys: the keys of content that ends inside blocks.
//!
//! Invariants: the tail keys of a block are those of one content, shortest first. A look-up returns
//! the block that was published first; when it loses the key, the next one is returned. A key
//! without blocks, and a block without tail keys, has no entry.
//! Twin: kvcore/pool/tails.py.

use std::collections::BTreeMap;

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::types::ids::BlockId;
use crate::types::keys::Key;

/// The tail keys of the blocks of one tier.
#[derive(Debug, Clone, Default)]
pub struct Tails {
    /// Those of each block that has any, shortest first.
    by_block: BTreeMap<BlockId, Vec<Key>>,
    /// The blocks of each, first published first.
    by_key: HashMap<Key, Vec<BlockId>, FxBuildHasher>,
}

impl Tails {
    /// The tail keys of a block, shortest first.
    #[must_use]
    pub fn keys(&self, block: BlockId) -> &[Key] {
        self.by_block.get(&block).map_or(&[], |keys| keys)
    }

    /// The blocks of a tail key, first published first.
    #[must_use]
    pub fn blocks(&self, key: &Key) -> &[BlockId] {
        self.by_key.get(key).map_or(&[], |blocks| blocks)
    }

    /// The blocks that have tail keys, rising, each with these.
    pub fn iter(&self) -> impl Iterator<Item = (BlockId, &[Key])> {
        self.by_block.iter().map(|(&block, keys)| (block, &keys[..]))
    }

    /// The tail keys, in no order, each with its blocks.
    pub fn keyed(&self) -> impl Iterator<Item = (&Key, &[BlockId])> {
        self.by_key.iter().map(|(key, blocks)| (key, &blocks[..]))
    }

    /// Whether no block has a tail key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_block.is_empty()
    }

    /// Add a tail key of a block that ends behind those that it has, or at this place among them.
    pub(crate) fn insert(&mut self, block: BlockId, key: Key, place: usize) {
        self.by_block.entry(block).or_default().insert(place, key);
        self.by_key.entry(key).or_default().push(block);
    }

    /// Set the tail keys of blocks, and the order of the blocks of each key.
    pub(crate) fn restore(
        &mut self,
        held: Vec<(BlockId, Vec<Key>)>,
        ranked: impl Iterator<Item = (Key, BlockId)>,
    ) {
        self.by_block = held.into_iter().collect();
        for (key, block) in ranked {
            self.by_key.entry(key).or_default().push(block);
        }
    }

    /// Remove a tail key of a block. True: it has none left.
    pub(crate) fn remove(&mut self, block: BlockId, key: &Key) -> bool {
        if let Some(blocks) = self.by_key.get_mut(key) {
            blocks.retain(|&each| each != block);
            if blocks.is_empty() {
                self.by_key.remove(key);
            }
        }
        let Some(keys) = self.by_block.get_mut(&block) else { return true };
        keys.retain(|each| each != key);
        let is_last = keys.is_empty();
        if is_last {
            self.by_block.remove(&block);
        }
        is_last
    }

    /// Remove all tail keys.
    pub(crate) fn clear(&mut self) {
        self.by_block.clear();
        self.by_key.clear();
    }
}
