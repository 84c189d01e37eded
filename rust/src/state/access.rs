// SPDX-License-Identifier: Apache-2.0
//! What may be read of a state and its requests from outside, and requests by their row.
//!
//! Rules: nothing is decided here; the fields themselves belong to the transitions.

use std::ops::{Index, IndexMut};

use crate::pool::block_pool::BlockPool;
use crate::state::state::{RequestState, State, request_mut};
use crate::types::config::Config;
use crate::types::effects::Effects;
use crate::types::errors::repr;
use crate::types::ids::{Row, Table};

impl RequestState {
    /// The id that the engine gave.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// The tokens, in order.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens of the request.
    #[must_use]
    pub fn num_tokens(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Guessed tokens behind them.
    #[must_use]
    pub fn num_drafts(&self) -> u32 {
        self.drafts.len() as u32
    }

    /// Tokens that are computed or scheduled.
    #[must_use]
    pub fn num_computed(&self) -> u32 {
        self.num_computed
    }

    /// Device block ids, one table a group.
    #[must_use]
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// The request's name in messages.
    #[must_use]
    pub fn name(&self) -> String {
        repr(&self.request_id)
    }
}

impl State {
    /// What the state was made for.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The device pool.
    #[must_use]
    pub fn device(&self) -> &BlockPool {
        &self.device
    }

    /// The host pool, where there is one.
    #[must_use]
    pub fn host(&self) -> Option<&BlockPool> {
        self.host.as_ref()
    }

    /// Commands and events that were not taken yet.
    #[must_use]
    pub fn effects(&self) -> &Effects {
        &self.effects
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
