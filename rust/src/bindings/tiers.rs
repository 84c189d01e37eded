// SPDX-License-Identifier: Apache-2.0
//! `kvcore._rust.Tiers`: the transitions of `kvcore.legacy.blocks.tiers` as methods of one value.
//!
//! They have the values and errors of those functions. `kvcore/legacy/blocks/blocks.py` holds one
//! and has checked its options.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::bindings::arguments::{
    BlockArg, BlocksArg, CountArg, HashesArg, NumberArg, TierArg, items, length, pool_eviction,
    tier, time,
};
use crate::bindings::errors::{CallError, Given, raise, raise_in, wrong_argument};
use crate::bindings::tiers_dump::{Dump, dump, numbers};
use crate::bindings::values;
use crate::bindings::values::{PyBatch, PyCopied, PyNumbers, PyTaken};
use crate::legacy::blocks::tiers;
use crate::legacy::blocks::tiers::{Misuse, make_tiers};
use crate::pool::transitions as layer;
use crate::types::commands::Tier;
use crate::types::errors::Error;
use crate::types::ids::BlockId;
use crate::types::keys::{KEY_SIZE, Key};

/// The blocks of one or two tiers and an open batch. `kvcore.legacy.blocks.blocks` is the way to
/// use it.
#[pyclass(module = "kvcore._rust")]
pub(crate) struct Tiers(pub(super) tiers::Tiers);

impl Tiers {
    /// Run a transition of some blocks.
    fn change_blocks(
        &mut self,
        blocks: BlocksArg<'_, '_>,
        tier: TierArg<'_, '_>,
        transition: impl FnOnce(&mut tiers::Tiers, &[i64], Tier) -> Result<(), Misuse>,
    ) -> PyResult<()> {
        let (mut given, py) = (Given::default(), blocks.0.py());
        let tier = self.tier(tier)?;
        let ids = given.blocks(blocks)?;
        or_raise(py, &given, transition(&mut self.0, &ids, tier))
    }

    /// Run a query about one block.
    pub(super) fn query_of<'a, T>(
        &'a self,
        block: BlockArg<'_, '_>,
        tier: TierArg<'_, '_>,
        read: impl FnOnce(&'a tiers::Tiers, i64, Tier) -> Result<T, Misuse>,
    ) -> PyResult<T> {
        let (mut given, py) = (Given::default(), block.0.py());
        let tier = self.tier(tier)?;
        let id = given.block(block.0)?;
        or_raise(py, &given, read(&self.0, id, tier))
    }

    /// Run a transition of a pair of blocks.
    fn change_pair<'py>(
        &mut self,
        first: BlockArg<'_, 'py>,
        second: BlockArg<'_, 'py>,
        transition: fn(&mut tiers::Tiers, i64, i64) -> Result<(), Misuse>,
    ) -> PyResult<()> {
        let (mut given, py) = (Given::default(), first.0.py());
        let (first, second) = (given.block(first.0)?, given.block(second.0)?);
        or_raise(py, &given, transition(&mut self.0, first, second))
    }

    /// Read the name of an existing tier. Raises WrongArgument, NoHostTier.
    pub(super) fn tier(&self, name: TierArg<'_, '_>) -> PyResult<Tier> {
        let (tier, py) = (tier(name)?, name.0.py());
        or_raise(py, &Given::default(), self.0.pool(tier))?;
        Ok(tier)
    }
}

#[pymethods]
impl Tiers {
    /// Empty tiers, which have one policy and one order in which blocks are first taken. Raises
    /// PoolTooLarge.
    #[new]
    #[pyo3(signature = (num_blocks, num_host_blocks, /, *, null_block, eviction, order))]
    fn new(
        py: Python<'_>,
        num_blocks: u32,
        num_host_blocks: u32,
        null_block: bool,
        eviction: &str,
        order: &str,
    ) -> PyResult<Self> {
        let policy = pool_eviction(eviction.into_pyobject(py)?.as_any().as_borrowed())?;
        let descending = order == "descending";
        let tiers = make_tiers(num_blocks, num_host_blocks, null_block, policy, descending);
        Ok(Tiers(tiers.map_err(|error| raise(py, error))?))
    }

