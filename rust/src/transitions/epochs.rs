// SPDX-License-Identifier: Apache-2.0
//! Epochs of weights: new weights without a flush.
//!
//! Invariants: a batch runs with the weights of the epoch in which it is taken. A key belongs to
//! one epoch, and look-ups find only those of the current one. A request belongs to the epoch in
//! which its count began. A request of an older epoch is stale: it keeps its blocks and goes on,
//! but does not publish, hit or load anything until its count is 0 and it is admitted again.
//! Twin: kvcore/transitions/epochs.py.

use crate::state::state::State;
use crate::transitions::in_flight::give_back;
use crate::types::config::MAX_EPOCH;
use crate::types::errors::{Error, Field};
use crate::types::events::News;
use crate::types::ids::Row;

/// Begin an epoch of new weights, the next one or a given later one; returns its number. Batches
/// that were taken run with the previous weights, and may be in flight. Content from before is not
/// findable any more; blocks stay where they are, and free ones are taken first. Fails with
/// EpochWentBack, InOpenBatch if the open batch schedules a request or has a store or load.
pub fn advance_epoch(state: &mut State, epoch: Option<i64>) -> Result<u32, Error> {
    let least = i64::from(state.epoch) + 1;
    let number = epoch.unwrap_or(least);
    if !(least..=MAX_EPOCH.into()).contains(&number) {
        let current = state.epoch.into();
        return Err(Error::EpochWentBack { epoch: number, current, least, most: MAX_EPOCH.into() });
    }
    check_open_batch(state)?;
    state.epoch = number as u32;
    state.batch.starts_epoch = true;
    state.device.start_epoch(&mut state.effects);
    if state.has_states {
        give_back(state, |_| true);
    }
    state.effects.announce(&News::AllBlocksCleared);
    Ok(state.epoch)
}

/// The rows of the requests that count tokens computed with older weights, rising.
pub fn stale_requests(state: &State) -> impl Iterator<Item = Row> + '_ {
    let rows = (0..).map(Row).zip(&state.requests);
    rows.filter(|&(row, request)| request.is_some() && state.is_stale(row)).map(|(row, _)| row)
}

/// Fails with InOpenBatch if the open batch computes, stores or loads something.
fn check_open_batch(state: &State) -> Result<(), Error> {
    if let Some(row) = state.batch.scheduled.keys().min() {
        let value = Field::Text(state[row].name());
        return Err(Error::InOpenBatch { kind: "request", value });
    }
    if state.operations.is_empty() {
        return Ok(());
    }
    let mut operations = state.operations.iter();
    match operations.find(|(_, each)| each.batch == state.batch.number) {
        Some((&number, _)) => Err(Error::InOpenBatch { kind: "operation", value: number.into() }),
        None => Ok(()),
    }
}
