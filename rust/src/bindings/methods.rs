// SPDX-License-Identifier: Apache-2.0
//! The methods of `kvcore._rust.Manager`.
//!
//! Rules: those of `kvcore.backend.Backend`, with the same arguments, results and errors, in that
//! order. A wrong argument is told when the transition would, so both backends name the same thing
//! first.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::allocate::{Requests, allocate_slots, append, can_allocate, read_request_ids};
use crate::batch::take_batch;
use crate::bindings::arguments::{
    self, BlocksArg, ConfigArg, CountArg, FlagArg, Given, HitArg, IdArg, IdsArg, RequestArg,
    TokensArg, listed,
};
use crate::bindings::errors::{Wrong, raise};
use crate::bindings::manager::Manager;
use crate::bindings::tokens::read_tokens;
use crate::bindings::values::{
    self, PyAdmitted, PyAppended, PyBatch, PyBlocks, PyEvents, PyHit, PyMoved, PyStats, PyStatus,
    PyVerdict,
};
use crate::caching::{cache_blocks, evict_blocks, reset_prefix_cache};
use crate::decode::decode;
use crate::drain::{take_events, take_stats};
use crate::encode::encode;
use crate::fork::fork;
use crate::pins::{pin, unpin};
use crate::queries::{get_blocks, get_computed_blocks, get_num_common_prefix_blocks};
use crate::release::free;
use crate::requests::{add_request, add_tokens, check_new_id, remove_request};
use crate::state::{RequestState, State, make_state};
use crate::swap::{swap_in, swap_out};
use crate::truncate::truncate;

#[pymethods]
impl Manager {
    /// The empty state of a configuration. Raises InvalidConfig.
    #[new]
    #[pyo3(signature = (config, /))]
    fn new(py: Python<'_>, config: ConfigArg<'_, '_>) -> PyResult<Self> {
        let config = arguments::config(config)?;
        Self::of(py, make_state(config).map_err(|error| raise(py, error))?)
    }

    /// Make a request known; returns its row.
    #[pyo3(signature = (request, /))]
    fn add_request(slf: &Bound<'_, Self>, request: RequestArg<'_, '_>) -> PyResult<u32> {
        let mut given = Given::default();
        let id = request.0.getattr("request_id")?;
        let name = given.name(id.as_borrowed());
        let tokens = read_tokens(TokensArg(request.0.getattr("tokens")?.as_borrowed()));
        let row = Self::change(slf, &given, |state| {
            check_new_id(state, name)?;
            Ok::<_, Wrong>(add_request(state, name, &tokens?)?)
        })?;
        Ok(row.0)
    }

    /// Add tokens behind those that a request has.
    #[pyo3(signature = (request_id, tokens, /))]
    fn add_tokens(
        slf: &Bound<'_, Self>,
        request_id: IdArg<'_, '_>,
        tokens: TokensArg<'_, '_>,
    ) -> PyResult<()> {
        let mut given = Given::default();
        let name = given.name(request_id.0);
        let tokens = read_tokens(tokens);
        Self::change(slf, &given, |state| {
            state.request(name)?;
            Ok::<_, Wrong>(add_tokens(state, name, &tokens?)?)
        })
    }

