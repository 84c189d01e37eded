// SPDX-License-Identifier: Apache-2.0
//! Requests come, grow and go.
//!
//! Rules: a request's tokens and its chain of block hashes grow together, so each full block is
//! hashed once. A row is given for the life of a request; the row given back last is used first.
//! Without prefix caching there are no hashes. Twin: kvcore/requests.py.

use std::sync::Arc;

use crate::errors::{Error, repr};
use crate::extra_keys::ExtraKeys;
use crate::hashing::{Hashing, hash_blocks};
use crate::ids::Row;
use crate::state::{RequestState, State, Table};

/// Make a request known; returns its row. Fails with EmptyRequestId, RepeatedRequest, EmptyTokens.
pub fn add_request(state: &mut State, request_id: &str, tokens: &[u32]) -> Result<Row, Error> {
    check_new_id(state, request_id)?;
    check_tokens(request_id, tokens)?;
    let row = empty_request(state, request_id);
    extend(state, row, tokens);
    Ok(row)
}

/// Add tokens behind those that a request has; full blocks are hashed. Fails with UnknownRequest,
/// EmptyTokens.
pub fn add_tokens(state: &mut State, request_id: &str, tokens: &[u32]) -> Result<(), Error> {
    let row = state.request(request_id)?;
    check_tokens(request_id, tokens)?;
    extend(state, row, tokens);
    Ok(())
}

/// Forget a request that holds no blocks; its row can be given again. Fails with UnknownRequest,
/// StillHoldsBlocks.
pub fn remove_request(state: &mut State, request_id: &str) -> Result<(), Error> {
    let row = state.request(request_id)?;
    let request = &state[row];
    let held: usize = request.tables.iter().chain(&request.host_tables).map(Table::len).sum();
    if held > 0 {
        let num_blocks = held as i64;
        return Err(Error::StillHoldsBlocks { request: request.name(), num_blocks });
    }
    state.rows.remove(request_id);
    state.requests[row.index()] = None;
    state.free_rows.push(row);
    Ok(())
}

/// Fails with EmptyRequestId or RepeatedRequest unless a request of this id can be added.
pub fn check_new_id(state: &State, request_id: &str) -> Result<(), Error> {
    if request_id.is_empty() {
        return Err(Error::EmptyRequestId { value: repr(request_id) });
    }
    if state.rows.contains_key(request_id) {
        return Err(Error::RepeatedRequest { request: repr(request_id) });
    }
    Ok(())
}

/// Put a request without tokens in a row of its own; returns it.
pub(crate) fn empty_request(state: &mut State, request_id: &str) -> Row {
    let row = state.free_rows.pop().unwrap_or_else(|| {
        state.requests.push(None);
        Row((state.requests.len() - 1) as u32)
    });
    let num_groups = state.config.groups.len();
    let request_id: Arc<str> = request_id.into();
    state.rows.insert(Arc::clone(&request_id), row);
    state.requests[row.index()] = Some(RequestState {
        request_id,
        tokens: Vec::new(),
        block_hashes: Vec::new(),
        num_computed: 0,
        tables: vec![Table::new(); num_groups],
        num_cached: vec![0; num_groups],
        host_tables: Vec::new(),
        preempted: false,
    });
    row
}

/// Give a request more tokens, and the hashes of the blocks that they fill.
pub(crate) fn extend(state: &mut State, row: Row, tokens: &[u32]) {
    let size = state.config.block_size();
    let caching = state.config.enable_caching;
    let root = state.root;
    let request = &mut state[row];
    request.tokens.extend_from_slice(tokens);
    let start = request.block_hashes.len() * size as usize;
    if caching && request.tokens.len() - start >= size as usize {
        let parent = request.block_hashes.last().copied().unwrap_or(root);
        let none = ExtraKeys::default();
        let hashing = Hashing::Sha256;
        let tokens = &request.tokens[start..];
        request.block_hashes.extend(hash_blocks(parent, tokens, size, 0, &none, hashing));
    }
}

fn check_tokens(request_id: &str, tokens: &[u32]) -> Result<(), Error> {
    if tokens.is_empty() {
        return Err(Error::EmptyTokens { request: repr(request_id) });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::hashing::root_hash;
    use crate::state::make_state;

    fn state() -> State {
        make_state(Config::new(5, 2, b"seed")).unwrap()
    }

    #[test]
    fn the_chain_grows_with_the_tokens() {
        let mut grown = state();
        let row = add_request(&mut grown, "a", &[1]).unwrap();
        assert_eq!(grown[row].block_hashes.len(), 0);
        add_tokens(&mut grown, "a", &[2, 3]).unwrap();
        add_tokens(&mut grown, "a", &[4, 5]).unwrap();
        let expected: Vec<_> = {
            let none = ExtraKeys::default();
            hash_blocks(
                root_hash(b"seed", Hashing::Sha256),
                &[1, 2, 3, 4, 5],
                2,
                0,
                &none,
                Hashing::Sha256,
            )
            .collect()
        };
        assert_eq!(grown[row].block_hashes, expected);
    }

    #[test]
    fn the_row_given_back_last_is_used_first() {
        let mut state = state();
        for (row, id) in ["a", "b", "c"].into_iter().enumerate() {
            assert_eq!(add_request(&mut state, id, &[1]), Ok(Row(row as u32)));
        }
        remove_request(&mut state, "a").unwrap();
        remove_request(&mut state, "b").unwrap();
        assert_eq!(add_request(&mut state, "d", &[1]), Ok(Row(1)));
        assert_eq!(add_request(&mut state, "e", &[1]), Ok(Row(0)));
        assert_eq!(add_request(&mut state, "f", &[1]), Ok(Row(3)));
    }

    #[test]
    fn misuse_is_named() {
        let mut state = state();
        add_request(&mut state, "a", &[1]).unwrap();
        let name = "'a'".to_owned();
        let repeated = Error::RepeatedRequest { request: name.clone() };
        assert_eq!(add_request(&mut state, "a", &[1]), Err(repeated));
        assert_eq!(add_tokens(&mut state, "a", &[]), Err(Error::EmptyTokens { request: name }));
        let unknown = Error::UnknownRequest { request: "'b'".to_owned() };
        assert_eq!(remove_request(&mut state, "b"), Err(unknown));
        let empty = Error::EmptyRequestId { value: "''".to_owned() };
        assert_eq!(add_request(&mut state, "", &[1]), Err(empty));
    }
}
