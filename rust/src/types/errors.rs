// SPDX-License-Identifier: Apache-2.0
//! Misuse and corruption, each as a variant of its own.
//!
//! Invariants: a refusal is a value (`values::Refused`), never an error. Misuse is an [`Error`]:
//! the message names the object and the numbers, `fields` holds them for programs, and the state is
//! as it was before the call. A broken invariant is an [`InvariantViolation`]: a bug of kvcore, not
//! to be caught.
//! Twin: kvcore/types/errors.py.

use std::fmt;

pub use crate::types::error_fields::{Field, repr};

macro_rules! errors {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty),* } $message:literal;)*) => {
        /// A call that was wrong; nothing has changed.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub enum Error {
            $($(#[$doc])* $name {
                $(#[doc = concat!("`", stringify!($field), "` of the message.")] $field: $kind),*
            }),*
        }

        impl Error {
            /// The name of the variant, which is the name of the Python class.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self {
                    $(Error::$name { .. } => stringify!($name)),*
                }
            }

            /// The fields by name, in the order of the variant.
            #[must_use]
            pub fn fields(&self) -> Vec<(&'static str, Field)> {
                match self {
                    $(Error::$name { $($field),* } => {
                        vec![$((stringify!($field), Field::from($field.clone()))),*]
                    }),*
                }
            }
        }

        impl fmt::Display for Error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Error::$name { $($field),* } => {
                        $(let $field = Field::from($field.clone());)*
                        write!(f, $message)
                    }),*
                }
            }
        }
    };
}

