// SPDX-License-Identifier: Apache-2.0
//! Whether names occur twice. Part of kvcore/types/commands.py.
//!
//! Why: a batch whose copies use each block once, as in most steps, is one segment, and this finds
//! it in fewer instructions than a hash map needs.

/// An odd number with mixed bits.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
/// No name.
const EMPTY: u64 = u64::MAX;

/// Whether none of at most this many names occurs twice.
pub(crate) fn all_differ(mut names: impl Iterator<Item = u64>, most: usize) -> bool {
    let mut seen = vec![EMPTY; (2 * most).next_power_of_two()];
    let mask = seen.len() - 1;
    names.all(|name| {
        let mut place = (name.wrapping_mul(SPREAD) >> 32) as usize & mask;
        while seen[place] != EMPTY && seen[place] != name {
            place = (place + 1) & mask;
        }
        std::mem::replace(&mut seen[place], name) == EMPTY
    })
}
