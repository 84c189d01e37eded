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

fn read_owed(source: &mut Reader<'_>, config: &Config) -> Result<OwedCheckpoint, Error> {
    let (block, key) = (BlockId(source.u32()?), source.key()?);
    let (has_event, start) = (source.flag()?, source.offset());
    let is_stored = !has_event || matches!(read_event(source)?, Event::BlockStored { .. });
    let group = config.groups.get(key.group_id() as usize);
    let of_state = group.is_some_and(Group::is_state);
    if block.0 >= config.num_blocks || !is_stored || !of_state {
        return Err(source.damaged("a batch owes an impossible checkpoint"));
    }
    let event = has_event.then(|| source.since(start).to_vec());
    Ok(OwedCheckpoint { block, key, event })
}
