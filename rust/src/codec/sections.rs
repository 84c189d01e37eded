// SPDX-License-Identifier: Apache-2.0
//! The sections at the end of canonical bytes: fields that most states do not use.
//!
//! A section is a tag, a size, and that number of bytes; tags ascend. A section with only defaults
//! is omitted, so a feature that is off adds no bytes.
//! Twin: kvcore/codec/sections.py.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::codec::claims_section::{has_pins, read_floors, read_pins, write_floors, write_pins};
use crate::codec::policy_sections::{
    place_blocks, read_uses, read_waiting, write_uses, write_waiting,
};
use crate::codec::retention_section::{
    has_retention, place_levels, read_retention, write_retention,
};
use crate::codec::samplers_section::{has_samplers, read_samplers, write_samplers};
use crate::codec::states_section::{
    has_checkpoints, has_marks, read_checkpoints, read_marks, write_checkpoints, write_marks,
};
use crate::codec::tails_section::{read_tails, write_tails};
use crate::pool::free_queue::{make_free_queue, num_older};
use crate::state::batch_records::{Reporter, UnconfirmedLoad};
use crate::state::state::{RequestState, State};
use crate::types::config::{Eviction, MAX_EPOCH};
use crate::types::errors::Error;
use crate::types::extra_inputs::ExtraKeys;
use crate::types::ids::{BlockId, Row};
use crate::types::wire::{Reader, Writer};

/// The tag of hits inside blocks, which comes first: others are checked against it.
const TAILS: u8 = 0;
/// The tag of the unconfirmed loads.
const LOADS: u8 = 1;
/// The tag of what extra keys are cut.
const EXTRA_KEYS: u8 = 2;
/// The tag of the options of the config.
const OPTIONS: u8 = 3;
/// The tag of the first batches whose output belongs to requests.
const OUTPUT: u8 = 4;
/// The tag of the rows that are held back.
const HELD_ROWS: u8 = 5;
/// The tag of epochs.
const EPOCHS: u8 = 6;
/// The tag of the order in which requests arrived.
const WAITING: u8 = 7;
/// The tag of what an eviction policy remembers.
const USES: u8 = 8;
/// The tag of levels.
const RETENTION: u8 = 9;
/// The tag of pins of prefixes.
const PINS: u8 = 10;
/// The tag of floors.
const FLOORS: u8 = 11;
/// The tag of the batches whose output is to come.
const SAMPLERS: u8 = 12;
/// The tag of checkpoints without keys.
const CHECKPOINTS: u8 = 13;
/// The tag of checkpoints that calls marked.
const MARKS: u8 = 14;
const MEDIA_CUT: u8 = 1;
const ROWS_CUT: u8 = 2;
const HIDE_SALTS: u8 = 1;

/// A tag, whether there is more than defaults, and what writes it.
type Section = (u8, bool, fn(&mut Writer, &State));

/// Write the sections that differ from the defaults.
pub(crate) fn write_sections(out: &mut Writer, state: &State) {
    let sections: [Section; 15] = [
        (TAILS, state.config.hash_unit.is_some(), write_tails),
        (LOADS, !state.loads.is_empty(), write_loads),
        (EXTRA_KEYS, with_ends(state).next().is_some(), write_ends),
        (OPTIONS, state.config.hide_salts, write_options),
        (OUTPUT, with_output(state).next().is_some(), write_output),
        (HELD_ROWS, !state.held_rows.is_empty(), write_held_rows),
        (EPOCHS, state.epoch > 0, write_epochs),
        (WAITING, state.waiting.as_ref().is_some_and(|each| each.next_due > 0), write_waiting),
        (USES, state.device.policy.as_ref().is_some_and(|each| each.is_remembered()), write_uses),
        (RETENTION, has_retention(state), write_retention),
        (PINS, has_pins(state), write_pins),
        (FLOORS, state.device.floors.is_some(), write_floors),
        (SAMPLERS, has_samplers(state), write_samplers),
        (CHECKPOINTS, has_checkpoints(state), write_checkpoints),
        (MARKS, has_marks(state), write_marks),
    ];
    for (tag, _, write) in sections.into_iter().filter(|(_, is_there, _)| *is_there) {
        let mut section = Writer::new(&[]);
        write(&mut section, state);
        out.u8(tag);
        out.sized(section.as_bytes());
    }
}

