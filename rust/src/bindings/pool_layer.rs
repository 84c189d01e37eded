// SPDX-License-Identifier: Apache-2.0
//! `kvcore._rust.BlockPool`: the pool layer's transitions as methods of one pool.
//!
//! They have the values and errors of `kvcore.pool.transitions`; their commands gather until
//! `commands` hands them out. Keys are `KEY_SIZE` bytes.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::bindings::arguments::{
    BlockArg, BlocksArg, CountArg, NumberArg, length, pool_eviction, time,
};
use crate::bindings::errors::{Given, Wrong, raise};
use crate::bindings::values;
use crate::bindings::values::{PyBatch, PyTaken};
use crate::pool::block_pool;
use crate::pool::priority_eviction::make_pool;
use crate::pool::transitions as layer;
use crate::types::commands::close;
use crate::types::effects::Effects;
use crate::types::errors::Error;
use crate::types::ids::BlockId;
use crate::types::keys::{KEY_SIZE, Key};

/// The blocks of one tier: owners, keys and the free queue. For tests of the pool layer.
#[pyclass(module = "kvcore._rust")]
pub(crate) struct BlockPool {
    pool: block_pool::BlockPool,
    effects: Effects,
}

impl BlockPool {
    /// Run a transition.
    fn change<T>(
        &mut self,
        py: Python<'_>,
        given: &Given<'_>,
        transition: impl FnOnce(&mut block_pool::BlockPool, &mut Effects) -> Result<T, Error>,
    ) -> PyResult<T> {
        let outcome = transition(&mut self.pool, &mut self.effects);
        outcome.map_err(|error| Wrong::from(error).raise(py, given))
    }

    /// Run a transition of some blocks.
    fn change_blocks(
        &mut self,
        blocks: BlocksArg<'_, '_>,
        transition: fn(&mut block_pool::BlockPool, &[i64], &mut Effects) -> Result<(), Error>,
    ) -> PyResult<()> {
        let (mut given, py) = (Given::default(), blocks.0.py());
        let ids = given.blocks(blocks)?;
        self.change(py, &given, |pool, effects| transition(pool, &ids, effects))
    }
}

#[pymethods]
impl BlockPool {
    /// An empty pool, whose blocks are first taken lowest first.
    #[new]
    #[pyo3(signature = (num_blocks, /, *, null_block = false, eviction = "lru"))]
    fn new(py: Python<'_>, num_blocks: u32, null_block: bool, eviction: &str) -> PyResult<Self> {
        let policy = pool_eviction(eviction.into_pyobject(py)?.as_any().as_borrowed())?;
        let pool = make_pool(num_blocks, null_block, policy);
        Ok(BlockPool { pool, effects: Effects::new(false) })
    }

    /// Give `count` blocks from the front one owner each; refused as a whole.
    #[pyo3(signature = (count, /))]
    fn take<'py>(&mut self, count: CountArg<'_, 'py>) -> PyResult<PyTaken<'py>> {
        let (mut given, py) = (Given::default(), count.0.py());
        let asked = given.count(count)?;
        let outcome = self.change(py, &given, |pool, effects| {
            Ok(layer::take(pool, read_number(asked)?, effects))
        })?;
        values::granted(py, outcome, &given)
    }

    /// Add an owner to each block that has one, or has a key. Raises UnknownBlock, UnusedBlock.
    #[pyo3(signature = (blocks, /))]
    fn touch(&mut self, blocks: BlocksArg<'_, '_>) -> PyResult<()> {
        self.change_blocks(blocks, layer::touch)
    }

    /// Take one owner from each block, in order. Raises UnknownBlock, DoubleFree.
    #[pyo3(signature = (blocks, /))]
    fn release(&mut self, blocks: BlocksArg<'_, '_>) -> PyResult<()> {
        self.change_blocks(blocks, layer::release)
    }

