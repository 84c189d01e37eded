// SPDX-License-Identifier: Apache-2.0
//! Converts the twin's values to Python: objects of the same classes as the pure core's.

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyTuple};

use crate::bindings::classes::Classes;
use crate::bindings::errors::Given;
use crate::legacy::blocks::by_table::Moves;
use crate::transitions::append::columns_grown;
use crate::types::commands::Batch;
use crate::types::event_log::EventLog;
use crate::types::ids::BlockId;
use crate::types::keys::Key;
use crate::types::values::{
    Admitted, Appended, Hit, KVCacheBlocks, PrefixCacheStats, Reason, Refused, Status, Swapped,
    Verdict,
};

/// Python objects by their kind, so that the stub can name it.
macro_rules! results {
    ($($(#[$doc:meta])* $name:ident: $hint:ident;)*) => {$(
        $(#[$doc])*
        pub(crate) struct $name<'py>(pub(crate) Bound<'py, PyAny>);

        impl<'py> IntoPyObject<'py> for $name<'py> {
            type Target = PyAny;
            type Output = Bound<'py, PyAny>;
            type Error = std::convert::Infallible;

            #[cfg(feature = "stubs")]
            const OUTPUT_TYPE: pyo3::inspect::PyStaticExpr = crate::bindings::hints::$hint;

            fn into_pyobject(self, _py: Python<'py>) -> Result<Self::Output, Self::Error> {
                Ok(self.0)
            }
        }
    )*};
}

results! {
    /// A `KVCacheBlocks`.
    PyBlocks: BLOCKS;
    /// A `KVCacheBlocks`, or a `Refused`.
    PyAdmitted: BLOCKS_OR_REFUSED;
    /// A `Swapped` or a `Refused`.
    PyMoved: SWAPPED_OR_REFUSED;
    /// A `Hit`.
    PyHit: HIT;
    /// A `Verdict`.
    PyVerdict: VERDICT;
    /// A `Status`.
    PyStatus: STATUS;
    /// An `Appended`.
    PyAppended: APPENDED;
    /// A `PrefixCacheStats`.
    PyStats: STATS;
    /// A `Batch`.
    PyBatch: BATCH;
    /// An `Events`.
    PyEvents: EVENTS;
    /// A tuple of block ids or operations, or a `Refused`.
    PyTaken: TAKEN;
    /// A block id, or a `Refused`.
    PyCopied: COPIED;
    /// A dictionary of block ids, or a `Refused`.
    PyCopies: COPIES;
    /// A block id, a `Refused`, or None.
    PyGrown: GROWN;
    /// A tuple of numbers, of blocks, operations or batches.
    PyNumbers: NUMBERS;
    /// A tuple of ids of requests.
    PyNames: NAMES;
    /// A tuple of keys per group.
    PyKeys: KEYS;
}

/// Block ids, as the bytes of each group.
pub(crate) fn blocks<'py>(py: Python<'py>, blocks: &[Vec<BlockId>]) -> PyResult<PyBlocks<'py>> {
    let bytes = |group: &Vec<BlockId>| {
        PyBytes::new_with(py, group.len() * 4, |room| {
            for (place, block) in room.as_chunks_mut().0.iter_mut().zip(group) {
                *place = block.0.to_ne_bytes();
            }
            Ok(())
        })
    };
    let groups: Vec<_> = blocks.iter().map(bytes).collect::<PyResult<_>>()?;
    let class = Classes::get(py)?.blocks.bind(py);
    Ok(PyBlocks(class.call1((PyTuple::new(py, groups)?,))?))
}

/// The ids of a group that came so.
pub(crate) fn packed_ids(group: &Bound<'_, PyAny>) -> Option<Vec<i64>> {
    let ids = group.cast::<PyBytes>().ok()?.as_bytes().as_chunks().0;
    Some(ids.iter().map(|id| i64::from(u32::from_ne_bytes(*id))).collect())
}

