// SPDX-License-Identifier: Apache-2.0
//! The queries of `kvcore._rust.Manager`, and the methods that write and read the whole state.
//!
//! They are those of `kvcore.backend.Backend`, but `can_allocate`, with the same arguments, results
//! and errors.

pub(crate) mod lost_keys;
mod removed_keys;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::bindings::arguments::{BlockArg, IdArg};
use crate::bindings::errors::{Given, Lend, Lent, raise};
use crate::bindings::manager::Manager;
use crate::bindings::queries::lost_keys::LostKeys;
use crate::bindings::queries::removed_keys::RemovedKeys;
use crate::bindings::tiers::read_key;
use crate::bindings::values;
use crate::bindings::values::{PyBlocks, PyHit, PyKeys, PyNumbers, PyStatus};
use crate::codec::decode::decode;
use crate::codec::encode::encode;
use crate::explain::lost_keys::FINDABLE;
use crate::pool::quarantine::Quarantine;
use crate::record::calls::GET_COMPUTED_BLOCKS;
use crate::state::state::{RequestState, State};
use crate::transitions::epochs::stale_requests;
use crate::transitions::queries::{
    find_request, get_block_key, get_block_keys, get_blocks, get_cached_block, get_computed_blocks,
    get_num_common_prefix_blocks, get_own_keys, has_key, num_owners,
};
use crate::types::commands::Command;
use crate::types::errors::Error;
use crate::types::groups::Group;
use crate::types::keys::{Key, fold_key};

impl Lent for PyRef<'_, Manager> {}

impl<'py> Given<'py> {
    /// The arguments of a call that changes this manager.
    pub(crate) fn of(manager: &Bound<'py, Manager>) -> Self {
        let changed = Some((manager.as_any().clone(), lend as Lend));
        Given { changed, ..Given::default() }
    }
}

fn lend<'py>(manager: &Bound<'py, PyAny>) -> PyResult<Box<dyn Lent + 'py>> {
    Ok(Box::new(Manager::shown(manager.cast()?)?))
}

/// Of each group the marks of a request's keys up to a number of tokens. of_lost: the mark of a
/// folded key that finds no block. Fails with UnknownRequest.
fn marks_of(
    state: &State,
    name: &str,
    end: u32,
    of_lost: impl Fn(u64) -> u32,
) -> Result<Vec<Vec<u8>>, Error> {
    let mark = |key: Key| match get_cached_block(state, &key) {
        Some(_) => FINDABLE,
        None => of_lost(fold_key(&key)),
    };
    let request = find_request(state, name)?;
    let num_hashes = end / state.config.hash_block_size();
    let of_group = |(group_id, group): (u32, &Group)| {
        let is_fine = state.has_tails || group.is_state();
        let scale = if is_fine { 1 } else { state.scales[group_id as usize] };
        let num_keys = request.num_hashed(scale).min(num_hashes / scale);
        let keys = (0..num_keys).map(|at| request.key(scale, group_id, at));
        keys.flat_map(|key| mark(key).to_ne_bytes()).collect()
    };
    Ok((0..).zip(&state.config.groups).map(of_group).collect())
}

/// A number of commands, blocks, and blocks with folded keys.
type Changes = (usize, Vec<u32>, Vec<(u32, u64)>);

