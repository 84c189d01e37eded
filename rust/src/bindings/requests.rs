// SPDX-License-Identifier: Apache-2.0
//! A `Request` as it comes from an engine.
//!
//! It is read once, when it is added; the core checks its parts. Its tokens are moved into the
//! state, not copied.

use pyo3::intern;
use pyo3::prelude::*;

use crate::bindings::arguments::{HashesArg, RequestArg, RetentionArg, TokensArg, hashes, pieces};
use crate::bindings::errors::Given;
use crate::bindings::extra_keys::Parts;
use crate::bindings::manager::Manager;
use crate::bindings::tokens::{TOKENS, read_signed};
use crate::record::calls::{ADD_REQUEST, Argument, Call};
use crate::record::fields::ReadTokens;
use crate::transitions::requests::{add_request, check_new_id};
use crate::types::values::Request;

/// Make a request known; returns its row.
pub(crate) fn add(manager: &Bound<'_, Manager>, request: RequestArg<'_, '_>) -> PyResult<u32> {
    let (mut given, py) = (Given::of(manager), request.0.py());
    let reading = given.reading()?;
    let id = request.0.getattr(intern!(py, "request_id"))?;
    let request_id = given.name(id.as_borrowed());
    let tokens = request.0.getattr(intern!(py, "tokens"))?;
    let tokens = read_signed(&given, TokensArg(tokens.as_borrowed()), &TOKENS);
    let own = request.0.getattr(intern!(py, "block_hashes"))?;
    let own_hashes = (!own.is_none()).then(|| hashes(HashesArg(own.as_borrowed())));
    let block_hashes = own_hashes.transpose()?;
    let parts = Parts::read(request)?;
    let extra_keys = parts.keys(&mut given);
    let skip_reading_prefix_cache =
        request.0.getattr(intern!(py, "skip_reading_prefix_cache"))?.is_truthy()?;
    let retention = request.0.getattr(intern!(py, "retention"))?;
    let retention = (!retention.is_none()).then(|| pieces(RetentionArg(retention.as_borrowed())));
    let retention = retention.transpose()?;
    let tokens_to_come = Vec::new();
    let request = Request {
        request_id,
        tokens: tokens_to_come,
        extra_keys,
        block_hashes,
        skip_reading_prefix_cache,
        retention,
    };
    drop(reading);
    let note = |manager: &mut Manager, tokens: ReadTokens<'_>, request: &Request<'_>| {
        let fields = [Argument::New(request, tokens)];
        manager.begin(py, &Call::new(ADD_REQUEST, &fields));
    };
    let row =
        Manager::change_by(manager, &given, (tokens, request), note, |state, tokens, rest| {
            check_new_id(state, request_id)?;
            let tokens = tokens.taken(|| rest.block_hashes.is_some())?.into_vec();
            Ok(add_request(state, Request { tokens, ..rest })?)
        })?;
    Ok(row.0)
}
