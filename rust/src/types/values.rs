// SPDX-License-Identifier: Apache-2.0
//! What calls take and give back: requests, hits, blocks, refusals, statistics.
//!
//! Invariants: all values compare by content. A refusal is one of these values, never an error.
//! Twin: kvcore/types/values.py.

use crate::types::extra_inputs::GivenKeys;
use crate::types::ids::BlockId;
use crate::types::keys::BlockHash;
use crate::types::retention::Piece;

/// Why a call was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Retry when blocks were given back.
    Later,
    /// More than an empty pool can give this call.
    Never,
}

/// The answer of `can_allocate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It would succeed now.
    Ok,
    /// It would be refused now.
    Later,
    /// It would be refused on an empty pool.
    Never,
}

/// The tier of a request's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It holds none.
    Waiting,
    /// On the device.
    Running,
    /// In the host tier.
    Swapped,
}

impl Status {
    /// The status as engines read it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Status::Waiting => "waiting",
            Status::Running => "running",
            Status::Swapped => "swapped",
        }
    }
}

/// A request as an engine passes it.
#[derive(Debug, Clone, Default)]
pub struct Request<'a> {
    /// A name of its own, not empty.
    pub request_id: &'a str,
    /// At least one token id.
    pub tokens: Vec<u32>,
    /// What its keys hold besides its tokens.
    pub extra_keys: GivenKeys<'a>,
    /// The engine's own hashes of full blocks, in order; None: the core hashes.
    pub block_hashes: Option<GivenHashes>,
    /// It never hits, but publishes.
    pub skip_reading_prefix_cache: bool,
    /// How long its content should stay cached.
    pub retention: Option<Vec<Piece>>,
}

impl<'a> Request<'a> {
    /// A request of these tokens and nothing else.
    #[must_use]
    pub fn new(request_id: &'a str, tokens: &[u32]) -> Self {
        Request { request_id, tokens: with_room(tokens), ..Request::default() }
    }
}

/// Room for the tokens and an answer; otherwise the first decoded token would move the prompt.
#[must_use]
pub(crate) fn room_for(num_tokens: usize) -> usize {
    num_tokens + num_tokens / 8 + 256
}

/// A copy of tokens with room behind them.
fn with_room(tokens: &[u32]) -> Vec<u32> {
    let mut column = Vec::with_capacity(room_for(tokens.len()));
    column.extend_from_slice(tokens);
    column
}

/// Block hashes as an engine hands them in: None for what is no hash.
pub type GivenHashes = Vec<Option<BlockHash>>;

/// Block ids, one list per group, in table order; 0 is the null block if there is one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KVCacheBlocks {
    /// The ids of each group.
    pub blocks: Vec<Vec<BlockId>>,
}

impl KVCacheBlocks {
    /// The ids as one list per group.
    #[must_use]
    pub fn get_block_ids(&self) -> Vec<Vec<u32>> {
        self.blocks.iter().map(|ids| ids.iter().map(|block| block.0).collect()).collect()
    }

    /// Return the ids of the blocks without a key, one list per group. has_key: the manager's
    /// method.
    #[must_use]
    pub fn get_unhashed_block_ids(&self, has_key: impl Fn(BlockId) -> bool) -> Vec<Vec<u32>> {
        let unhashed = |ids: &Vec<BlockId>| {
            ids.iter().filter(|&&block| !has_key(block)).map(|block| block.0).collect()
        };
        self.blocks.iter().map(unhashed).collect()
    }

    /// Return an instance without blocks, with the same number of groups.
    #[must_use]
    pub fn new_empty(&self) -> KVCacheBlocks {
        KVCacheBlocks { blocks: vec![Vec::new(); self.blocks.len()] }
    }
}

/// A cached prefix of a request: its blocks per group, and the tokens that they hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hit {
    /// The blocks, from the start of the request.
    pub blocks: KVCacheBlocks,
    /// The tokens in them.
    pub num_tokens: u32,
    /// The tokens that the groups other than state groups find, 0 without state groups. A state
    /// after them would make the hit that long.
    pub num_common: u32,
}

/// A call that did not fit and changed nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// Whether it is worth asking again.
    pub reason: Reason,
    /// Blocks that the call would take out of the free queue.
    pub needed: u64,
    /// Blocks that were free.
    pub available: u64,
    /// Released blocks that wait for a batch in flight.
    pub pending: u64,
}

impl Refused {
    /// The refusal of `needed` blocks by a pool with `available` free ones.
    #[must_use]
    pub fn new(reason: Reason, needed: u64, available: u32) -> Self {
        Refused { reason, needed, available: u64::from(available), pending: 0 }
    }

    /// The same, while `pending` blocks are about to come back.
    #[must_use]
    pub fn while_pending(self, pending: u32) -> Self {
        Refused { pending: u64::from(pending), ..self }
    }
}

/// What a swap moved: distinct blocks, copied to the other tier or found in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Swapped {
    /// Blocks that were copied.
    pub num_copied: u32,
    /// Blocks whose content was there.
    pub num_found: u32,
}

/// The value of a call that may be refused.
pub type Admitted<T> = Result<T, Refused>;

/// What a batch sampled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Output<'a> {
    /// Its tokens; None: they are to come.
    pub tokens: Option<&'a [u32]>,
    /// The last positions to come that are dropped first.
    pub num_rejected: i64,
    /// The number of the batch, if it is known.
    pub batch: Option<i64>,
}

impl<'a, T: AsRef<[u32]> + ?Sized> From<&'a T> for Output<'a> {
    fn from(tokens: &'a T) -> Self {
        Output { tokens: Some(tokens.as_ref()), ..Output::default() }
    }
}

/// How far an `append` came: requests from the refused one on are untouched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Appended {
    /// Requests that got their token and slot.
    pub done: u64,
    /// Why the next one did not.
    pub refused: Option<Refused>,
}

/// Look-ups since the last `take_stats`, counted with the allocation that used them.
///
/// queries and hits are tokens. Requests that were preempted before are counted separately. reset:
/// whether the cache was reset meanwhile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are the sums that the type names
pub struct PrefixCacheStats {
    pub requests: u64,
    pub queries: u64,
    pub hits: u64,
    pub preempted_requests: u64,
    pub preempted_queries: u64,
    pub preempted_hits: u64,
    pub reset: bool,
}

impl PrefixCacheStats {
    /// Hit tokens over queried tokens of new requests, 0.0 without queries.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        if self.queries == 0 { 0.0 } else { self.hits as f64 / self.queries as f64 }
    }

    /// Add one more look-up.
    pub fn observe(&mut self, num_queries: u64, num_hits: u64, preempted: bool) {
        if preempted {
            self.preempted_requests += 1;
            self.preempted_queries += num_queries;
            self.preempted_hits += num_hits;
        } else {
            self.requests += 1;
            self.queries += num_queries;
            self.hits += num_hits;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preempted_look_ups_are_counted_apart() {
        let mut stats = PrefixCacheStats::default();
        assert_eq!(stats.hit_rate(), 0.0);
        stats.observe(8, 4, false);
        stats.observe(8, 8, true);
        assert_eq!((stats.requests, stats.queries, stats.hits), (1, 8, 4));
        assert_eq!((stats.preempted_requests, stats.preempted_hits), (1, 8));
        assert_eq!(stats.hit_rate(), 0.5);
    }
}
