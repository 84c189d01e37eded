// SPDX-License-Identifier: Apache-2.0
//! `kvcore._rust.FreeQueue`: the free queue by itself.
//!
//! Rules: as the functions of `kvcore.pool.queue_transitions`, with the same values and errors;
//! `kvcore/legacy/blocks/queue.py` holds one.

use pyo3::prelude::*;

use crate::bindings::arguments::BlockArg;
use crate::bindings::errors::{Given, Wrong};
use crate::bindings::values;
use crate::bindings::values::PyNumbers;
use crate::pool::free_queue;
use crate::pool::free_queue::make_free_queue;
use crate::pool::queue_transitions as layer;
use crate::types::errors::Error;

/// A queue of block ids. `kvcore.legacy.blocks.queue` is the way to use it.
#[pyclass(module = "kvcore._rust")]
pub(crate) struct FreeQueue(free_queue::FreeQueue);

impl FreeQueue {
    /// Run a transition of one block.
    fn change(
        &mut self,
        block: BlockArg<'_, '_>,
        transition: fn(&mut free_queue::FreeQueue, i64) -> Result<(), Error>,
    ) -> PyResult<()> {
        let mut given = Given::default();
        let id = given.block(block.0)?;
        transition(&mut self.0, id).map_err(|error| Wrong::from(error).raise(block.0.py(), &given))
    }

    /// Ask a question about one block.
    fn ask<T>(
        &self,
        block: BlockArg<'_, '_>,
        question: fn(&free_queue::FreeQueue, i64) -> Result<T, Error>,
    ) -> PyResult<T> {
        let mut given = Given::default();
        let id = given.block(block.0)?;
        question(&self.0, id).map_err(|error| Wrong::from(error).raise(block.0.py(), &given))
    }
}

#[pymethods]
impl FreeQueue {
    /// An empty queue over so many blocks.
    #[new]
    #[pyo3(signature = (num_blocks, /))]
    fn new(num_blocks: u32) -> Self {
        FreeQueue(make_free_queue(num_blocks, []))
    }

    fn __len__(&self) -> usize {
        self.0.len() as usize
    }

    /// The block that leaves next.
    fn front(&self) -> Option<u32> {
        self.0.front().map(|block| block.0)
    }

    /// The block that leaves last.
    fn back(&self) -> Option<u32> {
        layer::back(&self.0).map(|block| block.0)
    }

    /// Take out the block that leaves next, if there is one.
    fn popleft(&mut self) -> Option<u32> {
        layer::popleft(&mut self.0).map(|block| block.0)
    }

    /// Take a block out, from wherever it is. Raises UnknownBlock, NotQueued.
    #[pyo3(signature = (block, /))]
    fn remove(&mut self, block: BlockArg<'_, '_>) -> PyResult<()> {
        self.change(block, layer::remove)
    }

    /// Put a block at the back. Raises UnknownBlock, AlreadyQueued.
    #[pyo3(signature = (block, /))]
    fn append(&mut self, block: BlockArg<'_, '_>) -> PyResult<()> {
        self.change(block, layer::append)
    }

    /// Put a block at the front. Raises UnknownBlock, AlreadyQueued.
    #[pyo3(signature = (block, /))]
    fn prepend(&mut self, block: BlockArg<'_, '_>) -> PyResult<()> {
        self.change(block, layer::prepend)
    }

    /// Whether a block is in the queue. Raises UnknownBlock.
    #[pyo3(signature = (block, /))]
    fn contains(&self, block: BlockArg<'_, '_>) -> PyResult<bool> {
        self.ask(block, |queue, id| Ok(queue.contains(layer::check_block(queue, id)?)))
    }

    /// What leaves just before and just after a block. Raises UnknownBlock.
    #[pyo3(signature = (block, /))]
    fn neighbours(&self, block: BlockArg<'_, '_>) -> PyResult<(Option<u32>, Option<u32>)> {
        let around = self.ask(block, layer::neighbours)?;
        let [before, after] = around.map(|block| block.map(|block| block.0));
        Ok((before, after))
    }

    /// All blocks, front first.
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<PyNumbers<'py>> {
        values::numbers(py, self.0.iter().map(|block| block.0).collect())
    }
}
