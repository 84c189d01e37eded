// SPDX-License-Identifier: Apache-2.0
//! The methods of `kvcore._rust.Tiers` that go by contents, or ask of several blocks at once.
//!
//! Rules: as the functions of `kvcore.legacy.blocks.by_key`, with the same values and errors.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::bindings::arguments::{BlockArg, BlocksArg, ContentsArg, HashesArg, TierArg, items};
use crate::bindings::errors::{Given, raise_in, wrong_argument};
use crate::bindings::pool_layer::read_key;
use crate::bindings::tiers::{Tiers, read_keys};
use crate::bindings::values;
use crate::bindings::values::{PyNumbers, PyOwners, PyPlaced};
use crate::legacy::blocks::by_key;
use crate::types::config::NO_LIMIT;
use crate::types::keys::Key;

#[pymethods]
impl Tiers {
    /// Give the block of each key an owner more, found or new; for None a new one without key.
    ///
    /// Gives the blocks, those of them that are new, those that were found without an owner. Raises
    /// InvalidKey, WrongArgument.
    #[pyo3(signature = (keys, lengths, tier, /))]
    fn find_or_take<'py>(
        &mut self,
        keys: ContentsArg<'_, 'py>,
        lengths: BlocksArg<'_, 'py>,
        tier: TierArg<'_, 'py>,
    ) -> PyResult<PyPlaced<'py>> {
        let (py, tier) = (tier.0.py(), self.tier(tier)?);
        let keys = read_contents(&items(keys.0)?)?;
        let lengths = read_lengths(lengths, keys.len())?;
        let outcome = by_key::find_or_take(&mut self.0, &keys, &lengths, tier)
            .map_err(|misuse| raise_in(py, misuse, &Given::default()))?;
        values::placed(py, outcome)
    }

    /// Copy device blocks to host blocks, or back, pair by pair, all or none.
    ///
    /// Raises WrongArgument, NoHostTier, UnknownBlock, NoOwner.
    #[pyo3(signature = (blocks, host_blocks, to, /))]
    fn copy_pairs<'py>(
        &mut self,
        blocks: BlocksArg<'_, 'py>,
        host_blocks: BlocksArg<'_, 'py>,
        to: TierArg<'_, 'py>,
    ) -> PyResult<()> {
        let (mut given, py) = (Given::default(), blocks.0.py());
        let to = self.tier(to)?;
        let (ids, host_ids) = (given.blocks(blocks)?, given.blocks(host_blocks)?);
        if ids.len() != host_ids.len() {
            let expected = format!("a host block for each of {} blocks", ids.len());
            let count = host_ids.len().into_pyobject(py)?;
            return Err(wrong_argument("host_blocks", &expected, count.as_any().as_borrowed()));
        }
        by_key::copy_pairs(&mut self.0, &ids, &host_ids, to)
            .map_err(|misuse| raise_in(py, misuse, &given))
    }

    /// How many own the block that answers for each key; None where none answers. Raises
    /// InvalidKey.
    #[pyo3(signature = (keys, tier, /))]
    fn owners_of<'py>(
        &self,
        keys: HashesArg<'_, 'py>,
        tier: TierArg<'_, 'py>,
    ) -> PyResult<PyOwners<'py>> {
        let (py, tier) = (tier.0.py(), self.tier(tier)?);
        let keys = read_keys(&items(keys.0)?)?;
        let owners = by_key::owners_of(&self.0, &keys, tier)
            .map_err(|misuse| raise_in(py, misuse, &Given::default()))?;
        Ok(PyOwners(PyTuple::new(py, owners)?.into_any()))
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
        let counts = by_key::ref_counts(&self.0, &ids, tier)
            .map_err(|misuse| raise_in(py, misuse, &given))?;
        values::numbers(py, counts)
    }

    /// When a block was last used, and how many tokens its chain has. Raises UnknownBlock.
    #[pyo3(signature = (block, tier, /))]
    fn rank_of<'py>(
        &self,
        block: BlockArg<'_, 'py>,
        tier: TierArg<'_, 'py>,
    ) -> PyResult<(f64, u32)> {
        let rank = self.ask_of(block, tier, by_key::rank_of)?;
        Ok((rank.time, rank.length))
    }
}

/// Keys of the right size, or None for a block without key. Raises InvalidKey.
fn read_contents(keys: &Bound<'_, PyTuple>) -> PyResult<Vec<Option<Key>>> {
    let read = |key: Borrowed<'_, '_, PyAny>| match key.extract::<Option<&[u8]>>()? {
        Some(bytes) => read_key(keys.py(), bytes).map(Some),
        None => Ok(None),
    };
    keys.iter_borrowed().map(read).collect()
}

/// Lengths of chains, one for each of so many keys. Raises WrongArgument.
fn read_lengths(lengths: BlocksArg<'_, '_>, num_keys: usize) -> PyResult<Vec<u32>> {
    let listed = items(lengths.0)?;
    if listed.len() != num_keys {
        let expected = format!("a length for each of {num_keys} keys");
        let count = listed.len().into_pyobject(listed.py())?;
        return Err(wrong_argument("lengths", &expected, count.as_any().as_borrowed()));
    }
    let read = |length: Borrowed<'_, '_, PyAny>| match length.extract::<u32>() {
        Ok(number) if number <= NO_LIMIT => Ok(number),
        _ => {
            let expected = format!("integers from 0 to {NO_LIMIT}");
            Err(wrong_argument("lengths", &expected, length))
        }
    };
    listed.iter_borrowed().map(read).collect()
}
