// SPDX-License-Identifier: Apache-2.0
//! Adding requests, letting them grow, and removing them.
//!
//! Invariants: a request's tokens and its chain of block hashes grow together, so each full block
//! is hashed once. An engine that supplies hashes of its own supplies all of them. Drafts stand
//! behind the tokens and are never hashed; scheduled drafts are accepted or dropped before anything
//! else is scheduled. A row is assigned for the life of a request; the row given back last is used
//! first. Without prefix caching there are no hashes.
//! Twin: kvcore/transitions/requests.py.

use std::sync::Arc;

use smallvec::smallvec;

use crate::hashing::block_hash::extend_chain;
use crate::hashing::extra_keys::read_extra_keys;
use crate::mutants::{Mutant, seeded};
use crate::state::state::{RequestState, State};
use crate::transitions::free::{check_leaving, cut_tables, leave_open_batch};
use crate::transitions::in_flight::{forget_entries, shift_starts};
use crate::transitions::output::{
    check_output, check_sampled, check_surplus, drop_positions, publish_accepted, publish_filled,
};
use crate::transitions::retention::set_wishes;
use crate::transitions::states::keep_accepted;
use crate::transitions::tails::keys::fill_tails;
use crate::transitions::unconfirmed_loads::forget_reporter;
use crate::types::errors::{Error, check_count};
use crate::types::extra_inputs::NO_EXTRA_KEYS;
use crate::types::ids::{Row, Table};
use crate::types::keys::HASH_SIZE;
use crate::types::retention::steps_of;
use crate::types::values::{GivenHashes, Output, Request};

/// Add a request; returns its row.
///
/// Fails with EmptyRequestId, RepeatedRequest, EmptyTokens, InvalidExtraKey, UnsortedMedia,
/// CountMismatch, WrongBlockHashes.
pub fn add_request(state: &mut State, request: Request<'_>) -> Result<Row, Error> {
    let Request { request_id, tokens, extra_keys, block_hashes, .. } = request;
    check_new_id(state, request_id)?;
    check_tokens(request_id, &tokens)?;
    let (num_tokens, size) = (tokens.len() as u32, state.hash_block_size);
    let extra_keys = read_extra_keys(request_id, extra_keys, num_tokens, size)?;
    if let Some(hashes) = &block_hashes {
        check_hashes(request_id, true, (num_tokens / size) as usize, hashes)?;
    }
    let row = empty_request(state, request_id);
    let known = &mut state[row];
    known.own_hashes = block_hashes.is_some();
    known.skip_reading = request.skip_reading_prefix_cache;
    known.extra_keys = (!extra_keys.is_empty()).then(|| Arc::new(extra_keys));
    known.tokens = tokens;
    known.block_hashes.extend(block_hashes.into_iter().flatten().flatten());
    hash_new_blocks(state, row);
    if let Some(pieces) = &request.retention {
        set_wishes(state, row, steps_of(pieces, num_tokens));
    }
    state.settle_waiting(row);
    Ok(row)
}

/// Add tokens behind those that a request has; they fill positions to come, in order, and full
/// blocks are hashed and become findable.
///
/// The last positions to come that were rejected are dropped first, at most all; beside state
/// groups the request then begins again. Fails with UnknownRequest, EmptyTokens, InvalidCount,
/// DraftsPending, InOpenBatch, BatchNotTaken, StaleOutput, OutputOutOfOrder, HitInOpenBatch,
/// BeforeOpenBatch.
pub fn add_tokens<'a>(
    state: &mut State,
    request_id: &str,
    output: impl Into<Output<'a>>,
) -> Result<(), Error> {
    let row = state.request(request_id)?;
    let Output { tokens, num_rejected, mut batch } = output.into();
    let tokens = tokens.unwrap_or(&[]);
    check_tokens(request_id, tokens)?;
    check_count("num_rejected", num_rejected, 0)?;
    if let Some(batch) = batch {
        check_count("batch", batch, 0)?;
    }
    check_no_drafts(&state[row])?;
    check_sampled(state, row)?;
    check_output(state, row, batch)?;
    let request = &state[row];
    let (num_known, mut to_come) = (request.num_tokens(), request.num_output_placeholders());
    let rejected = num_rejected.min(i64::from(u32::MAX)) as u32;
    if tokens.len() > 1 {
        check_surplus(state, row, batch, tokens.len(), rejected)?;
    }
    if rejected > 0 {
        if to_come > 0 && state.has_states {
            begin_anew(state, row)?;
            (to_come, batch) = (0, None);
        } else if to_come > 0 {
            shift_starts(state, row, num_known, rejected.min(to_come))?;
        }
        drop_positions(state, row, rejected);
    }
    if let Some(batch) = batch {
        state[row].output_from = batch as u64 + 1;
    }
    extend(state, row, tokens);
    state[row].settle_awaited();
    if to_come > 0 {
        publish_filled(state, row, num_known);
    }
    state.settle_waiting(row);
    Ok(())
}

