// SPDX-License-Identifier: Apache-2.0
//! Changes of block tables, each with its command and its effect on batches in flight.
//!
//! Invariants: no other file makes a `SetTable` or a `CutTable`. A block that leaves a table is in
//! use by every batch in flight whose forward pass reads or writes it there, that is, each batch
//! that schedules the request and was taken with the block in that place. Twin:
//! kvcore/state/table_edit.py.

use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use crate::mutants::{Mutant, seeded};
use crate::pool::block_pool::BlockPool;
use crate::state::batch_records::TableCell;
use crate::state::new_blocks::NewBlocks;
use crate::state::state::{NULL_BLOCK, State, request_mut};
use crate::types::commands::Command;
use crate::types::effects::Effects;
use crate::types::groups::{Group, Kind};
use crate::types::ids::{BlockId, Row, Table};
use crate::types::retention::{wish_at, wishes_of};

/// One table of a request while a transition changes it.
pub(crate) struct TableEdit<'a> {
    state: &'a mut State,
    row: Row,
    group_id: u32,
}

impl<'a> TableEdit<'a> {
    /// Begin a change of a request's table in a group.
    pub(crate) fn of(state: &'a mut State, row: Row, group_id: u32) -> Self {
        TableEdit { state, row, group_id }
    }

    /// Append blocks to the table. fresh: no command fills them.
    pub(crate) fn extend(self, blocks: &[BlockId], fresh: bool) {
        let TableEdit { state, row, group_id } = self;
        let State { config, effects, requests, new_blocks, .. } = state;
        let rule = &config.groups[group_id as usize];
        let mut news = config.record_new_blocks.then_some(new_blocks);
        let table = &mut request_mut(requests, row).tables[group_id as usize];
        if !fresh || news.is_none() && !rule.zero_new_blocks {
            effects.commands.set_places((row, group_id), table.len(), blocks);
            return table.extend_from_slice(blocks);
        }
        for &block in blocks {
            note_new((group_id, rule), news.as_deref_mut(), block, effects);
            push((row, group_id), table, block, effects);
        }
    }

    /// Add the request as an owner of blocks, which become its table; the table must be empty.
    pub(crate) fn share(self, blocks: Table) {
        let TableEdit { state, row, group_id } = self;
        for (position, &block) in (0..).zip(&blocks) {
            if !state.device.is_null(block) {
                state.device.touch(block, &mut state.effects);
            }
            state.effects.emit(Command::SetTable { row, group_id, position, block });
        }
        state[row].tables[group_id as usize] = blocks;
    }

    /// Put another block in a place of the table and release the one that was there. fresh: no
    /// command fills the new one.
    pub(crate) fn replace(mut self, position: u32, block: BlockId, fresh: bool) {
        self.keep_in_use(position..position + 1);
        self.note_wishes(position..position + 1);
        self.note_replaced(position);
        let TableEdit { state, row, group_id } = self;
        let State { config, device, effects, requests, new_blocks, .. } = state;
        if fresh {
            let news = config.record_new_blocks.then_some(new_blocks);
            note_new((group_id, &config.groups[group_id as usize]), news, block, effects);
        }
        effects.emit(Command::SetTable { row, group_id, position, block });
        let table = &mut request_mut(requests, row).tables[group_id as usize];
        let old = std::mem::replace(&mut table[position as usize], block);
        device.release([old], effects);
    }

    /// Put the null block into places [first, end) and release the old blocks, the last one first.
    pub(crate) fn blank(mut self, first: u32, end: u32) {
        self.keep_in_use(first..end);
        self.note_wishes(first..end);
        let (row, group_id) = (self.row, self.group_id);
        let State { device, effects, requests, .. } = self.state;
        let table = &mut request_mut(requests, row).tables[group_id as usize];
        device.release(table[first as usize..end as usize].iter().rev().copied(), effects);
        for position in first..end {
            table[position as usize] = NULL_BLOCK; // few: a call to fill them would cost more
            if !seeded(Mutant::TrimNotReported) {
                effects.emit(Command::SetTable { row, group_id, position, block: NULL_BLOCK });
            }
        }
        (first..end).for_each(|position| self.note_replaced(position));
    }

