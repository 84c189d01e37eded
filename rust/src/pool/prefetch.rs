// SPDX-License-Identifier: Apache-2.0
//! Prefetching of memory before it is needed.
//!
//! Invariants: a prefetch is a hint and no access, so it has no observable effect. It is sound: the
//! instruction faults on no address and reads nothing that the program sees.
//! Why: before blocks were taken in runs it saved almost half of an allocation's time in a pool of
//! a million blocks, from 74 to 39 ns per block, and a tenth in one of 16,384.

#![allow(unsafe_code)]

/// Prefetch the entry at this place of a column; any place is allowed.
#[inline(always)]
pub(crate) fn prefetch<T>(column: &[T], place: usize) {
    prefetch_at(column.as_ptr().wrapping_add(place));
}

/// Prefetch what is at any address.
#[inline(always)]
pub(crate) fn prefetch_at<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetch the entry at this place of a column, which is written; any place is allowed.
#[cfg(feature = "python")] // only records need it
#[inline(always)]
pub(crate) fn prefetch_to_write<T>(column: &[T], place: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(column.as_ptr().wrapping_add(place).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (column, place);
}
