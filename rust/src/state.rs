// SPDX-License-Identifier: Apache-2.0
//! The state: pools, requests and the open batch.
//!
//! Rules: a transition is a function of `&mut State` that checks all it is given before it changes
//! anything. Per-block data are columns; what can be derived is not stored. A request waits (no
//! tables), runs (device tables) or is swapped out (host tables); that is read from its tables, not
//! stored. Inside the twin a request is named by its row. Twin: kvcore/state.py.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::block_pool::{BlockPool, make_pool};
use crate::config::Config;
use crate::effects::Effects;
use crate::errors::{Error, repr};
use crate::hashing::{BlockHash, Hashing, Key, make_key, root_hash};
use crate::ids::{BlockId, Row};
use crate::values::{PrefixCacheStats, Status};

/// The blocks of a request in one group, in order.
pub type Table = Vec<BlockId>;

/// A request as the manager knows it.
#[derive(Debug, Clone)]
pub struct RequestState {
    pub(crate) request_id: Arc<str>,
    pub(crate) tokens: Vec<u32>,
    /// Of its full blocks, grown with the tokens.
    pub(crate) block_hashes: Vec<BlockHash>,
    pub(crate) num_computed: u32,
    /// Device block ids, one table a group.
    pub(crate) tables: Vec<Table>,
    /// Leading blocks of each table that need no publication any more.
    pub(crate) num_cached: Vec<u32>,
    /// The tables in the host tier while swapped out, else empty.
    pub(crate) host_tables: Vec<Table>,
    pub(crate) preempted: bool,
}

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

    /// Whether the request has device blocks.
    #[must_use]
    pub fn holds_blocks(&self) -> bool {
        self.tables.iter().any(|table| !table.is_empty())
    }

    /// Where the request's blocks are.
    #[must_use]
    pub fn status(&self) -> Status {
        if !self.host_tables.is_empty() {
            Status::Swapped
        } else if self.holds_blocks() {
            Status::Running
        } else {
            Status::Waiting
        }
    }

    /// The key of the full block at a position.
    #[must_use]
    pub fn key(&self, position: u32, group: u32) -> Key {
        make_key(&self.block_hashes[position as usize], group)
    }

    /// The request's name in messages.
    #[must_use]
    pub fn name(&self) -> String {
        repr(&self.request_id)
    }
}

/// A key that the open batch published for content that the batch itself writes.
#[derive(Debug, Clone)]
pub struct Published {
    pub(crate) group: u32,
    pub(crate) position: u32,
    pub(crate) block: BlockId,
    pub(crate) key: Key,
}

/// What the open batch did for a request that it schedules.
#[derive(Debug, Clone)]
pub struct BatchRecord {
    /// The count before the request's first slots in the batch, and before its hits.
    pub(crate) num_computed_before: u32,
    pub(crate) published: Vec<Published>,
}

/// A full block whose key another block held when it was filled (`Duplicates::Merge`).
#[derive(Debug, Clone)]
pub struct Merge {
    pub(crate) request_id: Arc<str>,
    pub(crate) group: u32,
    pub(crate) position: u32,
    pub(crate) block: BlockId,
    pub(crate) key: Key,
}

/// The batch that is being filled; its commands are in the state's effects.
#[derive(Debug, Clone, Default)]
pub struct OpenBatch {
    pub(crate) number: u64,
    pub(crate) records: HashMap<Row, BatchRecord, FxBuildHasher>,
    pub(crate) merges: Vec<Merge>,
}

/// Everything that a manager knows.
#[derive(Debug, Clone)]
pub struct State {
    pub(crate) config: Config,
    /// The parent of each request's first block; made from the seed once.
    pub(crate) root: BlockHash,
    pub(crate) device: BlockPool,
    pub(crate) host: Option<BlockPool>,
    /// The request in each row, None where the row is free.
    pub(crate) requests: Vec<Option<RequestState>>,
    pub(crate) rows: HashMap<Arc<str>, Row>,
    /// Rows to use again, in the order in which they were given back.
    pub(crate) free_rows: Vec<Row>,
    pub(crate) batch: OpenBatch,
    /// The open batch's commands, and the events that are not yet drained.
    pub(crate) effects: Effects,
    /// The host pool's, which nobody reads.
    pub(crate) host_effects: Effects,
    pub(crate) stats: PrefixCacheStats,
}

/// The empty state of a configuration. Fails with InvalidConfig.
pub fn make_state(config: Config) -> Result<State, Error> {
    config.check()?;
    let hosts = config.num_host_blocks;
    Ok(State {
        root: root_hash(&config.hash_seed, Hashing::Sha256),
        device: make_pool(config.num_blocks, config.null_block, config.eviction),
        host: (hosts > 0).then(|| make_pool(hosts, false, config.eviction)),
        requests: Vec::new(),
        rows: HashMap::new(),
        free_rows: Vec::new(),
        batch: OpenBatch::default(),
        effects: Effects::new(config.enable_events),
        host_effects: Effects::silent(),
        stats: PrefixCacheStats::default(),
        config,
    })
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

    /// The requests, in row order.
    pub fn requests(&self) -> impl Iterator<Item = &RequestState> {
        self.requests.iter().flatten()
    }

    /// The row of the request of this id. Fails with UnknownRequest.
    pub fn request(&self, request_id: &str) -> Result<Row, Error> {
        let known = self.rows.get(request_id).copied();
        known.ok_or_else(|| Error::UnknownRequest { request: repr(request_id) })
    }

    /// The row of the request of this id, which is not swapped out. Fails with UnknownRequest,
    /// SwappedOut.
    pub fn on_device(&self, request_id: &str) -> Result<Row, Error> {
        let row = self.request(request_id)?;
        self.check_on_device(row)?;
        Ok(row)
    }

    /// Fails with SwappedOut where the request in this row is in the host tier.
    pub(crate) fn check_on_device(&self, row: Row) -> Result<(), Error> {
        let request = &self[row];
        if request.host_tables.is_empty() {
            return Ok(());
        }
        Err(Error::SwappedOut { request: request.name() })
    }

    /// The rows of the requests of these ids. Fails with UnknownRequest, RepeatedRequest.
    pub fn distinct(&self, request_ids: &[&str]) -> Result<Vec<Row>, Error> {
        let mut rows = Vec::with_capacity(request_ids.len());
        let mut seen = hashbrown::HashSet::new();
        for &request_id in request_ids {
            let row = self.request(request_id)?;
            if !seen.insert(row) {
                return Err(Error::RepeatedRequest { request: repr(request_id) });
            }
            rows.push(row);
        }
        Ok(rows)
    }

    /// The host pool. Fails with NoHostTier.
    pub fn host_tier(&self) -> Result<&BlockPool, Error> {
        self.host.as_ref().ok_or(Error::NoHostTier {})
    }

    /// The host pool and its effects, where a request is there or going there.
    pub(crate) fn host_parts(&mut self) -> (&mut BlockPool, &mut Effects) {
        let host = self.host.as_mut().expect("TIER-PART: host tables need a host tier");
        (host, &mut self.host_effects)
    }

    /// The hash that the block at a position continues.
    #[must_use]
    pub fn parent_hash(&self, row: Row, position: u32) -> BlockHash {
        match position.checked_sub(1) {
            Some(before) => self[row].block_hashes[before as usize],
            None => self.root,
        }
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

/// The request in a row, while other parts of the state are borrowed.
pub(crate) fn request_mut(requests: &mut [Option<RequestState>], row: Row) -> &mut RequestState {
    requests[row.index()].as_mut().expect("ROWS: a row in use has a request")
}
