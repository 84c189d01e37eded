// SPDX-License-Identifier: Apache-2.0
//! The methods of `kvcore._rust.Manager` that change its state; `queries.rs` has the others, and
//! `slot_requests.rs` has `allocate_slots` and `load`, and `retention.rs` those of levels.
//!
//! They are those of `kvcore.backend.Backend` that change the state, in that order, with the same
//! arguments, results and errors. A wrong argument is reported when the transition would report it,
//! so both backends report the same error first.

use pyo3::prelude::*;

use crate::bindings::arguments::{
    BlocksArg, ConfigArg, CountArg, FlagArg, HashesArg, IdArg, IdsArg, MaybeCount, RequestArg,
    TokensArg, items,
};
use crate::bindings::errors::{CallError, Given, raise};
use crate::bindings::manager::Manager;
use crate::bindings::tokens::{TOKENS, read_once, read_signed};
use crate::bindings::values::{
    PyAppended, PyBatch, PyEvents, PyMoved, PyNames, PyNumbers, PyStats,
};
use crate::bindings::{arguments, requests, values};
use crate::record::calls;
use crate::record::calls::{Argument, Call, Options};
use crate::record::fields::ReadTokens;
use crate::state::state::make_state;
use crate::transitions::append::Requests;
use crate::transitions::batches::{complete, take_batch_into};
use crate::transitions::cancel::cancel;
use crate::transitions::drain::{take_events, take_new_block_ids, take_stats};
use crate::transitions::epochs::advance_epoch;
use crate::transitions::fork::fork;
use crate::transitions::free::free;
use crate::transitions::pins::{pin, unpin};
use crate::transitions::publish::{cache_blocks, evict_blocks, reset_prefix_cache};
use crate::transitions::queries::find_request;
use crate::transitions::requests::{
    accept, add_block_hashes, add_drafts, add_tokens, remove_request,
};
use crate::transitions::rewind::rewind;
use crate::transitions::swap::{swap_in, swap_out};
use crate::transitions::transfers::{complete_operation, store};
use crate::transitions::truncate::truncate;
use crate::transitions::unschedule::unschedule;
use crate::transitions::window::remove_skipped_blocks;
use crate::types::errors::Error;
use crate::types::values::Output;

#[pymethods]
impl Manager {
    /// The empty state of a configuration. Raises InvalidConfig, PoolTooLarge.
    #[new]
    #[pyo3(signature = (config, /))]
    fn new(py: Python<'_>, config: ConfigArg<'_, '_>) -> PyResult<Self> {
        let config = arguments::config(config)?;
        Self::of(py, make_state(config).map_err(|error| raise(py, error))?)
    }

    /// Make a request known; returns its row.
    #[pyo3(signature = (request, /))]
    fn add_request(slf: &Bound<'_, Self>, request: RequestArg<'_, '_>) -> PyResult<u32> {
        requests::add(slf, request)
    }