    /// Move the last block of the table to a position, which becomes the last one. Null blocks fill
    /// the places between; a block at the new position is released.
    pub(crate) fn move_last(mut self, position: u32) {
        let (row, group_id) = (self.row, self.group_id);
        let table = &self.state[row].tables[group_id as usize];
        let last = table.len() as u32 - 1;
        let (block, old) = (table[last as usize], table.get(position as usize).copied());
        if position > last {
            self.keep_in_use(last..last + 1);
            self.note_replaced(last);
            self.state[row].tables[group_id as usize][last as usize] = NULL_BLOCK;
            self.state.effects.emit(Command::SetTable {
                row,
                group_id,
                position: last,
                block: NULL_BLOCK,
            });
            let mut moved = vec![NULL_BLOCK; (position - last) as usize];
            moved[(position - last - 1) as usize] = block;
            self.extend(&moved, false);
        } else if let Some(old) = old.filter(|_| position < last) {
            self.keep_in_use(position..position + 1);
            self.note_replaced(position);
            self.shorten(position + 1);
            let length = position + 1;
            self.state.effects.emit(Command::SetTable { row, group_id, position, block });
            self.state.effects.emit(Command::CutTable { row, group_id, length });
            if !self.state.is_null(old) {
                self.note_wishes(position..length);
                self.state.device.release([old], &mut self.state.effects);
            }
            let table = &mut self.state[row].tables[group_id as usize];
            table.truncate(length as usize);
            table[position as usize] = block;
        }
    }

    /// Replace the end of the table, from place `first` on, by some of its blocks, in order. The
    /// others are released, the last one first. kept: places in the end, ascending.
    pub(crate) fn keep_of_end(mut self, first: u32, kept: &[u32]) {
        let (row, group_id) = (self.row, self.group_id);
        let end = self.state[row].tables[group_id as usize][first as usize..].to_vec();
        let length = first + kept.len() as u32;
        self.keep_in_use(first..first + end.len() as u32);
        for (position, &place) in (first..).zip(kept) {
            let block = end[place as usize];
            if block != end[(position - first) as usize] {
                self.note_replaced(position);
                self.state.effects.emit(Command::SetTable { row, group_id, position, block });
            }
        }
        self.shorten(length);
        self.state.effects.emit(Command::CutTable { row, group_id, length });
        let left = || (0..end.len() as u32).filter(|place| !kept.contains(place));
        left().for_each(|place| self.note_wishes(first + place..first + place + 1));
        let State { device, effects, requests, .. } = self.state;
        device.release(left().rev().map(|place| end[place as usize]), effects);
        let table = &mut request_mut(requests, row).tables[group_id as usize];
        table.truncate(first as usize);
        table.extend(kept.iter().map(|&place| end[place as usize]));
    }

    /// Keep `length` blocks of the table and release those behind, the last one first.
    pub(crate) fn cut(mut self, length: u32) {
        let (row, group_id) = (self.row, self.group_id);
        let end = self.state[row].tables[group_id as usize].len() as u32;
        self.keep_in_use(length..end);
        self.note_wishes(length..end);
        self.shorten(length);
        let State { config, device, effects, requests, .. } = self.state;
        let has_gaps = config.groups[group_id as usize].is_state();
        let table = &mut request_mut(requests, row).tables[group_id as usize];
        let first_held = table.iter().take_while(|&&block| device.is_null(block)).count();
        let released = &mut table[first_held.max(length as usize)..];
        if has_gaps || !seeded(Mutant::FreeHeadFirst) {
            released.reverse();
        }
        if has_gaps {
            let held = released.iter().filter(|&&block| block != NULL_BLOCK);
            device.release(held.copied(), effects);
        } else {
            device.release_all(released, effects);
        }
        table.truncate(length as usize);
        if !seeded(Mutant::CutNotReported) {
            effects.emit(Command::CutTable { row, group_id, length });
        }
    }

    /// Note that batches in flight still use the blocks in these places, which leave.
    #[inline]
    fn keep_in_use(&mut self, positions: Range<u32>) {
        if !self.state.in_flight.is_empty() && !seeded(Mutant::FreedUnderABatch) {
            self.note_uses(positions);
        }
    }

    fn note_uses(&mut self, positions: Range<u32>) {
        let (row, group_id) = (self.row, self.group_id);
        let State { in_flight, requests, device, .. } = &mut *self.state;
        let table = &request_mut(requests, row).tables[group_id as usize];
        for batch in in_flight.iter() {
            for position in positions.start..positions.end.min(batch.entries.held_in(row, group_id))
            {
                let block = table[position as usize];
                if !device.is_null(block) && !batch.replaced.contains(&(row, group_id, position)) {
                    device.note_use(block, batch.number);
                }
            }
        }
    }

