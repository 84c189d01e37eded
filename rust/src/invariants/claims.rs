// SPDX-License-Identifier: Apache-2.0
//! The properties of unfinished operations and of pins of prefixes, which hold blocks.
//!
//! Twin: kvcore/invariants/claims.py.

use std::collections::HashSet;

use crate::invariants::requests::Scratch;
use crate::state::state::named_pins::named_blocks;
use crate::state::state::{Operation, State};
use crate::types::ids::Row;
use crate::types::violation::Finding;

/// NAMED-PINS: a pin of a prefix holds each of its blocks once, in addition to operations, and
/// belongs to an epoch that has begun; all pins together hold at most `max_pinned_blocks`.
pub(crate) fn named_pins(state: &State, _: &mut Scratch) -> Finding {
    if state.named_pins.is_empty() {
        return Ok(());
    }
    let (first, most) = (state.config.epoch, state.config.most_pinned());
    let mut held = state.num_held();
    named_blocks(&state.named_pins).for_each(|block| *held.entry(block).or_insert(0) += 1);
    for (name, pin) in &state.named_pins {
        let blocks: HashSet<u32> = pin.blocks.iter().map(|block| block.0).collect();
        if blocks.is_empty() || blocks.len() < pin.blocks.len() {
            return Err(format!("pin {name:?} names blocks {:?}", pin.blocks));
        }
        if !(first..=state.epoch).contains(&pin.epoch) {
            return Err(format!("pin {name:?} is of epoch {}, not from {first} on", pin.epoch));
        }
    }
    for block in named_blocks(&state.named_pins) {
        let (pins, expected) = (state.device.num_pins(block), held[&block]);
        if state.is_null(block) || pins < expected {
            return Err(format!("block {} has {pins} pins, but {expected} hold it", block.0));
        }
    }
    let named: HashSet<u32> = named_blocks(&state.named_pins).map(|block| block.0).collect();
    if named.len() > most as usize {
        return Err(format!("pins hold {} blocks, {most} may be pinned", named.len()));
    }
    Ok(())
}

/// OPERATIONS: each unfinished operation holds its block; a request waits for those that name it.
pub(crate) fn operations(state: &State, _: &mut Scratch) -> Finding {
    let pool = &state.device;
    let times = |wanted: &dyn Fn(&Operation) -> bool| {
        state.operations.values().filter(|operation| wanted(operation)).count() as u32
    };
    for (&number, operation) in &state.operations {
        let block = operation.block;
        let (count, pins) = (times(&|other| other.block == block), pool.num_pins(block));
        if pool.is_null(block) || pins < count {
            return Err(format!("block {} has {count} operations, but {pins} pins", block.0));
        }
        if operation.batch > state.batch.number {
            let batch = operation.batch;
            return Err(format!(
                "operation {number} is of batch {batch}, which was not opened yet"
            ));
        }
        if operation.request.is_some_and(|row| !is_target(state, row, operation)) {
            let block = operation.block.0;
            return Err(format!("operation {number} fills block {block}, which its request lacks"));
        }
    }
    for (row, request) in (0..).map(Row).zip(&state.requests) {
        let Some(request) = request else { continue };
        let loads = match state.operations.is_empty() {
            true => 0,
            false => times(&|operation| operation.request == Some(row)),
        };
        let (name, waits) = (|| request.name(), request.num_loading);
        if waits != loads {
            return Err(format!("{} waits for {waits} loads, but {loads} name it", name()));
        }
        let most = if waits > 0 { request.num_computed } else { 0 };
        if request.load_end > most {
            return Err(format!("{} loaded up to {} of {most}", name(), request.load_end));
        }
    }
    Ok(())
}

/// Whether the block that a load fills is at the position of its key.
fn is_target(state: &State, row: Row, operation: &Operation) -> bool {
    let Some(Some(request)) = state.requests.get(row.index()) else { return false };
    for (index, group) in (0..).zip(&state.config.groups) {
        let (table, scale) = (&request.tables[index as usize], state.scales[index as usize]);
        let position = operation.first_token / group.block_size;
        let known = position < request.num_hashed(scale).min(table.len() as u32);
        if known && table[position as usize] == operation.block {
            return request.key(scale, index, position) == operation.key;
        }
    }
    false
}
