// SPDX-License-Identifier: Apache-2.0
//! The parts of a state and its requests that may be read from outside, and requests by row.
//!
//! Nothing is decided here; the fields belong to the transitions.

use std::ops::{Index, IndexMut};

use crate::pool::block_pool::BlockPool;
use crate::state::state::{RequestState, State, request_mut};
use crate::types::config::Duplicates;
use crate::types::ids::{BlockId, Row};

impl RequestState {
    /// Tokens of the request.
    #[must_use]
    pub fn num_tokens(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Number of drafts behind the tokens.
    #[must_use]
    pub fn num_drafts(&self) -> u32 {
        self.drafts.len() as u32
    }

    /// The request's name in messages.
    #[must_use]
    pub fn name(&self) -> String {
        self.request_id.to_string()
    }
}

impl State {
    /// The tenant for which a request takes blocks; 0 if it has no floor.
    pub(crate) fn tenant(&self, row: Row) -> u8 {
        self.config.tenant_of(self[row].extra_keys().cache_salt.as_deref())
    }

    /// The device pool.
    #[must_use]
    pub fn device(&self) -> &BlockPool {
        &self.device
    }

    /// Whether a table's entry is the null block.
    #[must_use]
    pub fn is_null(&self, block: BlockId) -> bool {
        self.device.is_null(block)
    }

    /// Whether a block can rest on a load: it has a key, or a batch owes it one.
    pub(crate) fn rests(&self, block: BlockId) -> bool {
        let mut owed = self.in_flight.iter().flat_map(|batch| &batch.owed);
        self.device.has_key(block) || owed.any(|owed| owed.block == block)
    }

    /// Whether the request in this row counts tokens that were computed with older weights.
    #[must_use]
    #[inline]
    pub fn is_stale(&self, row: Row) -> bool {
        self.epochs[row.index()] < self.epoch && self[row].num_computed > 0
    }

    /// Whether blocks get keys without merges, and without notes on loads or for a policy.
    pub(crate) fn has_plain_keys(&self) -> bool {
        let merges = self.config.duplicates == Duplicates::Merge;
        !merges && self.loads.is_empty() && self.device.policy.is_none()
    }

    /// The epoch in which the request in this row began to count; 0 if it counts nothing.
    #[must_use]
    pub fn epoch_of(&self, row: Row) -> u32 {
        let counts = self.requests[row.index()].as_ref().is_some_and(|each| each.num_computed > 0);
        if counts { self.epochs[row.index()] } else { 0 }
    }

    /// The numbers of the batches in flight, oldest first.
    pub fn in_flight(&self) -> impl Iterator<Item = u64> + '_ {
        self.in_flight.iter().map(|batch| batch.number)
    }

    /// The requests, in row order.
    pub fn requests(&self) -> impl Iterator<Item = &RequestState> {
        self.requests.iter().flatten()
    }
}

impl Index<Row> for State {
    type Output = RequestState;

    fn index(&self, row: Row) -> &RequestState {
        self.requests[row.index()].as_ref().expect("ROWS: a row in use has a request")
    }
}

impl IndexMut<Row> for State {
    fn index_mut(&mut self, row: Row) -> &mut RequestState {
        request_mut(&mut self.requests, row)
    }
}
