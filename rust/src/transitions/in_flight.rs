// SPDX-License-Identifier: Apache-2.0
//! What transitions note about unfinished batches: marks, published keys and blocks in use.
//!
//! Invariants: a batch marks each request that it changes, in the order of first marking; a mark
//! outlives that the request leaves the open batch, and goes when the request is removed. When a
//! block leaves a table, it is in use by every unfinished batch whose forward pass reads or writes
//! it there: one that schedules the request and was taken with the block in that place. Nothing is
//! kept if batches finish as they are taken. Twin: kvcore/transitions/in_flight.py.

use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use crate::mutants::{Mutant, seeded};
use crate::state::batch_records::{Mark, Marks, Place, next_order};
use crate::state::state::{State, request_mut};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;

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