    /// Forget a request that holds no blocks.
    #[pyo3(signature = (request_id, /))]
    fn remove_request(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<()> {
        Self::change_one(slf, request_id, remove_request)
    }

    /// The longest cached prefix that leaves a token to compute. Changes nothing.
    #[pyo3(signature = (request_id, /))]
    fn get_computed_blocks<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
    ) -> PyResult<PyHit<'py>> {
        let hit = Self::ask_of(slf, request_id, get_computed_blocks)?;
        values::hit(slf.py(), &hit)
    }

    /// Schedule the next tokens of a request; returns the blocks that its tables grew by.
    #[pyo3(signature = (
        request_id, num_new_tokens, hit, /, *, num_lookahead_tokens, num_external_computed_tokens,
        delay_cache_blocks, full_sequence_must_fit
    ))]
    #[allow(clippy::too_many_arguments)] // those of the transition
    fn allocate_slots<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        num_new_tokens: CountArg<'_, 'py>,
        hit: HitArg<'_, 'py>,
        num_lookahead_tokens: CountArg<'_, 'py>,
        num_external_computed_tokens: CountArg<'_, 'py>,
        delay_cache_blocks: FlagArg<'_, 'py>,
        full_sequence_must_fit: FlagArg<'_, 'py>,
    ) -> PyResult<PyAdmitted<'py>> {
        let mut given = Given::default();
        let name = given.name(request_id.0);
        let asked = given.asked(
            (num_new_tokens, num_lookahead_tokens, num_external_computed_tokens),
            hit,
            (delay_cache_blocks, full_sequence_must_fit),
        )?;
        let change = |state: &mut State| allocate_slots(state, name, &asked);
        let outcome = Self::change(slf, &given, change)?;
        values::admitted(slf.py(), &outcome, Self::grown_none(slf)?)
    }

    /// What `allocate_slots` would say to the same arguments. Changes nothing.
    #[pyo3(signature = (
        request_id, num_new_tokens, hit, /, *, num_lookahead_tokens, num_external_computed_tokens,
        delay_cache_blocks, full_sequence_must_fit
    ))]
    #[allow(clippy::too_many_arguments)] // those of the transition
    fn can_allocate<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        num_new_tokens: CountArg<'_, 'py>,
        hit: HitArg<'_, 'py>,
        num_lookahead_tokens: CountArg<'_, 'py>,
        num_external_computed_tokens: CountArg<'_, 'py>,
        delay_cache_blocks: FlagArg<'_, 'py>,
        full_sequence_must_fit: FlagArg<'_, 'py>,
    ) -> PyResult<PyVerdict<'py>> {
        let mut given = Given::default();
        let name = given.name(request_id.0);
        let asked = given.asked(
            (num_new_tokens, num_lookahead_tokens, num_external_computed_tokens),
            hit,
            (delay_cache_blocks, full_sequence_must_fit),
        )?;
        let question = |state: &State| can_allocate(state, name, &asked);
        values::verdict(slf.py(), Self::ask(slf, &given, question)?)
    }

    /// One token and one slot more for each request, in order. requests: ids, or a buffer of rows.
    #[pyo3(signature = (requests, tokens, /))]
    fn append<'py>(
        slf: &Bound<'py, Self>,
        requests: TokensArg<'_, 'py>,
        tokens: TokensArg<'_, 'py>,
    ) -> PyResult<PyAppended<'py>> {
        let mut given = Given::default();
        let tokens_read = read_tokens(tokens);
        let done = if let Some(ids) = listed(requests.0) {
            let names = given.names(&ids);
            Self::change(slf, &given, |state| {
                Ok::<_, Wrong>(append(state, Requests::Ids(&names), &tokens_read?)?)
            })?
        } else {
            let rows = read_tokens(requests)?;
            Self::change(slf, &given, |state| match tokens_read {
                Ok(tokens) => append(state, Requests::Rows(&rows), &tokens).map_err(Wrong::from),
                Err(wrong) => {
                    Err(read_request_ids(state, &rows).map_or_else(Wrong::from, |_| wrong.into()))
                }
            })?
        };
        values::appended(slf.py(), &done)
    }

    /// Publish a request's full blocks up to so many tokens, whose caching was delayed.
    #[pyo3(signature = (request_id, num_computed_tokens, /))]
    fn cache_blocks<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        num_computed_tokens: CountArg<'_, 'py>,
    ) -> PyResult<()> {
        let mut given = Given::default();
        let name = given.name(request_id.0);
        let count = given.count(num_computed_tokens)?;
        Self::change(slf, &given, |state| cache_blocks(state, name, count))
    }

    /// Give back a request's blocks, tail first; its tokens stay.
    #[pyo3(signature = (request_id, /))]
    fn free(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<()> {
        Self::change_one(slf, request_id, free)
    }

    /// Add a child that shares its parent's computed blocks; returns its row.
    #[pyo3(signature = (parent_id, child_id, /))]
    fn fork<'py>(
        slf: &Bound<'py, Self>,
        parent_id: IdArg<'_, 'py>,
        child_id: IdArg<'_, 'py>,
    ) -> PyResult<u32> {
        let mut given = Given::default();
        let (parent, child) = (given.name(parent_id.0), given.name(child_id.0));
        Ok(Self::change(slf, &given, |state| fork(state, parent, child))?.0)
    }

    /// Keep the first num_tokens of a request's tokens.
    #[pyo3(signature = (request_id, num_tokens, /))]
    fn truncate<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        num_tokens: CountArg<'_, 'py>,
    ) -> PyResult<()> {
        let mut given = Given::default();
        let name = given.name(request_id.0);
        let count = given.count(num_tokens)?;
        Self::change(slf, &given, |state| truncate(state, name, count))
    }

    /// Move the requests' blocks to the host tier, each distinct block once.
    #[pyo3(signature = (request_ids, /))]
    fn swap_out<'py>(
        slf: &Bound<'py, Self>,
        request_ids: IdsArg<'_, 'py>,
    ) -> PyResult<PyMoved<'py>> {
        Self::change_all(slf, request_ids, swap_out)
    }

    /// Move swapped requests back to the device.
    #[pyo3(signature = (request_ids, /))]
    fn swap_in<'py>(
        slf: &Bound<'py, Self>,
        request_ids: IdsArg<'_, 'py>,
    ) -> PyResult<PyMoved<'py>> {
        Self::change_all(slf, request_ids, swap_in)
    }

    /// Hold blocks so that their content stays.
    #[pyo3(signature = (block_ids, /))]
    fn pin<'py>(slf: &Bound<'py, Self>, block_ids: BlocksArg<'_, 'py>) -> PyResult<()> {
        Self::change_blocks(slf, block_ids, pin)
    }

    /// Undo `pin`.
    #[pyo3(signature = (block_ids, /))]
    fn unpin<'py>(slf: &Bound<'py, Self>, block_ids: BlocksArg<'_, 'py>) -> PyResult<()> {
        Self::change_blocks(slf, block_ids, unpin)
    }

    /// Forget the keys of blocks; their owners keep them.
    #[pyo3(signature = (block_ids, /))]
    fn evict_blocks<'py>(slf: &Bound<'py, Self>, block_ids: BlocksArg<'_, 'py>) -> PyResult<()> {
        Self::change_blocks(slf, block_ids, evict_blocks)
    }

    /// Forget every key; False, and nothing happens, while any block of any tier is used.
    fn reset_prefix_cache(&mut self) -> bool {
        reset_prefix_cache(&mut self.state)
    }

    /// Close and number the open batch.
    fn take_batch<'py>(slf: &Bound<'py, Self>) -> PyResult<PyBatch<'py>> {
        let taken = take_batch(&mut slf.try_borrow_mut()?.state);
        values::batch(slf.py(), &taken)
    }

    /// Hand out the events since the last call.
    fn take_events<'py>(slf: &Bound<'py, Self>) -> PyResult<PyEvents<'py>> {
        let taken = take_events(&mut slf.try_borrow_mut()?.state);
        values::events(slf.py(), &taken)
    }

    /// Hand out the look-up statistics since the last call.
    fn take_stats<'py>(slf: &Bound<'py, Self>) -> PyResult<PyStats<'py>> {
        let taken = take_stats(&mut slf.try_borrow_mut()?.state);
        values::stats(slf.py(), &taken)
    }

    /// The device blocks of a request. Changes nothing.
    #[pyo3(signature = (request_id, /))]
    fn get_blocks<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
    ) -> PyResult<PyBlocks<'py>> {
        let held = Self::ask_of(slf, request_id, get_blocks)?;
        values::blocks(slf.py(), &held.blocks)
    }

    /// Leading blocks that all requests with device blocks hold, a group. Changes nothing.
    #[pyo3(signature = (request_id, /))]
    fn get_num_common_prefix_blocks<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
    ) -> PyResult<Vec<u32>> {
        Self::ask_of(slf, request_id, get_num_common_prefix_blocks)
    }

    /// Tokens of a request. Changes nothing.
    #[pyo3(signature = (request_id, /))]
    fn num_tokens(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<u32> {
        Self::ask_one(slf, request_id, RequestState::num_tokens)
    }

    /// Tokens of a request that are computed or scheduled. Changes nothing.
    #[pyo3(signature = (request_id, /))]
    fn num_computed_tokens(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<u32> {
        Self::ask_one(slf, request_id, RequestState::num_computed)
    }

    /// The row of a request. Changes nothing.
    #[pyo3(signature = (request_id, /))]
    fn get_row(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<u32> {
        Ok(Self::ask_of(slf, request_id, State::request)?.0)
    }

    /// Where a request's blocks are. Changes nothing.
    #[pyo3(signature = (request_id, /))]
    fn status<'py>(slf: &Bound<'py, Self>, request_id: IdArg<'_, 'py>) -> PyResult<PyStatus<'py>> {
        let status = Self::ask_one(slf, request_id, RequestState::status)?;
        values::status(slf.py(), status)
    }

    /// Device blocks without owner.
    #[getter]
    fn num_free_blocks(&self) -> u32 {
        self.state.device().num_free()
    }

    /// Host blocks without owner; 0 without a host tier.
    #[getter]
    fn num_free_host_blocks(&self) -> u32 {
        self.state.host().map_or(0, |host| host.num_free())
    }

    /// The canonical bytes of the state. O(pool).
    fn encode<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = encode(&slf.try_borrow()?.state);
        Ok(PyBytes::new(slf.py(), &bytes))
    }

    /// Put the state of canonical bytes in place. Raises DamagedState, InvalidConfig.
    #[pyo3(signature = (data, /))]
    fn restore(slf: &Bound<'_, Self>, data: &[u8]) -> PyResult<()> {
        let py = slf.py();
        let state = decode(data).map_err(|error| raise(py, error))?;
        *slf.try_borrow_mut()? = Self::of(py, state)?;
        Ok(())
    }
}
