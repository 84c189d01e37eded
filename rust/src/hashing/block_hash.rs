// SPDX-License-Identifier: Apache-2.0
//! Keys of full blocks: a chain of hashes over an unambiguous encoding.
//!
//! Invariants: a block's hash covers its parent's hash, its tokens and its tagged extra keys. The
//! key under which a block is found is that hash and the group, so two groups never share a block.
//! The chain grows with the request, and no block is hashed twice. There are four hashings:
//!
//! "sha256", the default. All integers are little-endian but the group, which is big-endian as in
//! the field.
//!
//! ```text
//! root       = SHA-256("kvcore root" 0x00 seed)
//! block hash = SHA-256(parent[32] block)
//! block      = num_tokens[u32] token[u32]... num_extra[u8] (tag[u8] size[u32] bytes)...
//! key        = block hash[32] group[u32]
//! ```
//!
//! "sha256_cbor", equal bit for bit to vLLM's for the same requests with `sha256_cbor` and the seed
//! in PYTHONHASHSEED (or "vllm-none-hash", its default). CBOR is canonical (RFC 8949, 4.2.3).
//!
//! ```text
//! root       = SHA-256(CBOR(seed as text))
//! block hash = SHA-256(CBOR([parent, [token, ...], null or [extra key, ...]]))
//! extra key  = ["lora", name, path] | ["mm", identifier, offset] | ["cache_salt", salt]
//!              | ["prompt_embeds", digest]
//! ```
//!
//! "siphash", SipHash-1-3 with 128 bits, under the parent's digest as its key: a quarter of the
//! time of SHA-256 in the twin. Who chooses prompts, but knows neither the seed nor hashes, cannot
//! search for two that collide. Who sees hashes can.
//!
//! "xxh3", XXH3-128 without a key, twice as fast again: whoever chooses prompts can search for two
//! that collide, so it is for tenants that trust each other.
//!
//! ```text
//! digest     = SHA-256("kvcore root" 0x00 seed)[:8, 24:] | SipHash(parent's digest[16], block)
//! digest     = XXH3-128("kvcore root" 0x00 seed) | XXH3-128(parent's digest[16] block)
//! root, hash = digest[:8] mark[16] digest[8:]
//! mark       = "siphash:  no SHA" | "xxh3-128: no SHA"
//! ```
//!
//! The mark tells such a hash from a SHA-256. Both ends are digest, since an index and events read
//! only those.
//!
//! Different blocks have different inputs: after the parent, of fixed size, the default's encoding
//! is prefix-free, and so is CBOR. Inputs of different hashings differ too: byte 35 is the high
//! byte of a block's token count, below 0x80, or the head of a CBOR array, above. Twin:
//! kvcore/hashing/block_hash.py.

use crate::hashing::hash_chain::{
    USUAL_TOKENS, cbor_chain, siphash, siphash_usual, usual_chain, xxh3, xxh3_usual,
};
use crate::hashing::hash_message::Message;
use crate::types::extra_inputs::{ExtraKey, ExtraKeys, MAX_EXTRA_KEYS};
use crate::types::keys::{BlockHash, HASH_SIZE, Hashing};
use crate::types::values::room_for;

const ROOT: &[u8] = b"kvcore root\0";
const SIP_MARK: &[u8; 16] = b"siphash:  no SHA";
const XXH3_MARK: &[u8; 16] = b"xxh3-128: no SHA";
const HALF: usize = 8;
/// The extra keys of a block that has none.
const NONE: &[u8] = &[0];

/// The parent of each request's first block. seed: UTF-8 text for `Sha256Cbor`.
#[must_use]
pub fn root_hash(seed: &[u8], hashing: Hashing) -> BlockHash {
    let mut message = Message::default();
    match hashing {
        Hashing::Sha256Cbor => message.push_text(seed),
        _ => {
            message.push(ROOT);
            message.push(seed);
        }
    }
    match hashing {
        Hashing::Sha256 | Hashing::Sha256Cbor => message.sha256(),
        Hashing::Siphash => marked(digest_of(&message.sha256()), SIP_MARK),
        Hashing::Xxh3 => marked(xxh3(message.as_bytes()), XXH3_MARK),
    }
}

