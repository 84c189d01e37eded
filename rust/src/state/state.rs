// SPDX-License-Identifier: Apache-2.0
//! The state: pools, requests and the open batch.
//!
//! Invariants: a transition is a function of `&mut State` that checks all its arguments before it
//! changes anything. Per-block data are columns; what can be derived is not stored. A request waits
//! (no tables), runs (device tables) or is swapped out (host tables); this is read from its tables,
//! not stored. Inside the twin a request is named by its row.
//! Twin: kvcore/state/state.py.

mod kept;
pub mod named_pins;
pub mod samplers;

use std::collections::BTreeMap;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};
use smallvec::SmallVec;

use crate::hashing::block_hash::root_hash;
use crate::pool::block_pool::{BlockPool, make_device, make_pool};
use crate::state::batch_records::{BatchInFlight, Samplers, UnconfirmedLoad};
use crate::state::new_blocks::NewBlocks;
use crate::state::open_batch::OpenBatch;
use crate::state::state::named_pins::NamedPins;
use crate::types::clone_in_place::clone_in_place;
use crate::types::config::Config;
use crate::types::effects::Effects;
use crate::types::errors::Error;
use crate::types::extra_inputs::{ExtraKeys, NO_EXTRA_KEYS};
use crate::types::groups::Group;
use crate::types::ids::{BlockId, Row, Table};
use crate::types::keys::{BlockHash, Key, make_key};
use crate::types::memory::check_memory;
use crate::types::policies::Waiting;
use crate::types::retention::Wishes;
use crate::types::values::{PrefixCacheStats, Status};

/// Entry of a device table for a block that no query sees any more.
pub const NULL_BLOCK: BlockId = BlockId(0);
/// Entry of a host table in place of the null block.
pub const NO_HOST_BLOCK: BlockId = BlockId(u32::MAX);
/// The greatest number of an operation.
pub const MAX_OPERATION: u32 = (1 << 31) - 1;

clone_in_place! {
    /// A request as the manager knows it.
    ///
    /// The first 64 bytes are what most decode tokens read and change: one cache line of a request.
    #[derive(Debug, Default)]
    #[repr(C, align(64))]
    pub struct RequestState {
        /// The accepted tokens.
        pub(crate) tokens: Vec<u32>,
        pub(crate) num_computed: u32,
        /// Computed count up to which appends change only that count (`fast_path.rs`); not encoded.
        pub(crate) quiet_until: u32,
        /// The state's num_pins when that number was determined; inverted if the next of these
        /// appends also gives back a state.
        pub(crate) quiet_since: u64,
        /// The first batch whose output still belongs to it.
        pub(crate) output_from: u64,
        /// Number of tokens up to which the same holds.
        pub(crate) quiet_tokens: u32,
        /// Computed count up to which each next slot is there, and can be written in place, unless
        /// `quiet_until` is 0; not encoded.
        pub(crate) slots_until: u32,
        /// The hashes of its full blocks, at the config's hash_block_size; computed from the
        /// tokens, or supplied by the engine.
        pub(crate) block_hashes: Vec<BlockHash>,
        /// Device block ids, one table per group; no longer needed ones are the null block.
        pub(crate) tables: SmallVec<[Table; 2]>,
        /// Leading blocks of each table that need no publication any more; in a state group, the
        /// null blocks at its start.
        pub(crate) num_cached: SmallVec<[u32; 4]>,
        /// The batches whose output it awaits, oldest first, if they are recorded (`samplers.rs`).
        pub(crate) samplers: Samplers,
        pub(crate) request_id: Arc<str>,
        /// Guessed tokens behind the accepted ones.
        pub(crate) drafts: Vec<u32>,
        /// The tables in the host tier while swapped out, else empty.
        pub(crate) host_tables: Vec<Table>,
        /// None without extra keys, as in most requests.
        pub(crate) extra_keys: Option<Arc<ExtraKeys>>,
        /// Number of its unfinished loads.
        pub(crate) num_loading: u32,
        /// Number of tokens before the first failed load.
        pub(crate) load_end: u32,
        /// Whether the engine supplies the hashes.
        pub(crate) own_hashes: bool,
        /// Whether it never hits.
        pub(crate) skip_reading: bool,
        pub(crate) preempted: bool,
    }
}

// An odd number of cache lines: with four, the first lines of many requests would fall into a
// quarter of a cache's sets.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<RequestState>() == 5 * 64);

impl RequestState {
    /// The extra keys of the request.
    #[must_use]
    pub fn extra_keys(&self) -> &ExtraKeys {
        self.extra_keys.as_deref().unwrap_or(&NO_EXTRA_KEYS)
    }

    /// Whether the request has device blocks.
    #[must_use]
    pub fn holds_blocks(&self) -> bool {
        self.tables.iter().any(|table| !table.is_empty())
    }

    /// The tier of the request's blocks.
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

    /// Computed tokens that are known and not drafts.
    #[must_use]
    pub fn num_accepted(&self) -> u32 {
        self.num_computed.min(self.num_tokens())
    }

