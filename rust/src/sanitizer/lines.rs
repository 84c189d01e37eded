// SPDX-License-Identifier: Apache-2.0
//! A chunk of a step while it is checked, and the slots of its positions.
//!
//! Twin: kvcore/sanitizer/lines.py (`Line`, `WrongAccess`).

use crate::sanitizer::chunks::{CacheGroup, Chunk};
use crate::sanitizer::contents::{Event, Held};
use crate::sanitizer::requests::Table;

/// One chunk. place: of its request. oldest_epoch: of the contents that it reads and writes;
/// written: its value at the time of writing. loads: it only writes, from outside, without null
/// blocks, and in one group if that is given. begin, sums: the first position whose prefix was
/// summed for it, and where its sums are.
pub struct Line<'a> {
    pub chunk: &'a Chunk,
    pub place: usize,
    pub end: usize,
    pub begin: usize,
    pub sums: (usize, usize),
    pub oldest_epoch: u16,
    pub written: u16,
    pub loads: bool,
    pub group_id: Option<usize>,
    pub wrong: bool,
}

/// What a chunk did or found that is no right read; `alias` is the one that proves nothing.
///
/// block, slot, held and event are None if the table has no block for the position. event: under
/// which the slot was written, and how many steps behind it.
#[derive(Clone, Debug)]
pub struct WrongAccess {
    pub name: &'static str,
    pub serial: u32,
    pub group_id: usize,
    pub start: usize,
    pub position: usize,
    pub block: Option<u32>,
    pub slot: Option<usize>,
    pub held: Option<Held>,
    pub event: Option<(Event, u16)>,
    pub step: u32,
}

/// Where a position is: the index in its table, the block and the offset.
#[derive(Clone, Copy, Debug)]
pub struct SlotAddress {
    pub index: u32,
    pub block: u32,
    pub offset: usize,
}

/// A run of positions of one group; slots: the first one's and those behind it, if the chunk says
/// which they are.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    pub group_id: usize,
    pub first: usize,
    pub end: usize,
    pub slots: Option<&'a [i64]>,
}

impl<'a> Line<'a> {
    /// Whether the request claims each block that the chunk writes, as far as is known at once.
    pub fn claims(&self) -> bool {
        self.chunk.slots.is_none() && !self.loads
    }

    /// The positions that the chunk writes, by group.
    pub fn written(&self, num_groups: usize) -> impl Iterator<Item = Run<'a>> + use<'a> {
        let (first, end) = (self.chunk.start, self.end);
        let slots = self.chunk.slots.as_ref();
        let only = slots.map(|slots| slots.group_id).or(self.group_id);
        let groups = only.map_or(0..num_groups, |group_id| group_id..group_id + 1);
        groups.map(move |group_id| Run {
            group_id,
            first,
            end,
            slots: slots.map(|slots| slots.writes.as_slice()),
        })
    }

    /// The sum of the prefix that ends at a position; None if it is not known.
    pub fn total(&self, totals: &[u64], position: usize) -> Option<u64> {
        totals[self.sums.0..self.sums.1].get(position - self.begin).copied()
    }

    /// The positions to read of one group, if it is read in this phase.
    pub fn visible(
        &self,
        group_id: usize,
        group: &CacheGroup,
        (rings, lowest, whole): (bool, usize, bool),
    ) -> Option<Run<'a>> {
        if group.reads_first() != rings {
            return None;
        }
        if let Some(slots) = &self.chunk.slots {
            let end = if rings { self.chunk.start } else { self.end };
            let first = end - slots.reads.len();
            let slots = (slots.group_id == group_id).then_some(slots.reads.as_slice())?;
            return Some(Run { group_id, first, end, slots: Some(slots) });
        }
        let first = lowest.max(group.first(self.chunk.start));
        let end = if whole && !rings { self.end } else { self.chunk.start };
        Some(Run { group_id, first, end, slots: None })
    }
}

impl Run<'_> {
    /// The first position that is written: of a state, only the last one is.
    pub fn first_write(&self, group: &CacheGroup) -> usize {
        if group.state && self.slots.is_none() { self.end - 1 } else { self.first }
    }

    /// Whether the chunk says that it writes nothing for a position.
    pub fn skips(&self, position: usize) -> bool {
        self.slots.is_some_and(|slots| slots[position - self.first] < 0)
    }

    /// The place of a position; None if the table has no block for it.
    pub fn place(&self, group: &CacheGroup, table: &Table, position: usize) -> Option<SlotAddress> {
        let size = group.block_size;
        if let Some(slots) = self.slots {
            let slot = slots[position - self.first] as usize;
            let block = (slot / size) as u32;
            return Some(SlotAddress {
                index: (position / size) as u32,
                block,
                offset: slot % size,
            });
        }
        let mut index = position / size;
        if group.ring && !table.blocks.is_empty() {
            index %= table.blocks.len();
        }
        let block = *table.blocks.get(index)?;
        let offset = if group.state { 0 } else { position % size };
        Some(SlotAddress { index: index as u32, block, offset })
    }
}
