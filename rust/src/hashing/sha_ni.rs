// SPDX-License-Identifier: Apache-2.0
//! The chain of hashes in vLLM's encoding, with the SHA instructions of x86-64 processors.
//!
//! Invariants: the hashes are those of the portable code in `hash_chain.rs`, which runs on
//! processors without these instructions. It is sound: there is a `ShaNi` only if they were
//! detected, and the function that it calls is unsafe only without them.
//! Why: a block of 16 tokens takes 0.78 of the time of the portable code, one of 64 tokens 0.74.
//! The crate `sha2` uses the same instructions but moves each state to memory and back, and the
//! portable encoder writes one token at a time.

#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m128i, _mm_add_epi32, _mm_alignr_epi8, _mm_blend_epi16, _mm_cmpgt_epi32, _mm_cvtsi128_si64,
    _mm_extract_epi64, _mm_madd_epi16, _mm_or_si128, _mm_packs_epi32, _mm_set_epi32,
    _mm_set_epi64x, _mm_set1_epi32, _mm_set1_epi64x, _mm_sha256msg1_epu32, _mm_sha256msg2_epu32,
    _mm_sha256rnds2_epu32, _mm_shuffle_epi8, _mm_shuffle_epi32, _mm_slli_si128, _mm_srli_si128,
    _mm_unpackhi_epi64, _mm_unpacklo_epi64, _mm_xor_si128,
};

use crate::hashing::hash_message::{NULL, SHA256_START, UNSIGNED, pad, put_head};

/// The constants of the rounds (FIPS 180-4, 4.2.2).
#[rustfmt::skip]
const ROUNDS: [u32; 64] = [
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
];

/// The numbers above which a token takes more bytes in CBOR.
const LARGEST: [i32; 3] = [23, 0xff, 0xffff];
/// By how many of these it exceeds: where each byte comes from, 0 to 3 for the token's and 8 to 10
/// for the heads behind a pair of tokens.
const SOURCES: [&[u8]; 4] = [&[0], &[8, 0], &[9, 1, 0], &[10, 3, 2, 1, 0]];
const HEADS: i64 = 0x1a_1918;

/// The instructions, which this processor has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShaNi(());

impl ShaNi {
    /// Detect the instructions.
    #[inline]
    pub(crate) fn detect() -> Option<ShaNi> {
        let detected = is_x86_feature_detected!("sha") && is_x86_feature_detected!("sse4.1");
        detected.then_some(ShaNi(()))
    }

    /// Call with the hash of each of these blocks without extra keys in vLLM's encoding.
    ///
    /// room: the encoding up to the tokens, with zeros for the parent.
    #[inline]
    pub(crate) fn cbor_chain<'a>(
        self,
        parent: [u8; 32],
        blocks: impl Iterator<Item = &'a [u32]>,
        (room, start): (&mut [u8], usize),
        found: impl FnMut([u8; 32]),
    ) {
        // SAFETY: the instructions were detected.
        unsafe { cbor_chain(parent, blocks, (room, start), found) }
    }
}

/// The parent stays in registers: a processor that reads across the border of two stores waits
/// until both are done.
#[target_feature(enable = "sha,sse4.1")]
fn cbor_chain<'a>(
    parent: [u8; 32],
    blocks: impl Iterator<Item = &'a [u32]>,
    (room, start): (&mut [u8], usize),
    mut found: impl FnMut([u8; 32]),
) {
    let head = _mm_slli_si128::<13>(vector(room, 0));
    let mut parent = [vector(&parent, 0), vector(&parent, 16)];
    for tokens in blocks {
        let end = start + put_tokens(&mut room[start..], tokens);
        room[end] = NULL;
        let (first, others) = pad(room, end + 1).split_first().expect("a message is padded");
        let message = [
            _mm_alignr_epi8::<13>(parent[0], head),
            _mm_alignr_epi8::<13>(parent[1], parent[0]),
            _mm_or_si128(vector(first, 32), _mm_srli_si128::<13>(parent[1])),
            vector(first, 48),
        ];
        let mut state = compress(initial_state(), message);
        for chunk in others {
            state = compress(state, [0, 16, 32, 48].map(|place| vector(chunk, place)));
        }
        parent = digest(state);
        let mut hash = [0; 32];
        hash.copy_from_slice(parent.map(|half| bytes(half)).as_flattened());
        found(hash);
    }
}

/// The state in the order of the instructions: A, B, E, F and C, D, G, H, the highest first.
#[inline]
#[target_feature(enable = "sse4.1")]
fn initial_state() -> [__m128i; 2] {
    let [a, b, c, d, e, f, g, h] = SHA256_START;
    [words([f, e, b, a]), words([h, g, d, c])]
}