/// Return the hash of one full block.
///
/// parent: hash of the block before, or the root. extra_keys: (tag, value) pairs, at most
/// `MAX_EXTRA_KEYS`, in an order that is part of the key.
#[must_use]
pub fn hash_block(
    parent: &BlockHash,
    tokens: &[u32],
    extra_keys: &[ExtraKey],
    hashing: Hashing,
) -> BlockHash {
    debug_assert!(extra_keys.len() <= MAX_EXTRA_KEYS);
    let mut written = NONE.to_vec();
    for (tag, value) in extra_keys {
        write_key(&mut written, *tag, &[value]);
    }
    hash_message(&mut Message::default(), parent, tokens, &written, hashing)
}

/// Return the hashes of the full blocks of these tokens, in order; a partial tail has none.
///
/// start: position of the first of these tokens in the request; a block must start there. parent:
/// hash of the block before.
pub fn hash_blocks<'a>(
    mut parent: BlockHash,
    tokens: &'a [u32],
    block_size: u32,
    mut start: u32,
    extra_keys: &'a ExtraKeys,
    hashing: Hashing,
) -> impl Iterator<Item = BlockHash> + use<'a> {
    let (mut message, mut written) = (Message::default(), Vec::new());
    let has_keys = !extra_keys.is_empty();
    tokens.chunks_exact(block_size as usize).map(move |block| {
        let keys = if !has_keys {
            NONE
        } else {
            written.clear();
            written.push(0);
            let write = |tag, parts: &[&[u8]]| write_key(&mut written, tag, parts);
            extra_keys.each_of_block((start, start + block_size), block_size, write);
            &written
        };
        parent = hash_message(&mut message, &parent, block, keys, hashing);
        start += block_size;
        parent
    })
}

/// Add the hashes of `hash_blocks` to those that a request has.
pub fn extend_chain(
    hashes: &mut Vec<BlockHash>,
    parent: BlockHash,
    tokens: &[u32],
    (block_size, start): (u32, u32),
    extra_keys: &ExtraKeys,
    hashing: Hashing,
) {
    let room = if hashes.is_empty() { room_for(tokens.len()) } else { tokens.len() };
    hashes.reserve(room / block_size as usize);
    let is_plain = extra_keys.is_empty();
    match hashing {
        Hashing::Xxh3 if is_plain && block_size as usize == USUAL_TOKENS => {
            let found = |digest| hashes.push(marked(digest, XXH3_MARK));
            usual_chain(digest_of(&parent), tokens.as_chunks().0, xxh3_usual, found);
        }
        Hashing::Siphash if is_plain && block_size as usize == USUAL_TOKENS => {
            let found = |digest| hashes.push(marked(digest, SIP_MARK));
            usual_chain(digest_of(&parent), tokens.as_chunks().0, siphash_usual, found);
        }
        Hashing::Sha256Cbor if is_plain => {
            cbor_chain(parent, tokens, block_size as usize, |hash| hashes.push(hash));
        }
        _ => hashes.extend(hash_blocks(parent, tokens, block_size, start, extra_keys, hashing)),
    }
}

/// The hash of a block whose extra keys are `num_extra[u8] (tag[u8] size[u32] bytes)...`.
fn hash_message(
    message: &mut Message,
    parent: &BlockHash,
    tokens: &[u32],
    extra_keys: &[u8],
    hashing: Hashing,
) -> BlockHash {
    message.clear();
    match hashing {
        Hashing::Sha256 => {
            message.push_plain(parent, tokens, extra_keys);
            message.sha256()
        }
        Hashing::Sha256Cbor => {
            message.push_cbor(parent, tokens, extra_keys);
            message.sha256()
        }
        Hashing::Siphash => {
            message.push_plain(&[], tokens, extra_keys);
            marked(siphash(&digest_of(parent), message.as_bytes()), SIP_MARK)
        }
        Hashing::Xxh3 => {
            message.push_plain(&digest_of(parent), tokens, extra_keys);
            marked(xxh3(message.as_bytes()), XXH3_MARK)
        }
    }
}

