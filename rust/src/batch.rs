// SPDX-License-Identifier: Apache-2.0
//! Closing the open batch.
//!
//! Rules: a taken batch counts as executed, so what it wrote is there for the next one. With
//! `Duplicates::Merge` a block that was filled although its content was findable is looked up again
//! now: the table's move to the older block, and the `Free`, open the next batch. Twin:
//! kvcore/batch.py.

use crate::caching::announce_stored;
use crate::commands::{Batch, Command, close};
use crate::state::{Merge, State};

/// Close and number the open batch and give its commands; pending merges open the next one.
pub fn take_batch(state: &mut State) -> Batch {
    let taken = close(state.batch.number, &state.effects.commands);
    state.effects.commands.clear();
    state.batch.advance();
    for merge in std::mem::take(&mut state.batch.merges) {
        apply_merge(state, &merge);
    }
    taken
}

/// Move a table to the older block of its content, or publish its own where that is gone.
fn apply_merge(state: &mut State, merge: &Merge) {
    let Some(&row) = state.rows.get(&merge.request_id) else { return };
    let request = &state[row];
    let (group, position) = (merge.group as usize, merge.position as usize);
    let same = request.tables[group].get(position) == Some(&merge.block);
    let size = state.config.groups[group].block_size;
    let computed = request.num_accepted() >= (merge.position + 1) * size;
    if !same || !computed || state.device.key(merge.block).is_some() {
        return;
    }
    let scale = state.scales[group];
    if merge.position >= request.num_hashed(scale)
        || request.key(scale, merge.group, merge.position) != merge.key
    {
        return;
    }
    let Some(older) = state.device.index.first(&merge.key) else {
        state.device.publish(merge.block, merge.key);
        announce_stored(state, row, merge.group, (merge.position, merge.position + 1));
        return;
    };
    state.device.touch(older, &mut state.effects);
    let (group, position) = (merge.group, merge.position);
    state.effects.emit(Command::SetTable { row, group, position, block: older });
    state[row].tables[group as usize][position as usize] = older;
    state.device.release([merge.block], &mut state.effects);
}
