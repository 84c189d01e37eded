// SPDX-License-Identifier: Apache-2.0
//! The bytes of which a block's hash is taken, laid out in a buffer that is kept.
//!
//! Invariants: hashing a block allocates nothing once the buffer is as long as the longest block.
//! Extra keys have the form `num_extra[u8] (tag[u8] size[u32] bytes)...`, which the default hashing
//! takes as it is. CBOR is canonical (RFC 8949, 4.2.3): each head in its shortest form.

use sha2::compress256;
use sha2::digest::generic_array::GenericArray;
use smallvec::SmallVec;

use crate::types::extra_inputs::{CACHE_SALT, CUT_EMBEDS, CUT_MEDIA, LORA, MEDIA};

/// Bytes that SHA-256 takes at a time.
const CHUNK: usize = 64;
/// The state that SHA-256 starts from (FIPS 180-4, 5.3.3).
pub(crate) const SHA256_START: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// Bytes that the padding takes at least: a one bit and the message's length in bits.
const PADDING_MIN: usize = 9;
/// Bytes that may be written to pad a message: stores of a fixed size are faster.
const PADDING_ROOM: usize = CHUNK + PADDING_MIN;
/// Bytes of which `put_head` writes all, whatever the head's size.
const HEAD_ROOM: usize = 8;
/// Room for all of a block's encoding but its tokens and extra keys, and for the padding.
pub(crate) const CBOR_ROOM: usize = 48 + PADDING_ROOM;

pub(crate) const UNSIGNED: u8 = 0x00;
const NEGATIVE: u8 = 0x20;
const BYTES: u8 = 0x40;
const TEXT: u8 = 0x60;
pub(crate) const ARRAY: u8 = 0x80;
pub(crate) const NULL: u8 = 0xf6;

/// What is before a parent in vLLM's encoding.
pub(crate) const CBOR_HEAD: [u8; 3] = [ARRAY | 3, BYTES | 24, 32];

/// Bytes that a block of few tokens takes with its padding: it needs no room on the heap.
pub(crate) const USUAL_ROOM: usize = 256;

/// A message to a hash function.
#[derive(Debug)]
pub(crate) struct Message {
    /// The message and, behind its end, room for more.
    room: SmallVec<[u8; USUAL_ROOM]>,
    end: usize,
}

impl Default for Message {
    fn default() -> Self {
        Message { room: SmallVec::from_buf([0; USUAL_ROOM]), end: 0 }
    }
}

impl Message {
    /// Start anew.
    pub(crate) fn clear(&mut self) {
        self.end = 0;
    }

