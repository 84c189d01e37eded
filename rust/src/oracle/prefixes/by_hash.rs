// SPDX-License-Identifier: Apache-2.0
//! A map by block hashes, which are as good as random: they need no more than to be folded.
//!
//! A part of prefixes.rs.

use std::hash::{BuildHasherDefault, Hasher};

use hashbrown::HashMap;

use crate::types::keys::BlockHash;

pub(super) type ByHash<V> = HashMap<BlockHash, V, BuildHasherDefault<Fold>>;

/// Folds the bytes of a hash; its length is the same for all.
#[derive(Debug, Default)]
pub(super) struct Fold(u64);

impl Hasher for Fold {
    fn write(&mut self, bytes: &[u8]) {
        let words = bytes.as_chunks().0.iter().map(|&word| u64::from_le_bytes(word));
        self.0 = words.fold(self.0, |folded, word| folded ^ word);
    }

    fn write_usize(&mut self, _length: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}
