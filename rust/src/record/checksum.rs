// SPDX-License-Identifier: Apache-2.0
//! CRC-32C, the checksum of a record's headers, frames and batches, and copies that compute it.
//!
//! Bytes are folded 256 at a time if the processor has VPCLMULQDQ (Gopal et al., "Fast CRC
//! computation for generic polynomials", Intel 2009). Otherwise the crate computes it.
//! Why it is sound: the folding runs only if its instructions were detected. Each load and each
//! store is inside one of two slices of equally many chunks.
//! Gain: a prompt is copied to the file and summed in one pass; the checksum needs no second look.
//! Twin: kvcore/record/checksum.py.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use folded::Folding;

use crate::record::streamed::copy;

/// The checksum of these bytes behind others, which have this checksum.
pub(crate) fn crc32c(before: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let Some(folding) = Folding::detect() {
        return folding.sum(before, bytes);
    }
    crc32c::crc32c_append(before, bytes)
}

/// The same, and copy the bytes to places of the same number, past the cache.
pub(crate) fn crc32c_of_copy(before: u32, places: &mut [u8], bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let Some(folding) = Folding::detect() {
        let head = places.as_ptr().align_offset(folded::LINE).min(places.len());
        let (first, places) = places.split_at_mut(head);
        let (first_bytes, bytes) = bytes.split_at(head);
        let (places, last) = places.as_chunks_mut();
        let (chunks, last_bytes) = bytes.as_chunks();
        first.copy_from_slice(first_bytes);
        last.copy_from_slice(last_bytes);
        let sum = folding.sum(before, first_bytes);
        return folding.sum(folding.sum_of_copy(sum, places, chunks), last_bytes);
    }
    let sum = crc32c::crc32c_append(before, bytes);
    copy(places, bytes);
    sum
}

#[cfg(target_arch = "x86_64")]
mod folded {
    use std::arch::x86_64::{
        __m128i, __m512i, _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi32_si128,
        _mm_cvtsi128_si64, _mm_extract_epi64, _mm_set_epi64x, _mm_sfence, _mm_xor_si128,
        _mm512_broadcast_i32x4, _mm512_clmulepi64_epi128, _mm512_extracti32x4_epi32,
        _mm512_loadu_si512, _mm512_stream_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
        _mm512_zextsi128_si512,
    };

    /// Castagnoli's polynomial, bits reversed.
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    /// How many bytes are folded at once.
    const CHUNK: usize = 256;
    /// The bytes of a register.
    pub(super) const LINE: usize = 64;
    const NUM_LINES: usize = CHUNK / LINE;
    /// Factors that move 16 bytes on by a chunk, a line, and 16 bytes.
    const BY_CHUNK: [i64; 2] = factors(8 * CHUNK as u32);
    const BY_LINE: [i64; 2] = factors(8 * LINE as u32);
    const BY_LANE: [i64; 2] = factors(128);
    const XOR: i32 = 0x96;

    /// x to this power, modulo the polynomial; the highest bit is x to the power of 0.
    const fn power(exponent: u32) -> u32 {
        let (mut value, mut step) = (1_u32 << 31, 0);
        while step < exponent {
            value = (value >> 1) ^ (POLYNOMIAL * (value & 1));
            step += 1;
        }
        value
    }

    /// The factors of the first and the second 8 bytes of 16.
    const fn factors(bits: u32) -> [i64; 2] {
        [power(bits + 31) as i64, power(bits - 33) as i64]
    }

    /// The instructions, which this processor has.
    #[derive(Clone, Copy)]
    pub(super) struct Folding(());

    impl Folding {
        /// Detect the instructions.
        #[inline]
        pub(super) fn detect() -> Option<Folding> {
            let detected = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("vpclmulqdq")
                && is_x86_feature_detected!("pclmulqdq")
                && is_x86_feature_detected!("sse4.2");
            detected.then_some(Folding(()))
        }

        /// The checksum of bytes behind others of this checksum.
        #[inline]
        pub(super) fn sum(self, before: u32, bytes: &[u8]) -> u32 {
            let (chunks, rest) = bytes.as_chunks();
            let mut sum = before;
            if !chunks.is_empty() {
                // SAFETY: the instructions were detected.
                sum = unsafe { fold::<false>(sum, &mut [], chunks) };
            }
            // SAFETY: the instructions were detected.
            unsafe { of_few(sum, rest) }
        }

