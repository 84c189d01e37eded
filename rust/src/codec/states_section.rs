// SPDX-License-Identifier: Apache-2.0
//! The section of canonical bytes for checkpoints that have no key yet.
//!
//! Twin: kvcore/codec/states_section.py.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::state::batch_records::OwedCheckpoint;
use crate::state::state::State;
use crate::types::config::Config;
use crate::types::errors::Error;
use crate::types::event_log::read_event;
use crate::types::events::Event;
use crate::types::groups::Group;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;
use crate::types::wire::{Reader, Writer};

/// Whether the open batch writes a checkpoint, or a batch in flight owes one.
pub(crate) fn has_checkpoints(state: &State) -> bool {
    !state.batch.ends.is_empty() || state.in_flight.iter().any(|batch| !batch.owed.is_empty())
}

/// Write the rows whose state the open batch leaves as a checkpoint, and what each batch in flight
/// owes, in order.
pub(crate) fn write_checkpoints(out: &mut Writer, state: &State) {
    out.numbers(&state.batch.ends.iter().map(|row| row.0).collect::<Vec<u32>>());
    for batch in &state.in_flight {
        out.count(batch.owed.len());
        for owed in &batch.owed {
            out.u32(owed.block.0);
            out.sized(&owed.key.0);
            out.flag(owed.event.is_some());
            out.data.extend_from_slice(owed.event.as_deref().unwrap_or_default());
        }
    }
}

/// Read the checkpoints of the next bytes, one at least. Fails with DamagedState.
pub(crate) fn read_checkpoints(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let rows = source.ids(state.requests.len() as u32)?;
    let ends: Vec<Row> = rows.into_iter().map(Row).collect();
    let known = ends.iter().all(|row| state.requests[row.index()].is_some());
    let is_once = ends.iter().collect::<BTreeSet<_>>().len() == ends.len();
    if !known || !is_once || !state.has_states {
        return Err(source.damaged("a checkpoint of the open batch does not belong to a request"));
    }
    state.batch.ends = ends;
    for batch in &mut state.in_flight {
        let config = &state.config;
        Arc::make_mut(batch).owed = source.list(|source| read_owed(source, config))?;
    }
    if !has_checkpoints(state) {
        return Err(source.damaged("a section is empty"));
    }
    Ok(())
}

/// Whether calls marked states of the open batch, or blocks have keys that no event names.
pub(crate) fn has_marks(state: &State) -> bool {
    !state.batch.marked.is_empty() || !state.device.silent.is_empty()
}

/// Write the rows whose state calls marked in the open batch, and the blocks whose keys no event
/// names, ascending.
pub(crate) fn write_marks(out: &mut Writer, state: &State) {
    out.numbers(&state.batch.marked.iter().map(|row| row.0).collect::<Vec<u32>>());
    out.numbers(&state.device.silent.iter().map(|block| block.0).collect::<Vec<u32>>());
}

/// Read the marks of the next bytes, one at least. Fails with DamagedState.
pub(crate) fn read_marks(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let rows = source.ids(state.requests.len() as u32)?;
    let silent = source.ids(state.config.num_blocks)?;
    let is_state = |&block: &u32| {
        let key = state.device.key(BlockId(block));
        state.config.enable_events && key.is_some_and(|key| is_of_state(&state.config, key))
    };
    let rising = |ids: &[u32]| ids.is_sorted_by(|one, other| one < other);
    let ordered = rising(&rows) && rising(&silent) && !(rows.is_empty() && silent.is_empty());
    let known = rows.iter().all(|&row| state.batch.ends.contains(&Row(row)));
    if !ordered || !known || !silent.iter().all(is_state) {
        return Err(source.damaged("a mark belongs to no checkpoint"));
    }
    state.batch.marked = rows.into_iter().map(Row).collect();
    state.device.silent = silent.into_iter().map(BlockId).collect();
    Ok(())
}

fn is_of_state(config: &Config, key: &Key) -> bool {
    config.groups.get(key.group_id() as usize).is_some_and(Group::is_state)
}

fn read_owed(source: &mut Reader<'_>, config: &Config) -> Result<OwedCheckpoint, Error> {
    let (block, key) = (BlockId(source.u32()?), source.key()?);
    let (has_event, start) = (source.flag()?, source.offset());
    let is_stored = !has_event || matches!(read_event(source)?, Event::BlockStored { .. });
    if block.0 >= config.num_blocks || !is_stored || !is_of_state(config, &key) {
        return Err(source.damaged("a batch owes an impossible checkpoint"));
    }
    let event = has_event.then(|| source.since(start).to_vec());
    Ok(OwedCheckpoint { block, key, event })
}