    /// Give `count` free blocks one owner each; refused as a whole. Raises InvalidCount.
    #[pyo3(signature = (count, tier, /))]
    fn take<'py>(
        &mut self,
        count: CountArg<'_, 'py>,
        tier: TierArg<'_, 'py>,
    ) -> PyResult<PyTaken<'py>> {
        let (mut given, py) = (Given::default(), count.0.py());
        let tier = self.tier(tier)?;
        let count = read_number(py, &mut given, count)?;
        let outcome = tiers::take(&mut self.0, count, tier);
        values::granted(py, or_raise(py, &given, outcome)?, &given)
    }

    /// Touch blocks and take `count` others; refused as a whole.
    ///
    /// Raises WrongArgument, InvalidCount, InvalidKey, WrongKey, UnknownBlock, UnusedBlock.
    #[pyo3(signature = (blocks, count, keys, tier, /))]
    fn admit<'py>(
        &mut self,
        blocks: BlocksArg<'_, 'py>,
        count: CountArg<'_, 'py>,
        keys: Option<HashesArg<'_, 'py>>,
        tier: TierArg<'_, 'py>,
    ) -> PyResult<PyTaken<'py>> {
        let (mut given, py) = (Given::default(), count.0.py());
        let tier = self.tier(tier)?;
        let count = read_number(py, &mut given, count)?;
        let ids = given.blocks(blocks)?;
        let keys = keys.map(|keys| key_each(py, keys, ids.len())).transpose()?;
        let outcome = tiers::admit(&mut self.0, &ids, count, keys.as_deref(), tier);
        values::granted(py, or_raise(py, &given, outcome)?, &given)
    }

    /// Add an owner to each block that has one, or has a key. Raises UnknownBlock, UnusedBlock.
    #[pyo3(signature = (blocks, tier, /))]
    fn touch(&mut self, blocks: BlocksArg<'_, '_>, tier: TierArg<'_, '_>) -> PyResult<()> {
        self.change_blocks(blocks, tier, tiers::touch)
    }

    /// Take one owner from each block, in order. Raises UnknownBlock, DoubleFree.
    #[pyo3(signature = (blocks, tier, /))]
    fn release(&mut self, blocks: BlocksArg<'_, '_>, tier: TierArg<'_, '_>) -> PyResult<()> {
        self.change_blocks(blocks, tier, tiers::release)
    }

    /// Hold blocks that have an owner or a key. For tests of the pool layer.
    ///
    /// Raises UnknownBlock, UnusedBlock.
    #[pyo3(signature = (blocks, tier, /))]
    fn pin(&mut self, blocks: BlocksArg<'_, '_>, tier: TierArg<'_, '_>) -> PyResult<()> {
        self.change_blocks(blocks, tier, |tiers, ids, tier| {
            tiers.run(tier, |pool, effects| layer::pin(pool, ids, effects))
        })
    }

    /// Undo `pin`. Raises UnknownBlock, NotPinned.
    #[pyo3(signature = (blocks, tier, /))]
    fn unpin(&mut self, blocks: BlocksArg<'_, '_>, tier: TierArg<'_, '_>) -> PyResult<()> {
        self.change_blocks(blocks, tier, |tiers, ids, tier| {
            tiers.run(tier, |pool, effects| layer::unpin(pool, ids, effects))
        })
    }

    /// The pins of each device block. For tests of the pool layer.
    fn pins(&self) -> Vec<u32> {
        let pool = &self.0.device;
        (0..pool.num_blocks()).map(|block| pool.num_pins(BlockId(block))).collect()
    }

    /// Make a block with an owner findable.
    ///
    /// Raises InvalidKey, UnknownBlock, UnusedBlock, AlreadyPublished.
    #[pyo3(signature = (block, key, tier, /))]
    fn publish<'py>(
        &mut self,
        block: BlockArg<'_, 'py>,
        key: &[u8],
        tier: TierArg<'_, 'py>,
    ) -> PyResult<()> {
        let (mut given, py) = (Given::default(), block.0.py());
        let tier = self.tier(tier)?;
        let (key, id) = (read_key(py, key)?, given.block(block.0)?);
        or_raise(py, &given, tiers::publish(&mut self.0, id, key, tier))
    }

    /// Make blocks with owners findable, each by its key, in order; all of them or none.
    ///
    /// Raises WrongArgument, InvalidKey, UnknownBlock, UnusedBlock, AlreadyPublished.
    #[pyo3(signature = (blocks, keys, tier, /))]
    fn publish_all<'py>(
        &mut self,
        blocks: BlocksArg<'_, 'py>,
        keys: HashesArg<'_, 'py>,
        tier: TierArg<'_, 'py>,
    ) -> PyResult<()> {
        let (mut given, py) = (Given::default(), blocks.0.py());
        let tier = self.tier(tier)?;
        let ids = given.blocks(blocks)?;
        let keys = key_each(py, keys, ids.len())?;
        or_raise(py, &given, tiers::publish_all(&mut self.0, &ids, &keys, tier))
    }

    /// Forget a block's key, if it has one. Raises UnknownBlock.
    #[pyo3(signature = (block, tier, /))]
    fn unpublish<'py>(&mut self, block: BlockArg<'_, 'py>, tier: TierArg<'_, 'py>) -> PyResult<()> {
        let (mut given, py) = (Given::default(), block.0.py());
        let tier = self.tier(tier)?;
        let id = given.block(block.0)?;
        or_raise(py, &given, tiers::unpublish(&mut self.0, id, tier))
    }

    /// Say when blocks were used, and how many tokens their chain has; None changes nothing.
    ///
    /// Raises WrongArgument, UnknownBlock, and InvalidConfig unless eviction is "priority".
    #[pyo3(signature = (blocks, time, length, tier, /))]
    fn set_priority<'py>(
        &mut self,
        blocks: BlocksArg<'_, 'py>,
        time: NumberArg<'_, 'py>,
        length: NumberArg<'_, 'py>,
        tier: TierArg<'_, 'py>,
    ) -> PyResult<()> {
        self.tier(tier)?;
        let (time, length) = (self::time(time)?, self::length(length)?);
        self.change_blocks(blocks, tier, |tiers, ids, tier| {
            tiers::set_priority(tiers, ids, time, length, tier)
        })
    }

    /// Forget every key.
    #[pyo3(signature = (tier, /))]
    fn clear_index(&mut self, tier: TierArg<'_, '_>) -> PyResult<()> {
        let (py, tier) = (tier.0.py(), self.tier(tier)?);
        or_raise(py, &Given::default(), tiers::clear_index(&mut self.0, tier))
    }

    /// Copy a device block for one of its owners, which moves to the copy that is returned.
    ///
    /// Raises UnknownBlock, NoOwner.
    #[pyo3(signature = (block, /))]
    fn copy<'py>(&mut self, block: BlockArg<'_, 'py>) -> PyResult<PyCopied<'py>> {
        let (mut given, py) = (Given::default(), block.0.py());
        let id = given.block(block.0)?;
        values::copied(py, or_raise(py, &given, tiers::copy(&mut self.0, id))?)
    }

    /// Copy a device block to a host block. Raises NoHostTier, UnknownBlock, NoOwner.
    #[pyo3(signature = (block, host_block, /))]
    fn copy_out<'py>(
        &mut self,
        block: BlockArg<'_, 'py>,
        host_block: BlockArg<'_, 'py>,
    ) -> PyResult<()> {
        self.change_pair(block, host_block, tiers::copy_out)
    }

    /// Copy a host block to a device block. Raises NoHostTier, UnknownBlock, NoOwner.
    #[pyo3(signature = (host_block, block, /))]
    fn copy_in<'py>(
        &mut self,
        host_block: BlockArg<'_, 'py>,
        block: BlockArg<'_, 'py>,
    ) -> PyResult<()> {
        self.change_pair(host_block, block, tiers::copy_in)
    }

    /// Return the block that a look-up of a key finds. Raises InvalidKey.
    #[pyo3(signature = (key, tier, /))]
    fn lookup(&self, key: &[u8], tier: TierArg<'_, '_>) -> PyResult<Option<u32>> {
        let (py, tier) = (tier.0.py(), self.tier(tier)?);
        let found = tiers::lookup(&self.0, &read_key(py, key)?, tier);
        Ok(or_raise(py, &Given::default(), found)?.map(|block| block.0))
    }

    /// Return the blocks that hold the keys' contents, up to the first key without one. Raises
    /// InvalidKey.
    #[pyo3(signature = (keys, tier, /))]
    fn lookup_prefix<'py>(
        &self,
        keys: HashesArg<'_, 'py>,
        tier: TierArg<'_, 'py>,
    ) -> PyResult<PyNumbers<'py>> {
        let (py, tier) = (tier.0.py(), self.tier(tier)?);
        let keys = read_keys(&items(keys.0)?)?;
        let found = tiers::lookup_prefix(&self.0, &keys, tier);
        values::numbers(py, numbers(or_raise(py, &Given::default(), found)?))
    }

    /// Blocks in the free queue.
    #[pyo3(signature = (tier, /))]
    fn num_free(&self, tier: TierArg<'_, '_>) -> PyResult<u32> {
        let (py, tier) = (tier.0.py(), self.tier(tier)?);
        or_raise(py, &Given::default(), tiers::num_free(&self.0, tier))
    }

    /// Owners of a block. Raises UnknownBlock.
    #[pyo3(signature = (block, tier, /))]
    fn ref_count<'py>(&self, block: BlockArg<'_, 'py>, tier: TierArg<'_, 'py>) -> PyResult<u32> {
        self.query_of(block, tier, tiers::ref_count)
    }

    /// Owners of each block. Raises UnknownBlock.
    #[pyo3(signature = (blocks, tier, /))]
    fn ref_counts<'py>(
        &self,
        blocks: BlocksArg<'_, 'py>,
        tier: TierArg<'_, 'py>,
    ) -> PyResult<PyNumbers<'py>> {
        let (mut given, py) = (Given::default(), blocks.0.py());
        let tier = self.tier(tier)?;
        let ids = given.blocks(blocks)?;
        values::numbers(py, or_raise(py, &given, tiers::ref_counts(&self.0, &ids, tier))?)
    }

    /// The key of a block. Raises UnknownBlock.
    #[pyo3(signature = (block, tier, /))]
    fn key_of<'py>(
        &self,
        block: BlockArg<'_, 'py>,
        tier: TierArg<'_, 'py>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let key = self.query_of(block, tier, tiers::key_of)?;
        Ok(key.map(|key| PyBytes::new(block.0.py(), &key.0)))
    }

    /// The free queue, front first.
    #[pyo3(signature = (tier, /))]
    fn free_blocks<'py>(&self, tier: TierArg<'_, 'py>) -> PyResult<PyNumbers<'py>> {
        let (py, tier) = (tier.0.py(), self.tier(tier)?);
        let blocks = or_raise(py, &Given::default(), tiers::free_blocks(&self.0, tier))?;
        values::numbers(py, numbers(blocks))
    }

    /// Close and number the open batch: the commands since the last one.
    fn take_batch<'py>(&mut self, py: Python<'py>) -> PyResult<PyBatch<'py>> {
        values::batch(py, &tiers::take_batch(&mut self.0))
    }

    /// The columns of the device's and the host's blocks, and the open batch.
    fn dump<'py>(&self, py: Python<'py>) -> PyResult<Dump<'py>> {
        dump(py, &self.0)
    }
}

