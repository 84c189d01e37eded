// SPDX-License-Identifier: Apache-2.0
//! Keys of blocks as values: the sizes and forms of hashes and keys, and the names of the hashings.
//!
//! A key is a block's hash and its group. `hashing/block_hash.rs` makes the hashes. Twin:
//! kvcore/types/keys.py.

use std::hash::{Hash, Hasher};

/// Bytes of a block hash.
pub const HASH_SIZE: usize = 32;
/// Bytes of a key.
pub const KEY_SIZE: usize = 36;

/// An odd number of 64 bits: the golden ratio's.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// The hash of a full block, or the root of a chain.
pub type BlockHash = [u8; HASH_SIZE];

/// What a block is found under: opaque to the pool; here a block hash and a group.
#[derive(Debug, Clone, Copy, Eq, PartialOrd, Ord)]
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
    pub fn group_id(&self) -> u32 {
        let mut group = [0; KEY_SIZE - HASH_SIZE];
        group.copy_from_slice(&self.0[HASH_SIZE..]);
        u32::from_be_bytes(group)
    }

    /// Its first bytes, which are those of a hash already, and the group.
    #[inline]
    pub(crate) fn head(&self) -> u64 {
        let mut head = [0; 8];
        head.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(head) ^ u64::from(self.group_id())
    }

    /// The head of the key of a block hash and a group.
    #[inline]
    pub(crate) fn head_of(block_hash: &BlockHash, group_id: u32) -> u64 {
        let mut head = [0; 8];
        head.copy_from_slice(&block_hash[..8]);
        u64::from_le_bytes(head) ^ u64::from(group_id)
    }
}

/// In two parts, each of which is compared without a call.
impl PartialEq for Key {
    #[inline]
    fn eq(&self, other: &Key) -> bool {
        self.0.first_chunk::<HASH_SIZE>() == other.0.first_chunk()
            && self.0.last_chunk::<{ KEY_SIZE - HASH_SIZE }>() == other.0.last_chunk()
    }
}

/// No need to hash the rest.
impl Hash for Key {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write_u64(self.head());
    }
}

/// How blocks are hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hashing {
    /// SHA-256 of the default encoding.
    Sha256,
    /// SHA-256 of vLLM's CBOR encoding.
    Sha256Cbor,
    /// XXH3-128 of the default encoding.
    Xxh3,
    /// SipHash-1-3 with 128 bits of the default encoding, under the parent's digest as its key.
    Siphash,
}

/// All hashings, in the order of their codes.
pub const HASHINGS: [Hashing; 4] =
    [Hashing::Sha256, Hashing::Sha256Cbor, Hashing::Xxh3, Hashing::Siphash];

impl Hashing {
    /// The hashing of this name in a configuration.
    #[must_use]
    pub fn named(name: &str) -> Option<Hashing> {
        Some(match name {
            "sha256" => Hashing::Sha256,
            "sha256_cbor" => Hashing::Sha256Cbor,
            "xxh3" => Hashing::Xxh3,
            "siphash" => Hashing::Siphash,
            _ => return None,
        })
    }

    /// Whether nobody finds tokens from its hashes, or two that collide.
    #[must_use]
    pub fn is_one_way(self) -> bool {
        matches!(self, Hashing::Sha256 | Hashing::Sha256Cbor)
    }
}

/// Return the key of a block of this content and group.
#[must_use]
pub fn make_key(block_hash: &BlockHash, group_id: u32) -> Key {
    let mut key = [0; KEY_SIZE];
    key[..HASH_SIZE].copy_from_slice(block_hash);
    key[HASH_SIZE..].copy_from_slice(&group_id.to_be_bytes());
    Key(key)
}

/// Return the 64-bit form of a hash in events: the low bits of the big-endian integer.
#[must_use]
pub fn external_hash(block_hash: &BlockHash) -> u64 {
    let mut low = [0; 8];
    low.copy_from_slice(&block_hash[HASH_SIZE - 8..]);
    u64::from_be_bytes(low)
}

/// Fold a key into 8 bytes, evenly spread even if the hashes are not. Equal keys give equal
/// results.
#[must_use]
pub fn fold_key(key: &Key) -> u64 {
    let mut folded = u64::from(key.group_id());
    for word in key.0[..HASH_SIZE].chunks_exact(8) {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        folded = folded.wrapping_mul(SPREAD) ^ u64::from_le_bytes(bytes);
    }
    folded = folded.wrapping_mul(SPREAD);
    folded ^ folded >> 32
}