        /// The checksum of chunks, which are copied to as many that begin at a line.
        pub(super) fn sum_of_copy(
            self,
            before: u32,
            places: &mut [[u8; CHUNK]],
            chunks: &[[u8; CHUNK]],
        ) -> u32 {
            assert_eq!(places.len(), chunks.len(), "a copy has the size of what is copied");
            assert!(places.is_empty() || places.as_ptr().cast::<__m512i>().is_aligned());
            // SAFETY: the instructions were detected.
            unsafe { fold::<true>(before, places, chunks) }
        }
    }

    /// The checksum of some bytes, 8 at once.
    #[inline]
    #[target_feature(enable = "sse4.2")]
    fn of_few(before: u32, bytes: &[u8]) -> u32 {
        let (words, rest) = bytes.as_chunks();
        let mut sum = u64::from(!before);
        for &word in words {
            sum = _mm_crc32_u64(sum, u64::from_le_bytes(word));
        }
        !rest.iter().fold(sum as u32, |sum, &byte| _mm_crc32_u8(sum, byte))
    }

    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    fn fold<const COPIES: bool>(
        before: u32,
        places: &mut [[u8; CHUNK]],
        chunks: &[[u8; CHUNK]],
    ) -> u32 {
        let Some(first) = chunks.first() else { return before };
        let mut sums = load(first);
        if COPIES {
            store(&mut places[0], sums);
        }
        let start = _mm_cvtsi32_si128((!before).cast_signed());
        sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(start));
        let by = _mm512_broadcast_i32x4(_mm_set_epi64x(BY_CHUNK[1], BY_CHUNK[0]));
        for (number, chunk) in chunks.iter().enumerate().skip(1) {
            let lines = load(chunk);
            if COPIES {
                store(&mut places[number], lines);
            }
            for (sum, line) in sums.iter_mut().zip(lines) {
                *sum = moved(*sum, by, line);
            }
        }
        if COPIES {
            _mm_sfence(); // no later store overtakes those above
        }
        let by = _mm512_broadcast_i32x4(_mm_set_epi64x(BY_LINE[1], BY_LINE[0]));
        let [a, b, c, d] = sums;
        !of_line(moved(moved(moved(a, by, b), by, c), by, d))
    }

    /// Move a sum on, by what these factors do, and add what stands there.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn moved(sum: __m512i, by: __m512i, there: __m512i) -> __m512i {
        let low = _mm512_clmulepi64_epi128::<0x00>(sum, by);
        let high = _mm512_clmulepi64_epi128::<0x11>(sum, by);
        _mm512_ternarylogic_epi64::<XOR>(low, high, there)
    }

    /// The checksum of a line, from 0 and without the final inversion.
    #[inline]
    #[target_feature(enable = "avx512f,pclmulqdq,sse4.2")]
    fn of_line(line: __m512i) -> u32 {
        let mut sum = _mm512_extracti32x4_epi32::<0>(line);
        for lane in [
            _mm512_extracti32x4_epi32::<1>(line),
            _mm512_extracti32x4_epi32::<2>(line),
            _mm512_extracti32x4_epi32::<3>(line),
        ] {
            sum = _mm_xor_si128(lane, moved_lane(sum));
        }
        let low = _mm_crc32_u64(0, _mm_cvtsi128_si64(sum).cast_unsigned());
        _mm_crc32_u64(low, _mm_extract_epi64::<1>(sum).cast_unsigned()) as u32
    }

    #[inline]
    #[target_feature(enable = "pclmulqdq")]
    fn moved_lane(sum: __m128i) -> __m128i {
        let by = _mm_set_epi64x(BY_LANE[1], BY_LANE[0]);
        let low = _mm_clmulepi64_si128::<0x00>(sum, by);
        _mm_xor_si128(low, _mm_clmulepi64_si128::<0x11>(sum, by))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(chunk: &[u8; CHUNK]) -> [__m512i; NUM_LINES] {
        let (lines, _) = chunk.as_chunks::<LINE>();
        // SAFETY: a line has this many bytes.
        std::array::from_fn(|place| unsafe { _mm512_loadu_si512(lines[place].as_ptr().cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(places: &mut [u8; CHUNK], lines: [__m512i; NUM_LINES]) {
        let (to, _) = places.as_chunks_mut::<LINE>();
        for (to, line) in to.iter_mut().zip(lines) {
            // SAFETY: a line has this many bytes, and the first one is aligned, thus each one.
            unsafe { _mm512_stream_si512(to.as_mut_ptr().cast(), line) };
        }
    }
}
