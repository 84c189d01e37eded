// SPDX-License-Identifier: Apache-2.0
//! Digests of prefixes: a namespace and the sum of one mixed word per token and position.
//!
//! Twin: kvcore/sanitizer/digests.py.

/// No content, the content of an unknown token, and zeros.
pub const NOTHING: u64 = 0;
pub const UNKNOWN: u64 = 1;
pub const ZEROS: u64 = 2;
const NUM_RESERVED: u64 = 3;

/// The word that a token adds at a position.
pub fn mix(token: i64, position: u64) -> u64 {
    let word = (position << 32 | (token as u64 & 0xFFFF_FFFF)).wrapping_add(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ word >> 31
}

/// What a group adds to the sums of its slots.
pub fn group_word(group_id: usize) -> u64 {
    mix(group_id as i64, 0xFFFF_FFFF)
}

/// What a slot of a group holds for a prefix with this sum: 48 bits, none of the reserved.
pub fn slot_digest(total: u64, group_word: u64) -> u64 {
    let digest = total.wrapping_add(group_word) >> 16;
    if digest < NUM_RESERVED { digest + NUM_RESERVED } else { digest }
}
