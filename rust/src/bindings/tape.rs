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

use crate::bindings::ahead::Ahead;
use crate::bindings::mapped::{FRAME_SIZE, Mapped, OpenFrame};
use crate::codec::encode::encode;
use crate::record::calls::{
    Call, GET_COMPUTED_BLOCKS, REMOVE_REQUEST, TAKE_BATCH, Written, extends,
};
use crate::record::names::{Known, Names, keys_form};
use crate::record::outcomes::{Named, Outcome, put_error};
use crate::state::state::State;
use crate::types::values::Hit;

const HEADER_SIZE: usize = 64;
const FRAME_BYTES: usize = 1 << 16;

/// What the record refers to.
#[derive(Default)]
struct Told {
    /// What the last look-up of each row found in this segment, by row.
    hits: Vec<Option<Hit>>,
    /// The names of a record by keys.
    names: Option<Names>,
}

/// The open segment and its open frame.
pub(crate) struct Tape {
    files: Py<PyAny>,
    ahead: Ahead, // is dropped before the mapping
    frame: OpenFrame,
    /// The place at which the segment is full.
    full: usize,
    segment_bytes: usize,
    rotates: bool,
    sync: bool,
    num_calls: u64,
    told: Told,
    /// The running call, if it was recorded.
    running: Option<Written>,
    /// The row of the request that the last call named.
    row_before: u32,
}

impl Told {
    /// Note what a look-up found, in the room of what the one before found.
    fn note_hit(&mut self, row: u32, hit: &Hit) {
        let row = row as usize;
        if self.hits.len() <= row {
            self.hits.resize(row + 1, None);
        }
        let known = self.hits[row].get_or_insert_default();
        (known.num_tokens, known.num_common) = (hit.num_tokens, hit.num_common);
        known.blocks.blocks.clone_from(&hit.blocks.blocks);
    }

    /// What the last look-up of a row found.
    fn hit(&self, row: u32) -> Option<&Hit> {
        self.hits.get(row as usize)?.as_ref()
    }

    /// Forget what was found for a row.
    fn forget_hit(&mut self, row: u32) {
        if let Some(hit) = self.hits.get_mut(row as usize) {
            *hit = None;
        }
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
            frame: OpenFrame::new(mapped),
            full: 0,
            segment_bytes,
            rotates: rotates.is_truthy()?,
            sync: sync.is_truthy()?,
            num_calls: 0,
            told,
            running: None,
            row_before: 0,
        };
        tape.begin_frames(data.len());
        Ok(Some(tape))
    }

    /// Commit the arguments of a call. Fails if the files fail, which ends the record.
    #[inline(always)] // the call's form is known where it is made
    pub(crate) fn begin(&mut self, py: Python<'_>, state: &State, call: &Call<'_>) -> PyResult<()> {
        self.end_panicked(py)?;
        self.running = if call.has_form() {
            if let Some(names) = &mut self.told.names {
                names.begin(state, call.pin(), &call.extended(state));
            }
            loop {
                let mut pen = self.frame.pen();
                let (names, row_before) = (self.told.names.as_ref(), self.row_before);
                let known = Known { state, names, row_before };
                let running = call.write(&mut pen, known, |row| self.told.hit(row));
                let written = pen.written();
                let Err(end) = self.frame.commit(written) else { break Some(running) };
                self.grow(py, end)?;
            }
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
        loop {
            let mut pen = self.frame.pen();
            match outcome {
                Ok(value) => {
                    value.write(&mut pen);
                    if let Some(names) = self.told.names.as_ref().filter(|_| extends(opcode)) {
                        names.put_new_hashes(&mut pen, state);
                    }
                }
                Err(error) => put_error(&mut pen, error.error_name()),
            }
            let written = pen.written();
            let Err(end) = self.frame.commit(written) else { break };
            self.grow(py, end)?;
        }
        if let (Ok(value), Some(row)) = (outcome, row) {
            self.row_before = row;
            match (opcode, value.hit()) {
                (GET_COMPUTED_BLOCKS, Some(hit)) => self.told.note_hit(row, hit),
                (REMOVE_REQUEST, _) => self.told.forget_hit(row),
                _ => {}
            }
        }
        self.num_calls += 1;
        if opcode != TAKE_BATCH && self.frame.size < FRAME_BYTES {
            return Ok(());
        }
        self.close_frame(py)?;
        if self.rotates && self.frame.at >= self.full {
            self.rotate(py, state, true)
        } else {
            Ok(())
        }
    }

    /// Record the outcome of a call that never ended, since it panicked: another exception.
    #[inline]
    fn end_panicked(&mut self, py: Python<'_>) -> PyResult<()> {
        if self.running.is_some() { self.put_panic(py) } else { Ok(()) }
    }

    #[cold]
    fn put_panic(&mut self, py: Python<'_>) -> PyResult<()> {
        self.running = None;
        loop {
            let mut pen = self.frame.pen();
            put_error(&mut pen, "a panic");
            let written = pen.written();
            let Err(end) = self.frame.commit(written) else { break };
            self.grow(py, end)?;
        }
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
        self.frame.mapped = opened.ok_or_else(ended)?;
        self.begin_frames(data.len());
        Ok(())
    }

    /// End the open frame and the segment.
    pub(crate) fn close(&mut self, py: Python<'_>) -> PyResult<()> {
        self.end_panicked(py)?;
        self.close_frame(py)?;
        self.ahead.leave(); // the file is cut off here
        self.files.bind(py).call_method1(intern!(py, "close_segment"), (self.frame.at,))?;
        Ok(())
    }

    /// Open the next frame after the first one, which has this many bytes.
    fn begin_frames(&mut self, state_size: usize) {
        self.told.hits.clear();
        self.frame.begin(HEADER_SIZE + FRAME_SIZE + state_size);
        self.full = self.frame.at + self.segment_bytes;
        self.ahead.enter(self.frame.mapped.bytes(), self.frame.at);
    }

    /// Make the segment have room up to this place.
    #[cold]
    fn grow(&mut self, py: Python<'_>, end: usize) -> PyResult<()> {
        let grown = self.files.bind(py).call_method1(intern!(py, "grow"), (end,))?;
        let mapped = Mapped::of(&grown)?.ok_or_else(ended)?;
        self.ahead.leave();
        self.frame.mapped = mapped;
        let at = self.frame.at + FRAME_SIZE + self.frame.size;
        self.ahead.enter(self.frame.mapped.bytes(), at);
        Ok(())
    }

    fn close_frame(&mut self, py: Python<'_>) -> PyResult<()> {
        if self.frame.size == 0 {
            return Ok(());
        }
        self.frame.close();
        self.ahead.reach(self.frame.at);
        if self.sync && self.files.bind(py).call_method1("flush", (self.frame.at,))?.is_none() {
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
    let one_way = state.config.hashing.is_one_way();
    let arguments = (PyBytes::new(files.py(), data), first_call, go_on, one_way);
    Mapped::of(&files.call_method1("open_segment", arguments)?)
}

/// Make the error for files that have failed and have reported it.
fn ended() -> PyErr {
    pyo3::exceptions::PyOSError::new_err("the record has ended")
}