    /// Scheduled positions whose tokens are not yet known.
    #[must_use]
    pub fn num_output_placeholders(&self) -> u32 {
        if self.drafts.is_empty() { self.num_computed - self.num_accepted() } else { 0 }
    }

    /// Computed drafts that were neither accepted nor dropped.
    #[must_use]
    pub fn num_scheduled_drafts(&self) -> u32 {
        if self.drafts.is_empty() { 0 } else { self.num_computed - self.num_accepted() }
    }

    /// Tokens of which the request has the state: the computed ones, without drafts.
    #[must_use]
    pub fn state_count(&self) -> u32 {
        self.num_computed - self.num_scheduled_drafts()
    }

    /// Leading blocks of a group's table that have a hash. scale: the group's.
    #[must_use]
    pub fn num_hashed(&self, scale: u32) -> u32 {
        self.block_hashes.len() as u32 / scale
    }

    /// Return the key of a full block, whose last hash also covers all tokens before.
    ///
    /// scale: the group's.
    #[must_use]
    pub fn key(&self, scale: u32, group_id: u32, position: u32) -> Key {
        let last = (position + 1) * scale - 1;
        make_key(&self.block_hashes[last as usize], group_id)
    }

    /// Return the key of the state after a number of tokens, a multiple of the config's
    /// hash_block_size.
    #[must_use]
    pub fn key_at(&self, hash_block_size: u32, group_id: u32, num_tokens: u32) -> Key {
        make_key(&self.block_hashes[(num_tokens / hash_block_size - 1) as usize], group_id)
    }
}

/// An unfinished store or load; it holds its block as a pin does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    pub(crate) block: BlockId,
    pub(crate) key: Key,
    /// The number of the batch with its command.
    pub(crate) batch: u64,
    /// The request that waits for it; None for a store, and if the request was freed since.
    pub(crate) request: Option<Row>,
    /// Position of the block's first token, for a load.
    pub(crate) first_token: u32,
}

clone_in_place! {
    /// The whole state of a manager.
    #[derive(Debug)]
    pub struct State {
        pub(crate) config: Config,
        /// The parent of each request's first block; derived from the seed.
        pub(crate) root: BlockHash,
        /// Number of tokens per block hash; derived from the config.
        pub(crate) hash_block_size: u32,
        /// Every hit is a multiple of this number of tokens; derived from the config.
        pub(crate) hit_alignment: u32,
        /// Whether any group gives back blocks; derived from the groups.
        pub(crate) has_windows: bool,
        /// Whether any group keeps recurrent states; derived from the groups.
        pub(crate) has_states: bool,
        /// Whether hits may end inside blocks; derived from the config.
        pub(crate) has_tails: bool,
        /// Whether the taking of a batch gives keys: to states, or to parts of blocks.
        pub(crate) has_late_keys: bool,
        /// Number of hashes per block, for each group.
        pub(crate) scales: Vec<u32>,
        pub(crate) device: BlockPool,
        pub(crate) host: Option<BlockPool>,
        /// The request in each row, None if it has none.
        pub(crate) requests: Vec<Option<RequestState>>,
        pub(crate) rows: HashMap<Arc<str>, Row>,
        /// The number of the current epoch of weights.
        pub(crate) epoch: u32,
        /// The epoch in which the request in each row began to count, if it counts tokens.
        pub(crate) epochs: Vec<u32>,
        /// How long the content of each request should stay cached.
        pub(crate) wishes: Wishes,
        /// Rows to use again, in the order in which they were given back.
        pub(crate) free_rows: Vec<Row>,
        /// Rows to use again once a batch is finished, each with its number, in the same order.
        pub(crate) held_rows: Vec<(Row, u64)>,
        pub(crate) batch: OpenBatch,
        /// The open batch's commands, and the events that are not yet drained.
        pub(crate) effects: Effects,
        /// The effects of the host pool, which are not read.
        pub(crate) host_effects: Effects,
        pub(crate) stats: PrefixCacheStats,
        pub(crate) new_blocks: NewBlocks,
        pub(crate) operations: BTreeMap<u32, Operation>,
        pub(crate) next_operation: u32,
        /// Taken batches that are neither completed nor cancelled, oldest first.
        pub(crate) in_flight: Vec<Arc<BatchInFlight>>,
        /// External loads that may still fail.
        pub(crate) loads: Vec<UnconfirmedLoad>,
        /// Waiting requests, for policies that depend on what they will look up.
        pub(crate) waiting: Option<Box<Waiting>>,
        pub(crate) named_pins: NamedPins,
        /// Number of calls of `pin` so far; not encoded.
        pub(crate) num_pins: u64,
    }
}