    /// What was laid out.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.room[..self.end]
    }

    /// Add bytes as they are.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.reserve(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.end += bytes.len();
    }

    /// The room behind the end, at least `num_bytes` bytes.
    fn reserve(&mut self, num_bytes: usize) -> &mut [u8] {
        if self.room.len() < self.end + num_bytes {
            self.room.resize(2 * self.end + num_bytes, 0);
        }
        &mut self.room[self.end..]
    }

    /// Add a block in the default encoding.
    pub(crate) fn push_plain<const N: usize>(
        &mut self,
        parent: &[u8; N],
        tokens: &[u32],
        extra_keys: &[u8],
    ) {
        let end = N + 4 + 4 * tokens.len();
        let room = self.reserve(end + extra_keys.len() + PADDING_ROOM);
        room[..N].copy_from_slice(parent);
        room[N..N + 4].copy_from_slice(&(tokens.len() as u32).to_le_bytes());
        for (place, token) in room[N + 4..end].as_chunks_mut().0.iter_mut().zip(tokens) {
            *place = token.to_le_bytes();
        }
        match extra_keys {
            [none] => room[end] = *none,
            _ => room[end..end + extra_keys.len()].copy_from_slice(extra_keys),
        }
        self.end += end + extra_keys.len();
    }

    /// Add a block in vLLM's encoding.
    ///
    /// Each token is written as eight bytes, of which the next one overwrites what is no part of
    /// it: stores of a fixed size and one check of the room are most of the speed.
    pub(crate) fn push_cbor(&mut self, parent: &[u8; 32], tokens: &[u32], extra_keys: &[u8]) {
        let room = self.reserve(CBOR_ROOM + 5 * tokens.len());
        room[..3].copy_from_slice(&CBOR_HEAD);
        room[3..35].copy_from_slice(parent);
        let mut end = 35 + put_head(&mut room[35..], ARRAY, tokens.len() as u32);
        for token in tokens {
            end += put_head(&mut room[end..], UNSIGNED, *token);
        }
        room[end] = NULL;
        self.end += end + usize::from(extra_keys[0] == 0);
        if extra_keys[0] > 0 {
            self.push_head(ARRAY, u32::from(extra_keys[0]));
            self.push_arrays(&extra_keys[1..]);
        }
    }

    /// Add a text with its head.
    pub(crate) fn push_text(&mut self, text: &[u8]) {
        self.push_head(TEXT, text.len() as u32);
        self.push(text);
    }

    fn push_bytes(&mut self, bytes: &[u8]) {
        self.push_head(BYTES, bytes.len() as u32);
        self.push(bytes);
    }

    fn push_integer(&mut self, number: i32) {
        match number {
            ..0 => self.push_head(NEGATIVE, (-1 - number) as u32),
            _ => self.push_head(UNSIGNED, number as u32),
        }
    }

    fn push_head(&mut self, kind: u8, number: u32) {
        self.end += put_head(self.reserve(HEAD_ROOM), kind, number);
    }

    fn push_arrays(&mut self, mut extra_keys: &[u8]) {
        while let [tag, rest @ ..] = extra_keys {
            let (value, rest) = sized(rest);
            match *tag {
                LORA => {
                    let (name, path) = sized(value);
                    self.push_array(3, b"lora");
                    self.push_text(name);
                    self.push_text(path);
                }
                MEDIA => {
                    let (offset, identifier) = number(value);
                    self.push_array(3, b"mm");
                    self.push_text(identifier);
                    self.push_integer(offset as i32);
                }
                CUT_MEDIA => {
                    let (offset, rest) = number(value);
                    let (end, identifier) = number(rest);
                    self.push_array(4, b"mm cut");
                    self.push_text(identifier);
                    self.push_integer(offset as i32);
                    self.push_head(UNSIGNED, end);
                }
                CACHE_SALT => {
                    self.push_array(2, b"cache_salt");
                    self.push_text(value);
                }
                CUT_EMBEDS => {
                    let (num_left, digest) = number(value);
                    self.push_array(3, b"prompt_embeds cut");
                    self.push_bytes(digest);
                    self.push_head(UNSIGNED, num_left);
                }
                _ => {
                    self.push_array(2, b"prompt_embeds");
                    self.push_bytes(value);
                }
            }
            extra_keys = rest;
        }
    }

    fn push_array(&mut self, size: u32, kind: &[u8]) {
        self.push_head(ARRAY, size);
        self.push_text(kind);
    }

    /// SHA-256 of the message.
    pub(crate) fn sha256(&mut self) -> [u8; 32] {
        self.reserve(PADDING_ROOM);
        sha256(&mut self.room, self.end)
    }
}

/// SHA-256 of the first bytes; what is behind them, at least `PADDING_ROOM`, is overwritten.
pub(crate) fn sha256(room: &mut [u8], end: usize) -> [u8; 32] {
    let mut state = SHA256_START;
    for chunk in pad(room, end) {
        compress256(&mut state, std::slice::from_ref(GenericArray::from_slice(chunk)));
    }
    let mut digest = [0; 32];
    digest.copy_from_slice(state.map(u32::to_be_bytes).as_flattened());
    digest
}

/// Pad a message as SHA-256 demands; returns all of its chunks.
#[inline]
pub(crate) fn pad(room: &mut [u8], end: usize) -> &[[u8; CHUNK]] {
    let padded = (end + PADDING_MIN).next_multiple_of(CHUNK);
    room[end..end + PADDING_ROOM].fill(0);
    room[end] = 0x80;
    room[padded - 8..padded].copy_from_slice(&(8 * end as u64).to_be_bytes());
    room[..padded].as_chunks().0
}

/// Write the head of a kind and a number; returns its size. No branches, which the mixed sizes of
/// token ids would mislead.
pub(crate) fn put_head(room: &mut [u8], kind: u8, number: u32) -> usize {
    let [one, two, four] = [23, 0xff, 0xffff].map(|most| u64::from(number > most));
    let num_bytes = one + two + 2 * four;
    let first = u64::from(kind) | (0x18 * one + two + four);
    let bytes = u64::from(number).swap_bytes() >> (56 - 8 * num_bytes);
    room[..HEAD_ROOM].copy_from_slice(&(bytes | first).to_le_bytes());
    num_bytes as usize + 1
}

/// A number in front, and what is behind it.
fn number(bytes: &[u8]) -> (u32, &[u8]) {
    let (number, rest) = bytes.split_at(4);
    (u32::from_le_bytes([number[0], number[1], number[2], number[3]]), rest)
}

