// SPDX-License-Identifier: Apache-2.0
//! The chains of hashes of blocks without extra keys, which are laid out without a call for each.

use siphasher::sip128::SipHasher13;
use smallvec::{SmallVec, smallvec};
use twox_hash::XxHash3_128;

use crate::hashing::hash_message::{
    ARRAY, CBOR_HEAD, CBOR_ROOM, NULL, UNSIGNED, USUAL_ROOM, put_head, sha256,
};
#[cfg(target_arch = "x86_64")]
use crate::hashing::sha_ni::ShaNi;

/// Tokens of a block of the usual size.
pub(crate) const USUAL_TOKENS: usize = 16;
/// Room for a digest, and the default encoding of a block of the usual size without extra keys.
type Usual = [u8; 16 + 4 + 4 * USUAL_TOKENS + 1];

pub(crate) fn xxh3(bytes: &[u8]) -> [u8; 16] {
    XxHash3_128::oneshot(bytes).to_be_bytes()
}

pub(crate) fn siphash(key: &[u8; 16], bytes: &[u8]) -> [u8; 16] {
    SipHasher13::new_with_key(key).hash(bytes).as_bytes()
}

/// A step of `usual_chain` for `Xxh3`.
pub(crate) fn xxh3_usual(parent: &[u8; 16], block: &mut Usual) -> [u8; 16] {
    block[..16].copy_from_slice(parent);
    xxh3(block)
}

/// A step of `usual_chain` for `Siphash`.
pub(crate) fn siphash_usual(parent: &[u8; 16], block: &mut Usual) -> [u8; 16] {
    siphash(parent, &block[16..])
}

/// Call with the digest of each block of the usual size without extra keys, in order.
///
/// The same digests as those of the default encoding. The size is known when it is compiled, and
/// the next block is laid out before the last one's digest is there: its bytes are stored by then.
pub(crate) fn usual_chain(
    mut digest: [u8; 16],
    tokens: &[[u32; USUAL_TOKENS]],
    hash: impl Fn(&[u8; 16], &mut Usual) -> [u8; 16],
    mut found: impl FnMut([u8; 16]),
) {
    let mut room = [[0; size_of::<Usual>()]; 2];
    room.iter_mut().for_each(|message| message[16..20].copy_from_slice(&16_u32.to_le_bytes()));
    let lay_out = |message: &mut Usual, tokens: &[u32; USUAL_TOKENS]| {
        for (place, token) in message[20..].as_chunks_mut().0.iter_mut().zip(tokens) {
            *place = token.to_le_bytes();
        }
    };
    let Some(first) = tokens.first() else { return };
    lay_out(&mut room[0], first);
    for (number, _) in tokens.iter().enumerate() {
        if let Some(next) = tokens.get(number + 1) {
            lay_out(&mut room[(number + 1) % 2], next);
        }
        digest = hash(&digest, &mut room[number % 2]);
        found(digest);
    }
}

/// Call with the hash of each full block without extra keys in vLLM's encoding, in order.
pub(crate) fn cbor_chain(
    parent: [u8; 32],
    tokens: &[u32],
    block_size: usize,
    found: impl FnMut([u8; 32]),
) {
    let mut room: SmallVec<[u8; USUAL_ROOM]> = smallvec![0; CBOR_ROOM + 5 * block_size];
    room[..3].copy_from_slice(&CBOR_HEAD);
    let start = 35 + put_head(&mut room[35..], ARRAY, block_size as u32);
    let blocks = tokens.chunks_exact(block_size);
    #[cfg(target_arch = "x86_64")]
    if let Some(instructions) = ShaNi::detect() {
        return instructions.cbor_chain(parent, blocks, (&mut room, start), found);
    }
    portable_cbor_chain(parent, blocks, (&mut room, start), found);
}

/// The same on any processor. room: the encoding up to the tokens, without the parent.
fn portable_cbor_chain<'a>(
    mut parent: [u8; 32],
    blocks: impl Iterator<Item = &'a [u32]>,
    (room, start): (&mut [u8], usize),
    mut found: impl FnMut([u8; 32]),
) {
    for tokens in blocks {
        room[3..35].copy_from_slice(&parent);
        let mut end = start;
        for token in tokens {
            end += put_head(&mut room[end..], UNSIGNED, *token);
        }
        room[end] = NULL;
        parent = sha256(room, end + 1);
        found(parent);
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::hashing::hash_message::Message;

    #[test]
    fn a_chain_of_blocks_of_any_size_is_that_of_the_portable_code() {
        let edges = [0, 23, 24, 255, 256, 65_535, 65_536, i32::MAX as u32, 1 << 31, u32::MAX];
        let mut drawn = 1_u32;
        for block_size in 1..200 {
            let draw = |_| {
                drawn = drawn.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                edges[(drawn >> 16) as usize % edges.len()]
            };
            let tokens: Vec<u32> = (0..4 * block_size - 1).map(draw).collect();
            let (mut found, mut expected, mut parent) = (Vec::new(), Vec::new(), [7; 32]);
            cbor_chain(parent, &tokens, block_size, |hash| found.push(hash));
            for block in tokens.chunks_exact(block_size) {
                let mut message = Message::default();
                message.push_cbor(&parent, block, &[0]);
                parent = Sha256::digest(message.as_bytes()).into();
                expected.push(parent);
            }
            assert_eq!(found, expected);
            let mut room = vec![0; CBOR_ROOM + 5 * block_size];
            room[..3].copy_from_slice(&CBOR_HEAD);
            let start = 35 + put_head(&mut room[35..], ARRAY, block_size as u32);
            let blocks = tokens.chunks_exact(block_size);
            found.clear();
            portable_cbor_chain([7; 32], blocks, (&mut room, start), |hash| found.push(hash));
            assert_eq!(found, expected);
        }
    }
}
