// SPDX-License-Identifier: Apache-2.0
//! Handles on the Python classes that calls give back.
//!
//! They are looked up once per process, at the first call that needs one.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

/// The classes of `kvcore.types.values`, `kvcore.types.event_log` and `kvcore.types.commands`,
/// members of enums included.
pub(crate) struct Classes {
    pub(crate) blocks: Py<PyAny>,
    pub(crate) hit: Py<PyAny>,
    pub(crate) refused: Py<PyAny>,
    pub(crate) swapped_value: Py<PyAny>,
    pub(crate) appended: Py<PyAny>,
    pub(crate) stats: Py<PyAny>,
    pub(crate) batch: Py<PyAny>,
    pub(crate) events: Py<PyAny>,
    pub(crate) later: Py<PyAny>,
    pub(crate) never: Py<PyAny>,
    pub(crate) verdict_ok: Py<PyAny>,
    pub(crate) verdict_later: Py<PyAny>,
    pub(crate) verdict_never: Py<PyAny>,
    pub(crate) waiting: Py<PyAny>,
    pub(crate) running: Py<PyAny>,
    pub(crate) swapped: Py<PyAny>,
    /// The module `kvcore.types.errors`.
    pub(crate) errors: Py<PyModule>,
}

impl Classes {
    /// The handles of this process.
    pub(crate) fn get(py: Python<'_>) -> PyResult<&Self> {
        CLASSES.get_or_try_init(py, || Self::find(py))
    }

    fn find(py: Python<'_>) -> PyResult<Self> {
        let values = py.import("kvcore.types.values")?;
        let value = |name: &str| values.getattr(name).map(Bound::unbind);
        let member =
            |name: &str, of: &str| Ok::<_, PyErr>(values.getattr(name)?.getattr(of)?.unbind());
        Ok(Classes {
            blocks: value("KVCacheBlocks")?,
            hit: value("Hit")?,
            refused: value("Refused")?,
            swapped_value: value("Swapped")?,
            appended: value("Appended")?,
            stats: value("PrefixCacheStats")?,
            batch: py.import("kvcore.types.commands")?.getattr("Batch")?.unbind(),
            events: py.import("kvcore.types.event_log")?.getattr("Events")?.unbind(),
            later: member("Reason", "LATER")?,
            never: member("Reason", "NEVER")?,
            verdict_ok: member("Verdict", "OK")?,
            verdict_later: member("Verdict", "LATER")?,
            verdict_never: member("Verdict", "NEVER")?,
            waiting: member("Status", "WAITING")?,
            running: member("Status", "RUNNING")?,
            swapped: member("Status", "SWAPPED")?,
            errors: py.import("kvcore.types.errors")?.unbind(),
        })
    }
}