    /// Add tokens behind those that a request has, into its positions to come first.
    #[pyo3(
        signature = (request_id, tokens, *, num_rejected=MaybeCount(None), batch=None),
        text_signature = "($self, request_id, tokens, *, num_rejected=0, batch=None)"
    )]
    fn add_tokens<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        tokens: TokensArg<'_, 'py>,
        num_rejected: MaybeCount<'_, 'py>,
        batch: Option<CountArg<'_, 'py>>,
    ) -> PyResult<()> {
        let mut given = Given::of(slf);
        let name = given.name(request_id.0);
        let tokens = read_signed(&given, tokens, &TOKENS);
        let num_rejected = given.maybe_count(num_rejected)?.unwrap_or(0);
        let batch = given.maybe_count(MaybeCount(batch))?;
        let note = |manager: &mut Self, tokens: ReadTokens<'_>, (): &()| {
            let fields = [Argument::Request(name), Argument::Tokens(tokens)];
            let options = [Argument::count(num_rejected), batch.map(Argument::Number)];
            let call = Call::new(calls::ADD_TOKENS, &fields).with(Options::Given(&options));
            manager.begin(slf.py(), &call);
        };
        Self::change_by(slf, &given, (tokens, ()), note, |state, tokens, ()| {
            let own_hashes = find_request(state, name)?.own_hashes;
            let tokens = tokens.taken(|| own_hashes)?;
            let output = Output { tokens: Some(&tokens), num_rejected, batch };
            Ok(add_tokens(state, name, output)?)
        })
    }

    /// Add the engine's hashes of the next full blocks of a request that has its own hashes.
    #[pyo3(signature = (request_id, hashes, /))]
    fn add_block_hashes(
        slf: &Bound<'_, Self>,
        request_id: IdArg<'_, '_>,
        hashes: HashesArg<'_, '_>,
    ) -> PyResult<()> {
        let (mut given, hashes) = (Given::of(slf), arguments::hashes(hashes)?);
        let name = given.name(request_id.0);
        let fields = [Argument::Request(name), Argument::Hashes(&hashes)];
        let call = Call::new(calls::ADD_BLOCK_HASHES, &fields);
        Self::change(slf, &given, call, |state| add_block_hashes(state, name, hashes.clone()))
    }

    /// Put drafts behind the tokens of a request, in place of those before.
    #[pyo3(signature = (request_id, tokens))]
    fn add_drafts(
        slf: &Bound<'_, Self>,
        request_id: IdArg<'_, '_>,
        tokens: TokensArg<'_, '_>,
    ) -> PyResult<()> {
        let mut given = Given::of(slf);
        let name = given.name(request_id.0);
        let tokens = read_signed(&given, tokens, &TOKENS);
        let note = |manager: &mut Self, tokens: ReadTokens<'_>, (): &()| {
            let fields = [Argument::Request(name), Argument::Tokens(tokens)];
            manager.begin(slf.py(), &Call::new(calls::ADD_DRAFTS, &fields));
        };
        Self::change_by(slf, &given, (tokens, ()), note, |state, tokens, ()| {
            state.idle(name)?;
            let own_hashes = find_request(state, name)?.own_hashes;
            let tokens = tokens.taken(|| own_hashes)?;
            Ok::<_, CallError>(add_drafts(state, name, tokens.into_vec())?)
        })
    }

    /// Make the first scheduled drafts tokens of the request and drop the others.
    #[pyo3(signature = (request_id, num_accepted))]
    fn accept<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        num_accepted: CountArg<'_, 'py>,
    ) -> PyResult<()> {
        Self::change_count(slf, calls::ACCEPT, request_id, num_accepted, accept)
    }

    /// Forget a request that holds no blocks.
    #[pyo3(signature = (request_id))]
    fn remove_request(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<()> {
        Self::change_one(slf, calls::REMOVE_REQUEST, request_id, remove_request)
    }

    /// One token and one slot more for each request, in order; without tokens, a slot for one that
    /// is to come. requests: ids, or a buffer of rows.
    #[pyo3(signature = (requests, tokens=None, *, batch=None))]
    fn append<'py>(
        slf: &Bound<'py, Self>,
        requests: TokensArg<'_, 'py>,
        tokens: Option<TokensArg<'_, 'py>>,
        batch: Option<CountArg<'_, 'py>>,
    ) -> PyResult<PyAppended<'py>> {
        let mut given = Given::of(slf);
        let batch = given.maybe_count(MaybeCount(batch))?;
        if let Some(tokens) = tokens
            && let Some(done) = Self::append_one(slf, &given, [requests.0, tokens.0], batch)?
        {
            return Ok(done);
        }
        let (requests, tokens) = (read_once(requests)?, tokens.map(read_once).transpose()?);
        let requests = TokensArg(requests.as_borrowed());
        let tokens = tokens.as_ref().map(|tokens| TokensArg(tokens.as_borrowed()));
        Self::append_all(slf, &mut given, requests, tokens, batch)
    }

    /// Publish a request's full blocks up to a token count, whose caching was delayed.
    #[pyo3(signature = (request_id, num_computed_tokens))]
    fn cache_blocks<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        num_computed_tokens: CountArg<'_, 'py>,
    ) -> PyResult<()> {
        Self::change_count(slf, calls::CACHE_BLOCKS, request_id, num_computed_tokens, cache_blocks)
    }

    /// Give back a request's blocks, tail first; its tokens stay.
    #[pyo3(signature = (request_id))]
    fn free(slf: &Bound<'_, Self>, request_id: IdArg<'_, '_>) -> PyResult<()> {
        Self::change_one(slf, calls::FREE, request_id, free)
    }

    /// Add a child that shares its parent's computed blocks; returns its row.
    #[pyo3(signature = (parent_id, child_id))]
    fn fork<'py>(
        slf: &Bound<'py, Self>,
        parent_id: IdArg<'_, 'py>,
        child_id: IdArg<'_, 'py>,
    ) -> PyResult<u32> {
        let mut given = Given::of(slf);
        let (parent, child) = (given.name(parent_id.0), given.name(child_id.0));
        let fields = [Argument::Request(parent), Argument::Child(child)];
        let call = Call::new(calls::FORK, &fields);
        Ok(Self::change(slf, &given, call, |state| fork(state, parent, child))?.0)
    }

    /// Let the open batch compute a request only up to num_tokens; its blocks stay.
    #[pyo3(signature = (request_id, num_tokens))]
    fn unschedule<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        num_tokens: CountArg<'_, 'py>,
    ) -> PyResult<()> {
        Self::change_count(slf, calls::UNSCHEDULE, request_id, num_tokens, unschedule)
    }

    /// Keep the first num_tokens of a request's tokens.
    #[pyo3(signature = (request_id, num_tokens))]
    fn truncate<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        num_tokens: CountArg<'_, 'py>,
    ) -> PyResult<()> {
        Self::change_count(slf, calls::TRUNCATE, request_id, num_tokens, truncate)
    }

    /// Let requests count no more than num_computed_tokens; returns the ids of those that fell.
    #[pyo3(signature = (request_ids, num_computed_tokens, /))]
    fn rewind<'py>(
        slf: &Bound<'py, Self>,
        request_ids: IdsArg<'_, 'py>,
        num_computed_tokens: CountArg<'_, 'py>,
    ) -> PyResult<PyNames<'py>> {
        let mut given = Given::of(slf);
        let ids: Vec<_> = items(request_ids.0)?.iter().collect();
        let names = given.names(&ids);
        let count = given.count(num_computed_tokens)?;
        let fields = [Argument::Requests(Requests::Ids(&names)), Argument::Number(count)];
        let fell = Self::change(slf, &given, Call::new(calls::REWIND, &fields), |state| {
            let rows = rewind(state, &names, count)?;
            let ids = rows.iter().map(|&row| state[row].request_id.to_string());
            Ok::<_, Error>(ids.collect::<Vec<_>>())
        })?;
        values::names(slf.py(), fell)
    }

    /// Give back the blocks that no query at total_computed_tokens or later sees.
    #[pyo3(signature = (request_id, total_computed_tokens))]
    fn remove_skipped_blocks<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        total_computed_tokens: CountArg<'_, 'py>,
    ) -> PyResult<()> {
        Self::change_count(
            slf,
            calls::REMOVE_SKIPPED_BLOCKS,
            request_id,
            total_computed_tokens,
            remove_skipped_blocks,
        )
    }

    /// Move the requests' blocks to the host tier, each distinct block once.
    #[pyo3(signature = (request_ids, /))]
    fn swap_out<'py>(
        slf: &Bound<'py, Self>,
        request_ids: IdsArg<'_, 'py>,
    ) -> PyResult<PyMoved<'py>> {
        Self::change_all(slf, calls::SWAP_OUT, request_ids, swap_out)
    }

    /// Move swapped requests back to the device.
    #[pyo3(signature = (request_ids, /))]
    fn swap_in<'py>(
        slf: &Bound<'py, Self>,
        request_ids: IdsArg<'_, 'py>,
    ) -> PyResult<PyMoved<'py>> {
        Self::change_all(slf, calls::SWAP_IN, request_ids, swap_in)
    }

    /// Hold blocks so that their content stays.
    #[pyo3(signature = (block_ids, /))]
    fn pin<'py>(slf: &Bound<'py, Self>, block_ids: BlocksArg<'_, 'py>) -> PyResult<()> {
        Self::change_blocks(slf, calls::PIN, block_ids, pin)
    }

    /// Undo `pin`.
    #[pyo3(signature = (block_ids, /))]
    fn unpin<'py>(slf: &Bound<'py, Self>, block_ids: BlocksArg<'_, 'py>) -> PyResult<()> {
        Self::change_blocks(slf, calls::UNPIN, block_ids, unpin)
    }

    /// Forget the keys of blocks; their owners keep them.
    #[pyo3(signature = (block_ids, /))]
    fn evict_blocks<'py>(slf: &Bound<'py, Self>, block_ids: BlocksArg<'_, 'py>) -> PyResult<()> {
        Self::change_blocks(slf, calls::EVICT_BLOCKS, block_ids, evict_blocks)
    }

    /// Forget every key; False, and nothing happens, while any block of any tier is used.
    fn reset_prefix_cache(slf: &Bound<'_, Self>) -> PyResult<bool> {
        Self::drain(slf, calls::RESET_PREFIX_CACHE, reset_prefix_cache)
    }

    /// Begin an epoch, the next one or a later one that is given; returns its number.
    #[pyo3(signature = (epoch=None))]
    fn advance_epoch<'py>(
        slf: &Bound<'py, Self>,
        epoch: Option<CountArg<'_, 'py>>,
    ) -> PyResult<u32> {
        let mut given = Given::of(slf);
        let number = given.maybe_count(MaybeCount(epoch))?;
        let options = [number.map(Argument::Number)];
        let call = Call::new(calls::ADVANCE_EPOCH, &[]).with(Options::Given(&options));
        Self::change(slf, &given, call, |state| advance_epoch(state, number))
    }

    /// Copy blocks to the external store under their keys; returns one operation per block.
    #[pyo3(signature = (block_ids, /))]
    fn store<'py>(
        slf: &Bound<'py, Self>,
        block_ids: BlocksArg<'_, 'py>,
    ) -> PyResult<PyNumbers<'py>> {
        let started = Self::change_blocks(slf, calls::STORE, block_ids, store)?;
        values::numbers(slf.py(), started)
    }

    /// Finish a store or load, done or failed.
    #[pyo3(signature = (operation, done, /))]
    fn complete_operation<'py>(
        slf: &Bound<'py, Self>,
        operation: CountArg<'_, 'py>,
        done: FlagArg<'_, 'py>,
    ) -> PyResult<()> {
        let mut given = Given::of(slf);
        let (number, done) = (given.count(operation)?, given.flag("done", done)?);
        let (fields, options) = ([Argument::Number(number)], [Argument::flag(done)]);
        let call = Call::new(calls::COMPLETE_OPERATION, &fields).with(Options::Given(&options));
        Self::change(slf, &given, call, |state| complete_operation(state, number, done))
    }

    /// Close and number the open batch.
    fn take_batch<'py>(slf: &Bound<'py, Self>) -> PyResult<PyBatch<'py>> {
        let (mut manager, py) = (Self::lent(slf)?, slf.py());
        let mut room = std::mem::take(&mut manager.room);
        manager.begin(py, &Call::new(calls::TAKE_BATCH, &[]));
        let outcome = take_batch_into(&mut manager.state, &mut room).map(|()| &room);
        manager.end(py, &outcome);
        drop(manager);
        let taken = match outcome {
            Ok(batch) => values::batch(py, batch),
            Err(error) => Err(raise(py, error)),
        };
        Self::lent(slf)?.room = room;
        taken
    }

    /// Finish the oldest batch in flight, by its number.
    #[pyo3(signature = (batch))]
    fn complete<'py>(slf: &Bound<'py, Self>, batch: CountArg<'_, 'py>) -> PyResult<()> {
        Self::change_number(slf, calls::COMPLETE, batch, complete)
    }

    /// Take back a batch in flight, all later ones and the open one.
    #[pyo3(signature = (batch))]
    fn cancel<'py>(slf: &Bound<'py, Self>, batch: CountArg<'_, 'py>) -> PyResult<()> {
        Self::change_number(slf, calls::CANCEL, batch, cancel)
    }

    /// Hand out the events since the last call.
    fn take_events<'py>(slf: &Bound<'py, Self>) -> PyResult<PyEvents<'py>> {
        let taken = Self::drain(slf, calls::TAKE_EVENTS, take_events)?;
        values::events(slf.py(), &taken)
    }

    /// Return the look-up statistics since the last call.
    fn take_stats<'py>(slf: &Bound<'py, Self>) -> PyResult<PyStats<'py>> {
        let taken = Self::drain(slf, calls::TAKE_STATS, take_stats)?;
        values::stats(slf.py(), &taken)
    }

    /// Hand out the blocks that full-attention groups got since the last call, group by group.
    fn take_new_block_ids(slf: &Bound<'_, Self>) -> PyResult<Vec<u32>> {
        let taken = Self::drain(slf, calls::TAKE_NEW_BLOCK_IDS, take_new_block_ids)?;
        Ok(taken.into_iter().map(|block| block.0).collect())
    }
}
