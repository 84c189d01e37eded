// SPDX-License-Identifier: Apache-2.0
//! Recording of a manager's calls: what happens around each call, and the methods that start and
//! stop it.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::bindings::arguments;
use crate::bindings::arguments::{CountArg, HashesArg, IdArg};
use crate::bindings::errors::{CallError, Given, raise};
use crate::bindings::manager::Manager;
use crate::bindings::tape::Tape;
use crate::record::calls::Call;
use crate::record::checksum;
use crate::record::outcomes::{INVALID_TOKEN, Named, Outcome};
use crate::state::state::State;

/// The CRC-32C of bytes, as records have it.
#[pyfunction]
#[pyo3(signature = (data, /))]
pub(crate) fn crc32c(data: PyBackedBytes) -> u32 {
    checksum::crc32c(0, &data)
}

impl Named for CallError {
    fn error_name(&self) -> &'static str {
        match self {
            CallError::Twin(error) => error.name(),
            CallError::Python(_) => INVALID_TOKEN,
        }
    }
}

impl Manager {
    /// Record the beginning of a call, if calls are recorded.
    #[inline(always)] // of each call
    pub(crate) fn begin(&mut self, py: Python<'_>, call: &Call<'_>) {
        if let Some(tape) = &mut self.tape
            && tape.begin(py, &self.state, call).is_err()
        {
            self.tape = None;
        }
    }

    /// Record the end of the call.
    #[inline(always)] // of each call
    pub(crate) fn end<T: Outcome, E: Named>(&mut self, py: Python<'_>, outcome: &Result<T, E>) {
        if self.tape.is_some() {
            self.follow(|state, tape| tape.end(py, state, outcome.as_ref()));
        }
    }

    /// Run a step on the tape, which is dropped if that fails: the files have reported why.
    #[inline]
    pub(crate) fn follow(&mut self, step: impl FnOnce(&State, &mut Tape) -> PyResult<()>) {
        if let Some(tape) = &mut self.tape
            && step(&self.state, tape).is_err()
        {
            self.tape = None;
        }
    }
}

#[pymethods]
impl Manager {
    /// Record every call from now on into these files, a `kvcore.record.recorder.Recorder`.
    #[pyo3(signature = (files, /))]
    fn start_recording(slf: &Bound<'_, Self>, files: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut manager = Self::lent(slf)?;
        manager.tape = Tape::start(files, &manager.state)?.map(Box::new);
        Ok(())
    }

    /// End the record, if any.
    fn stop_recording(slf: &Bound<'_, Self>) -> PyResult<()> {
        let taken = Self::lent(slf)?.tape.take();
        taken.map_or(Ok(()), |mut tape| tape.close(slf.py()))
    }

    /// Forget the record, if any, which another process goes on writing: nothing is written.
    fn leave_recording(slf: &Bound<'_, Self>) -> PyResult<()> {
        Self::lent(slf)?.tape = None;
        Ok(())
    }

    /// Begin a new segment with the state as it is, if there is a record. O(pool).
    fn rotate_recording(slf: &Bound<'_, Self>) -> PyResult<()> {
        let mut manager = Self::lent(slf)?;
        manager.follow(|state, tape| tape.rotate(slf.py(), state, true));
        Ok(())
    }

    /// Give a request the hashes of its blocks from `first` on, which the next call fills, when the
    /// calls of a record by keys are made again; it keeps none that it had from there on. Does
    /// nothing if it has fewer than `first`.
    #[pyo3(signature = (request_id, first, hashes, /))]
    fn give_hashes(
        slf: &Bound<'_, Self>,
        request_id: IdArg<'_, '_>,
        first: CountArg<'_, '_>,
        hashes: HashesArg<'_, '_>,
    ) -> PyResult<()> {
        let (mut given, hashes) = (Given::default(), arguments::hashes(hashes)?);
        let first = given.count(first)?;
        let mut manager = Self::lent(slf)?;
        let row = manager.state.request(given.name(request_id.0));
        let row = row.map_err(|error| raise(slf.py(), error))?;
        let known = &mut manager.state[row].block_hashes;
        if let Ok(first) = usize::try_from(first)
            && first <= known.len()
        {
            known.truncate(first);
            known.extend(hashes.into_iter().flatten());
        }
        Ok(())
    }

    /// Whether calls are recorded.
    #[getter]
    fn is_recording(slf: &Bound<'_, Self>) -> PyResult<bool> {
        Ok(Self::shown(slf)?.tape.is_some())
    }
}
