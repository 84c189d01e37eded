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

use crate::bindings::mapped::Mapped;
use crate::codec::encode::encode;
use crate::record::calls::{
    Call, GET_COMPUTED_BLOCKS, REMOVE_REQUEST, TAKE_BATCH, Written, extends,
};
use crate::record::names::{Known, Names, keys_form};
use crate::record::outcomes::{Named, Outcome, put_error};
use crate::record::pen::Pen;
use crate::state::state::State;
use crate::types::keys::Hashing;
use crate::types::values::Hit;

const HEADER_SIZE: usize = 64;
const FRAME_SIZE: usize = 8;
const FRAME_BYTES: usize = 1 << 16;
const OPEN: u32 = 1 << 31;
/// Longer data are written through the file, which costs less than the faults of mapped pages.
const MANY_BYTES: usize = 1 << 12;

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
    mapped: Mapped,
    /// Where the open frame begins, and where the next byte goes.
    frame: usize,
    at: usize,
    /// The checksum of the frame's bytes up to a place.
    checksum: u32,
    summed: usize,
    /// The pages before this place cause no more faults.
    warm: usize,
    /// The place at which the segment is full.
    full: usize,
    segment_bytes: usize,
    rotates: bool,
    sync: bool,
    num_calls: u64,
    told: Told,
    /// A large buffer, kept for its pages.
    bytes: Vec<u8>,
    /// The running call, if it was recorded.
    running: Option<Written>,
}

impl Told {
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
            mapped,
            frame: 0,
            at: 0,
            checksum: 0,
            summed: 0,
            full: 0,
            segment_bytes,
            rotates: rotates.is_truthy()?,
            sync: sync.is_truthy()?,
            num_calls: 0,
            told,
            bytes: Vec::new(),
            warm: 0,
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
                (GET_COMPUTED_BLOCKS, Some(hit)) => drop(self.told.hits.insert(row, hit.clone())),
                (REMOVE_REQUEST, _) => drop(self.told.hits.remove(&row)),
                _ => {}
            }
        }
        self.num_calls += 1;
        if opcode != TAKE_BATCH && self.at - self.frame - FRAME_SIZE < FRAME_BYTES {
            return Ok(());
        }
        self.close_frame(py)?;
        if self.rotates && self.frame >= self.full { self.rotate(py, state, true) } else { Ok(()) }
    }

    /// Record the outcome of a call that never ended, since it panicked: another exception.
    fn end_panicked(&mut self, py: Python<'_>) -> PyResult<()> {
        if self.running.take().is_some() {
            self.put(py, |pen, _| put_error(pen, "a panic"))?;
            self.num_calls += 1;
        }
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
        self.files.bind(py).call_method1(intern!(py, "close_segment"), (self.frame,))?;
        Ok(())
    }

    /// Open the next frame after the first one, which has this many bytes.
    fn begin_frames(&mut self, state_size: usize) {
        self.told.hits.clear();
        self.begin_frame(HEADER_SIZE + FRAME_SIZE + state_size);
        (self.full, self.warm) = (self.frame + self.segment_bytes, self.frame);
    }

    /// Begin a frame behind this place.
    fn begin_frame(&mut self, end: usize) {
        self.frame = end.next_multiple_of(8);
        self.at = self.frame + FRAME_SIZE;
        (self.checksum, self.summed) = (0, self.at);
    }

    /// Extend the checksum to where the next byte goes.
    fn sum_up(&mut self) {
        let size = self.at - self.summed;
        self.checksum = self.mapped.checksum(self.checksum, self.summed, size);
        self.summed = self.at;
    }

    /// Add what `write` writes to the open frame, and commit it.
    #[inline]
    fn put<R>(&mut self, py: Python<'_>, write: impl Fn(&mut Pen<'_>, &Told) -> R) -> PyResult<R> {
        if self.at + MANY_BYTES > self.warm {
            self.warm = self.mapped.warm(self.warm.max(self.at));
        }
        let mut pen = Pen::new(self.mapped.room(self.at, MANY_BYTES));
        let written = write(&mut pen, &self.told);
        let (size, fits) = (pen.size(), pen.fits());
        if fits {
            self.at += size;
        } else {
            self.put_many(py, size, |pen, told| drop(write(pen, told)))?;
        }
        self.mapped.set_word(self.frame, OPEN | (self.at - self.frame - FRAME_SIZE) as u32);
        Ok(written)
    }

    /// Add many bytes, or more than the mapping has room for.
    fn put_many(
        &mut self,
        py: Python<'_>,
        size: usize,
        write: impl Fn(&mut Pen<'_>, &Told),
    ) -> PyResult<()> {
        let end = self.at + size;
        if end > self.mapped.len() {
            let grown = self.files.bind(py).call_method1("grow", (end + FRAME_SIZE,))?;
            self.mapped = Mapped::of(&grown)?.ok_or_else(ended)?;
        }
        if self.bytes.len() < size {
            self.bytes.resize(size, 0);
        }
        let bytes = &mut self.bytes[..size];
        write(&mut Pen::new(bytes), &self.told);
        let before = self.mapped.checksum(self.checksum, self.summed, self.at - self.summed);
        self.checksum = crc32c::crc32c_append(before, bytes);
        self.mapped.write(self.at, bytes);
        (self.at, self.summed) = (end, end);
        Ok(())
    }

    fn close_frame(&mut self, py: Python<'_>) -> PyResult<()> {
        let size = self.at - self.frame - FRAME_SIZE;
        if size == 0 {
            return Ok(());
        }
        self.sum_up();
        self.mapped.set_word(self.frame + 4, self.checksum);
        self.mapped.set_word(self.frame, size as u32);
        self.begin_frame(self.at);
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