/// The empty state of a configuration. Fails with InvalidConfig, PoolTooLarge.
pub fn make_state(config: Config) -> Result<State, Error> {
    config.check()?;
    let (hosts, waits) = (config.num_host_blocks, config.max_in_flight > 0);
    check_memory(u64::from(config.num_blocks) + u64::from(hosts))?;
    let num_groups = config.groups.len();
    let mut state = State {
        root: root_hash(&config.hash_seed, config.hashing),
        hash_block_size: 0,
        hit_alignment: 0,
        has_windows: config.groups.iter().any(Group::is_windowed),
        has_states: config.groups.iter().any(Group::is_state),
        has_tails: false,
        has_late_keys: false,
        scales: Vec::new(),
        device: make_device(&config),
        host: (hosts > 0).then(|| make_pool(hosts, false, config.eviction.of_host(), waits)),
        requests: Vec::new(),
        epoch: config.epoch,
        epochs: Vec::new(),
        wishes: Wishes::default(),
        rows: HashMap::new(),
        free_rows: Vec::new(),
        held_rows: Vec::new(),
        batch: OpenBatch::default(),
        effects: Effects::new(config.enable_events),
        host_effects: Effects::silent(),
        stats: PrefixCacheStats::default(),
        new_blocks: NewBlocks::new(num_groups),
        operations: BTreeMap::new(),
        next_operation: 0,
        in_flight: Vec::new(),
        loads: Vec::new(),
        waiting: config.eviction.sees_waiting().then(Box::default),
        named_pins: NamedPins::new(),
        num_pins: 0,
        config,
    };
    state.derive();
    Ok(state)
}

impl State {
    /// Derive what depends on the tokens of a block hash.
    pub(crate) fn derive(&mut self) {
        let config = &self.config;
        self.hash_block_size = config.hash_block_size();
        self.hit_alignment = config.hit_alignment();
        self.has_tails = config.has_tails();
        self.has_late_keys = self.has_tails || self.has_states;
        self.scales = (0..config.groups.len() as u32).map(|group| config.scale(group)).collect();
    }

    /// The row of the request of this id. Fails with UnknownRequest.
    pub fn request(&self, request_id: &str) -> Result<Row, Error> {
        let unknown = || Error::UnknownRequest { request: request_id.to_owned() };
        self.rows.get(request_id).copied().ok_or_else(unknown)
    }

    /// The row of the request of this id, which is not swapped out. Fails with UnknownRequest,
    /// SwappedOut.
    pub fn on_device(&self, request_id: &str) -> Result<Row, Error> {
        let row = self.request(request_id)?;
        self.check_on_device(row)?;
        Ok(row)
    }

    /// Fails with SwappedOut if the request in this row is in the host tier.
    pub(crate) fn check_on_device(&self, row: Row) -> Result<(), Error> {
        if self[row].host_tables.is_empty() {
            return Ok(());
        }
        Err(Error::SwappedOut { request: self[row].name() })
    }

    /// The row of the request of this id, on the device and without unfinished loads.
    ///
    /// Fails with UnknownRequest, SwappedOut, LoadUnfinished.
    pub fn idle(&self, request_id: &str) -> Result<Row, Error> {
        let row = self.request(request_id)?;
        self.check_idle(row)?;
        Ok(row)
    }

    /// Fails with SwappedOut or LoadUnfinished if the request in this row cannot be scheduled.
    pub(crate) fn check_idle(&self, row: Row) -> Result<(), Error> {
        self.check_on_device(row)?;
        let request = &self[row];
        if request.num_loading == 0 {
            return Ok(());
        }
        let num_operations = i64::from(request.num_loading);
        Err(Error::LoadUnfinished { request: request.name(), num_operations })
    }

    /// The rows of the requests of these ids. Fails with UnknownRequest, RepeatedRequest.
    pub fn distinct(&self, request_ids: &[&str]) -> Result<Vec<Row>, Error> {
        let mut rows = Vec::with_capacity(request_ids.len());
        let mut seen = HashSet::new();
        for &request_id in request_ids {
            let row = self.request(request_id)?;
            if !seen.insert(row) {
                let (request, reason) = (request_id.to_owned(), "is named twice in one call");
                return Err(Error::RepeatedRequest { request, reason });
            }
            rows.push(row);
        }
        Ok(rows)
    }

    /// The host pool. Fails with NoHostTier.
    pub fn host_tier(&self) -> Result<&BlockPool, Error> {
        self.host.as_ref().ok_or(Error::NoHostTier {})
    }

    /// The host pool and its effects, if a request is there or going there.
    pub(crate) fn host_parts(&mut self) -> (&mut BlockPool, &mut Effects) {
        let host = self.host.as_mut().expect("TIER-PART: host tables need a host tier");
        (host, &mut self.host_effects)
    }

    /// The hash that the next block of a request continues, behind `num_hashed` hashed ones.
    #[must_use]
    pub fn parent_hash(&self, row: Row, num_hashed: usize) -> BlockHash {
        match num_hashed.checked_sub(1) {
            Some(last) => self[row].block_hashes[last],
            None => self.root,
        }
    }
}

/// The request in a row, while other parts of the state are borrowed.
pub(crate) fn request_mut(requests: &mut [Option<RequestState>], row: Row) -> &mut RequestState {
    requests[row.index()].as_mut().expect("ROWS: a row in use has a request")
}
