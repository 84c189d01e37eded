// SPDX-License-Identifier: Apache-2.0
//! Segments: where the order of a batch's commands matters. Part of kvcore/types/commands.py.
//!
//! Why: a batch whose copies use each block once, as in most steps, is one segment, and `is_one`
//! finds it in fewer instructions than a hash map needs.

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::types::commands::Commands;

/// An odd number with mixed bits.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
/// The number of no block, above all others. Its bytes differ, so that a table is filled by stores
/// of whole registers; equal bytes are set one by one, at several times the instructions.
pub(super) const NONE: u64 = 1 << 63;

/// Return the blocks that the command of a row reads and writes, as numbers; `NONE` for none.
#[inline(always)]
pub(super) fn uses(&[kind, a, b, c, _]: &[i32; 5]) -> [u64; 2] {
    let device = |block: i32| u64::from(block.cast_unsigned()) << 1;
    let host = |block: i32| device(block) | 1;
    if kind == 7 {
        return [device(a), device(b)]; // nearly all are these
    }
    match kind {
        6 => [NONE, device(a)],
        8 => [device(a), host(b)],
        9 => [host(a), device(b)],
        10 => [device(b), NONE],
        11 => [NONE, device(c)],
        _ => [NONE; 2],
    }
}

/// Return the segment number of each command, if a command uses a block that another one uses.
pub(super) fn split(commands: &Commands) -> Vec<i32> {
    let mut numbers = vec![0; commands.len()];
    let (mut current, mut from) = (0, 0);
    // Whether the segment writes a block that it uses.
    let mut used = HashMap::with_capacity_and_hasher(2 * commands.moving.len(), FxBuildHasher);
    for &place in &commands.moving {
        let [source, target] = uses(&commands.rows[place as usize]);
        let [source, target] = [source, target].map(|block| Some(block).filter(|&b| b != NONE));
        let at_source = source.and_then(|block| used.insert(block, false));
        let at_target = target.and_then(|block| used.insert(block, true));
        let met = if source == target { at_source } else { at_target };
        if at_source == Some(true) || met.is_some() {
            numbers[from..place as usize].fill(current);
            (current, from) = (current + 1, place as usize);
            used.clear();
            used.extend(source.map(|block| (block, false)));
            used.extend(target.map(|block| (block, true)));
        }
    }
    numbers[from..].fill(current);
    numbers
}

/// Whether no command uses a block that another one uses, in any way.
pub(super) fn is_one(commands: &Commands) -> bool {
    let Commands { rows, moving, .. } = commands;
    if moving.is_empty() {
        return true;
    }
    let mut seen = vec![NONE; (4 * moving.len()).next_power_of_two()];
    moving.iter().all(|&place| {
        let [source, target] = uses(&rows[place as usize]);
        (source == NONE || is_new(&mut seen, source))
            && (target == NONE || is_new(&mut seen, target))
    })
}

/// Put a block into a table that is at most half full; false if it is there already.
#[inline(always)]
fn is_new(seen: &mut [u64], block: u64) -> bool {
    let mask = seen.len() - 1;
    let mut place = (block.wrapping_mul(SPREAD) >> 32) as usize & mask;
    while seen[place] != NONE {
        if seen[place] == block {
            return false;
        }
        place = (place + 1) & mask;
    }
    seen[place] = block;
    true
}