/// Give back all blocks of a request, whose states include rejected tokens; its output to come was
/// sampled behind them, and is out of date. Fails with HitInOpenBatch.
fn begin_anew(state: &mut State, row: Row) -> Result<(), Error> {
    check_leaving(state, &[row])?;
    leave_open_batch(state, row);
    cut_tables(state, row, 0, 0);
    let open = state.batch.number;
    state[row].await_none(open);
    Ok(())
}

/// Add the engine's hashes of the next full blocks of a request that has its own hashes.
///
/// Fails with UnknownRequest, WrongBlockHashes.
pub fn add_block_hashes(
    state: &mut State,
    request_id: &str,
    hashes: GivenHashes,
) -> Result<(), Error> {
    let row = state.request(request_id)?;
    extend_hashes(state, row, hashes)?;
    state.settle_waiting(row);
    Ok(())
}

/// Replace the drafts after the tokens of a request; an empty list drops them.
///
/// They can be scheduled, and are published only after they were accepted. Fails with
/// UnknownRequest, SwappedOut, LoadUnfinished, DraftsPending, PlaceholdersPending.
pub fn add_drafts(state: &mut State, request_id: &str, tokens: Vec<u32>) -> Result<(), Error> {
    let row = state.idle(request_id)?;
    check_drafts_settled(&state[row])?;
    check_no_placeholders(&state[row])?;
    let request = &mut state[row];
    (request.drafts, request.quiet_until) = (tokens, 0);
    Ok(())
}

/// Turn the first drafts into tokens of the request and drop the others; its blocks stay.
///
/// The computed count falls to the accepted tokens. Fails with UnknownRequest, SwappedOut,
/// InvalidCount, PlaceholdersPending, InOpenBatch, BeyondDrafts.
pub fn accept(state: &mut State, request_id: &str, num_accepted: i64) -> Result<(), Error> {
    let row = state.on_device(request_id)?;
    let request = &state[row];
    check_count("num_accepted", num_accepted, 0)?;
    check_no_placeholders(request)?;
    let num_scheduled = i64::from(request.num_computed - request.num_accepted());
    if num_scheduled > 0 && state.batch.scheduled.get(row).is_some() {
        return Err(Error::InOpenBatch { kind: "request", value: request.name().into() });
    }
    if num_accepted > num_scheduled {
        let request = request.name();
        return Err(Error::BeyondDrafts { request, num_scheduled, requested: num_accepted });
    }
    let (awaited, num_known) = (state[row].awaited(), state[row].num_tokens());
    keep_accepted(state, row, num_accepted as u32);
    let mut drafts = std::mem::take(&mut state[row].drafts);
    extend(state, row, &drafts[..num_accepted as usize]);
    drafts.clear();
    let request = &mut state[row];
    request.drafts = drafts;
    request.num_computed = request.num_accepted();
    request.set_awaited(&awaited);
    publish_accepted(state, row, num_known);
    fill_tails(state, row, num_known);
    Ok(())
}

/// Forget a request that holds no blocks; its row is reused once the open batch is finished.
///
/// If no other request can report that an unconfirmed load failed, the keys that rest on the load
/// are withdrawn.
/// Fails with UnknownRequest, StillHoldsBlocks.
pub fn remove_request(state: &mut State, request_id: &str) -> Result<(), Error> {
    let row = state.request(request_id)?;
    let request = &state[row];
    let held: usize = request.tables.iter().chain(&request.host_tables).map(Table::len).sum();
    if held > 0 {
        let num_blocks = held as i64;
        return Err(Error::StillHoldsBlocks { request: request.name(), num_blocks });
    }
    forget_reporter(state, row);
    if !seeded(Mutant::RemoveKeepsRow) {
        state.rows.remove(request_id);
    }
    state.requests[row.index()] = None;
    state.wishes.remove(&row);
    state.forget_waiting(row);
    forget_entries(state, row);
    state.held_rows.push((row, state.batch.number));
    Ok(())
}