/// No blocks in any group.
pub(crate) fn no_blocks(py: Python<'_>, num_groups: usize) -> PyResult<PyBlocks<'_>> {
    blocks(py, &vec![Vec::new(); num_groups])
}

/// New blocks or a refusal; `empty` stands for no new block in any group.
pub(crate) fn admitted<'py>(
    py: Python<'py>,
    outcome: &Admitted<KVCacheBlocks>,
    empty: PyBlocks<'py>,
) -> PyResult<PyAdmitted<'py>> {
    Ok(PyAdmitted(match outcome {
        Ok(grown) if grown.blocks.iter().all(Vec::is_empty) => empty.0,
        Ok(grown) => blocks(py, &grown.blocks)?.0,
        Err(refusal) => refused(py, refusal)?,
    }))
}

/// What a swap moved, or a refusal.
pub(crate) fn moved<'py>(py: Python<'py>, outcome: Admitted<Swapped>) -> PyResult<PyMoved<'py>> {
    Ok(PyMoved(match outcome {
        Ok(swapped) => {
            let class = Classes::get(py)?.swapped_value.bind(py);
            class.call1((swapped.num_copied, swapped.num_found))?
        }
        Err(refusal) => refused(py, &refusal)?,
    }))
}

/// Operations, or a refusal.
pub(crate) fn taken<'py>(py: Python<'py>, outcome: Admitted<Vec<u32>>) -> PyResult<PyTaken<'py>> {
    Ok(PyTaken(match outcome {
        Ok(numbers) => PyTuple::new(py, numbers)?.into_any(),
        Err(refusal) => refused(py, &refusal)?,
    }))
}

/// The blocks that were taken, or a refusal, with the original number instead of its stand-in.
pub(crate) fn granted<'py>(
    py: Python<'py>,
    outcome: Admitted<Vec<BlockId>>,
    given: &Given<'py>,
) -> PyResult<PyTaken<'py>> {
    let refusal = match outcome {
        Ok(blocks) => return Ok(PyTaken(ids(py, &blocks)?.into_any())),
        Err(refusal) => refusal,
    };
    Ok(PyTaken(match given.number(refusal.needed as i64)? {
        Some(needed) => refused_of(py, &refusal, needed)?,
        None => refused(py, &refusal)?,
    }))
}

/// A block of a pool, or a refusal.
pub(crate) fn copied<'py>(py: Python<'py>, outcome: Admitted<BlockId>) -> PyResult<PyCopied<'py>> {
    Ok(PyCopied(match outcome {
        Ok(block) => block.0.into_pyobject(py)?.into_any(),
        Err(refusal) => refused(py, &refusal)?,
    }))
}

/// Blocks with their copies, or a refusal.
pub(crate) fn copies<'py>(py: Python<'py>, outcome: Admitted<Moves>) -> PyResult<PyCopies<'py>> {
    Ok(PyCopies(match outcome {
        Ok(moves) => {
            let copies = PyDict::new(py);
            for (source, target) in moves {
                copies.set_item(source.0, target.0)?;
            }
            copies.into_any()
        }
        Err(refusal) => refused(py, &refusal)?,
    }))
}

/// Another block of a table, a refusal, or nothing.
pub(crate) fn grown(py: Python<'_>, outcome: Admitted<Option<BlockId>>) -> PyResult<PyGrown<'_>> {
    Ok(PyGrown(match outcome {
        Ok(block) => block.map(|block| block.0).into_pyobject(py)?.into_any(),
        Err(refusal) => refused(py, &refusal)?,
    }))
}

/// A cached prefix.
pub(crate) fn hit<'py>(py: Python<'py>, found: &Hit) -> PyResult<PyHit<'py>> {
    let held = blocks(py, &found.blocks.blocks)?;
    Ok(PyHit(Classes::get(py)?.hit.bind(py).call1((held.0, found.num_tokens, found.num_common))?))
}

/// How far an `append` came.
pub(crate) fn appended<'py>(
    py: Python<'py>,
    far: Appended,
    grown: &[[u32; 4]],
) -> PyResult<PyAppended<'py>> {
    let class = Classes::get(py)?.appended.bind(py);
    let refusal = far.refused.as_ref().map(|refusal| refused(py, refusal)).transpose()?;
    let columns = PyBytes::new(py, &columns_grown(grown));
    Ok(PyAppended(class.call1((far.done, refusal, columns))?))
}

