// SPDX-License-Identifier: Apache-2.0
//! Pins: owners of blocks that are not requests, to keep content.
//!
//! Twin: kvcore/transitions/pins.py.

use crate::state::state::State;
use crate::types::errors::Error;
use crate::types::ids::BlockId;

/// Hold blocks that have an owner or a key, once per occurrence in the list.
///
/// Fails with UnknownBlock, UnusedBlock.
pub fn pin(state: &mut State, block_ids: &[i64]) -> Result<(), Error> {
    let blocks = state.device.check_pins(block_ids)?;
    state.num_pins += 1;
    for block in blocks {
        state.device.pin(block, &mut state.effects);
    }
    Ok(())
}

/// Undo `pin`; what an unfinished operation holds stays. Fails with UnknownBlock, NotPinned.
pub fn unpin(state: &mut State, block_ids: &[i64]) -> Result<(), Error> {
    let held = state.num_held();
    let num_held = |block: BlockId| held.get(&block).copied().unwrap_or(0);
    for block in state.device.check_unpins(block_ids, num_held)? {
        state.device.unpin(block, &mut state.effects);
    }
    Ok(())
}
