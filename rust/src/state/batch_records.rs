// SPDX-License-Identifier: Apache-2.0
//! Batches that were taken and are not finished: what each remembers, and what it still uses.
//!
//! Rules: a batch marks each request that it changes, in the order of first marking; a mark
//! outlives that the request leaves the open batch, and goes when the request is removed. When a
//! block leaves a table, it is in use by every unfinished batch whose forward pass reads or writes
//! it there: one that schedules the request and was taken with the block in that place. Nothing is
//! kept where batches finish as they are taken. A taken batch is shared by the copies of a state
//! until one of them changes it. Source: design, 7.2 to 7.4. Twin: kvcore/state/batch_records.py.

use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use crate::hashing::block_hash::Key;
use crate::mutants::{Mutant, seeded};
use crate::state::row_map::RowMap;
use crate::state::state::{State, request_mut};
use crate::types::clone_in_place::clone_in_place;
use crate::types::ids::{BlockId, Row};

/// A block, and the key that a batch published it under.
pub type Given = (BlockId, Key);

/// Row, group and position in a table.
pub type Place = (Row, u32, u32);

/// What a batch remembers of a request.
#[derive(Debug, Clone, Copy)]
pub struct Mark {
    /// Place among the marks of the batch.
    pub(crate) order: u32,
    /// The request's count before its first slots in the batch, and before its hits; 0 where it
    /// was swapped.
    pub(crate) before: u32,
    /// The count that a cancel takes it back to.
    pub(crate) restore: u32,
    /// The batch's completion may publish its blocks.
    pub(crate) publishes: bool,
}

/// The marks of one batch.
#[derive(Debug, Default)]
pub struct Marks {
    rows: RowMap<Mark>,
    /// Marks that were made, those that are gone included.
    num_made: u32,
    /// In a taken batch, for each mark in the order of their making: leading blocks of each table
    /// that the forward pass uses, as far as they are still there.
    held: Vec<u32>,
}

clone_in_place!(Marks { rows, num_made, held });

impl Marks {
    /// The mark of a row.
    #[must_use]
    pub fn get(&self, row: Row) -> Option<&Mark> {
        self.rows.get(row)
    }

    /// Add a mark for a row that has none.
    pub(crate) fn insert_new(&mut self, row: Row, made: Mark) {
        self.num_made = made.order + 1;
        self.rows.insert_new(row, made);
    }

    /// Leading blocks of each table of a row that the forward pass uses; empty in the open batch.
    #[must_use]
    pub fn held(&self, row: Row) -> &[u32] {
        self.get(row).map_or(&[], |mark| &self.held[self.places(mark)])
    }

    /// The same, of one group.
    fn held_in(&self, row: Row, group: u32) -> u32 {
        self.held(row).get(group as usize).copied().unwrap_or(0)
    }

    /// Where the blocks are noted that the forward pass uses of a request.
    fn places(&self, mark: &Mark) -> Range<usize> {
        let width = self.held.len() / self.num_made as usize;
        let order = if seeded(Mutant::HeldOfTheFirst) { 0 } else { mark.order as usize };
        order * width..(order + 1) * width
    }

    /// Put what the forward pass uses in place, one mark behind the other.
    pub(crate) fn restore(&mut self, held: Vec<u32>) {
        self.held = held;
    }

    /// Note that the forward pass uses no more of a table than so many blocks.
    fn cut(&mut self, row: Row, group: u32, length: u32) {
        if let Some(place) = self.get(row).map(|mark| self.places(mark).start + group as usize) {
            self.held[place] = length;
        }
    }

    /// Note the blocks that the forward pass uses, a group, for marks of a batch that is taken.
    pub(crate) fn hold(&mut self, num_groups: usize, held: impl Fn(Row, &mut [u32])) {
        self.held = vec![0; self.num_made as usize * num_groups];
        for (row, mark) in self.rows.iter() {
            let first = mark.order as usize * num_groups;
            held(row, &mut self.held[first..first + num_groups]);
        }
    }
}

/// A taken batch.
#[derive(Debug, Clone, Default)]
pub struct Unfinished {
    pub(crate) number: u64,
    pub(crate) marks: Marks,
    /// What it published, in order, where that can be taken back.
    pub(crate) given: Vec<Given>,
    /// Those that its commands name, rising.
    pub(crate) rows: Vec<Row>,
    /// Places that a mark holds and whose block is another one by now.
    pub(crate) replaced: BTreeSet<Place>,
}

impl Unfinished {
    /// The number of the batch.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Group and position of a request's places whose block is another one by now, rising.
    pub(crate) fn replaced_of(&self, row: Row) -> impl Iterator<Item = (u32, u32)> + '_ {
        let places = self.replaced.range((row, 0, 0)..=(row, u32::MAX, u32::MAX));
        places.map(|&(_, group, position)| (group, position))
    }

    /// Whether the forward pass uses the block in this place of a table.
    fn uses(&self, row: Row, group: u32, position: u32) -> bool {
        position < self.marks.held_in(row, group)
            && !self.replaced.contains(&(row, group, position))
    }
}

/// Note in the open batch what it does to a request; counts only fall.
///
/// publishes: as the last call says that says it.
pub(crate) fn mark(
    state: &mut State,
    row: Row,
    before: u32,
    restore: u32,
    publishes: Option<bool>,
) {
    if !state.config.tracks_batches() {
        return;
    }
    let marks = &mut state.batch.marks;
    if let Some(known) = marks.rows.get_mut(row) {
        known.before = known.before.min(before);
        known.restore = known.restore.min(restore);
        known.publishes = publishes.unwrap_or(known.publishes);
        return;
    }
    let publishes = publishes.unwrap_or(false);
    let order = next_order(marks);
    marks.insert_new(row, Mark { order, before, restore, publishes });
}

