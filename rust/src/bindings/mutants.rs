// SPDX-License-Identifier: Apache-2.0
//! `kvcore._rust.seed`: a bug of the twin, for `tools/twin_mutants.py`. In no wheel.

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;

use crate::mutants;

/// Seed the bug of this name in the calling thread; returns all names. A crash that it leads to is
/// reported as a violation and prints nothing. Raises KeyError.
#[pyfunction]
#[pyo3(signature = (name, /))]
pub(crate) fn seed(name: Option<&str>) -> PyResult<Vec<&'static str>> {
    let found = |name: &str| mutants::MUTANTS.iter().find(|each| each.0 == name).map(|each| each.1);
    let chosen = name.map(|name| found(name).ok_or_else(|| PyKeyError::new_err(name.to_owned())));
    mutants::seed(chosen.transpose()?);
    std::panic::set_hook(Box::new(|_| {}));
    Ok(mutants::MUTANTS.iter().map(|each| each.0).collect())
}