#[inline]
#[target_feature(enable = "sha,sse4.1")]
fn compress(before: [__m128i; 2], message: [__m128i; 4]) -> [__m128i; 2] {
    let [mut abef, mut cdgh] = before;
    let mut next = message.map(|part| swapped(part));
    for (four_rounds, constants) in ROUNDS.as_chunks().0.iter().enumerate() {
        let [first, second, third, fourth] = next;
        let sum = _mm_add_epi32(first, words(*constants));
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32::<0b1110>(sum));
        let mut fifth = first;
        if four_rounds < 12 {
            let between = _mm_alignr_epi8::<4>(fourth, third);
            fifth = _mm_add_epi32(_mm_sha256msg1_epu32(first, second), between);
            fifth = _mm_sha256msg2_epu32(fifth, fourth);
        }
        next = [second, third, fourth, fifth];
    }
    [_mm_add_epi32(abef, before[0]), _mm_add_epi32(cdgh, before[1])]
}

#[inline]
#[target_feature(enable = "sse4.1")]
fn digest([abef, cdgh]: [__m128i; 2]) -> [__m128i; 2] {
    let feba = _mm_shuffle_epi32::<0b0001_1011>(abef);
    let dchg = _mm_shuffle_epi32::<0b1011_0001>(cdgh);
    [swapped(_mm_blend_epi16::<0xf0>(feba, dchg)), swapped(_mm_alignr_epi8::<8>(dchg, feba))]
}

/// Where the bytes of a pair of tokens come from, by how many of `LARGEST` the first exceeds plus
/// four times those of the second.
const PAIRS: [[u8; 16]; 16] = {
    let (mut pairs, mut pair) = ([[0; 16]; 16], 0);
    while pair < 16 {
        let (first, second) = (SOURCES[pair % 4], SOURCES[pair / 4]);
        let mut place = 0;
        while place < first.len() {
            pairs[pair][place] = first[place];
            place += 1;
        }
        while place < first.len() + second.len() {
            let source = second[place - first.len()];
            pairs[pair][place] = if source < 4 { source + 4 } else { source };
            place += 1;
        }
        pair += 1;
    }
    pairs
};

/// Write tokens as unsigned integers; returns their size.
#[inline]
#[target_feature(enable = "sse4.1")]
fn put_tokens(room: &mut [u8], tokens: &[u32]) -> usize {
    let (heads, lowest) = (_mm_set1_epi64x(HEADS), _mm_set1_epi32(i32::MIN));
    let (eights, left) = tokens.as_chunks::<8>();
    let mut end = 0;
    for eight in eights {
        let halves = [0, 1].map(|half| words(eight.as_chunks().0[half]));
        // Each lane counts downwards; the comparison takes the numbers as signed.
        let exceeded = halves.map(|half| {
            let signed = _mm_xor_si128(half, lowest);
            let above = |most| _mm_cmpgt_epi32(signed, _mm_set1_epi32(i32::MIN + most));
            let [some, more, most] = LARGEST.map(above);
            _mm_add_epi32(_mm_add_epi32(some, more), most)
        });
        let factors = _mm_set1_epi32(-1 - (3 << 16)); // -4 and -1 in 16 bits each
        let pairs = _mm_madd_epi16(_mm_packs_epi32(exceeded[0], exceeded[1]), factors);
        let pairs = [_mm_cvtsi128_si64(pairs) as usize, _mm_extract_epi64::<1>(pairs) as usize];
        for (half, two) in halves.into_iter().zip(pairs) {
            let sources = [_mm_unpacklo_epi64(half, heads), _mm_unpackhi_epi64(half, heads)];
            for (source, pair) in sources.into_iter().zip([two % 16, (two >> 32) % 16]) {
                let written = _mm_shuffle_epi8(source, vector(&PAIRS[pair], 0));
                room[end..end + 16].copy_from_slice(&bytes(written));
                end += SOURCES[pair % 4].len() + SOURCES[pair / 4].len();
            }
        }
    }
    for token in left {
        end += put_head(&mut room[end..], UNSIGNED, *token);
    }
    end
}

#[inline]
#[target_feature(enable = "sse4.1")]
fn words([first, second, third, fourth]: [u32; 4]) -> __m128i {
    _mm_set_epi32(fourth as i32, third as i32, second as i32, first as i32)
}

#[inline]
#[target_feature(enable = "sse4.1")]
fn vector(bytes: &[u8], place: usize) -> __m128i {
    let mut sixteen = [0; 16];
    sixteen.copy_from_slice(&bytes[place..place + 16]);
    let number = u128::from_le_bytes(sixteen);
    _mm_set_epi64x((number >> 64) as i64, number as i64)
}

#[inline]
#[target_feature(enable = "sse4.1")]
fn bytes(vector: __m128i) -> [u8; 16] {
    let (low, high) = (_mm_cvtsi128_si64(vector) as u64, _mm_extract_epi64::<1>(vector) as u64);
    (u128::from(high) << 64 | u128::from(low)).to_le_bytes()
}

/// The words with the bytes of each in the other order.
#[inline]
#[target_feature(enable = "sse4.1")]
fn swapped(words: __m128i) -> __m128i {
    _mm_shuffle_epi8(words, _mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203))
}
