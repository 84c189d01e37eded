// SPDX-License-Identifier: Apache-2.0
//! Decodes batches from their canonical bytes: the open one, and those in flight.
//!
//! Twin: kvcore/codec/decode_batch.py.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::codec::encode::BATCHES_END;
use crate::state::batch_records::{
    BatchInFlight, PublishedKey, RequestEntries, RequestEntry, TableCell,
};
use crate::state::open_batch::{Merge, ScheduledRequest};
use crate::state::state::State;
use crate::types::commands::{Batch, Commands, close, named_rows};
use crate::types::errors::Error;
use crate::types::ids::{BlockId, Row};
use crate::types::wire::Reader;

/// Read the open batch of the next bytes. Fails with DamagedState.
pub(crate) fn read_batch(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    state.batch.number = source.u64()?;
    if state.batch.number >= BATCHES_END {
        return Err(source.damaged(format!("{} is not the number of a batch", state.batch.number)));
    }
    state.effects.commands = read_commands(source, state.batch.number)?;
    let is_there = |row: &Row| row.index() < state.requests.len();
    if !named_rows(&state.effects.commands).iter().all(is_there) {
        return Err(source.damaged("a command names a row that does not exist"));
    }
    let rows = source.ids(state.requests.len() as u32)?;
    if rows.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(source.damaged("the rows of the open batch are not in ascending order"));
    }
    for row in rows.into_iter().map(Row) {
        if state.requests[row.index()].is_none() {
            return Err(source.damaged("a free row is in the open batch"));
        }
        let record = ScheduledRequest::new(source.u32()?);
        state
            .batch
            .scheduled
            .insert_new(row, ScheduledRequest { num_kept: source.u32()?, ..record });
        for _ in 0..source.u32()? {
            let (group_id, position, block) =
                (source.u32()?, source.u32()?, BlockId(source.u32()?));
            state.batch.note_unwritten(row, (group_id, position), block, source.key()?);
        }
    }
    state.batch.merges = source.list(|source| {
        let request_id = Arc::from(source.name()?);
        let (group_id, position, block) = (source.u32()?, source.u32()?, BlockId(source.u32()?));
        Ok(Merge { request_id, group_id, position, block, key: source.key()? })
    })?;
    (state.batch.entries, _) = read_entries(source, state, false)?;
    state.batch.published_keys = read_published_keys(source, state)?;
    Ok(())
}

/// Read the batches in flight of the next bytes. Fails with DamagedState.
pub(crate) fn read_batches_in_flight(
    source: &mut Reader<'_>,
    state: &mut State,
) -> Result<(), Error> {
    let mut last: Option<u64> = None;
    for _ in 0..source.u32()? {
        let number = source.u64()?;
        let (entries, replaced) = read_entries(source, state, true)?;
        let published_keys = read_published_keys(source, state)?;
        let rows = source.ids(state.requests.len() as u32)?;
        if !rows.is_sorted_by(|before, after| before < after)
            || last.is_some_and(|last| last >= number)
        {
            return Err(source.damaged("the batches in flight are not in ascending order"));
        }
        let rows = rows.into_iter().map(Row).collect();
        state.in_flight.push(Arc::new(BatchInFlight {
            number,
            entries,
            published_keys,
            rows,
            replaced,
            starts_epoch: false,
            owed: Vec::new(),
        }));
        last = Some(number);
    }
    if state.in_flight.len() > state.config.max_in_flight as usize {
        let reason = format!("{} batches are in flight", state.in_flight.len());
        return Err(source.damaged(reason));
    }
    Ok(())
}

/// The entries of a batch, and the places of a taken one whose block is another by now.
fn read_entries(
    source: &mut Reader<'_>,
    state: &State,
    taken: bool,
) -> Result<(RequestEntries, BTreeSet<TableCell>), Error> {
    let (mut entries, mut replaced) = (RequestEntries::default(), BTreeSet::new());
    let mut all_held: Vec<Vec<u32>> = Vec::new();
    for order in 0..source.u32()? {
        let (row, before, restore) = (Row(source.u32()?), source.u32()?, source.u32()?);
        let publishes = source.flag()?;
        let (mut held, mut places) = (Vec::new(), Vec::new());
        if taken {
            held = source.numbers()?;
            places = source.list(|source| Ok((source.u32()?, source.u32()?)))?;
        }
        let known = state.requests.get(row.index()).is_some_and(Option::is_some);
        if !known || entries.get(row).is_some() || !state.config.tracks_batches() {
            return Err(source.damaged("an entry does not belong to a request"));
        }
        let num_held = if taken { state.config.groups.len() } else { 0 };
        if held.len() != num_held || !places.is_sorted_by(|before, after| before < after) {
            return Err(source.damaged("the blocks in use by a batch are not in canonical form"));
        }
        for (group_id, position) in places {
            if held.get(group_id as usize).is_none_or(|&end| position >= end) {
                return Err(source.damaged("a batch lost places that it does not use"));
            }
            replaced.insert((row, group_id, position));
        }
        all_held.push(held);
        entries.insert_new(row, RequestEntry { order, before, restore, publishes });
    }
    entries.restore(all_held.concat());
    Ok((entries, replaced))
}

fn read_published_keys(source: &mut Reader<'_>, state: &State) -> Result<Vec<PublishedKey>, Error> {
    let published_keys = source.list(|source| Ok((BlockId(source.u32()?), source.key()?)))?;
    if published_keys.iter().any(|(block, _)| block.0 >= state.config.num_blocks) {
        return Err(source.damaged(format!("an id is not below {}", state.config.num_blocks)));
    }
    Ok(published_keys)
}

fn read_commands(source: &mut Reader<'_>, number: u64) -> Result<Commands, Error> {
    let (values, keys) = (source.sized()?, source.sized()?.to_vec());
    let (buffer, rest) = values.as_chunks();
    let batch = Batch { number, buffer: buffer.to_vec(), keys, epoch: 0 };
    let commands = batch.commands().map_err(|error| source.damaged(error.to_string()))?;
    let commands = commands.into_iter().collect();
    if !rest.is_empty() {
        return Err(source.damaged("commands are not whole numbers"));
    }
    if close(number, &commands) != batch {
        return Err(source.damaged("commands are not in canonical form"));
    }
    Ok(commands)
}

#[cfg(test)]
mod tests {
    use crate::codec::decode::decode;
    use crate::codec::encode::encode;
    use crate::state::state::make_state;
    use crate::transitions::batches::take_batch;
    use crate::types::config::Config;

    #[test]
    fn unfinished_batches_rise() {
        let mut config = Config::new(3, 2, b"seed");
        config.max_in_flight = 2;
        let mut state = make_state(config).unwrap();
        take_batch(&mut state).unwrap();
        take_batch(&mut state).unwrap();
        assert!(decode(&encode(&state)).is_ok());
        state.in_flight.swap(0, 1);
        let error = decode(&encode(&state)).unwrap_err().to_string();
        assert!(error.contains("the batches in flight are not in ascending order"), "{error}");
    }
}
