// SPDX-License-Identifier: Apache-2.0
//! What a step writes: positions of a request, and the encoder's run beside them.

use crate::oracle::calls::Name;
use crate::state::state::{RequestState, State};
use crate::types::ids::Row;

/// What a request's cross-attention tables hold: this many tokens of one encoder's run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoder {
    /// Of the run.
    pub number: u32,
    /// The tokens.
    pub num_tokens: u32,
}

/// Positions [start, end) of a request that a step writes; rubbish follows up to num_slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// The request.
    pub name: Name,
    /// Its row.
    pub row: Row,
    /// The first position.
    pub start: u32,
    /// Up to there they come from elsewhere; the queries stand behind.
    pub loaded: u32,
    /// The position behind the last token.
    pub end: u32,
    /// The position behind the last slot.
    pub num_slots: u32,
    /// What fills the cross-attention tables in this step.
    pub encoder: Option<Encoder>,
    /// The first position that a load did not bring.
    pub failed: Option<u32>,
    /// How many positions at the end are drafts, each with a state of its own.
    pub num_drafts: u32,
    /// How many positions behind the end are drafts that the device did not accept, which the state
    /// after the step includes.
    pub num_rejected: u32,
    /// Whether it was planned behind positions to come: if drafts among these are not accepted, its
    /// state is worth nothing.
    pub ahead: bool,
}

impl Write {
    /// The write up to this end; positions behind the request's tokens are drafts if it has any.
    #[must_use]
    pub(crate) fn with_drafts(self, request: &RequestState, end: u32) -> Self {
        let beyond = end.saturating_sub(request.num_tokens());
        Write { end, num_drafts: if request.drafts.is_empty() { 0 } else { beyond }, ..self }
    }

    /// The tokens of the state after the step, without drafts that have states of their own.
    pub(crate) fn num_in_state(&self) -> u32 {
        self.end + self.num_rejected - self.num_drafts
    }

    /// The write of one token.
    #[must_use]
    pub fn of_next_token(name: Name, row: Row, start: u32) -> Self {
        Write {
            name,
            row,
            start,
            loaded: start,
            end: start + 1,
            num_slots: start + 1,
            encoder: None,
            failed: None,
            num_drafts: 0,
            num_rejected: 0,
            ahead: false,
        }
    }
}

/// A first position behind drafts that were rejected, which were behind this many tokens.
pub(crate) fn moved_up(first: u32, known: u32, count: u32) -> u32 {
    if first > known { first - count } else { first }
}

/// Leave out a request's positions from num_tokens on, lookahead slots too.
pub fn shorten(writes: &mut Vec<Write>, row: Row, num_tokens: u32) {
    writes.retain(|write| write.row != row || write.start < num_tokens);
    for write in writes.iter_mut().filter(|write| write.row == row) {
        write.end = write.end.min(num_tokens);
        write.num_slots = write.num_slots.min(num_tokens);
    }
}

/// What the cross-attention tables of a state's request hold, full to the last slot: two that share
/// their first block hold the same.
pub(crate) fn encoder_of(state: &State, row: Row) -> Option<Encoder> {
    let request = &state[row];
    let on_device = request.host_tables.is_empty();
    let tables = if on_device { &request.tables[..] } else { &request.host_tables };
    let held = state.config.groups.iter().zip(tables);
    let mut held = held.filter(|(group, table)| group.is_cross() && !table.is_empty());
    let (group, table) = held.next_back()?;
    let num_tokens = table.len() as u32 * group.block_size;
    Some(Encoder { number: 2 * (1 + table[0].0), num_tokens })
}

/// The rows, each where it comes first.
pub(crate) fn each_once(rows: impl Iterator<Item = Row>) -> Vec<Row> {
    let mut found = Vec::new();
    rows.for_each(|row| {
        if !found.contains(&row) {
            found.push(row)
        }
    });
    found
}