    /// Note how long the blocks in these places, which leave, should stay cached.
    #[inline]
    fn note_wishes(&mut self, positions: Range<u32>) {
        if self.state.device.retention.is_none() {
            return;
        }
        let State { config, device, requests, wishes, .. } = &mut *self.state;
        let table = &request_mut(requests, self.row).tables[self.group_id as usize];
        let size = config.groups[self.group_id as usize].block_size;
        let steps = wishes_of(wishes, self.row);
        for position in positions {
            let block = table[position as usize];
            if !device.is_null(block) {
                device.note_wish(block, wish_at(steps, (position + 1) * size - 1));
            }
        }
    }

    /// Note that the table is cut: blocks that follow later are not those that batches in flight
    /// use.
    fn shorten(&mut self, length: u32) {
        let (row, group) = (self.row, self.group_id);
        for batch in &mut self.state.in_flight {
            if batch.entries.held_in(row, group) <= length {
                continue;
            }
            let batch = Arc::make_mut(batch);
            batch.entries.cut(row, group, length);
            remove_places(&mut batch.replaced, (row, group, length)..=(row, group, u32::MAX));
        }
    }

    /// Note that a place of the table has another block by now.
    #[inline]
    fn note_replaced(&mut self, position: u32) {
        let (row, group_id) = (self.row, self.group_id);
        for batch in &mut self.state.in_flight {
            if position < batch.entries.held_in(row, group_id) {
                Arc::make_mut(batch).replaced.insert((row, group_id, position));
            }
        }
    }
}

/// Split the next blocks off those that a plan took.
pub(crate) fn first_of<'a>(taken: &mut &'a [BlockId], count: u32) -> &'a [BlockId] {
    taken.split_off(..count as usize).expect("ADMIT-EXACT: the plan counts each block")
}

/// Append a block to a table.
#[inline(always)] // once in each block of a request
pub(crate) fn push(
    (row, group_id): (Row, u32),
    table: &mut Table,
    block: BlockId,
    effects: &mut Effects,
) {
    effects.emit(Command::SetTable { row, group_id, position: table.len() as u32, block });
    table.push(block);
}

/// Whether it has to be noted which blocks leave tables.
pub(crate) fn has_notes(state: &State) -> bool {
    !state.in_flight.is_empty() || state.device.retention.is_some()
}

/// Put the null block into one place of a table and release the block, if nothing has to be noted.
#[inline(always)] // once in each block of a request
pub(crate) fn blank_one(
    (row, group_id, position): TableCell,
    place: &mut BlockId,
    device: &mut BlockPool,
    effects: &mut Effects,
) {
    device.release_one(std::mem::replace(place, NULL_BLOCK), effects);
    if !seeded(Mutant::TrimNotReported) {
        effects.emit(Command::SetTable { row, group_id, position, block: NULL_BLOCK });
    }
}

/// Forget that places of tables have other blocks by now.
pub(crate) fn remove_places(places: &mut BTreeSet<TableCell>, lost: RangeInclusive<TableCell>) {
    if seeded(Mutant::LostPlacesStay) {
        return;
    }
    while let Some(&place) = places.range(lost.clone()).next() {
        places.remove(&place);
    }
}

/// Record a block as new, and zero it if its group needs zeroing.
#[inline(always)] // once in each block of a request
pub(crate) fn note_new(
    (group_id, rule): (u32, &Group),
    news: Option<&mut NewBlocks>,
    block: BlockId,
    effects: &mut Effects,
) {
    if rule.zero_new_blocks {
        effects.emit(Command::Zero { block });
    }
    if let Some(news) = news
        && matches!(rule.kind, Kind::FullAttention | Kind::Mla)
    {
        news.push(group_id, block);
    }
}

/// The batches in flight whose forward pass uses the block in this place of a table.
pub(crate) fn users(
    state: &State,
    row: Row,
    group_id: u32,
    position: u32,
) -> impl Iterator<Item = u64> + '_ {
    let using = state.in_flight.iter().filter(move |batch| batch.uses(row, group_id, position));
    using.map(|batch| batch.number)
}

/// Send the whole tables of a row to the runtime again.
pub(crate) fn rebuild(state: &mut State, row: Row) {
    let State { config, requests, effects, .. } = state;
    for group_id in 0..config.groups.len() as u32 {
        effects.emit(Command::CutTable { row, group_id, length: 0 });
        let Some(request) = &requests[row.index()] else { continue };
        for (position, &block) in (0..).zip(&request.tables[group_id as usize]) {
            effects.emit(Command::SetTable { row, group_id, position, block });
        }
    }
}
