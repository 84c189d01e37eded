// SPDX-License-Identifier: Apache-2.0
//! What a batch to come overwrites before anything reads it: it counts as unknown.
//!
//! A part of in_flight.rs. Commands run in order, and the forward pass of a batch after its
//! commands. A block that is handed out, zeroed or copied to loses what it held; a table loses
//! entries that are set or cut. If neither a copy nor a pass reads them before, nothing can, unless
//! a cancel drops the commands: then what is unknown must not be read either, since it equals
//! nothing. So states are folded and none that breaks a property is lost. Texts on the device from
//! which no pass can feed any more are forgotten, too.

use smallvec::SmallVec;

use crate::check::names::in_flight::{Node, in_flight};
use crate::oracle::contents::mirror::{FORGOTTEN, FORGOTTEN_REST};
use crate::oracle::contents::{Content, Ghost, TierBlock};
use crate::types::commands::{Command, Commands, Tier};
use crate::types::ids::Row;

/// What happens first to a block or to a table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    Nothing,
    Read,
    Overwritten,
}

/// Forget what the batches that wait, and the open one, overwrite before anything reads it.
pub(crate) fn forget_overwritten(node: &mut Node) {
    let Node { state, pending, memory, .. } = node;
    let num_places = memory.contents.len() / memory.size;
    let mut blocks = SmallVec::<[First; 16]>::from_elem(First::Nothing, num_places);
    let mut read_rows = SmallVec::<[Row; 8]>::new();
    for batch in pending.iter().filter(|batch| !batch.executed) {
        follow(&batch.commands, memory, &mut blocks, &read_rows);
        for &place in &batch.used {
            note(memory, &mut blocks, place, First::Read);
        }
        read_rows.extend(batch.writes.iter().map(|write| write.row));
    }
    follow(&state.effects.commands, memory, &mut blocks, &read_rows);
    let size = memory.size;
    for (slots, first) in memory.contents.chunks_mut(size).zip(blocks) {
        if first == First::Overwritten {
            slots.fill(Content::Unknown);
        }
    }
    forget_texts(node);
}

/// Forget texts on the device from which no pass can feed: that needs an output that was sampled
/// and may still be taken, or, once a batch is cancelled, one of an older batch.
fn forget_texts(node: &mut Node) {
    let Node { outputs, texts, pending, .. } = node;
    let sampled = |row: Row, before: u64| {
        let mut fed = outputs.iter().filter(|each| !each.text.is_empty() && !each.stale);
        fed.any(|each| each.row == row && each.batch < before)
    };
    texts.retain(|each| sampled(each.0, u64::MAX));
    for batch in pending {
        batch.texts.retain(|each| sampled(each.0, batch.number));
    }
}

/// Note what the commands of a batch do first, and forget entries of tables that no pass has read.
fn follow(commands: &Commands, memory: &mut Ghost, blocks: &mut [First], read_rows: &[Row]) {
    for command in in_flight(commands) {
        if let Some(place) = command.reads() {
            note(memory, blocks, place, First::Read);
        }
        if let Some(place) = command.writes() {
            note(memory, blocks, place, First::Overwritten);
        }
        let num_groups = memory.groups.len();
        let is_read = |row: Row| read_rows.contains(&row);
        match command {
            Command::Allocate { block } => {
                note(memory, blocks, (Tier::Device, block), First::Overwritten);
            }
            Command::SetTable { row, group_id, position, .. } if !is_read(row) => {
                let table = memory.tables.get_mut(row.index() * num_groups + group_id as usize);
                let entry = table.and_then(|table| table.get_mut(position as usize));
                if let Some(entry) = entry.filter(|entry| **entry != FORGOTTEN_REST) {
                    *entry = FORGOTTEN;
                }
            }
            Command::CutTable { row, group_id, length } if !is_read(row) => {
                let table = memory.tables.get_mut(row.index() * num_groups + group_id as usize);
                if let Some(table) = table.filter(|table| table.len() > length as usize) {
                    table.truncate(length as usize);
                    table.push(FORGOTTEN_REST);
                }
            }
            _ => {}
        }
    }
}

fn note(memory: &Ghost, blocks: &mut [First], place: TierBlock, first: First) {
    let known = &mut blocks[memory.first_slot(place) / memory.size];
    if *known == First::Nothing {
        *known = first;
    }
}