/// Bytes with their size before them, and what is behind them.
fn sized(bytes: &[u8]) -> (&[u8], &[u8]) {
    let (size, rest) = number(bytes);
    rest.split_at(size as usize)
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::types::extra_inputs::PROMPT_EMBEDS;

    /// The bytes that stand in a text of hexadecimal digits.
    fn hex(digits: &str) -> Vec<u8> {
        let digits: String = digits.split_whitespace().collect();
        let pair = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
        (0..digits.len()).step_by(2).map(pair).collect()
    }

    /// Extra keys with their number before them.
    fn written(extra_keys: &[(u8, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![extra_keys.len() as u8];
        for (tag, value) in extra_keys {
            bytes.push(*tag);
            bytes.extend((value.len() as u32).to_le_bytes());
            bytes.extend(*value);
        }
        bytes
    }

    fn cbor(tokens: &[u32], extra_keys: &[(u8, &[u8])]) -> Vec<u8> {
        let mut message = Message::default();
        message.push_cbor(&[7; 32], tokens, &written(extra_keys));
        message.as_bytes().to_vec()
    }

    /// What is encoded behind the parent.
    fn block(parts: &[&[u8]]) -> Vec<u8> {
        [&hex("83 5820"), &[7; 32][..], &parts.concat()].concat()
    }

    #[test]
    fn numbers_are_as_short_as_they_can_be() {
        let tokens = [0, 23, 24, 255, 256, 65_535, 65_536, u32::MAX];
        let expected = hex("88 00 17 1818 18ff 190100 19ffff 1a00010000 1affffffff f6");
        assert_eq!(cbor(&tokens, &[]), block(&[&expected]));
    }

    #[test]
    fn extra_keys_are_arrays() {
        let extra: [(u8, &[u8]); 5] = [
            (LORA, b"\x01\0\0\0np"),
            (MEDIA, b"\xfd\xff\xff\xffimage"),
            (MEDIA, b"\xf4\x01\0\0i"),
            (CACHE_SALT, b"salt"),
            (PROMPT_EMBEDS, &[9; 32]),
        ];
        let expected: [&[u8]; 4] = [
            // Offset -3 is 22, offset 500 is 1901f4.
            &hex("81 05 85 83 64 6c6f7261 61 6e 61 70 83 62 6d6d 65 696d616765 22"),
            &hex("83 62 6d6d 61 69 1901f4 82 6a 63616368655f73616c74 64 73616c74"),
            &hex("82 6d 70726f6d70745f656d62656473 5820"),
            &[9; 32],
        ];
        assert_eq!(cbor(&[5], &extra), block(&expected));
    }

    #[test]
    fn what_a_cut_left_has_names_that_vllm_has_not() {
        let rows = [b"\x03\0\0\0", &[9_u8; 32][..]].concat();
        let extra: [(u8, &[u8]); 2] =
            [(CUT_MEDIA, b"\xfe\xff\xff\xff\x03\0\0\0i"), (CUT_EMBEDS, &rows)];
        let expected: [&[u8]; 3] = [
            &hex("81 05 82 84 66 6d6d20637574 61 69 21 03"),
            &hex("83 71 70726f6d70745f656d6265647320637574 5820"),
            &[&[9; 32][..], &[3]].concat(),
        ];
        assert_eq!(cbor(&[5], &extra), block(&expected));
    }

    #[test]
    fn long_arrays_and_texts_have_long_heads() {
        for (num_tokens, array) in [(23, "97"), (24, "98 18"), (255, "98 ff"), (256, "99 0100")] {
            for (size, text) in [(23, "77"), (24, "78 18"), (300, "79 012c")] {
                let (tokens, salt) = (vec![0; num_tokens], vec![b's'; size]);
                let salt_key = hex("81 82 6a 63616368655f73616c74");
                let parts = [hex(array), vec![0; num_tokens], salt_key, hex(text), salt.clone()];
                let expected = block(&parts.each_ref().map(Vec::as_slice));
                assert_eq!(cbor(&tokens, &[(CACHE_SALT, &salt)]), expected);
            }
        }
    }

    #[test]
    fn a_message_of_any_length_is_hashed_in_a_buffer_used_before() {
        let mut message = Message::default();
        for size in (0..200).rev() {
            let bytes: Vec<u8> = (0..size).collect();
            message.clear();
            message.push(&bytes);
            assert_eq!(message.sha256()[..], Sha256::digest(&bytes)[..]);
            assert_eq!(message.as_bytes(), bytes);
        }
    }
}
