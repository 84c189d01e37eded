// SPDX-License-Identifier: Apache-2.0
//! Calls as values, and the values that they give. Python names a call by a string.

use crate::state::state::RequestState;
use crate::types::errors::Error;
use crate::types::ids::Row;
use crate::types::values::{Appended, Hit, KVCacheBlocks, Refused};

/// Most requests of a world.
pub const MAX_NAMES: usize = 10;
const NAMES: [&str; MAX_NAMES] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];

/// The id of a request, as a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(pub u8);

impl Name {
    /// The name of a request that an exploration added.
    #[must_use]
    pub fn of(request: &RequestState) -> Self {
        Name(request.request_id().as_bytes()[0] - b'0')
    }

    /// The id.
    #[must_use]
    pub fn id(self) -> &'static str {
        NAMES[self.index()]
    }

    /// The place of the request in a column.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// The arguments of `allocate_slots`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slots {
    /// The request.
    pub name: Name,
    /// Tokens to schedule.
    pub num_new: u32,
    /// Of `get_computed_blocks`.
    pub hit: Option<Hit>,
    /// Tokens that are computed elsewhere.
    pub num_external: u32,
    /// Slots behind the new tokens.
    pub num_lookahead: u32,
    /// Publish nothing; `cache_blocks` does it later.
    pub delay: bool,
    /// Of the cross-attention groups.
    pub num_encoder: u32,
    /// Leave so many blocks free.
    pub num_reserved: u32,
}

impl Slots {
    /// So many new tokens of a request and nothing else.
    #[must_use]
    pub fn new(name: Name, num_new: u32) -> Self {
        Slots {
            name,
            num_new,
            hit: None,
            num_external: 0,
            num_lookahead: 0,
            delay: false,
            num_encoder: 0,
            num_reserved: 0,
        }
    }
}

/// A transition with its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are the arguments of the transition that each variant names
pub enum Call {
    /// kind: the place in the world's kinds of requests.
    AddRequest {
        name: Name,
        tokens: Vec<u32>,
        kind: usize,
    },
    RemoveRequest {
        name: Name,
    },
    AllocateSlots(Slots),
    Append {
        name: Name,
        token: u32,
    },
    Fork {
        parent: Name,
        child: Name,
    },
    Free {
        name: Name,
    },
    Truncate {
        name: Name,
        num_tokens: u32,
    },
    Rewind {
        names: Vec<Name>,
        num_tokens: u32,
    },
    AddDrafts {
        name: Name,
        tokens: Vec<u32>,
    },
    Accept {
        name: Name,
        num_accepted: u32,
    },
    RemoveSkippedBlocks {
        name: Name,
        num_tokens: u32,
    },
    CacheBlocks {
        name: Name,
        num_tokens: u32,
    },
    EvictBlocks {
        block: u32,
    },
    ResetPrefixCache,
    SwapOut {
        names: Vec<Name>,
    },
    SwapIn {
        names: Vec<Name>,
    },
    Pin {
        block: u32,
    },
    Unpin {
        block: u32,
    },
    Store {
        block: u32,
    },
    Load {
        name: Name,
        num_tokens: u32,
        hit: Option<Hit>,
    },
    CompleteOperation {
        operation: u32,
        done: bool,
    },
    TakeBatch,
    Complete {
        batch: u64,
    },
    Cancel {
        batch: u64,
    },
    /// The runtime executes a taken batch: no transition of the core.
    Execute {
        batch: u64,
    },
}

impl Call {
    /// The name of the transition.
    #[must_use]
    pub fn transition(&self) -> &'static str {
        match self {
            Call::AddRequest { .. } => "add_request",
            Call::RemoveRequest { .. } => "remove_request",
            Call::AllocateSlots(_) => "allocate_slots",
            Call::Append { .. } => "append",
            Call::Fork { .. } => "fork",
            Call::Free { .. } => "free",
            Call::Truncate { .. } => "truncate",
            Call::Rewind { .. } => "rewind",
            Call::AddDrafts { .. } => "add_drafts",
            Call::Accept { .. } => "accept",
            Call::RemoveSkippedBlocks { .. } => "remove_skipped_blocks",
            Call::CacheBlocks { .. } => "cache_blocks",
            Call::EvictBlocks { .. } => "evict_blocks",
            Call::ResetPrefixCache => "reset_prefix_cache",
            Call::SwapOut { .. } => "swap_out",
            Call::SwapIn { .. } => "swap_in",
            Call::Pin { .. } => "pin",
            Call::Unpin { .. } => "unpin",
            Call::Store { .. } => "store",
            Call::Load { .. } => "load",
            Call::CompleteOperation { .. } => "complete_operation",
            Call::TakeBatch => "take_batch",
            Call::Complete { .. } => "complete",
            Call::Cancel { .. } => "cancel",
            Call::Execute { .. } => "execute",
        }
    }
}

/// What a call gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Nothing.
    Nothing,
    /// A row.
    Row(u32),
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
