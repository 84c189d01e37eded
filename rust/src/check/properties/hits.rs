// SPDX-License-Identifier: Apache-2.0
//! The hit that a call is made with, and its blocks. Twin: kvcore/check/properties/hits.py.

use crate::check::properties::published::Made;
use crate::oracle::calls::{Call, Name, Value};
use crate::types::ids::{BlockId, Row};
use crate::types::values::Hit;

/// Return the blocks that a call was made with as a hit, if it was done: group, position and block.
///
/// Where external tokens follow, a window may be past a hit block: the null block stands for it.
pub(crate) fn all_hit_blocks<'a>(
    made: &Made<'a>,
) -> impl Iterator<Item = (u32, u32, BlockId)> + use<'a> {
    let (before, after) = (made.before, made.after);
    let of = hit_of(made);
    let hit = of.map(|(_, hit)| hit.blocks.blocks.as_slice()).unwrap_or_default();
    let all = (0..).zip(hit).flat_map(|(group_id, blocks)| {
        (0..).zip(blocks).map(move |(position, &block)| (group_id, position, block))
    });
    all.filter(move |&(group_id, position, block)| {
        let table = of.and_then(|(row, _)| after[row].tables.get(group_id as usize));
        let there = table.and_then(|table| table.get(position as usize));
        !before.is_null(block) && !there.is_some_and(|&there| before.is_null(there))
    })
}

/// Return the hit that a call was made with and the row of its request, if the call was done.
pub(crate) fn hit_of<'a>(made: &Made<'a>) -> Option<(Row, &'a Hit)> {
    let (name, hit) = called_with(made.call)?;
    if matches!(made.outcome.value, Value::Misuse(_) | Value::Refused(_)) {
        return None;
    }
    Some((name.row(made.before)?, hit))
}

/// Return the hit that a call is made with, and its request.
#[must_use]
pub fn called_with(call: &Call) -> Option<(Name, &Hit)> {
    let (name, hit) = match call {
        Call::AllocateSlots(slots) => (slots.name, &slots.hit),
        Call::Load { name, hit, .. } => (*name, hit),
        _ => return None,
    };
    Some((name, hit.as_ref()?))
}