    /// Make a block with an owner findable.
    ///
    /// Raises InvalidKey, UnknownBlock, UnusedBlock, AlreadyPublished.
    #[pyo3(signature = (block, key, /))]
    fn publish<'py>(&mut self, block: BlockArg<'_, 'py>, key: &[u8]) -> PyResult<()> {
        let (mut given, py) = (Given::default(), block.0.py());
        let (id, key) = (given.block(block.0)?, read_key(py, key)?);
        self.change(py, &given, |pool, _| layer::publish(pool, id, key))
    }

    /// Forget a block's key, if it has one. Raises UnknownBlock.
    #[pyo3(signature = (block, /))]
    fn unpublish(&mut self, block: BlockArg<'_, '_>) -> PyResult<()> {
        let (mut given, py) = (Given::default(), block.0.py());
        let id = given.block(block.0)?;
        self.change(py, &given, |pool, effects| layer::unpublish(pool, id, effects))
    }

    /// Say when blocks were used, and how many tokens their chain has; None changes nothing.
    ///
    /// Raises WrongArgument, UnknownBlock, and InvalidConfig unless the policy is "priority".
    #[pyo3(signature = (blocks, time, length, /))]
    fn set_priority<'py>(
        &mut self,
        blocks: BlocksArg<'_, 'py>,
        time: NumberArg<'_, 'py>,
        length: NumberArg<'_, 'py>,
    ) -> PyResult<()> {
        let (time, length) = (self::time(time)?, self::length(length)?);
        let (mut given, py) = (Given::default(), blocks.0.py());
        let ids = given.blocks(blocks)?;
        self.change(py, &given, |pool, _| layer::set_priority(pool, &ids, time, length))
    }

    /// Forget every key.
    fn clear_index(&mut self) {
        layer::clear_index(&mut self.pool, &mut self.effects);
    }

    /// The block that answers for a key. Changes nothing. Raises InvalidKey.
    #[pyo3(signature = (key, /))]
    fn lookup(&self, py: Python<'_>, key: &[u8]) -> PyResult<Option<u32>> {
        Ok(layer::lookup(&self.pool, &read_key(py, key)?).map(|block| block.0))
    }

    /// Hold blocks that have an owner or a key. Raises UnknownBlock, UnusedBlock.
    #[pyo3(signature = (blocks, /))]
    fn pin(&mut self, blocks: BlocksArg<'_, '_>) -> PyResult<()> {
        self.change_blocks(blocks, layer::pin)
    }

    /// Undo `pin`. Raises UnknownBlock, NotPinned.
    #[pyo3(signature = (blocks, /))]
    fn unpin(&mut self, blocks: BlocksArg<'_, '_>) -> PyResult<()> {
        self.change_blocks(blocks, layer::unpin)
    }

    /// Hand out the commands since the last call, as a batch of number 0.
    fn commands<'py>(&mut self, py: Python<'py>) -> PyResult<PyBatch<'py>> {
        let taken = close(0, &self.effects.commands);
        self.effects.commands.clear();
        values::batch(py, &taken)
    }

    /// The owners of each block, their keys, the free queue from its front, the pins of each block.
    fn dump<'py>(&self, py: Python<'py>) -> Columns<'py> {
        let ids = || (0..self.pool.num_blocks()).map(BlockId);
        let key = |block| self.pool.key(block).map(|key| PyBytes::new(py, &key.0));
        (
            ids().map(|block| self.pool.ref_count(block)).collect(),
            ids().map(key).collect(),
            self.pool.queue.iter().map(|block| block.0).collect(),
            ids().map(|block| self.pool.num_pins(block)).collect(),
        )
    }
}

type Columns<'py> = (Vec<u32>, Vec<Option<Bound<'py, PyBytes>>>, Vec<u32>, Vec<u32>);

/// A key of the right size. Raises InvalidKey.
pub(crate) fn read_key(py: Python<'_>, key: &[u8]) -> PyResult<Key> {
    let (size, expected) = (key.len() as i64, KEY_SIZE as i64);
    key.try_into().map(Key).map_err(|_| raise(py, Error::InvalidKey { size, expected }))
}

/// A count, or the stand-in of one: more than any tier has. Fails with
/// InvalidCount.
pub(super) fn read_number(asked: i64) -> Result<u64, Error> {
    u64::try_from(asked).map_err(|_| Error::InvalidCount { name: "count", value: asked, least: 0 })
}
