// SPDX-License-Identifier: Apache-2.0
//! `kvcore._rust.check_state`: which of the twin's properties the bytes of a state break.
//! With it, both languages can check the same state.

use pyo3::prelude::*;

use crate::bindings::errors::raise;
use crate::codec::decode::decode;
use crate::invariants::pool_and_state::failing;
use crate::invariants::requests::Scratch;

/// The names of the structural properties that do not hold in a state, from its canonical bytes.
///
/// Raises DamagedState.
#[pyfunction]
#[pyo3(signature = (data, /))]
pub(crate) fn check_state(py: Python<'_>, data: &[u8]) -> PyResult<Vec<&'static str>> {
    let state = decode(data).map_err(|error| raise(py, error))?;
    Ok(failing(&state, &mut Scratch::default()))
}