/// The block hash of a digest.
#[inline]
fn marked(digest: [u8; 2 * HALF], mark: &[u8; HASH_SIZE - 2 * HALF]) -> BlockHash {
    let mut hash = [0; HASH_SIZE];
    hash[..HALF].copy_from_slice(&digest[..HALF]);
    hash[HALF..HASH_SIZE - HALF].copy_from_slice(mark);
    hash[HASH_SIZE - HALF..].copy_from_slice(&digest[HALF..]);
    hash
}

/// The digest around the mark of a block hash.
#[inline]
fn digest_of(hash: &BlockHash) -> [u8; 2 * HALF] {
    let mut digest = [0; 2 * HALF];
    digest[..HALF].copy_from_slice(&hash[..HALF]);
    digest[HALF..].copy_from_slice(&hash[HASH_SIZE - HALF..]);
    digest
}

/// Add a key whose value comes in parts, and count it in the first byte.
fn write_key(written: &mut Vec<u8>, tag: u8, parts: &[&[u8]]) {
    let size: usize = parts.iter().map(|part| part.len()).sum();
    written[0] += 1;
    written.push(tag);
    written.extend_from_slice(&(size as u32).to_le_bytes());
    parts.iter().for_each(|part| written.extend_from_slice(part));
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::types::extra_inputs::MediaItem;
    use crate::types::keys::{HASHINGS, Key, external_hash, make_key};

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn sha256(parts: &[&[u8]]) -> BlockHash {
        Sha256::digest(parts.concat()).into()
    }

    /// The bytes of the default encoding behind the parent, laid out by hand.
    fn plain(tokens: &[u32], extra_keys: &[ExtraKey]) -> Vec<u8> {
        let mut bytes = (tokens.len() as u32).to_le_bytes().to_vec();
        tokens.iter().for_each(|token| bytes.extend(token.to_le_bytes()));
        bytes.push(extra_keys.len() as u8);
        for (tag, value) in extra_keys {
            bytes.push(*tag);
            bytes.extend((value.len() as u32).to_le_bytes());
            bytes.extend(value);
        }
        bytes
    }

    #[test]
    fn a_block_of_any_length_hashes_as_its_bytes() {
        let root = root_hash(b"seed", Hashing::Sha256);
        assert_eq!(root, sha256(&[b"kvcore root\0seed"]));
        let parents = [Hashing::Xxh3, Hashing::Siphash].map(|each| root_hash(b"seed", each));
        for num_tokens in 0..200 {
            let tokens: Vec<u32> = (0..num_tokens).map(|each| each * 70_000).collect();
            for extra in [vec![], vec![(1, b"lora".to_vec()), (2, Vec::new())]] {
                let block = plain(&tokens, &extra);
                let hash = hash_block(&root, &tokens, &extra, Hashing::Sha256);
                assert_eq!(hash, sha256(&[&root, &block]));
                let keys = parents.map(|each| [&each[..8], &each[24..]].concat());
                let digest = xxh3(&[&keys[0][..], &block].concat());
                let hash = hash_block(&parents[0], &tokens, &extra, Hashing::Xxh3);
                let whole =
                    |mark: &[u8], digest: [u8; 16]| [&digest[..8], mark, &digest[8..]].concat();
                assert_eq!(hash.to_vec(), whole(b"xxh3-128: no SHA", digest));
                let digest = siphash(keys[1][..].try_into().unwrap(), &block);
                let hash = hash_block(&parents[1], &tokens, &extra, Hashing::Siphash);
                assert_eq!(hash.to_vec(), whole(b"siphash:  no SHA", digest));
            }
        }
    }

    #[test]
    fn a_chain_of_vllm_is_that_of_the_worked_example() {
        let root = root_hash(b"vllm-none-hash", Hashing::Sha256Cbor);
        let expected = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0";
        assert_eq!(hex(&root), expected);
        let tokens = [0, 23, 24, 255, 256, 65535, 65536, 128_255];
        let hash = hash_block(&root, &tokens, &[], Hashing::Sha256Cbor);
        let expected = "ae9e440d51b85b23f45c385ed801ffbd6b9ceb347ec9f3b760b06739c9947826";
        assert_eq!(hex(&hash), expected);
        assert_eq!(external_hash(&hash), 0x60b0_6739_c994_7826);
    }

    #[test]
    fn the_chain_of_a_request_is_that_of_its_blocks() {
        let tokens: Vec<u32> = (0_u32..150).map(|each| each.wrapping_mul(0x9e37_79b9)).collect();
        let salted = ExtraKeys { cache_salt: Some("s".to_owned()), ..ExtraKeys::default() };
        let none = ExtraKeys::default();
        let cases = HASHINGS.into_iter().flat_map(|each| [(each, &none), (each, &salted)]);
        for (hashing, keys) in cases {
            let root = root_hash(b"seed", hashing);
            for (size, num_tokens) in [(16, 15), (16, 16), (16, 150), (3, 8), (64, 150), (70, 150)]
            {
                let tokens = &tokens[..num_tokens];
                let mut hashes = vec![root];
                extend_chain(&mut hashes, root, tokens, (size, 0), keys, hashing);
                let mut expected = vec![root];
                for (block, start) in
                    tokens.chunks_exact(size as usize).zip((0..).step_by(size as usize))
                {
                    let extra_keys = keys.of_block(start, start + size, size);
                    let parent = expected[expected.len() - 1];
                    expected.push(hash_block(&parent, block, &extra_keys, hashing));
                }
                assert_eq!(hashes, expected);
            }
        }
    }

    #[test]
    fn a_chain_in_pieces_is_the_chain() {
        let media = vec![MediaItem { identifier: "i".to_owned(), offset: 1, length: 4 }];
        let keys = ExtraKeys { media, cache_salt: Some("s".to_owned()), ..ExtraKeys::default() };
        let tokens = [1, 2, 3, 4, 5, 6, 7];
        for hashing in HASHINGS {
            let root = root_hash(b"seed", hashing);
            let whole: Vec<_> = hash_blocks(root, &tokens, 2, 0, &keys, hashing).collect();
            let rest: Vec<_> = hash_blocks(whole[0], &tokens[2..], 2, 2, &keys, hashing).collect();
            assert_eq!(whole.len(), 3);
            assert_eq!(whole[1..], rest);
            let mut parent = root;
            for (block, start) in tokens.chunks_exact(2).zip([0, 2, 4]) {
                parent = hash_block(&parent, block, &keys.of_block(start, start + 2, 2), hashing);
                assert_eq!(parent, whole[start as usize / 2]);
            }
        }
    }

    #[test]
    fn a_key_gives_back_its_hash_and_group() {
        let hash = root_hash(b"", Hashing::Sha256);
        let key = make_key(&hash, 258);
        assert_eq!(key.block_hash(), hash);
        assert_eq!(key.group_id(), 258);
        assert_eq!(key.0[HASH_SIZE..], [0, 0, 1, 2]);
    }

    #[test]
    fn keys_that_differ_in_hash_or_group_have_other_heads() {
        let [one, other] = [b"a", b"b"].map(|seed| root_hash(seed, Hashing::Sha256));
        let head = |hash, group| make_key(hash, group).head();
        assert_ne!(head(&one, 0), head(&other, 0));
        assert_ne!(head(&one, 0), head(&one, 1));
        assert_eq!(Key::head_of(&one, 1), head(&one, 1));
    }
}