/// Fails with EmptyRequestId or RepeatedRequest unless a request of this id can be added.
pub fn check_new_id(state: &State, request_id: &str) -> Result<(), Error> {
    if request_id.is_empty() {
        return Err(Error::EmptyRequestId { value: request_id.to_owned() });
    }
    if state.rows.contains_key(request_id) {
        return Err(Error::RepeatedRequest {
            request: request_id.to_owned(),
            reason: "is there already",
        });
    }
    Ok(())
}

/// Fails with DraftsPending while the request has drafts.
pub fn check_no_drafts(request: &RequestState) -> Result<(), Error> {
    if request.drafts.is_empty() {
        return Ok(());
    }
    let num_drafts = request.drafts.len() as i64;
    Err(Error::DraftsPending { request: request.name(), num_drafts })
}

/// Fails with DraftsPending while the request has scheduled drafts that were not yet accepted.
pub fn check_drafts_settled(request: &RequestState) -> Result<(), Error> {
    if request.num_computed > request.num_tokens() { check_no_drafts(request) } else { Ok(()) }
}

/// Fails with PlaceholdersPending while scheduled positions wait for tokens.
fn check_no_placeholders(request: &RequestState) -> Result<(), Error> {
    let num_placeholders = i64::from(request.num_output_placeholders());
    if num_placeholders == 0 {
        return Ok(());
    }
    Err(Error::PlaceholdersPending { request: request.name(), num_placeholders })
}

/// Put a request without tokens into a row of its own; returns the row.
pub(crate) fn empty_request(state: &mut State, request_id: &str) -> Row {
    let row = state.free_rows.pop().unwrap_or_else(|| {
        state.requests.push(None);
        state.epochs.push(0);
        Row((state.requests.len() - 1) as u32)
    });
    let num_groups = state.config.groups.len();
    let request_id: Arc<str> = request_id.into();
    state.rows.insert(Arc::clone(&request_id), row);
    state.requests[row.index()] = Some(RequestState {
        request_id,
        tables: smallvec![Table::new(); num_groups],
        num_cached: smallvec![0; num_groups],
        ..RequestState::default()
    });
    row
}

/// Add tokens, and the hashes of the blocks that they fill.
#[inline]
pub(crate) fn extend(state: &mut State, row: Row, tokens: &[u32]) {
    let size = state.hash_block_size as usize;
    let request = &mut state[row];
    request.tokens.extend_from_slice(tokens);
    if request.tokens.len() >= (request.block_hashes.len() + 1) * size {
        hash_new_blocks(state, row);
    }
}

/// Hash the blocks that are full and were not hashed yet.
pub(crate) fn hash_new_blocks(state: &mut State, row: Row) {
    let (root, size, hashing) = (state.root, state.hash_block_size, state.config.hashing);
    let caching = state.config.enable_caching;
    let request = &mut state[row];
    let start = request.block_hashes.len() * size as usize;
    if !caching || request.own_hashes || request.tokens.len() < start + size as usize {
        return;
    }
    let parent = request.block_hashes.last().copied().unwrap_or(root);
    let tokens = &request.tokens[start..];
    let extra_keys = request.extra_keys.as_deref().unwrap_or(&NO_EXTRA_KEYS);
    let hashes = &mut request.block_hashes;
    extend_chain(hashes, parent, tokens, (size, start as u32), extra_keys, hashing);
}

/// Add more of the engine's hashes. Fails with WrongBlockHashes.
pub(crate) fn extend_hashes(state: &mut State, row: Row, hashes: GivenHashes) -> Result<(), Error> {
    let request = &state[row];
    let num_full = request.tokens.len() / state.hash_block_size as usize;
    let most = num_full.saturating_sub(request.block_hashes.len());
    check_hashes(&request.request_id, request.own_hashes, most, &hashes)?;
    state[row].block_hashes.extend(hashes.into_iter().flatten());
    Ok(())
}

