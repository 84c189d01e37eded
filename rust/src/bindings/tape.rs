// SPDX-License-Identifier: Apache-2.0
//! The calls of one manager on their way into the mapped segment.
//!
//! Invariants: the arguments of a call are committed before it runs, its outcome after it; a commit
//! is one store of the open frame's length. The files are `kvcore.record.recorder.Recorder`, which
//! is called when a segment begins or ends. An error there ends the record, never the call.
//! Twin: kvcore/record/tape.py.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustc_hash::FxHashMap;

use crate::bindings::ahead::Ahead;
use crate::bindings::mapped::Mapped;
use crate::codec::encode::encode;
use crate::record::calls::{
    Call, GET_COMPUTED_BLOCKS, REMOVE_REQUEST, TAKE_BATCH, Written, extends,
};
use crate::record::names::{Known, Names, keys_form};
use crate::record::outcomes::{Named, Outcome, put_error};
use crate::record::pen::{Pen, Sum};
use crate::state::state::State;
use crate::types::keys::Hashing;
use crate::types::values::Hit;

const HEADER_SIZE: usize = 64;
const FRAME_SIZE: usize = 8;
const FRAME_BYTES: usize = 1 << 16;
const OPEN: u32 = 1 << 31;

/// What the record refers to.
#[derive(Default)]
struct Told {
    /// What the last look-up of each row found in this segment.
    hits: FxHashMap<u32, Hit>,
    /// The names of a record by keys.
    names: Option<Names>,
}

/// The open segment and its open frame.
pub(crate) struct Tape {
    files: Py<PyAny>,
    ahead: Ahead, // is dropped before the mapping
    mapped: Mapped,
    /// Where the open frame begins, how many bytes it has, and the checksum of some.
    frame: usize,
    size: usize,
    sum: Sum,
    /// The place at which the segment is full.
    full: usize,
    segment_bytes: usize,
    rotates: bool,
    sync: bool,
    num_calls: u64,
    told: Told,
    /// The running call, if it was recorded.
    running: Option<Written>,
}

impl Told {
    /// Note what a look-up found, in the room of what the one before found.
    fn note_hit(&mut self, row: u32, hit: &Hit) {
        let known = self.hits.entry(row).or_default();
        (known.num_tokens, known.num_common) = (hit.num_tokens, hit.num_common);
        known.blocks.blocks.clone_from(&hit.blocks.blocks);
    }

    /// The bytes of a state at the start of a segment.
    fn encode(&self, state: &State) -> Vec<u8> {
        self.names.as_ref().map_or_else(|| encode(state), |names| encode(&keys_form(state, names)))
    }
}

impl Tape {
    /// Start the tape of a manager; None if the files failed.
    pub(crate) fn start(files: &Bound<'_, PyAny>, state: &State) -> PyResult<Option<Self>> {
        let segment_bytes = files.getattr("segment_bytes")?.extract()?;
        let (rotates, sync) = (files.getattr("rotates")?, files.getattr("sync")?);
        let by_keys = files.getattr("by_keys")?.is_truthy()?;
        let told = Told { names: by_keys.then(|| Names::new(state)), ..Told::default() };
        let data = told.encode(state);
        let Some(mapped) = open_segment(files, state, &data, 0, false)? else {
            return Ok(None);
        };
        let mut tape = Tape {
            files: files.clone().unbind(),
            ahead: Ahead::start(),
            mapped,
            frame: 0,
            size: 0,
            sum: Sum::default(),
            full: 0,
            segment_bytes,
            rotates: rotates.is_truthy()?,
            sync: sync.is_truthy()?,
            num_calls: 0,
            told,
            running: None,
        };
        tape.begin_frames(data.len());
        Ok(Some(tape))
    }

