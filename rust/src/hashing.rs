// SPDX-License-Identifier: Apache-2.0
//! Keys of full blocks: a chain of SHA-256 over an unambiguous encoding.
//!
//! Rules: a block's hash covers its parent's hash, its tokens and its tagged extra keys; the key
//! under which a block is found is that hash and the group, so two groups never share a block. The
//! chain grows with the request and no block is hashed twice. All integers are little-endian but
//! the group, which is big-endian as in the field. Twin: kvcore/hashing.py.
//!
//! ```text
//! root       = SHA-256("kvcore root" 0x00 seed)
//! block hash = SHA-256(parent[32] num_tokens[u32] token[u32]...
//!                      num_extra[u8] (tag[u8] size[u32] bytes)...)
//! key        = block hash[32] group[u32]
//! ```

use std::hash::{Hash, Hasher};

use sha2::{Digest, Sha256};

/// Bytes of a block hash.
pub const HASH_SIZE: usize = 32;
/// Bytes of a key.
pub const KEY_SIZE: usize = 36;
/// Most extra keys of a block.
pub const MAX_EXTRA_KEYS: usize = 255;

/// Tokens that are laid out as bytes at a time: a whole number of SHA-256 blocks.
const TOKENS_A_ROUND: usize = 64;

/// The hash of a full block, or the root of a chain.
pub type BlockHash = [u8; HASH_SIZE];

/// What a block is found under: opaque to the pool; here a block hash and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(pub [u8; KEY_SIZE]);

impl Key {
    /// The block hash in the key.
    #[must_use]
    pub fn block_hash(&self) -> BlockHash {
        let mut hash = [0; HASH_SIZE];
        hash.copy_from_slice(&self.0[..HASH_SIZE]);
        hash
    }

    /// The group in the key.
    #[must_use]
    pub fn group(&self) -> u32 {
        let mut group = [0; KEY_SIZE - HASH_SIZE];
        group.copy_from_slice(&self.0[HASH_SIZE..]);
        u32::from_be_bytes(group)
    }
}

/// The first bytes of a key are those of a hash already: no need to hash the rest.
impl Hash for Key {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let mut head = [0; 8];
        head.copy_from_slice(&self.0[..8]);
        hasher.write_u64(u64::from_le_bytes(head) ^ u64::from(self.group()));
    }
}

/// The parent of each request's first block.
#[must_use]
pub fn root_hash(seed: &[u8]) -> BlockHash {
    let mut hasher = Sha256::new();
    hasher.update(b"kvcore root\0");
    hasher.update(seed);
    hasher.finalize().into()
}

/// The hash of one full block.
///
/// parent: hash of the block before, or the root. extra_keys: (tag, value) pairs, at most
/// `MAX_EXTRA_KEYS`, in an order that is part of the key.
#[must_use]
pub fn hash_block(parent: &BlockHash, tokens: &[u32], extra_keys: &[(u8, &[u8])]) -> BlockHash {
    debug_assert!(extra_keys.len() <= MAX_EXTRA_KEYS);
    let mut hasher = Sha256::new();
    hasher.update(parent);
    hasher.update((tokens.len() as u32).to_le_bytes());
    let mut bytes = [0; 4 * TOKENS_A_ROUND];
    for round in tokens.chunks(TOKENS_A_ROUND) {
        for (place, token) in bytes.chunks_exact_mut(4).zip(round) {
            place.copy_from_slice(&token.to_le_bytes());
        }
        hasher.update(&bytes[..4 * round.len()]);
    }
    hasher.update([extra_keys.len() as u8]);
    for (tag, value) in extra_keys {
        hasher.update([*tag]);
        hasher.update((value.len() as u32).to_le_bytes());
        hasher.update(value);
    }
    hasher.finalize().into()
}

/// The hashes of the full blocks of these tokens, in order; a partial tail has none.
pub fn hash_blocks(
    parent: BlockHash,
    tokens: &[u32],
    block_size: u32,
) -> impl Iterator<Item = BlockHash> + '_ {
    tokens.chunks_exact(block_size as usize).scan(parent, |parent, block| {
        *parent = hash_block(parent, block, &[]);
        Some(*parent)
    })
}

/// The key under which a block of this content and group is found.
#[must_use]
pub fn make_key(block_hash: &BlockHash, group: u32) -> Key {
    let mut key = [0; KEY_SIZE];
    key[..HASH_SIZE].copy_from_slice(block_hash);
    key[HASH_SIZE..].copy_from_slice(&group.to_be_bytes());
    Key(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of the module's rule, laid out by hand.
    fn plain_hash(parent: &BlockHash, tokens: &[u32], extra_keys: &[(u8, &[u8])]) -> BlockHash {
        let mut bytes = parent.to_vec();
        bytes.extend((tokens.len() as u32).to_le_bytes());
        tokens.iter().for_each(|token| bytes.extend(token.to_le_bytes()));
        bytes.push(extra_keys.len() as u8);
        for (tag, value) in extra_keys {
            bytes.push(*tag);
            bytes.extend((value.len() as u32).to_le_bytes());
            bytes.extend(*value);
        }
        Sha256::digest(bytes).into()
    }

    #[test]
    fn a_long_block_hashes_as_its_bytes() {
        let root = root_hash(b"seed");
        for num_tokens in [1, 16, 63, 64, 65, 200] {
            let tokens: Vec<u32> = (0..num_tokens).map(|each| each * 70_000).collect();
            assert_eq!(hash_block(&root, &tokens, &[]), plain_hash(&root, &tokens, &[]));
        }
        let extra: [(u8, &[u8]); 2] = [(1, b"lora"), (2, b"")];
        assert_eq!(hash_block(&root, &[7], &extra), plain_hash(&root, &[7], &extra));
    }

    #[test]
    fn the_chain_covers_the_blocks_before() {
        let root = root_hash(b"seed");
        let hashes: Vec<BlockHash> = hash_blocks(root, &[1, 2, 3, 4, 5], 2).collect();
        let first = hash_block(&root, &[1, 2], &[]);
        assert_eq!(hashes, [first, hash_block(&first, &[3, 4], &[])]);
    }

    #[test]
    fn a_key_gives_back_its_hash_and_group() {
        let hash = root_hash(b"");
        let key = make_key(&hash, 258);
        assert_eq!(key.block_hash(), hash);
        assert_eq!(key.group(), 258);
        assert_eq!(key.0[HASH_SIZE..], [0, 0, 1, 2]);
    }
}
