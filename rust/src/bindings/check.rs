// SPDX-License-Identifier: Apache-2.0
//! `kvcore._rust.check_world`: the checker's search, over the twin's own transitions.
//!
//! A world is read from its object. The result is plain data: counts, a verdict, the calls of a
//! story with arguments that `kvcore.trace.calls.Call` takes. No Python runs while states are
//! explored; between rounds it may stop the search, by Ctrl-C or an exception.

use pyo3::exceptions::{PyKeyboardInterrupt, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::bindings::arguments::{ConfigArg, config, items};
use crate::bindings::check_calls::Stories;
use crate::bindings::errors::raise;
use crate::bindings::extra_keys::kind_of_request;
use crate::check;
use crate::check::search::report::Report;
use crate::check::search::search::{Limits, Progress};
use crate::check::world::world::{Moves, Symmetry, World};
use crate::types::violation::Checks;

/// Explore a world; the report as a dict.
///
/// symmetry: whether requests, blocks and tokens are renamed. full_keys: whether whole names are
/// kept, not fingerprints. checks: the properties that count, all unless given. progress: is told
/// states, edges, depth, waiting states, seconds and bytes, from time to time.
#[pyfunction]
#[pyo3(signature = (
    world, /, *, symmetry = (true, true, true), full_keys = false, checks = None, max_depth = None,
    max_states = None, max_seconds = None, workers = 1, progress = None
))]
#[allow(clippy::too_many_arguments)] // they are the options of `kvcore.check.check`
pub(crate) fn check_world<'py>(
    world: &Bound<'py, PyAny>,
    symmetry: (bool, bool, bool),
    full_keys: bool,
    checks: Option<Vec<String>>,
    max_depth: Option<u32>,
    max_states: Option<u64>,
    max_seconds: Option<f64>,
    workers: usize,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = world.py();
    let read = read_world(world)?;
    let (requests, blocks, tokens) = symmetry;
    let symmetry = Symmetry { requests, blocks, tokens };
    let checks = checks.map_or_else(Checks::default, Checks::only);
    let limits = Limits { max_depth, max_states, max_seconds };
    let mut raised = None;
    let mut watch = |come: &Progress| {
        let reported = Python::attach(|py| report_progress(py, progress.as_ref(), come));
        reported.map_err(|error| raised = Some(error)).is_ok()
    };
    let report = py.detach(|| {
        check::check_world(read, symmetry, full_keys, checks, &limits, workers, &mut watch)
    });
    let report = report.map_err(|error| raise(py, error))?;
    match raised {
        Some(error) if !error.is_instance_of::<PyKeyboardInterrupt>(py) => Err(error),
        _ => Ok(to_dict(py, &report, world)?.into_any()),
    }
}

/// Every state of a small world as its canonical bytes, with the names of the structural properties
/// that do not hold there.
#[pyfunction]
#[pyo3(signature = (world, /, *, max_states = None))]
pub(crate) fn check_states<'py>(
    world: &Bound<'py, PyAny>,
    max_states: Option<u64>,
) -> PyResult<Vec<(Bound<'py, PyBytes>, Vec<&'static str>)>> {
    let py = world.py();
    let read = read_world(world)?;
    let found = py.detach(|| check::check_states(read, max_states));
    let found = found.map_err(|error| raise(py, error))?;
    Ok(found.into_iter().map(|(state, names)| (PyBytes::new(py, &state), names)).collect())
}

/// Report progress to Python, which says whether to go on.
fn report_progress(py: Python<'_>, progress: Option<&Py<PyAny>>, come: &Progress) -> PyResult<()> {
    py.check_signals()?;
    let Some(progress) = progress else { return Ok(()) };
    let counts = (come.num_states, come.num_edges, come.depth, come.num_waiting);
    progress.call1(py, (counts.0, counts.1, counts.2, counts.3, come.seconds, come.num_bytes))?;
    Ok(())
}

fn read_world(world: &Bound<'_, PyAny>) -> PyResult<World> {
    let number = |name: &str| world.getattr(name)?.extract::<u32>();
    let moves = world.getattr("moves")?;
    let moves = match moves.extract::<&str>() {
        Ok("calls") => Moves::Calls,
        Ok("engine") => Moves::Engine,
        _ => {
            let shown = moves.repr()?;
            return Err(PyValueError::new_err(format!("moves {shown} are Python's alone")));
        }
    };
    let mut kinds_of_requests = Vec::new();
    for kind in items(world.getattr("kinds_of_requests")?.as_borrowed())? {
        kinds_of_requests.push(kind_of_request(&kind)?);
    }
    let strings = |name: &str| -> PyResult<Vec<String>> {
        items(world.getattr(name)?.as_borrowed())?.iter().map(|each| each.extract()).collect()
    };
    let delays = items(world.getattr("delays")?.as_borrowed())?;
    Ok(World {
        config: config(ConfigArg(world.getattr("config")?.as_borrowed()))?,
        num_requests: number("num_requests")?,
        num_tokens: number("num_tokens")?,
        num_prompt: number("num_prompt")?,
        num_letters: number("num_letters")?,
        num_drafts: number("num_drafts")?,
        num_lookahead: number("num_lookahead")?,
        num_external: number("num_external")?,
        num_encoder: number("num_encoder")?,
        num_pins: number("num_pins")?,
        num_output_placeholders: number("num_output_placeholders")?,
        num_outputs: number("num_outputs")?,
        forgets_overwritten: world.getattr("forgets_overwritten")?.is_truthy()?,
        delays: delays.iter().map(|each| each.extract()).collect::<PyResult<_>>()?,
        marks: world.getattr("marks")?.is_truthy()?,
        kinds_of_requests,
        moves_per_batch: number("moves_per_batch")?,
        loads_fail: world.getattr("loads_fail")?.is_truthy()?,
        calls: strings("calls")?,
        moves,
    })
}

fn to_dict<'py>(
    py: Python<'py>,
    report: &Report,
    world: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    let found = PyDict::new(py);
    found.set_item("verdict", report.end.name())?;
    found.set_item("num_states", report.num_states)?;
    found.set_item("num_edges", report.num_edges)?;
    found.set_item("num_waiting", report.num_waiting)?;
    found.set_item("depths", &report.depths)?;
    let notes = PyDict::new(py);
    for (kind, name, count) in report.notes.sorted() {
        notes.set_item((kind, name), count)?;
    }
    found.set_item("notes", notes)?;
    found.set_item("seconds", report.seconds)?;
    found.set_item("num_bytes", report.num_bytes)?;
    let Some(story) = &report.story else {
        found.set_item("violation", py.None())?;
        return Ok(found);
    };
    let stories = Stories::new(world)?;
    let mut edges = Vec::new();
    for calls in &story.edges {
        let calls = calls.iter().map(|call| stories.call(call)).collect::<PyResult<Vec<_>>>()?;
        edges.push(PyTuple::new(py, calls)?);
    }
    let violation = (story.violation.property, &story.violation.detail, edges);
    found.set_item("violation", violation)?;
    Ok(found)
}