    /// Commit the arguments of a call. Fails if the files fail, which ends the record.
    pub(crate) fn begin(&mut self, py: Python<'_>, state: &State, call: &Call<'_>) -> PyResult<()> {
        self.end_panicked(py)?;
        self.running = if call.has_form() {
            if let Some(names) = &mut self.told.names {
                names.begin(state, call.pin(), &call.extended(state));
            }
            let write = |pen: &mut Pen<'_>, told: &Told| {
                let known = Known { state, names: told.names.as_ref() };
                call.write(pen, known, |row| told.hits.get(&row))
            };
            Some(self.put(py, write)?)
        } else {
            None
        };
        Ok(())
    }

    /// Commit the outcome of the call, which may end the frame and the segment.
    pub(crate) fn end<T: Outcome, E: Named>(
        &mut self,
        py: Python<'_>,
        state: &State,
        outcome: Result<&T, &E>,
    ) -> PyResult<()> {
        let Some((opcode, row)) = self.running.take() else {
            return Ok(());
        };
        if let (Some(names), Ok(value)) = (&mut self.told.names, outcome) {
            value.row().into_iter().for_each(|row| names.note_added(row, self.num_calls));
            names.note_pin(self.num_calls);
        }
        self.put(py, |pen, told| match outcome {
            Ok(value) => {
                value.write(pen);
                if let Some(names) = told.names.as_ref().filter(|_| extends(opcode)) {
                    names.put_new_hashes(pen, state);
                }
            }
            Err(error) => put_error(pen, error.error_name()),
        })?;
        if let (Ok(value), Some(row)) = (outcome, row) {
            match (opcode, value.hit()) {
                (GET_COMPUTED_BLOCKS, Some(hit)) => self.told.note_hit(row, hit),
                (REMOVE_REQUEST, _) => drop(self.told.hits.remove(&row)),
                _ => {}
            }
        }
        self.num_calls += 1;
        if opcode != TAKE_BATCH && self.size < FRAME_BYTES {
            return Ok(());
        }
        self.close_frame(py)?;
        if self.rotates && self.frame >= self.full { self.rotate(py, state, true) } else { Ok(()) }
    }

    /// Record the outcome of a call that never ended, since it panicked: another exception.
    #[inline]
    fn end_panicked(&mut self, py: Python<'_>) -> PyResult<()> {
        if self.running.is_some() { self.put_panic(py) } else { Ok(()) }
    }

    #[cold]
    fn put_panic(&mut self, py: Python<'_>) -> PyResult<()> {
        self.running = None;
        self.put(py, |pen, _| put_error(pen, "a panic"))?;
        self.num_calls += 1;
        Ok(())
    }

    /// End the segment; the next one begins with this state.
    pub(crate) fn rotate(&mut self, py: Python<'_>, state: &State, go_on: bool) -> PyResult<()> {
        self.close(py)?;
        if !go_on && self.told.names.is_some() {
            self.told.names = Some(Names::new(state));
        }
        let data = self.told.encode(state);
        let opened = open_segment(self.files.bind(py), state, &data, self.num_calls, go_on)?;
        self.mapped = opened.ok_or_else(ended)?;
        self.begin_frames(data.len());
        Ok(())
    }

    /// End the open frame and the segment.
    pub(crate) fn close(&mut self, py: Python<'_>) -> PyResult<()> {
        self.end_panicked(py)?;
        self.close_frame(py)?;
        self.ahead.leave(); // the file is cut off here
        self.files.bind(py).call_method1(intern!(py, "close_segment"), (self.frame,))?;
        Ok(())
    }

    /// Open the next frame after the first one, which has this many bytes.
    fn begin_frames(&mut self, state_size: usize) {
        self.told.hits.clear();
        self.begin_frame(HEADER_SIZE + FRAME_SIZE + state_size);
        self.full = self.frame + self.segment_bytes;
        self.ahead.enter(self.mapped.bytes(), self.frame);
    }

    /// Begin a frame behind this place.
    fn begin_frame(&mut self, end: usize) {
        self.frame = end.next_multiple_of(8);
        (self.size, self.sum) = (0, Sum::default());
        self.ahead.reach(self.frame);
    }

    /// Add what `write` writes to the open frame, and commit it.
    #[inline]
    fn put<R>(&mut self, py: Python<'_>, write: impl Fn(&mut Pen<'_>, &Told) -> R) -> PyResult<R> {
        let start = self.frame + FRAME_SIZE;
        if self.size == 0 {
            self.mapped.begin_word(self.frame, OPEN);
        }
        loop {
            let mut pen = Pen::new(self.mapped.room(start), self.size, self.sum);
            let result = write(&mut pen, &self.told);
            match pen.written() {
                Ok((size, sum)) => {
                    (self.size, self.sum) = (size, sum);
                    self.mapped.set_word(self.frame, OPEN | size as u32);
                    return Ok(result);
                }
                Err(size) => self.grow(py, start + size + FRAME_SIZE)?,
            }
        }
    }

    /// Make the segment have room up to this place.
    #[cold]
    fn grow(&mut self, py: Python<'_>, end: usize) -> PyResult<()> {
        let grown = self.files.bind(py).call_method1(intern!(py, "grow"), (end,))?;
        let mapped = Mapped::of(&grown)?.ok_or_else(ended)?;
        self.ahead.leave();
        self.mapped = mapped;
        self.ahead.enter(self.mapped.bytes(), self.frame + FRAME_SIZE + self.size);
        Ok(())
    }

    fn close_frame(&mut self, py: Python<'_>) -> PyResult<()> {
        if self.size == 0 {
            return Ok(());
        }
        let start = self.frame + FRAME_SIZE;
        let sum = self.sum.of(&self.mapped.room(start)[..self.size]);
        self.mapped.set_word(self.frame + 4, sum);
        self.mapped.set_word(self.frame, self.size as u32);
        self.begin_frame(start + self.size);
        if self.sync && self.files.bind(py).call_method1("flush", (self.frame,))?.is_none() {
            return Err(ended());
        }
        Ok(())
    }
}

fn open_segment(
    files: &Bound<'_, PyAny>,
    state: &State,
    data: &[u8],
    first_call: u64,
    go_on: bool,
) -> PyResult<Option<Mapped>> {
    let one_way = state.config.hashing != Hashing::Xxh3;
    let arguments = (PyBytes::new(files.py(), data), first_call, go_on, one_way);
    Mapped::of(&files.call_method1("open_segment", arguments)?)
}

/// Make the error for files that have failed and have reported it.
fn ended() -> PyErr {
    pyo3::exceptions::PyOSError::new_err("the record has ended")
}