/// Return the result of a call, or raise its error.
fn or_raise<T>(py: Python<'_>, given: &Given<'_>, outcome: Result<T, Misuse>) -> PyResult<T> {
    outcome.map_err(|misuse| raise_in(py, misuse, given))
}

/// Read a count of blocks; one number stands for all that exceed every tier. Raises InvalidCount.
fn read_number<'py>(
    py: Python<'py>,
    given: &mut Given<'py>,
    count: CountArg<'_, 'py>,
) -> PyResult<u64> {
    let value = given.count(count)?;
    let wrong = |_| CallError::from(Error::InvalidCount { name: "count", value, least: 0 });
    u64::try_from(value).map_err(|error| wrong(error).raise(py, given))
}

/// A key of the right size. Raises InvalidKey.
pub(crate) fn read_key(py: Python<'_>, key: &[u8]) -> PyResult<Key> {
    let (size, expected) = (key.len() as i64, KEY_SIZE as i64);
    key.try_into().map(Key).map_err(|_| raise(py, Error::InvalidKey { size, expected }))
}

/// One key per block. Raises WrongArgument, InvalidKey.
fn key_each(py: Python<'_>, keys: HashesArg<'_, '_>, num_blocks: usize) -> PyResult<Vec<Key>> {
    let listed = items(keys.0)?;
    if listed.len() != num_blocks {
        let expected = format!("{num_blocks} keys, one per block");
        let count = listed.len().into_pyobject(py)?;
        return Err(wrong_argument("keys", &expected, count.as_any().as_borrowed()));
    }
    read_keys(&listed)
}

/// Keys of the right size. Raises InvalidKey.
fn read_keys(keys: &Bound<'_, PyTuple>) -> PyResult<Vec<Key>> {
    keys.iter_borrowed().map(|key| read_key(keys.py(), key.extract()?)).collect()
}
