// SPDX-License-Identifier: Apache-2.0
//! The sections of canonical bytes for pins of prefixes and for floors.
//!
//! Twin: kvcore/codec/claims_section.py.

use crate::state::state::State;
use crate::state::state::named_pins::NamedPin;
use crate::types::errors::Error;
use crate::types::wire::{Reader, Writer};

/// Whether there are pins of prefixes, or a number for them.
pub(crate) fn has_pins(state: &State) -> bool {
    !state.named_pins.is_empty() || state.config.max_pinned_blocks.is_some()
}

/// Write the most that may be pinned, and 1, or 0 for the default; then the pins by name.
pub(crate) fn write_pins(out: &mut Writer, state: &State) {
    out.u32(state.config.max_pinned_blocks.map_or(0, |most| most + 1));
    out.count(state.named_pins.len());
    for (name, pin) in &state.named_pins {
        out.sized(name.as_bytes());
        out.u32(pin.epoch);
        out.ids(&pin.blocks);
    }
}

/// Read the pins of the next bytes. Fails with DamagedState.
pub(crate) fn read_pins(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let most = source.u32()?;
    for _ in 0..source.u32()? {
        let (name, epoch) = (source.name()?.to_owned(), source.u32()?);
        let blocks = source.blocks(state.config.num_blocks)?;
        let last = state.named_pins.last_key_value().map_or("", |(last, _)| last);
        if name.as_str() <= last || blocks.is_empty() {
            return Err(source.damaged("the pins are not in their canonical form"));
        }
        state.named_pins.insert(name, NamedPin { epoch, blocks });
    }
    if most == 0 && state.named_pins.is_empty() {
        return Err(source.damaged("a section holds nothing"));
    }
    state.config.max_pinned_blocks = most.checked_sub(1);
    state.config.check().map_err(|error| source.damaged(error.to_string()))
}

/// Write the floors by salt, then for each block the tenant that took it last.
pub(crate) fn write_floors(out: &mut Writer, state: &State) {
    out.count(state.config.floors.len());
    for (salt, size) in &state.config.floors {
        out.sized(salt.as_bytes());
        out.u32(*size);
    }
    state.device.takers().unwrap_or_default().iter().for_each(|&tenant| out.u8(tenant));
}

/// Read the floors of the next bytes. Fails with DamagedState.
pub(crate) fn read_floors(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let mut floors: Vec<(String, u32)> = Vec::new();
    for _ in 0..source.u32()? {
        let (salt, size) = (source.name()?.to_owned(), source.u32()?);
        if salt.as_str() <= floors.last().map_or("", |(last, _)| last) {
            return Err(source.damaged("the floors are not in their canonical form"));
        }
        floors.push((salt, size));
    }
    if floors.is_empty() {
        return Err(source.damaged("a section holds nothing"));
    }
    state.config.floors = floors;
    state.config.check().map_err(|error| source.damaged(error.to_string()))?;
    let takers = source.take(state.config.num_blocks as usize)?;
    let num_nulls = usize::from(state.config.null_block);
    let is_known = |&tenant: &u8| usize::from(tenant) <= state.config.floors.len();
    if takers[..num_nulls].iter().any(|&tenant| tenant > 0) || !takers.iter().all(is_known) {
        return Err(source.damaged("a block was taken by a tenant without a floor"));
    }
    state.device.set_floors(state.config.floors.iter().map(|each| each.1));
    state.device.restore_takers(takers);
    Ok(())
}