/// Note a key that a cancel of the open batch withdraws.
pub(crate) fn note_given(state: &mut State, block: BlockId, key: Key) {
    if state.config.max_in_flight > 0 {
        state.batch.given.push((block, key));
    }
}

/// Note that a request left the open batch: what it remembers stays, but publishes nothing.
pub(crate) fn leave(state: &mut State, row: Row) {
    if let Some(known) = state.batch.marks.rows.get_mut(row) {
        known.publishes = false;
    }
}

/// Note that a cancel of the batch that was just taken restores no more of a request.
pub(crate) fn lower(state: &mut State, row: Row, num_tokens: u32) {
    let Some(taken) = state.unfinished.last_mut() else { return };
    if taken.marks.get(row).is_none_or(|known| known.restore <= num_tokens) {
        return;
    }
    if let Some(known) = Arc::make_mut(taken).marks.rows.get_mut(row) {
        known.restore = num_tokens;
    }
}

/// The order of the next mark.
pub(crate) fn next_order(marks: &Marks) -> u32 {
    marks.num_made
}

/// The marks of a batch, in the order of their making.
pub(crate) fn in_order(marks: &Marks) -> Vec<(Row, &Mark)> {
    let mut ordered: Vec<(Row, &Mark)> = marks.rows.iter().collect();
    ordered.sort_by_key(|(_, mark)| mark.order);
    ordered
}

/// Give a forked child its parent's marks; no batch schedules it.
pub(crate) fn inherit(state: &mut State, parent: Row, child: Row) {
    for batch in &mut state.unfinished {
        if batch.marks.get(parent).is_some() {
            inherit_one(&mut Arc::make_mut(batch).marks, parent, child);
        }
    }
    inherit_one(&mut state.batch.marks, parent, child);
}

fn inherit_one(marks: &mut Marks, parent: Row, child: Row) {
    let order = next_order(marks);
    let Some(&known) = marks.get(parent) else { return };
    let width = marks.held(parent).len();
    marks.insert_new(child, Mark { order, ..known });
    marks.held.resize(marks.held.len() + width, 0);
}

/// Drop a request's marks in all batches.
pub(crate) fn forget(state: &mut State, row: Row) {
    for batch in &mut state.unfinished {
        if batch.marks.get(row).is_some() && !seeded(Mutant::RemovedStaysMarked) {
            let batch = Arc::make_mut(batch);
            batch.marks.rows.remove(row);
            remove_places(&mut batch.replaced, (row, 0, 0)..=(row, u32::MAX, u32::MAX));
        }
    }
    state.batch.marks.rows.remove(row);
}

/// The unfinished batches whose forward pass uses the block in this place of a table.
pub(crate) fn users(
    state: &State,
    row: Row,
    group: u32,
    position: u32,
) -> impl Iterator<Item = u64> + '_ {
    let using = state.unfinished.iter().filter(move |batch| batch.uses(row, group, position));
    using.map(|batch| batch.number)
}

/// Note that the blocks in these places leave a table: unfinished batches still use them.
pub(crate) fn let_go(state: &mut State, row: Row, group: u32, positions: Range<u32>) {
    if state.unfinished.is_empty() || seeded(Mutant::FreedUnderABatch) {
        return;
    }
    let State { unfinished, requests, device, .. } = state;
    let table = &request_mut(requests, row).tables[group as usize];
    for batch in unfinished.iter() {
        for position in positions.start..positions.end.min(batch.marks.held_in(row, group)) {
            let block = table[position as usize];
            if !device.is_null(block) && !batch.replaced.contains(&(row, group, position)) {
                device.note_use(block, batch.number);
            }
        }
    }
}

/// Note that a table was cut: what comes behind is not what unfinished batches use.
pub(crate) fn shorten(state: &mut State, row: Row, group: u32, length: u32) {
    for batch in &mut state.unfinished {
        if batch.marks.held_in(row, group) <= length {
            continue;
        }
        let batch = Arc::make_mut(batch);
        batch.marks.cut(row, group, length);
        remove_places(&mut batch.replaced, (row, group, length)..=(row, group, u32::MAX));
    }
}

/// Note that a place of a table has another block by now.
pub(crate) fn replace(state: &mut State, row: Row, group: u32, position: u32) {
    for batch in &mut state.unfinished {
        if position < batch.marks.held_in(row, group) {
            Arc::make_mut(batch).replaced.insert((row, group, position));
        }
    }
}

fn remove_places(places: &mut BTreeSet<Place>, lost: RangeInclusive<Place>) {
    if seeded(Mutant::LostPlacesStay) {
        return;
    }
    while let Some(&place) = places.range(lost.clone()).next() {
        places.remove(&place);
    }
}

/// Tokens of a request, drafts aside, that no batch computes any more.
pub(crate) fn num_finished(state: &State, row: Row) -> u32 {
    if seeded(Mutant::PublishesInFlight) {
        return state[row].num_accepted();
    }
    let taken = state.unfinished.iter().map(|batch| &batch.marks);
    let marks = taken.chain([&state.batch.marks]).filter_map(|marks| marks.get(row));
    marks.map(|mark| mark.before).fold(state[row].num_accepted(), u32::min)
}
