// SPDX-License-Identifier: Apache-2.0
//! `kvcore._rust.SlotChecker`: that of `kvcore.sanitizer.slot_checker`, over ints and lists.
//!
//! `kvcore/sanitizer/twin.py` holds one and has checked its arguments.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::bindings::lists::exact_ids;
use crate::sanitizer::chunks::{CacheGroup, Chunk, SlotChunk};
use crate::sanitizer::contents::{Event, Held};
use crate::sanitizer::lines::WrongAccess;
use crate::sanitizer::requests::Tokens;
use crate::sanitizer::slot_checker::{self, TierPlace};

/// An engine's list of tokens, which grows.
struct Growing(Py<PyAny>);

impl Tokens for Growing {
    fn len(&self) -> usize {
        Python::attach(|py| self.0.bind(py).len().unwrap_or(0))
    }

    fn read(&self, first: usize, end: usize, into: &mut Vec<i64>) {
        Python::attach(|py| {
            let tokens = self.0.bind(py);
            let list = tokens.cast::<PyList>().ok();
            if let Some(list) = list.filter(|_| end - first > 1) {
                let part = list.get_slice(first, end);
                if let Some(ids) = exact_ids(part.as_any().as_borrowed()) {
                    into.extend(ids.iter().map(|&id| i64::from(id)));
                    return;
                }
            }
            for position in first..end {
                let token = match list {
                    Some(list) => list.get_item(position),
                    None => tokens.get_item(position),
                };
                into.push(token.and_then(|token| token.extract()).unwrap_or(-1));
            }
        });
    }
}

