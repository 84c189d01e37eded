// SPDX-License-Identifier: Apache-2.0
//! `kvcore._rust.root_hash`, `hash_block` and `hash_blocks`: the twin's hashing alone.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::bindings::arguments::{RequestArg, TokensArg, hashing};
use crate::bindings::errors::{CallError, Given, raise};
use crate::bindings::extra_keys::Parts;
use crate::bindings::tokens::{TOKENS, read_tokens};
use crate::hashing::block_hash;
use crate::hashing::extra_keys::read_extra_keys;
use crate::types::errors::Error;
use crate::types::keys::{BlockHash, HASH_SIZE};

/// The parent of each request's first block.
#[pyfunction]
#[pyo3(signature = (seed, hashing = "sha256", /))]
pub(crate) fn root_hash<'py>(
    py: Python<'py>,
    seed: &[u8],
    hashing: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let hash = block_hash::root_hash(seed, self::hashing(py, hashing)?);
    Ok(PyBytes::new(py, &hash))
}

/// The hash of one full block of these tokens, which has no extra keys.
///
/// Raises InvalidToken, UnsupportedBuffer, InvalidKey, InvalidConfig.
#[pyfunction]
#[pyo3(signature = (parent, tokens, hashing = "sha256", /))]
pub(crate) fn hash_block<'py>(
    parent: &[u8],
    tokens: TokensArg<'_, 'py>,
    hashing: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let py = tokens.0.py();
    let (parent, hashing) = (read_parent(py, parent)?, self::hashing(py, hashing)?);
    Ok(PyBytes::new(
        py,
        &block_hash::hash_block(&parent, &read_tokens(tokens, &TOKENS)?, &[], hashing),
    ))
}

/// The hashes of a request's full blocks from token `start` on, of which `parent` is before.
///
/// Raises InvalidToken, UnsupportedBuffer, InvalidKey, InvalidConfig, InvalidExtraKey,
/// UnsortedMedia, CountMismatch.
#[pyfunction]
#[pyo3(signature = (request, parent, block_size, /, *, start = 0, hashing = "sha256"))]
pub(crate) fn hash_blocks<'py>(
    request: RequestArg<'_, 'py>,
    parent: &[u8],
    block_size: u32,
    start: u32,
    hashing: &str,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let (mut given, py) = (Given::default(), request.0.py());
    let id: String = request.0.getattr("request_id")?.extract()?;
    let tokens = read_tokens(TokensArg(request.0.getattr("tokens")?.as_borrowed()), &TOKENS)?;
    let hashing = self::hashing(py, hashing)?;
    let parent = read_parent(py, parent)?;
    let parts = Parts::read(request)?;
    let keys = read_extra_keys(&id, parts.keys(&mut given), tokens.len() as u32, block_size)
        .map_err(|error| CallError::from(error).raise(py, &given))?;
    let rest = tokens.get(start as usize..).unwrap_or_default();
    let hashes = block_hash::hash_blocks(parent, rest, block_size, start, &keys, hashing);
    Ok(hashes.map(|hash| PyBytes::new(py, &hash)).collect())
}

/// A hash of the right size. Raises InvalidKey.
fn read_parent(py: Python<'_>, parent: &[u8]) -> PyResult<BlockHash> {
    let (size, expected) = (parent.len() as i64, HASH_SIZE as i64);
    parent.try_into().map_err(|_| raise(py, Error::InvalidKey { size, expected }))
}
