// SPDX-License-Identifier: Apache-2.0
//! Calls as values, and the values that they give. Python names a call by a string.

use crate::state::state::{RequestState, State};
use crate::types::errors::Error;
use crate::types::ids::Row;
use crate::types::keys::BlockHash;
use crate::types::values::{Appended, Hit, KVCacheBlocks, Refused};

/// Most requests of a world.
pub const MAX_NAMES: usize = 10;
/// The names of pins of prefixes that a world can have.
pub const PIN_NAMES: [&str; 2] = ["p", "q"];
const NAMES: [&str; MAX_NAMES] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];

/// The id of a request, as a number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(pub u8);

impl Name {
    /// The name of a request that an exploration added.
    #[must_use]
    pub fn of(request: &RequestState) -> Self {
        Name(request.request_id.as_bytes()[0] - b'0')
    }

    /// The id.
    #[must_use]
    pub fn id(self) -> &'static str {
        NAMES[usize::from(self.0)]
    }

    /// The row of the request.
    pub(crate) fn row(self, state: &State) -> Option<Row> {
        state.rows.get(self.id()).copied()
    }
}

/// Where tokens come from: the batch that sampled them, and the drafts that it rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are the options of `add_tokens`
pub struct Sampled {
    pub batch: u64,
    pub num_rejected: u32,
}

/// The arguments of `allocate_slots` that a world's calls have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slots {
    /// The request.
    pub name: Name,
    /// Tokens to schedule.
    pub num_new_tokens: u32,
    /// Of `get_computed_blocks`.
    pub hit: Option<Hit>,
    /// Tokens that are computed elsewhere.
    pub num_external_computed_tokens: u32,
    /// Slots behind the new tokens.
    pub num_lookahead_tokens: u32,
    /// Publish nothing; `cache_blocks` does it later.
    pub delay_cache_blocks: bool,
    /// Of the cross-attention groups.
    pub num_encoder_tokens: u32,
    /// Leave this many blocks free.
    pub reserved_blocks: u32,
    /// Of the tokens to schedule, those that are to come.
    pub num_output_placeholders: u32,
    /// Keep the recurrent states after these tokens.
    pub checkpoint: bool,
}

impl Slots {
    /// This many new tokens of a request and nothing else.
    #[must_use]
    pub fn new(name: Name, num_new_tokens: u32) -> Self {
        Slots { name, num_new_tokens, ..Slots::default() }
    }
}

/// The calls: each with its arguments and the name of its transition.
macro_rules! calls {
    ($($call:ident $(($slots:ty))? $({ $($field:ident: $kind:ty),+ })? = $name:literal;)+) => {
        /// A transition with its arguments; kind: the place in the world's kinds of requests.
        #[derive(Debug, Clone, PartialEq, Eq)]
        #[allow(missing_docs)] // the fields are the arguments of the transition
        pub enum Call {
            $($call $(($slots))? $({ $($field: $kind),+ })?,)+
        }

        impl Call {
            /// The name of the transition.
            #[must_use]
            pub fn transition(&self) -> &'static str {
                match self {
                    $(Call::$call { .. } => $name,)+
                }
            }
        }
    };
}

calls! {
    AddRequest { name: Name, tokens: Vec<u32>, kind: usize } = "add_request";
    RemoveRequest { name: Name } = "remove_request";
    AllocateSlots(Slots) = "allocate_slots";
    Append { name: Name, token: Option<u32>, batch: Option<u64> } = "append";
    Fork { parent: Name, child: Name } = "fork";
    Free { name: Name } = "free";
    Truncate { name: Name, num_tokens: u32 } = "truncate";
    Unschedule { name: Name, num_tokens: u32 } = "unschedule";
    Rewind { names: Vec<Name>, num_tokens: u32 } = "rewind";
    AddTokens { name: Name, tokens: Vec<u32>, output: Option<Sampled> } = "add_tokens";
    AddBlockHashes { name: Name, hashes: Vec<BlockHash> } = "add_block_hashes";
    AddDrafts { name: Name, tokens: Vec<u32> } = "add_drafts";
    Accept { name: Name, num_accepted: u32 } = "accept";
    RemoveSkippedBlocks { name: Name, num_tokens: u32 } = "remove_skipped_blocks";
    CacheBlocks { name: Name, num_tokens: u32 } = "cache_blocks";
    EvictBlocks { block: u32 } = "evict_blocks";
    ResetPrefixCache = "reset_prefix_cache";
    AdvanceEpoch = "advance_epoch";
    Tick { now: u64 } = "tick";
    SwapOut { names: Vec<Name> } = "swap_out";
    SwapIn { names: Vec<Name> } = "swap_in";
    Pin { block: u32 } = "pin";
    Unpin { block: u32 } = "unpin";
    PinPrefix { pin: &'static str, name: Name, num_tokens: u32 } = "pin_prefix";
    UnpinPrefix { pin: &'static str } = "unpin_prefix";
    Store { block: u32 } = "store";
    Load { name: Name, num_tokens: u32, hit: Option<Hit> } = "load";
    CompleteOperation { operation: u32, done: bool } = "complete_operation";
    TakeBatch = "take_batch";
    Complete { batch: u64 } = "complete";
    Cancel { batch: u64 } = "cancel";
    Execute { batch: u64 } = "execute"; // by the runtime: no transition of the core
}

impl Call {
    /// Append a token of the engine's own, or none.
    #[must_use]
    pub fn append(name: Name, token: Option<u32>) -> Self {
        Call::Append { name, token, batch: None }
    }
}

/// What a call gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Nothing.
    Nothing,
    /// A row.
    Row(u32),
    /// Tokens that a pin covers.
    Covered(u32),
    /// Rows of requests whose counts fell.
    Fell(Vec<Row>),
    /// True or false.
    Flag(bool),
    /// The blocks that tables grew by.
    Blocks(KVCacheBlocks),
    /// How far an `append` came.
    Appended(Appended),
    /// Operations that were started.
    Operations(Vec<u32>),
    /// The call did not fit.
    Refused(Refused),
    /// The call was wrong.
    Misuse(Error),
}

impl Value {
    /// The requests whose counts fell.
    #[must_use]
    pub fn fell(&self) -> &[Row] {
        if let Value::Fell(rows) = self { rows } else { &[] }
    }
}