/// A group as a tuple: block_size, window, ring, num_null, zeros_readable, pool, chunked.
type GroupFields = (usize, Option<usize>, bool, u32, bool, usize, bool, bool);
/// An event as a tuple: kind, step, serial, index.
type EventFields = (&'static str, u32, Option<u32>, u32);
/// A wrong access as a tuple, in the order of `kvcore.sanitizer.lines.WrongAccess`, with held as
/// digest, oldest_epoch and steps behind the event.
type WrongFields = (
    &'static str,
    u32,
    usize,
    usize,
    usize,
    Option<u32>,
    Option<usize>,
    Option<(u64, u16, u16)>,
    Option<EventFields>,
    u32,
);

/// Contents, tables and verified lengths. `kvcore.sanitizer.Sanitizer` is the way to use it.
#[pyclass(module = "kvcore._rust")]
pub(crate) struct SlotChecker(slot_checker::SlotChecker<Growing>);

#[pymethods]
impl SlotChecker {
    /// Follow empty pools of this many blocks.
    #[new]
    #[pyo3(signature = (groups, num_blocks, full, /))]
    fn new(groups: Vec<GroupFields>, num_blocks: usize, full: bool) -> Self {
        let groups = groups.into_iter().map(|fields| {
            let (block_size, window, ring, num_null, zeros_readable, pool, chunked, state) = fields;
            CacheGroup { block_size, window, ring, num_null, zeros_readable, pool, chunked, state }
        });
        Self(slot_checker::SlotChecker::new(groups.collect(), num_blocks, full))
    }

    /// Follow a request from now on; a fork may read what its parent may read.
    #[pyo3(signature = (serial, tokens, base, parent, checked, /))]
    fn begin(
        &mut self,
        serial: u32,
        tokens: Bound<'_, PyAny>,
        base: u64,
        parent: Option<u32>,
        checked: bool,
    ) {
        self.0.begin(serial, Growing(tokens.unbind()), base, parent, checked);
    }

    /// Let a request that has no blocks expect KV of the current weights.
    #[pyo3(signature = (serial, /))]
    fn renew(&mut self, serial: u32) {
        self.0.renew(serial);
    }

    /// Put blocks into a table from a place on, replacing those there.
    #[pyo3(signature = (serial, group_id, position, blocks, step, /))]
    fn extend(
        &mut self,
        serial: u32,
        group_id: usize,
        position: usize,
        blocks: &Bound<'_, PyAny>,
        step: u32,
    ) -> PyResult<()> {
        self.0.extend(serial, group_id, position, &numbers(blocks)?, step);
        Ok(())
    }

    /// Shorten a table to this many blocks.
    #[pyo3(signature = (serial, group_id, length, step, /))]
    fn cut(&mut self, serial: u32, group_id: usize, length: usize, step: u32) {
        self.0.cut(serial, group_id, length, step);
    }

    /// Write loaded content, like a step that reads nothing.
    #[pyo3(signature = (serial, group_id, start, count, step, /))]
    fn load(
        &mut self,
        serial: u32,
        group_id: Option<usize>,
        start: usize,
        count: usize,
        step: u32,
    ) -> Vec<WrongFields> {
        let found = self.0.load(serial, group_id, (start, count), step);
        found.into_iter().map(wrong_fields).collect()
    }

    /// Give up all tables of a request.
    #[pyo3(signature = (serial, step, /))]
    fn drop(&mut self, serial: u32, step: u32) {
        self.0.drop_tables(serial, step);
    }

    /// Give up all tables of a request, and stop following it.
    #[pyo3(signature = (serial, step, /))]
    fn end(&mut self, serial: u32, step: u32) {
        self.0.end(serial, step);
    }

    /// Say that the weights changed.
    fn advance_epoch(&mut self) {
        self.0.advance_epoch();
    }

    /// Copy a block, and empty the source if it moves.
    #[pyo3(signature = (source, target, step, moves, /))]
    fn copy(&mut self, source: TierPlace, target: TierPlace, step: u32, moves: bool) {
        self.0.copy(source, target, step, moves);
    }

    /// Zero a block.
    #[pyo3(signature = (place, step, /))]
    fn zero(&mut self, place: TierPlace, step: u32) {
        self.0.zero(place, step);
    }

    /// Leave a block unwritten.
    #[pyo3(signature = (place, step, /))]
    fn lose(&mut self, place: TierPlace, step: u32) {
        self.0.lose(place, step);
    }

    /// Return the last events of a block, the oldest first.
    #[pyo3(signature = (place, /))]
    fn events(&mut self, place: TierPlace) -> Vec<EventFields> {
        self.0.events(place).into_iter().map(event_fields).collect()
    }

    /// Write and read what the chunks of a step do; return the errors, at most one per chunk.
    #[pyo3(signature = (step, serials, starts, counts, drafts, slots, tables, /))]
    #[allow(clippy::too_many_arguments)] // they are the columns of a step
    fn step(
        &mut self,
        step: u32,
        serials: &Bound<'_, PyAny>,
        starts: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
        drafts: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        tables: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<WrongFields>> {
        let columns = (numbers(serials)?, numbers(starts)?, numbers(counts)?);
        let mut chunks: Vec<Chunk> = (columns.0.iter().zip(&columns.1).zip(&columns.2))
            .map(|((&serial, &start), &count)| Chunk {
                serial,
                start: start as usize,
                num_tokens: count as usize,
                ..Chunk::default()
            })
            .collect();
        for (at, tokens) in drafts.cast::<PyDict>()? {
            let chunk: &mut Chunk = chunk_of(&mut chunks, &at)?;
            chunk.drafts = signed(&tokens)?;
        }
        for (at, lists) in slots.cast::<PyDict>()? {
            let (group_id, writes, reads) =
                lists.extract::<(usize, Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
            let lists = SlotChunk { group_id, writes: signed(&writes)?, reads: signed(&reads)? };
            chunk_of(&mut chunks, &at)?.slots = Some(lists);
        }
        for (at, lists) in tables.cast::<PyDict>()? {
            let serial = chunk_of(&mut chunks, &at)?.serial;
            for (group_id, blocks) in lists.try_iter()?.enumerate() {
                self.0.append(serial, group_id, &numbers(&blocks?)?, step);
            }
        }
        Ok(self.0.step(step, &chunks).into_iter().map(wrong_fields).collect())
    }

    /// Return the bytes of contents, events and claims of the device.
    fn num_bytes(&self) -> usize {
        self.0.num_bytes()
    }
}

fn chunk_of<'a>(chunks: &'a mut [Chunk], at: &Bound<'_, PyAny>) -> PyResult<&'a mut Chunk> {
    let at = at.extract::<usize>()?;
    chunks.get_mut(at).ok_or_else(|| PyTypeError::new_err(format!("no chunk {at}")))
}

fn numbers(list: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    match exact_ids(list.as_borrowed()) {
        Some(ids) => Ok(ids.to_vec()),
        None => list.try_iter()?.map(|item| item?.extract()).collect(),
    }
}

fn signed(list: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    list.try_iter()?.map(|item| item?.extract()).collect()
}

fn event_fields(event: Event) -> EventFields {
    (event.kind.name(), event.step, event.serial, event.index)
}

fn wrong_fields(wrong: WrongAccess) -> WrongFields {
    let delta = wrong.event.map_or(0, |(_, delta)| delta);
    (
        wrong.name,
        wrong.serial,
        wrong.group_id,
        wrong.start,
        wrong.position,
        wrong.block,
        wrong.slot,
        wrong.held.map(|Held { digest, oldest_epoch }| (digest, oldest_epoch, delta)),
        wrong.event.map(|(event, _)| event_fields(event)),
        wrong.step,
    )
}
