// SPDX-License-Identifier: Apache-2.0
//! Pins: owners of blocks that are no requests, so that content stays.
//!
//! Twin: kvcore/pins.py.

use crate::errors::Error;
use crate::state::State;

/// Hold blocks that have an owner or a key, once for each naming.
///
/// Fails with UnknownBlock, UnusedBlock.
pub fn pin(state: &mut State, block_ids: &[i64]) -> Result<(), Error> {
    for block in state.device.check_pins(block_ids)? {
        state.device.pin(block, &mut state.effects);
    }
    Ok(())
}

/// Undo `pin`. Fails with UnknownBlock, NotPinned.
pub fn unpin(state: &mut State, block_ids: &[i64]) -> Result<(), Error> {
    for block in state.device.check_unpins(block_ids)? {
        state.device.unpin(block, &mut state.effects);
    }
    Ok(())
}