errors! {
    /// A configuration that cannot work.
    InvalidConfig { field: &'static str, value: Field, reason: String }
        "config {field}={value:?}: {reason}";
    /// One pool has one page size, so that any block can serve any group.
    GroupsDoNotFit { groups: Vec<i64>, sizes: Vec<i64> }
        "groups {groups} have blocks of {sizes} bytes: one pool has one block size";
    /// Pools that do not fit in memory.
    PoolTooLarge { num_blocks: i64, needed_bytes: i64, available_bytes: i64 }
        "{num_blocks} blocks need {needed_bytes} bytes, {available_bytes} are available";
    /// One manager runs one call at a time.
    ConcurrentCall { } "another call of this manager is running: make one call at a time";
    /// No request of this id is known.
    UnknownRequest { request: String } "request {request:?} is not known";
    /// No request is in this row.
    UnknownRow { row: i64 } "request in row {row} is not known";
    /// A request of this id exists already, or is named twice in one call.
    RepeatedRequest { request: String, reason: &'static str } "request {request:?} {reason}";
    /// A request id is a non-empty str.
    EmptyRequestId { value: String } "a request id must be a non-empty str, not {value:?}";
    /// A request has at least one token; an extension adds at least one.
    EmptyTokens { request: String } "request {request:?} is given no tokens";
    /// A token id is an integer from 0 to 2**32 - 1, or of a request with own hashes from -2**31.
    InvalidToken { value: i64, position: i64 }
        "token {value:?} at position {position} of the call is not an integer in [0, 2**32)";
    /// A token buffer is one-dimensional, contiguous, of 1, 2, 4 or 8 byte integers.
    UnsupportedBuffer { name: &'static str, format: String, dimensions: i64 }
        "{name}: a buffer of format {format}, {dimensions}-dimensional, is no row of integers";
    /// Two arguments of one call must have as many items.
    LengthMismatch { num_requests: i64, num_tokens: i64 }
        "{num_requests} requests are given {num_tokens} tokens";
    /// A count is below what the call needs.
    InvalidCount { name: &'static str, value: i64, least: i64 }
        "{name} is {value:?}, must be at least {least}";
    /// Slots are requested for tokens that the request does not have.
    TooManyTokens { request: String, num_tokens: i64, requested: i64 }
        "request {request:?} has {num_tokens} tokens, slots go up to token {requested}";
    /// New tokens would pass the longest length that the model takes.
    BeyondModelLength { request: String, requested: i64, max_model_len: i64 }
        "request {request:?} would reach {requested} tokens, the model takes {max_model_len}";
    /// The call names more tokens than were computed.
    BeyondComputed { request: String, num_computed: i64, requested: i64 }
        "request {request:?} has {num_computed} computed tokens, the call names {requested}";
    /// The call takes back tokens that the open batch does not compute, or not without the rest.
    BeforeOpenBatch { request: String, num_kept: i64, requested: i64 }
        "request {request:?} cannot fall to {requested}: the open batch keeps its first {num_kept}";
    /// Hashes supplied by an engine have one size, and there is at most one per full block.
    WrongBlockHashes { request: String, num_hashes: i64, reason: String }
        "request {request:?} is given {num_hashes} block hashes: {reason}";
    /// Draft tokens were not yet accepted or dropped.
    DraftsPending { request: String, num_drafts: i64 }
        "request {request:?} has {num_drafts} draft tokens, accept or drop them first";
    /// Output of a request is still to come, so it takes no drafts.
    PlaceholdersPending { request: String, num_placeholders: i64 }
        "request {request:?} waits for {num_placeholders} tokens to come, add those first";
    /// No token can have been sampled: the request's own are not all computed.
    NotComputed { request: String, num_tokens: i64, num_computed: i64 }
        "request {request:?} computed {num_computed} of {num_tokens} tokens: allocate the rest";
    /// A batch sampled this before its request was cut, or scheduled anew, or it was handed in.
    StaleOutput { request: String, batch: i64, output_from: i64 }
        "request {request:?} takes no output of batch {batch}: the first is {output_from}";
    /// Output fills positions to come in order; the batch in flight does not sample the next one.
    OutputOutOfOrder { request: String, batch: i64, num_tokens: i64 }
        "batch {batch} does not sample token {num_tokens} of request {request:?}";
    /// A batch that was not taken yet has sampled nothing.
    BatchNotTaken { batch: i64, open_batch: i64 }
        "batch {batch} was not taken yet, the open batch is {open_batch}";
    /// Only drafts that were scheduled can be accepted.
    BeyondDrafts { request: String, num_scheduled: i64, requested: i64 }
        "request {request:?} has {num_scheduled} scheduled drafts, {requested} are accepted";
    /// The open batch is executed later, so what it schedules is not written yet.
    InOpenBatch { kind: &'static str, value: Field }
        "{kind} {value:?} is in the open batch: take the batch first";
    /// The number of the weights rises.
    EpochWentBack { epoch: i64, current: i64, least: i64, most: i64 }
        "epoch {epoch:?} cannot follow epoch {current}: it must be from {least} to {most}";
    /// The time of a manager never falls.
    TimeWentBack { now_ms: i64, current: i64, most: i64 }
        "time {now_ms:?} ms cannot follow {current}: it must be from {current} to {most}";
    /// The name of a pin is not empty.
    EmptyPinName { value: String } "the name of a pin must be a non-empty str, not {value:?}";
    /// No pin of a prefix has this name.
    UnknownPin { pin: String } "there is no pin {pin:?}";
    /// A pin of this name exists already.
    RepeatedPin { pin: String } "pin {pin:?} is there already: unpin it first";
    /// None of the request's first tokens could be found later.
    NothingToPin { request: String, requested: i64, reason: String }
        "of the first {requested} tokens of request {request:?} none can be pinned: {reason}";
    /// Pins of prefixes would hold more blocks than the config allows.
    TooManyPinned { pin: String, num_blocks: i64, most: i64 }
        "with pin {pin:?} {num_blocks} blocks are pinned, max_pinned_blocks={most}";
    /// A request that began with older weights loads nothing: stored content is of the new ones.
    StaleRequest { request: String, epoch: i64, current: i64 }
        "request {request:?} is of epoch {epoch}, the weights are of epoch {current}";
    /// As many batches are in flight as the config allows.
    TooManyInFlight { num_in_flight: i64, max_in_flight: i64 }
        "{num_in_flight} batches are in flight, max_in_flight={max_in_flight}: complete the \
         oldest or cancel first";
    /// No batch in flight has this number.
    NotInFlight { batch: i64, in_flight: Vec<i64> }
        "batch {batch} is not in flight; in flight are: {in_flight}";
    /// Batches are completed in the order of their numbers.
    BatchOutOfOrder { batch: i64, oldest: i64 }
        "batch {batch} cannot be completed before batch {oldest}";
    /// The request waits for the external store.
    LoadUnfinished { request: String, num_operations: i64 }
        "request {request:?} has {num_operations} unfinished loads: complete them or free it";
    /// A block that rests on external tokens is not stored while their load may fail.
    LoadUnconfirmed { block: i64 }
        "block {block} rests on external tokens whose load may still fail: store it later";
    /// Only whole blocks with keys can be loaded.
    WrongLoad { request: String, num_tokens: i64, reason: String }
        "request {request:?} cannot load {num_tokens} tokens: {reason}";
    /// Only a block with a key can be stored.
    NotPublished { block: i64 } "block {block} has no key to be stored under";
    /// No unfinished operation has this number.
    UnknownOperation { operation: i64 } "there is no unfinished operation {operation}";
    /// Other requests count tokens in blocks that were not written.
    HeldByOthers { blocks: Vec<i64>, requests: Vec<String> }
        "blocks {blocks} are counted by requests {requests} too: name those in the same call";
    /// Encoder tokens need a cross-attention group.
    NoEncoderGroup { request: String, num_encoder_tokens: i64 }
        "request {request:?} brings {num_encoder_tokens} encoder tokens, no group has them";
    /// A cut lies outside the request.
    BeyondRequest { request: String, num_tokens: i64, requested: i64 }
        "request {request:?} has {num_tokens} tokens, cannot be cut to {requested}: keep 1 to \
         {num_tokens}";
    /// Only a request that holds nothing can bring hits.
    HitsOnRunningRequest { request: String, num_blocks: i64 }
        "request {request:?} already holds blocks and brings {num_blocks} hit blocks";
    /// The blocks of a hit and its token count do not belong together, or not to this request.
    WrongHit { request: String, num_blocks: i64, num_tokens: i64 }
        "request {request:?}: {num_blocks} hit blocks cannot stand for {num_tokens} of its tokens: \
         bring the hit that was found for it";
    /// A hit block does not, or no longer, hold the request's key.
    StaleHits { request: String, block: i64, position: i64 }
        "request {request:?}: block {block} at position {position} does not hold its key: the hit \
         is of other tokens, or out of date; look up again";
    /// Hits are given although prefix caching is off.
    CachingDisabled { request: String, num_blocks: i64 }
        "request {request:?} brings {num_blocks} hit blocks, prefix caching is off";
    /// The request's blocks are in the host tier.
    SwappedOut { request: String } "request {request:?} is swapped out, swap it in first";
    /// The request has nothing in the host tier.
    NotSwapped { request: String } "request {request:?} is not swapped out";
    /// The request holds no blocks.
    NotRunning { request: String } "request {request:?} holds no blocks";
    /// A request is forgotten only after it gave back its blocks.
    StillHoldsBlocks { request: String, num_blocks: i64 }
        "request {request:?} still holds {num_blocks} blocks, free it first";
    /// Other requests count on blocks that this call would leave unwritten.
    HitInOpenBatch { blocks: Vec<i64>, requests: Vec<String> }
        "blocks {blocks} were published in the open batch and are counted by requests {requests}: \
         free those first, or take the batch";
    /// The configuration has no host blocks.
    NoHostTier { } "there is no host tier: num_host_blocks is 0";
    /// The pool has no such block, or it is the null block.
    UnknownBlock { block: i64, first: i64, last: i64 }
        "block {block} is not one of the blocks {first} to {last} of this pool";
    /// A block is given back more often than it is held.
    DoubleFree { block: i64, ref_count: i64, requested: i64 }
        "block {block} has {ref_count} owners, the call releases {requested}";
    /// A block is unpinned more often than it was pinned.
    NotPinned { block: i64, num_pins: i64, requested: i64 }
        "block {block} has {num_pins} pins, the call removes {requested}";
    /// A block does not, or no longer, have the key that the call expects of it.
    WrongKey { block: i64, position: i64 }
        "block {block} at position {position} does not have the key of that position";
    /// A block without owner and key holds nothing that could be kept.
    UnusedBlock { block: i64 } "block {block} has neither owner nor key";
    /// A block that is copied or taken over has an owner.
    NoOwner { block: i64 } "block {block} has no owner";
    /// A block has at most one key.
    AlreadyPublished { block: i64 } "block {block} already has a key";
    /// Keys have one size, since a batch carries them one after the other.
    InvalidKey { size: i64, expected: i64 } "a key has {expected} bytes, not {size}";
    /// Bytes that are not an encoded state.
    DamagedState { reason: String, offset: i64 }
        "not an encoded state: {reason} at byte {offset}";
    /// Columns and keys that are not a batch.
    DamagedBatch { batch: i64, reason: String } "batch {batch} is damaged: {reason}";
    /// A text trace that cannot be read.
    TraceError { source: String, line: i64, reason: String } "{source}, line {line}: {reason}";
    /// A part of a block's extra keys that no key can be made of.
    InvalidExtraKey { name: String, expected: &'static str, value: Field }
        "{name} must be {expected}, not {value:?}";
    /// Media items are sorted by their first position, and stand in the prompt.
    UnsortedMedia {
        request: String, position: i64, offset: i64, length: i64, first: i64, num_tokens: i64
    }
        "request {request:?}: media item {position} takes {length} tokens from {offset} on, must \
         begin at {first} or later, like the item before it, and end by {num_tokens}";
    /// Two parts of one request do not have the sizes that belong together.
    CountMismatch { request: String, name: &'static str, given: i64, expected: i64 }
        "request {request:?} is given {given} {name}, must be {expected}";
}

impl std::error::Error for Error {}

/// A named property of every reachable state does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvariantViolation {
    name: &'static str,
    detail: String,
}

impl InvariantViolation {
    /// The violation of the invariant of this name.
    #[must_use]
    pub fn new(name: &'static str, detail: String) -> Self {
        InvariantViolation { name, detail }
    }

    /// The name of the invariant.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What was found.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }
}

impl fmt::Display for InvariantViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.detail)
    }
}

impl std::error::Error for InvariantViolation {}

/// Fails with InvalidCount for a count below the least one.
pub(crate) fn check_count(name: &'static str, value: i64, least: i64) -> Result<(), Error> {
    if value < least { Err(Error::InvalidCount { name, value, least }) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
