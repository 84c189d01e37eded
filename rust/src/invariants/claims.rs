// SPDX-License-Identifier: Apache-2.0
//! The properties of a state in which content is kept whatever it costs.
//!
//! Twin: kvcore/invariants/claims.py.

use std::collections::HashSet;

use crate::invariants::requests::Scratch;
use crate::state::state::State;
use crate::state::state::named_pins::named_blocks;
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