/// Write the unconfirmed loads, in the order of their calls.
fn write_loads(out: &mut Writer, state: &State) {
    out.count(state.loads.len());
    for load in &state.loads {
        out.u64(load.batch);
        out.u32(load.first);
        out.u32(load.end);
        out.count(load.reporters.len());
        for each in &load.reporters {
            [each.row.0, each.counted, each.most].into_iter().for_each(|number| out.u32(number));
        }
        out.count(keyed_only(state, load).count());
        for (block, end) in keyed_only(state, load) {
            [block.0, end].into_iter().for_each(|number| out.u32(number));
        }
    }
}

/// Write where the extra keys of requests end, in row order.
fn write_ends(out: &mut Writer, state: &State) {
    out.count(with_ends(state).count());
    for (row, keys) in with_ends(state) {
        out.u32(row);
        out.u32(keys.num_rows);
        out.u8((MEDIA_CUT * u8::from(keys.media_cut)) | (ROWS_CUT * u8::from(keys.rows_cut)));
    }
}

/// Write which options of the config are set.
fn write_options(out: &mut Writer, _: &State) {
    out.u8(HIDE_SALTS);
}

/// Write the first batch whose output belongs to each request, in row order.
fn write_output(out: &mut Writer, state: &State) {
    out.count(with_output(state).count());
    for (row, batch) in with_output(state) {
        out.u32(row);
        out.u64(batch);
    }
}

/// Write the held rows, each with its batch, in order.
fn write_held_rows(out: &mut Writer, state: &State) {
    out.count(state.held_rows.len());
    for &(row, batch) in &state.held_rows {
        out.u32(row.0);
        out.u64(batch);
    }
}

/// Write the first and the current epoch, the blocks of older ones, the unfinished batches in which
/// one began, and the epoch of each request that counts tokens, in row order.
fn write_epochs(out: &mut Writer, state: &State) {
    out.u32(state.config.epoch);
    out.u32(state.epoch);
    out.u32(num_older(&state.device.queue));
    out.ids(&state.device.older());
    state.in_flight.iter().for_each(|batch| out.flag(batch.starts_epoch));
    out.flag(state.batch.starts_epoch);
    counting(state).for_each(|row| out.u32(state.epochs[row.index()]));
}

/// Read the sections up to the end. Fails with DamagedState.
pub(crate) fn read_sections(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let mut last = None;
    while source.offset < source.data.len() {
        let (tag, size) = (source.u8()?, source.u32()?);
        let read = match tag {
            TAILS => read_tails,
            LOADS => read_loads,
            EXTRA_KEYS => read_ends,
            OPTIONS => read_options,
            OUTPUT => read_output,
            HELD_ROWS => read_held_rows,
            EPOCHS => read_epochs,
            WAITING => read_waiting,
            USES => read_uses,
            RETENTION => read_retention,
            PINS => read_pins,
            FLOORS => read_floors,
            SAMPLERS => read_samplers,
            CHECKPOINTS => read_checkpoints,
            _ => read_marks,
        };
        if !(TAILS..=MARKS).contains(&tag) || last.is_some_and(|last| tag <= last) {
            let reason = format!("section {tag} is unknown, or out of order");
            return Err(source.damaged(reason));
        }
        let end = source.offset + size as usize;
        last = Some(tag);
        read(source, state)?;
        if source.offset != end {
            return Err(source.damaged(format!("section {tag} has the wrong size")));
        }
    }
    let keys = |request: &RequestState| {
        let keys = request.extra_keys();
        keys.embeds.is_empty() == (keys.num_rows == 0)
    };
    if !state.requests().all(keys) {
        return Err(source.damaged("embeddings without a number of rows"));
    }
    if state.loads.iter().any(|load| !load.blocks.iter().all(|&(block, _)| state.rests(block))) {
        return Err(source.damaged("a block without a key rests on a load"));
    }
    match state.config.eviction {
        Eviction::Retention => place_levels(source, state),
        _ => place_blocks(source, state),
    }
}

