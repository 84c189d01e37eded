// SPDX-License-Identifier: Apache-2.0
//! Levels: how long content stays cached, as the requests that computed or hit it wish.
//!
//! Invariants: the core has no clock: the engine passes the time, which never falls. A level only
//! orders evictions and never refuses a call. Twin: kvcore/transitions/retention.py.

use crate::state::state::State;
use crate::types::errors::Error;
use crate::types::ids::Row;
use crate::types::retention::{
    DEFAULT_STEPS, Piece, Step, TIME_MAX, join_steps, steps_of, wishes_of,
};

/// Advance the time, in ms since any moment: free blocks whose level has ended go to their base
/// level.
///
/// Under another policy the time has no effect, and is not kept. Fails with TimeWentBack.
pub fn tick(state: &mut State, now_ms: i64) -> Result<(), Error> {
    let current = state.device.now() as i64;
    if !(current..=TIME_MAX as i64).contains(&now_ms) {
        return Err(Error::TimeWentBack { now_ms, current, most: TIME_MAX as i64 });
    }
    state.device.tick(now_ms as u64);
    Ok(())
}

/// Add wishes to those of a request, for blocks that it releases from now on.
///
/// A range without an end ends with the request's current tokens. Fails with UnknownRequest.
pub fn extend_retention(
    state: &mut State,
    request_id: &str,
    pieces: &[Piece],
) -> Result<(), Error> {
    let row = state.request(request_id)?;
    let more = steps_of(pieces, state[row].num_tokens());
    let steps = join_steps(wishes_of(&state.wishes, row), &more);
    set_wishes(state, row, steps);
    Ok(())
}

/// Set the wishes of a request if the policy uses them; the defaults are not stored.
pub(crate) fn set_wishes(state: &mut State, row: Row, steps: Vec<Step>) {
    if state.device.retention.is_none() || steps == DEFAULT_STEPS {
        state.wishes.remove(&row);
    } else {
        state.wishes.insert(row, steps);
    }
}
