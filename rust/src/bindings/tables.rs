// SPDX-License-Identifier: Apache-2.0
//! The methods of `kvcore._rust.Tiers` for tables of blocks.
//!
//! They have the values and errors of the functions of `kvcore.legacy.blocks.by_table`.

use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::bindings::arguments::{BlockArg, BlocksArg, CountArg, items};
use crate::bindings::errors::{Given, raise_in};
use crate::bindings::tiers::Tiers;
use crate::bindings::values;
use crate::bindings::values::{PyCopied, PyCopies, PyGrown};
use crate::legacy::blocks::tiers::Misuse;
use crate::legacy::blocks::{by_table, tiers};
use crate::types::values::Admitted;

type Moved = Result<Admitted<by_table::Moves>, Misuse>;

impl Tiers {
    /// Run a transition that takes blocks for others.
    fn move_owners<'py>(
        &mut self,
        blocks: BlocksArg<'_, 'py>,
        transition: fn(&mut tiers::Tiers, &[i64]) -> Moved,
    ) -> PyResult<PyCopies<'py>> {
        let (mut given, py) = (Given::default(), blocks.0.py());
        let ids = given.blocks(blocks)?;
        let outcome =
            transition(&mut self.0, &ids).map_err(|misuse| raise_in(py, misuse, &given))?;
        values::copies(py, outcome)
    }
}

#[pymethods]
impl Tiers {
    /// Let the owner of device blocks append behind their content, in `num_blocks` blocks.
    ///
    /// Returns None if the last block can be written as it is; otherwise a new block to put
    /// behind it, if there were fewer, or a copy to put in its place.
    ///
    /// Raises InvalidCount, UnknownBlock, NoOwner.
    #[pyo3(signature = (blocks, num_blocks, /))]
    fn append<'py>(
        &mut self,
        blocks: BlocksArg<'_, 'py>,
        num_blocks: CountArg<'_, 'py>,
    ) -> PyResult<PyGrown<'py>> {
        let (mut given, py) = (Given::default(), blocks.0.py());
        let num_blocks = given.count(num_blocks)?;
        let (num_held, last) = end_of(blocks)?;
        let last = last.map(|block| given.block(block.as_borrowed())).transpose()?;
        let outcome = by_table::append(&mut self.0, last, num_held as i64, num_blocks)
            .map_err(|misuse| raise_in(py, misuse, &given))?;
        values::grown(py, outcome)
    }

    /// Let one of a device block's owners write; returns the block to write to: it, or a copy.
    ///
    /// Raises UnknownBlock, NoOwner.
    #[pyo3(signature = (block, /))]
    fn own<'py>(&mut self, block: BlockArg<'_, 'py>) -> PyResult<PyCopied<'py>> {
        let (mut given, py) = (Given::default(), block.0.py());
        let id = given.block(block.0)?;
        let outcome =
            by_table::own(&mut self.0, id).map_err(|misuse| raise_in(py, misuse, &given))?;
        values::copied(py, outcome)
    }

    /// Move one owner of each device block to the host; gives each with its copy, or a refusal.
    ///
    /// Raises NoHostTier, UnknownBlock, DoubleFree.
    #[pyo3(signature = (blocks, /))]
    fn move_out<'py>(&mut self, blocks: BlocksArg<'_, 'py>) -> PyResult<PyCopies<'py>> {
        self.move_owners(blocks, by_table::move_out)
    }

    /// Move one owner of each host block to the device; gives each with its copy, or a refusal.
    ///
    /// Raises NoHostTier, UnknownBlock, DoubleFree.
    #[pyo3(signature = (host_blocks, /))]
    fn move_in<'py>(&mut self, host_blocks: BlocksArg<'_, 'py>) -> PyResult<PyCopies<'py>> {
        self.move_owners(host_blocks, by_table::move_in)
    }
}

/// How many blocks there are, and the last one.
fn end_of<'py>(blocks: BlocksArg<'_, 'py>) -> PyResult<(usize, Option<Bound<'py, PyAny>>)> {
    if let Ok(list) = blocks.0.cast::<PyList>() {
        let len = list.len();
        return Ok((len, len.checked_sub(1).map(|last| list.get_item(last)).transpose()?));
    }
    let items = items(blocks.0)?;
    let len = items.len();
    Ok((len, len.checked_sub(1).map(|last| items.get_item(last)).transpose()?))
}