/// Read the unconfirmed loads of the next bytes, one at least. Fails with DamagedState.
fn read_loads(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let pair = |source: &mut Reader<'_>| Ok((source.u32()?, source.u32()?));
    let reporter = |source: &mut Reader<'_>| {
        let row = Row(source.u32()?);
        Ok(Reporter { row, counted: source.u32()?, most: source.u32()? })
    };
    for _ in 0..source.u32()? {
        let (batch, first, end) = (source.u64()?, source.u32()?, source.u32()?);
        let (reporters, blocks) = (source.list(reporter)?, source.list(pair)?);
        let is_known = |row: &Row| matches!(state.requests.get(row.index()), Some(Some(_)));
        let rows: BTreeSet<Row> = reporters.iter().map(|each| each.row).collect();
        if rows.is_empty() || rows.len() < reporters.len() || !rows.iter().all(is_known) {
            return Err(source.damaged("a load does not belong to requests"));
        }
        if blocks.iter().any(|&(block, _)| block >= state.config.num_blocks) {
            return Err(source.damaged("a block that does not exist rests on a load"));
        }
        let held: BTreeSet<u32> = blocks.iter().map(|&(block, _)| block).collect();
        let inside = |each: &Reporter| {
            let rests = first < each.counted && each.counted <= each.most;
            first < each.most && each.most <= end && (each.counted == 0 || rests)
        };
        if held.len() < blocks.len() || !reporters.iter().all(inside) {
            return Err(source.damaged("a load is not in canonical form"));
        }
        state.loads.push(UnconfirmedLoad {
            batch,
            first,
            end,
            reporters,
            blocks: blocks.into_iter().map(|(block, end)| (BlockId(block), end)).collect(),
        });
    }
    if state.loads.is_empty() {
        return Err(source.damaged("a section is empty"));
    }
    Ok(())
}

/// Read the ends of the extra keys of the next bytes. Fails with DamagedState.
fn read_ends(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let (size, mut next) = (state.hash_block_size, 0);
    for _ in 0..source.u32()? {
        let (row, num_rows, flags) = (source.u32()?, source.u32()?, source.u8()?);
        let known = state.requests.get_mut(row as usize).and_then(Option::as_mut);
        let Some(request) = known.filter(|_| row >= next && (num_rows, flags) != (0, 0)) else {
            return Err(source.damaged("the end of a request's extra keys is impossible"));
        };
        next = row + 1;
        let mut keys = request.extra_keys().clone();
        keys.num_rows = num_rows;
        (keys.media_cut, keys.rows_cut) = (flags & MEDIA_CUT > 0, flags & ROWS_CUT > 0);
        let inside = |end: u64| !end.is_multiple_of(size.into());
        let fits = keys.embeds.len() == num_rows.div_ceil(size) as usize
            && flags <= MEDIA_CUT | ROWS_CUT
            && (!keys.rows_cut || inside(num_rows.into()))
            && (!keys.media_cut || keys.media_cut_at().is_some_and(inside));
        if !fits {
            return Err(source.damaged("the end of a request's extra keys is wrong"));
        }
        request.extra_keys = Some(Arc::new(keys));
    }
    if next == 0 {
        return Err(source.damaged("a section is empty"));
    }
    Ok(())
}

/// Read the options of the config of the next bytes. Fails with DamagedState.
fn read_options(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    if source.u8()? != HIDE_SALTS {
        return Err(source.damaged("options are not in canonical form"));
    }
    state.config.hide_salts = true;
    Ok(())
}

/// Read the batches of output of the next bytes. Fails with DamagedState.
fn read_output(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let mut last = None;
    for _ in 0..source.u32()? {
        let (row, batch) = (source.u32()?, source.u64()?);
        let is_known = matches!(state.requests.get(row as usize), Some(Some(_)));
        let rises = last.is_none_or(|last| last < row);
        if !is_known || !rises || !(1..=state.batch.number).contains(&batch) {
            return Err(source.damaged("the batch of a request's output is impossible"));
        }
        last = Some(row);
        state[Row(row)].output_from = batch;
    }
    if last.is_none() {
        return Err(source.damaged("a section is empty"));
    }
    Ok(())
}

