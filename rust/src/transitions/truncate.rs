// SPDX-License-Identifier: Apache-2.0
//! Truncate: cut a request's tokens and chain (rejected drafts, rewritten history).
//!
//! Invariants: a cut request leaves the open batch. Blocks past the cut are released and keep their
//! keys; the block that contains the cut keeps its key until it is written again (`allocate.rs`).
//! Source: row 7 of kvcore/check/mutants/catalogue.py. Twin: kvcore/transitions/truncate.py.

use std::sync::Arc;

use crate::mutants::{Mutant, seeded};
use crate::state::state::State;
use crate::transitions::free::{check_leaving, cut_tables, leave_open_batch};
use crate::types::errors::Error;

/// Keep the first num_tokens (at least one) of a request's tokens.
///
/// Fails with UnknownRequest, SwappedOut, LoadUnfinished, BeyondRequest, HitInOpenBatch.
pub fn truncate(state: &mut State, request_id: &str, num_tokens: i64) -> Result<(), Error> {
    let row = state.idle(request_id)?;
    let most = i64::from(state[row].num_tokens());
    if !(1..=most).contains(&num_tokens) {
        let request = state[row].name();
        return Err(Error::BeyondRequest { request, num_tokens: most, requested: num_tokens });
    }
    check_leaving(state, &[row])?;
    leave_open_batch(state, row);
    let kept = num_tokens as u32;
    cut_tables(state, row, kept, 0);
    let (size, open) = (state.hash_block_size, state.batch.number);
    let request = &mut state[row];
    request.tokens.truncate(kept as usize);
    if !seeded(Mutant::TruncateKeepsHashes) {
        request.block_hashes.truncate((kept / size) as usize);
    }
    if let Some(extra_keys) = &mut request.extra_keys {
        *extra_keys = Arc::new(extra_keys.cut(kept, size));
    }
    request.await_none(open);
    state.settle_waiting(row);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transitions::tests::*;

    #[test]
    fn a_block_that_was_cut_loses_its_key_when_it_is_written_again() {
        let mut state = make_state(Config::new(5, 2, b"seed")).unwrap();
        let row = admit(&mut state, "a", &[1, 2, 3, 4], 4);
        take_batch(&mut state).unwrap();
        truncate(&mut state, "a", 3).unwrap();
        assert!(state.device.key(BlockId(2)).is_some());
        append(&mut state, Requests::Ids(&["a"]), &[9]).unwrap();
        let commands = commands(&state);
        assert!(matches!(commands[..], [Command::Evict { block: BlockId(2), .. }]), "{commands:?}");
        assert_eq!(state.device.key(BlockId(2)), Some(&state[row].key(1, 0, 1)));
    }

    #[test]
    fn a_cut_outside_the_request_is_misuse() {
        let mut state = make_state(Config::new(5, 2, b"seed")).unwrap();
        add_request(&mut state, Request::new("a", &[1, 2])).unwrap();
        for requested in [0, 3, -1] {
            let request = "a".to_owned();
            let beyond = Error::BeyondRequest { request, num_tokens: 2, requested };
            assert_eq!(truncate(&mut state, "a", requested), Err(beyond));
        }
    }
}
