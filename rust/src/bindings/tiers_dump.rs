// SPDX-License-Identifier: Apache-2.0
//! Converts tiers to columns, from which `kvcore/legacy/blocks/from_twin.py` makes the Python
//! value.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::bindings::errors::{Given, raise_in};
use crate::bindings::values;
use crate::bindings::values::PyBatch;
use crate::legacy::blocks::tiers::Tiers;
use crate::pool::block_pool::BlockPool;
use crate::pool::priority_eviction::eviction_priority::NO_PRIORITY;
use crate::types::commands::Tier;
use crate::types::ids::BlockId;

/// The columns of the device's and the host's blocks, and the open batch.
pub(super) type Dump<'py> = (Columns<'py>, Option<Columns<'py>>, PyBatch<'py>);

/// The number of owners of each block, their keys, the free queue from its front, the rank of each
/// block among those of its key, the priorities of those that have one, and the block that was
/// placed by priority last.
pub(super) type Columns<'py> = (
    Vec<u32>,
    Vec<Option<Bound<'py, PyBytes>>>,
    Vec<u32>,
    Vec<u32>,
    Vec<(u32, (f64, u32))>,
    Option<u32>,
);

/// The columns of all tiers.
pub(super) fn dump<'py>(py: Python<'py>, tiers: &Tiers) -> PyResult<Dump<'py>> {
    let host = tiers.pool(Tier::Host).ok().map(|pool| columns(py, pool));
    let device = tiers.pool(Tier::Device).map(|pool| columns(py, pool));
    let device = device.map_err(|misuse| raise_in(py, misuse, &Given::default()))?;
    Ok((device, host, values::batch(py, &tiers.open_batch())?))
}

fn columns<'py>(py: Python<'py>, pool: &BlockPool) -> Columns<'py> {
    let ids = || (0..pool.num_blocks()).map(BlockId);
    let key = |block| pool.key(block).map(|key| PyBytes::new(py, &key.0));
    let known = pool.priorities.as_ref();
    let priorities = (0..).zip(known.iter().flat_map(|known| &known.of_blocks));
    let priorities = priorities.filter(|(_, priority)| **priority != NO_PRIORITY);
    (
        ids().map(|block| pool.ref_count(block)).collect(),
        ids().map(key).collect(),
        numbers(pool.queue.iter().collect()),
        pool.index.ranks(),
        priorities.map(|(block, priority)| (block, (priority.time, priority.length))).collect(),
        known.and_then(|known| known.last_placed).map(|block| block.0),
    )
}

pub(super) fn numbers(blocks: Vec<BlockId>) -> Vec<u32> {
    blocks.into_iter().map(|block| block.0).collect()
}
