// SPDX-License-Identifier: Apache-2.0
//! What a step writes: positions of a request, and the encoder's run beside them.
//!
//! A part of schedule.rs.

use crate::oracle::calls::Name;
use crate::types::ids::Row;

/// What a request's cross-attention tables hold: this many tokens of one encoder's run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoder {
    /// Of the run.
    pub number: u32,
    /// The tokens.
    pub num_tokens: u32,
}

/// Positions [start, end) of a request that a step writes; rubbish up to num_slots.
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
}

impl Write {
    /// The write of one token.
    #[must_use]
    pub fn of_next_token(name: Name, row: Row, start: u32) -> Self {
        let (loaded, end) = (start, start + 1);
        Write { name, row, start, loaded, end, num_slots: end, encoder: None, failed: None }
    }
}

/// A first position behind drafts that were rejected, which were behind this many tokens.
pub(crate) fn moved_up(first: u32, known: u32, count: u32) -> u32 {
    if first > known { first - count } else { first }
}