/// Read the rows held back of the next bytes, one at least. Fails with DamagedState.
fn read_held_rows(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let held = source.list(|source| Ok((Row(source.u32()?), source.u64()?)))?;
    let is_unfinished = |number: u64| {
        number == state.batch.number || state.in_flight.iter().any(|batch| batch.number == number)
    };
    let fits =
        |&(row, batch): &(Row, u64)| row.index() < state.requests.len() && is_unfinished(batch);
    if !held.iter().all(fits) {
        return Err(source.damaged("a row is held for a batch that is not unfinished"));
    }
    if held.is_empty() {
        return Err(source.damaged("a section is empty"));
    }
    state.held_rows = held;
    Ok(())
}

/// Read the epochs of the next bytes. Fails with DamagedState.
fn read_epochs(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let (start, epoch) = (source.u32()?, source.u32()?);
    if !(start..=MAX_EPOCH).contains(&epoch) || epoch == 0 {
        return Err(source.damaged(format!("epoch {epoch} does not follow {start}")));
    }
    let (num_blocks, num_first) = (state.device.num_blocks(), source.u32()?);
    let order: Vec<BlockId> = state.device.queue.iter().collect();
    let older = source.blocks(num_blocks)?;
    let held =
        |block: &BlockId| !state.device.has_key(*block) && !state.device.queue.contains(*block);
    let rises = older.is_sorted_by(|one, next| one < next);
    if !older.iter().all(held) || !rises || num_first as usize > order.len() {
        return Err(source.damaged("the blocks of older epochs are not in canonical form"));
    }
    let first = &order[..num_first as usize];
    if first.iter().any(|&block| state.device.has_key(block)) {
        return Err(source.damaged("a block with a key is of an older epoch"));
    }
    state.device.queue = make_free_queue(num_blocks, order, num_first);
    state.device.restore_older(&older);
    for batch in &mut state.in_flight {
        Arc::make_mut(batch).starts_epoch = source.flag()?;
    }
    state.batch.starts_epoch = source.flag()?;
    for row in counting(state).collect::<Vec<Row>>() {
        let number = source.u32()?;
        if !(start..=epoch).contains(&number) {
            return Err(source.damaged(format!("a request is of epoch {number}")));
        }
        state.epochs[row.index()] = number;
    }
    (state.config.epoch, state.epoch) = (start, epoch);
    Ok(())
}

/// Return the requests that count tokens, in row order.
fn counting(state: &State) -> impl Iterator<Item = Row> + '_ {
    let counts = |request: &Option<RequestState>| {
        request.as_ref().is_some_and(|request| request.num_computed > 0)
    };
    (0..).map(Row).zip(&state.requests).filter(move |each| counts(each.1)).map(|(row, _)| row)
}

/// Return the requests that do not take output of every batch, in row order.
fn with_output(state: &State) -> impl Iterator<Item = (u32, u64)> + '_ {
    let number =
        |(row, each): (u32, &Option<RequestState>)| Some((row, each.as_ref()?.output_from));
    (0..).zip(&state.requests).filter_map(number).filter(|&(_, batch)| batch > 0)
}

/// The extra keys of requests that have an end to write, with the rows, in order.
fn with_ends(state: &State) -> impl Iterator<Item = (u32, &ExtraKeys)> {
    let known = (0..).zip(&state.requests).filter_map(|(row, each)| Some((row, each.as_ref()?)));
    let keys = known.map(|(row, request)| (row, request.extra_keys()));
    keys.filter(|(_, keys)| keys.num_rows > 0 || keys.media_cut)
}

/// The blocks of a load that have a key, or that a batch owes one.
pub(crate) fn keyed_only<'a>(
    state: &'a State,
    load: &'a UnconfirmedLoad,
) -> impl Iterator<Item = (BlockId, u32)> + 'a {
    load.blocks.iter().copied().filter(|&(block, _)| state.rests(block))
}