/// Fails with WrongBlockHashes unless a request with its own hashes can have these, within the
/// number that it still needs.
fn check_hashes(
    request_id: &str,
    own_hashes: bool,
    most: usize,
    hashes: &GivenHashes,
) -> Result<(), Error> {
    let reason = if !own_hashes {
        "it did not bring its own when it was added".to_owned()
    } else if hashes.len() > most {
        format!("its tokens fill {most} more blocks")
    } else if hashes.iter().any(Option::is_none) {
        format!("each must be {HASH_SIZE} bytes")
    } else {
        return Ok(());
    };
    let (request, num_hashes) = (request_id.to_owned(), hashes.len() as i64);
    Err(Error::WrongBlockHashes { request, num_hashes, reason })
}

fn check_tokens(request_id: &str, tokens: &[u32]) -> Result<(), Error> {
    if tokens.is_empty() {
        return Err(Error::EmptyTokens { request: request_id.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hashing::block_hash::{hash_block, hash_blocks, root_hash};
    use crate::state::state::make_state;
    use crate::transitions::batches::take_batch;
    use crate::types::config::Config;
    use crate::types::extra_inputs::ExtraKeys;
    use crate::types::keys::Hashing;

    fn state() -> State {
        make_state(Config::new(5, 2, b"seed")).unwrap()
    }

    #[test]
    fn a_hashed_block_is_not_hashed_again() {
        let mut grown = state();
        let row = add_request(&mut grown, Request::new("a", &[1, 2, 3])).unwrap();
        // Hashing the first block again would remove the mark.
        let entry = [7; HASH_SIZE];
        grown[row].block_hashes[0] = entry;
        add_tokens(&mut grown, "a", &[4]).unwrap();
        add_tokens(&mut grown, "a", &[5]).unwrap();
        let second = hash_block(&entry, &[3, 4], &[], Hashing::Sha256);
        assert_eq!(grown[row].block_hashes, [entry, second]);
    }

    #[test]
    fn the_chain_grows_with_the_tokens() {
        let mut grown = state();
        let row = add_request(&mut grown, Request::new("a", &[1])).unwrap();
        assert_eq!(grown[row].block_hashes.len(), 0);
        add_tokens(&mut grown, "a", &[2, 3]).unwrap();
        add_tokens(&mut grown, "a", &[4, 5]).unwrap();
        let root = root_hash(b"seed", Hashing::Sha256);
        let none = ExtraKeys::default();
        let expected: Vec<_> =
            hash_blocks(root, &[1, 2, 3, 4, 5], 2, 0, &none, Hashing::Sha256).collect();
        assert_eq!(grown[row].block_hashes, expected);
        assert_eq!(grown[row].tokens, [1, 2, 3, 4, 5]);
    }

    #[test]
    fn the_row_given_back_last_is_used_first() {
        let mut state = state();
        for (row, id) in ["a", "b", "c"].into_iter().enumerate() {
            assert_eq!(add_request(&mut state, Request::new(id, &[1])), Ok(Row(row as u32)));
        }
        remove_request(&mut state, "a").unwrap();
        remove_request(&mut state, "b").unwrap();
        assert_eq!(add_request(&mut state, Request::new("d", &[1])), Ok(Row(3)));
        take_batch(&mut state).unwrap();
        assert_eq!(add_request(&mut state, Request::new("e", &[1])), Ok(Row(1)));
        assert_eq!(add_request(&mut state, Request::new("f", &[1])), Ok(Row(0)));
        assert_eq!(add_request(&mut state, Request::new("g", &[1])), Ok(Row(4)));
    }

    #[test]
    fn misuse_is_named() {
        let mut state = state();
        add_request(&mut state, Request::new("a", &[1])).unwrap();
        let name = "a".to_owned();
        let repeated = Error::RepeatedRequest { request: name.clone(), reason: "is there already" };
        assert_eq!(add_request(&mut state, Request::new("a", &[1])), Err(repeated));
        assert_eq!(add_tokens(&mut state, "a", &[]), Err(Error::EmptyTokens { request: name }));
        let unknown = Error::UnknownRequest { request: "b".to_owned() };
        assert_eq!(remove_request(&mut state, "b"), Err(unknown));
        let empty = Error::EmptyRequestId { value: String::new() };
        assert_eq!(add_request(&mut state, Request::new("", &[1])), Err(empty));
    }
}