/// What `can_allocate` says.
pub(crate) fn verdict(py: Python<'_>, verdict: Verdict) -> PyResult<PyVerdict<'_>> {
    let classes = Classes::get(py)?;
    let member = match verdict {
        Verdict::Ok => &classes.verdict_ok,
        Verdict::Later => &classes.verdict_later,
        Verdict::Never => &classes.verdict_never,
    };
    Ok(PyVerdict(member.bind(py).clone()))
}

/// Where a request's blocks are.
pub(crate) fn status(py: Python<'_>, status: Status) -> PyResult<PyStatus<'_>> {
    let classes = Classes::get(py)?;
    let member = match status {
        Status::Waiting => &classes.waiting,
        Status::Running => &classes.running,
        Status::Swapped => &classes.swapped,
    };
    Ok(PyStatus(member.bind(py).clone()))
}

/// A closed batch.
pub(crate) fn batch<'py>(py: Python<'py>, batch: &Batch) -> PyResult<PyBatch<'py>> {
    let buffer = PyByteArray::new(py, batch.buffer.as_flattened());
    let keys = PyBytes::new(py, &batch.keys);
    let made = (batch.number, buffer, keys, batch.epoch);
    Ok(PyBatch(Classes::get(py)?.batch.bind(py).call1(made)?))
}

/// Look-up statistics.
pub(crate) fn stats<'py>(py: Python<'py>, stats: &PrefixCacheStats) -> PyResult<PyStats<'py>> {
    let fresh = (stats.requests, stats.queries, stats.hits);
    let again = (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits);
    let class = Classes::get(py)?.stats.bind(py);
    let counts = (fresh.0, fresh.1, fresh.2, again.0, again.1, again.2, stats.reset);
    Ok(PyStats(class.call1(counts)?))
}

/// Events, in order: objects are made when they are read.
pub(crate) fn events<'py>(py: Python<'py>, log: &EventLog) -> PyResult<PyEvents<'py>> {
    let data = PyBytes::new(py, log.as_bytes());
    Ok(PyEvents(Classes::get(py)?.events.bind(py).call1((data, log.len()))?))
}

/// Keys, one tuple per group.
pub(crate) fn keys<'py>(py: Python<'py>, groups: &[Vec<Key>]) -> PyResult<PyKeys<'py>> {
    let tuple = |keys: &Vec<Key>| PyTuple::new(py, keys.iter().map(|key| PyBytes::new(py, &key.0)));
    let tuples = groups.iter().map(tuple).collect::<PyResult<Vec<_>>>()?;
    Ok(PyKeys(PyTuple::new(py, tuples)?.into_any()))
}

/// The numbers of blocks, operations or batches.
pub(crate) fn numbers<'py, T>(py: Python<'py>, numbers: Vec<T>) -> PyResult<PyNumbers<'py>>
where
    T: IntoPyObject<'py>,
{
    Ok(PyNumbers(PyTuple::new(py, numbers)?.into_any()))
}

/// The ids of requests.
pub(crate) fn names(py: Python<'_>, names: Vec<String>) -> PyResult<PyNames<'_>> {
    Ok(PyNames(PyTuple::new(py, names)?.into_any()))
}

fn refused<'py>(py: Python<'py>, refusal: &Refused) -> PyResult<Bound<'py, PyAny>> {
    refused_of(py, refusal, refusal.needed.into_pyobject(py)?.into_any())
}

/// A refusal that names how many blocks are needed.
fn refused_of<'py>(
    py: Python<'py>,
    refusal: &Refused,
    needed: Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let classes = Classes::get(py)?;
    let reason = match refusal.reason {
        Reason::Later => &classes.later,
        Reason::Never => &classes.never,
    };
    classes.refused.bind(py).call1((reason, needed, refusal.available, refusal.pending))
}

fn ids<'py>(py: Python<'py>, blocks: &[BlockId]) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, blocks.iter().map(|block| block.0))
}