#[pymethods]
impl Manager {
    /// Return the longest cached prefix that leaves a token to compute. Changes nothing.
    #[pyo3(signature = (request_id))]
    fn get_computed_blocks<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
    ) -> PyResult<PyHit<'py>> {
        // A look-up that an argument of another call makes is not recorded.
        let hit = if Self::shown(slf)?.tape.is_some() && slf.try_borrow_mut().is_ok() {
            let look_up = |state: &mut State, name: &str| get_computed_blocks(state, name);
            Self::change_one(slf, GET_COMPUTED_BLOCKS, request_id, look_up)?
        } else {
            Self::query_of(slf, request_id, get_computed_blocks)?
        };
        values::hit(slf.py(), &hit)
    }

    /// The device blocks of a request. Changes nothing.
    #[pyo3(signature = (request_id))]
    fn get_blocks<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
    ) -> PyResult<PyBlocks<'py>> {
        let held = Self::query_of(slf, request_id, get_blocks)?;
        values::blocks(slf.py(), &held.blocks)
    }

    /// Leading blocks per group that all requests with device blocks hold. Changes nothing.
    #[pyo3(signature = (request_id))]
    fn get_num_common_prefix_blocks<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
    ) -> PyResult<Vec<u32>> {
        Self::query_of(slf, request_id, get_num_common_prefix_blocks)
    }

    /// Tokens of a request. Changes nothing.
    #[pyo3(signature = (request_id))]
    fn num_tokens(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<u32> {
        Self::query_one(slf, request_id, RequestState::num_tokens)
    }

    /// The keys of a request's full blocks, one tuple per group. Changes nothing.
    #[pyo3(signature = (request_id))]
    fn get_block_keys<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
    ) -> PyResult<PyKeys<'py>> {
        let keys = Self::query_of(slf, request_id, get_block_keys)?;
        values::keys(slf.py(), &keys)
    }

    /// Of each group the marks of a request's keys that a hit of up to `end` tokens may need, of 4
    /// bytes each: 1 if the key finds a block, else that of the key in `removed`. The keys of a
    /// group end at each whole block, or at each hash if hits may end inside its blocks. Changes
    /// nothing.
    #[pyo3(signature = (request_id, removed, end))]
    fn key_marks<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        removed: &Bound<'py, PyAny>,
        end: u32,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let marks = if let Ok(lost) = removed.cast::<LostKeys>() {
            let lost = lost.try_borrow()?;
            Self::query_of(slf, request_id, |state, name| {
                marks_of(state, name, end, |key| lost.0.mark(key))
            })
        } else {
            let columns = removed.getattr("columns")?.extract()?;
            let removed = RemovedKeys::of(slf.py(), &columns)?;
            Self::query_of(slf, request_id, |state, name| {
                marks_of(state, name, end, |key| removed.mark(key))
            })
        };
        Ok(marks?.iter().map(|marks| PyBytes::new(slf.py(), marks)).collect())
    }

    /// The key of a device block and its tail keys, folded; none for the null block. Changes
    /// nothing.
    #[pyo3(signature = (block))]
    fn block_keys<'py>(slf: &Bound<'py, Self>, block: BlockArg<'_, 'py>) -> PyResult<Vec<u64>> {
        let mut given = Given::default();
        let number = given.block(block.0)?;
        Self::query(slf, &given, |state| {
            let keys = get_own_keys(state, number)?;
            Ok(keys.into_iter().map(fold_key).collect())
        })
    }

    /// Whether a device block is findable; the null block counts as found. Changes nothing.
    #[pyo3(signature = (block))]
    fn has_key<'py>(slf: &Bound<'py, Self>, block: BlockArg<'_, 'py>) -> PyResult<bool> {
        let mut given = Given::default();
        let number = given.block(block.0)?;
        Self::query(slf, &given, |state| has_key(state, number))
    }

    /// The key of a device block, or else its longest tail key, or None. Changes nothing.
    #[pyo3(signature = (block))]
    fn get_block_key<'py>(
        slf: &Bound<'py, Self>,
        block: BlockArg<'_, 'py>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let mut given = Given::default();
        let number = given.block(block.0)?;
        let key = Self::query(slf, &given, |state| get_block_key(state, number))?;
        Ok(key.map(|key| PyBytes::new(slf.py(), &key.0)))
    }

    /// The device block that a key or tail key finds, or None. Changes nothing.
    #[pyo3(signature = (key))]
    fn get_cached_block(slf: &Bound<'_, Self>, key: &[u8]) -> PyResult<Option<u32>> {
        let key = read_key(slf.py(), key)?;
        let found = Self::query(slf, &Given::default(), |state| Ok(get_cached_block(state, &key)))?;
        Ok(found.map(|block| block.0))
    }

    /// Number of tables, pins and operations that hold a device block. Changes nothing.
    #[pyo3(signature = (block))]
    fn num_owners<'py>(slf: &Bound<'py, Self>, block: BlockArg<'_, 'py>) -> PyResult<u32> {
        let mut given = Given::default();
        let number = given.block(block.0)?;
        Self::query(slf, &given, |state| num_owners(state, number))
    }

    /// Number of scheduled positions of a request without tokens yet. Changes nothing.
    #[pyo3(signature = (request_id))]
    fn num_output_placeholders(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<u32> {
        Self::query_one(slf, request_id, RequestState::num_output_placeholders)
    }

    /// Number of draft tokens of a request. Changes nothing.
    #[pyo3(signature = (request_id))]
    fn num_draft_tokens(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<u32> {
        Self::query_one(slf, request_id, RequestState::num_drafts)
    }

    /// Tokens of a request that are computed or scheduled. Changes nothing.
    #[pyo3(signature = (request_id))]
    fn num_computed_tokens(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<u32> {
        Self::query_one(slf, request_id, |request| request.num_computed)
    }

    /// The row of a request. Changes nothing.
    #[pyo3(signature = (request_id))]
    fn get_row(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<u32> {
        Ok(Self::query_of(slf, request_id, State::request)?.0)
    }

    /// Return the requests that count tokens of older epochs, in row order. Changes nothing.
    fn stale_requests(slf: &Bound<'_, Self>) -> PyResult<Vec<String>> {
        let state = &Self::shown(slf)?.state;
        Ok(stale_requests(state).map(|row| state[row].name()).collect())
    }

    /// The tier of a request's blocks. Changes nothing.
    #[pyo3(signature = (request_id))]
    fn status<'py>(slf: &Bound<'py, Self>, request_id: IdArg<'_, 'py>) -> PyResult<PyStatus<'py>> {
        let status = Self::query_one(slf, request_id, RequestState::status)?;
        values::status(slf.py(), status)
    }

    /// The numbers of the batches in flight, oldest first.
    #[getter]
    fn in_flight<'py>(slf: &Bound<'py, Self>) -> PyResult<PyNumbers<'py>> {
        let numbers: Vec<u64> = Self::shown(slf)?.state.in_flight().collect();
        values::numbers(slf.py(), numbers)
    }

    /// What the open batch has done from one of its commands on: how many commands it has; the
    /// device blocks that it gave back; those that lost a key, each with that key, folded. Changes
    /// nothing.
    #[pyo3(signature = (start))]
    fn open_changes(slf: &Bound<'_, Self>, start: usize) -> PyResult<Changes> {
        let commands = &Self::shown(slf)?.state.effects.commands;
        let (mut freed, mut removed) = (Vec::new(), Vec::new());
        for command in commands.since(start) {
            match command {
                Command::Free { block, .. } => freed.push(block.0),
                Command::Evict { block, key } => removed.push((block.0, fold_key(&key))),
                _ => {}
            }
        }
        Ok((commands.len(), freed, removed))
    }

    /// The number of the current weights.
    #[getter]
    fn epoch(slf: &Bound<'_, Self>) -> PyResult<u32> {
        Ok(Self::shown(slf)?.state.epoch)
    }

    /// Device blocks in the free queue.
    #[getter]
    fn num_free_blocks(slf: &Bound<'_, Self>) -> PyResult<u32> {
        Ok(Self::shown(slf)?.state.device.num_free())
    }

    /// Device blocks that lost their last owner while a batch in flight uses them, in this order.
    #[getter]
    fn quarantined_blocks<'py>(slf: &Bound<'py, Self>) -> PyResult<PyNumbers<'py>> {
        let quarantine = Self::shown(slf)?.state.device.quarantine.as_ref().map(Quarantine::blocks);
        let blocks = quarantine.unwrap_or_default();
        values::numbers(slf.py(), blocks.into_iter().map(|block| block.0).collect::<Vec<_>>())
    }

    /// Free device blocks whose content can be hit. O(pool).
    #[getter]
    fn num_cached_blocks(slf: &Bound<'_, Self>) -> PyResult<u32> {
        Ok(Self::shown(slf)?.state.device.num_cached())
    }

    /// Free device blocks that waiting requests will look up; 0 unless eviction is queue_aware.
    #[getter]
    fn num_due_blocks(slf: &Bound<'_, Self>) -> PyResult<u32> {
        Ok(Self::shown(slf)?.state.device.num_due())
    }

    /// Host blocks in the free queue; 0 without a host tier.
    #[getter]
    fn num_free_host_blocks(slf: &Bound<'_, Self>) -> PyResult<u32> {
        Ok(Self::shown(slf)?.state.host.as_ref().map_or(0, |host| host.num_free()))
    }

    /// The canonical bytes of the state. O(pool).
    fn encode<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyBytes>> {
        let manager = Self::shown(slf)?;
        let state = &manager.state;
        let bytes = slf.py().detach(|| encode(state));
        Ok(PyBytes::new(slf.py(), &bytes))
    }

    /// Put the state of canonical bytes in place. Raises DamagedState, PoolTooLarge.
    #[pyo3(signature = (data, /))]
    fn restore(slf: &Bound<'_, Self>, data: &[u8]) -> PyResult<()> {
        let py = slf.py();
        let state = py.detach(|| decode(data)).map_err(|error| raise(py, error))?;
        let mut manager = Self::lent(slf)?;
        let tape = manager.tape.take();
        *manager = Self::of(py, state)?;
        manager.tape = tape;
        manager.follow(|state, tape| tape.rotate(py, state, false));
        Ok(())
    }
}
