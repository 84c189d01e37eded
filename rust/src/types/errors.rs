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
        /// A call was wrong, and has changed nothing.
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
    /// The configuration cannot work.
    InvalidConfig { field: &'static str, value: Field, reason: String }
        "config {field}={value:?}: {reason}";
    /// All blocks of a pool must have one size, so that any block can serve any group.
    GroupsDoNotFit { groups: Vec<i64>, sizes: Vec<i64> }
        "groups {groups} have blocks of {sizes} bytes: one pool has one block size";
    /// The pools do not fit in memory.
    PoolTooLarge { num_blocks: i64, needed_bytes: i64, available_bytes: i64 }
        "{num_blocks} blocks need {needed_bytes} bytes, {available_bytes} are available";
    /// A manager runs one call at a time.
    ConcurrentCall { } "another call of this manager is running: make one call at a time";
    /// There is no request with this id.
    UnknownRequest { request: String } "request {request:?} is not known";
    /// No request is in this row.
    UnknownRow { row: i64 } "request in row {row} is not known";
    /// The request exists already, or is named twice in one call.
    RepeatedRequest { request: String, reason: &'static str } "request {request:?} {reason}";
    /// A request id is a non-empty str.
    EmptyRequestId { value: String } "a request id must be a non-empty str, not {value:?}";
    /// A request needs at least one token, and an extension must add at least one.
    EmptyTokens { request: String } "request {request:?} was given no tokens";
    /// A token id must be in [0, 2**32), or at least -2**31 if the request has its own hashes.
    InvalidToken { value: i64, position: i64, least: i64 }
        "token {value:?} at position {position} of the call is not an integer from {least} to \
         4294967295";
    /// A token buffer must be one-dimensional, contiguous, of integers of 1, 2, 4 or 8 bytes.
    UnsupportedBuffer { name: &'static str, format: String, dimensions: i64 }
        "{name}: {dimensions}-dimensional buffer of format {format} is not a row of integers";
    /// Two arguments of a call must have the same length.
    LengthMismatch { num_requests: i64, num_tokens: i64 }
        "{num_requests} requests were given {num_tokens} tokens";
    /// A count is below what the call needs.
    InvalidCount { name: &'static str, value: i64, least: i64 }
        "{name} is {value:?}, must be an integer of at least {least}";
    /// The call requests slots for tokens that the request does not have.
    TooManyTokens { request: String, num_tokens: i64, requested: i64 }
        "request {request:?} has {num_tokens} tokens, but slots would reach token {requested}";
    /// New tokens would exceed the maximum length of the model.
    BeyondModelLength { request: String, requested: i64, max_model_len: i64 }
        "request {request:?} would reach {requested} tokens: max_model_len is {max_model_len}";
    /// The call names more tokens than were computed.
    BeyondComputed { request: String, num_computed: i64, requested: i64 }
        "request {request:?} has {num_computed} computed tokens: the call names {requested}";
    /// The call takes back tokens that the open batch does not compute, or cannot drop alone.
    BeforeOpenBatch { request: String, num_kept: i64, requested: i64 }
        "request {request:?} cannot fall to {requested}: the open batch keeps its first {num_kept}";
    /// Hashes supplied by an engine must have one size, and at most one per full block.
    WrongBlockHashes { request: String, num_hashes: i64, reason: String }
        "request {request:?} was given {num_hashes} block hashes: {reason}";
    /// The request has drafts that were not yet accepted or dropped.
    DraftsPending { request: String, num_drafts: i64 }
        "request {request:?} has {num_drafts} draft tokens: accept or drop them first";
    /// The request still waits for output, so it cannot get drafts.
    PlaceholdersPending { request: String, num_placeholders: i64 }
        "request {request:?} waits for {num_placeholders} tokens of output: add those first";
    /// No token can have been sampled, since some tokens of the request are not computed.
    NotComputed { request: String, num_tokens: i64, num_computed: i64 }
        "request {request:?} computed {num_computed} of {num_tokens} tokens: allocate the rest";
    /// The output is stale: its request was cut or rescheduled since, or has already got it.
    StaleOutput { request: String, batch: i64, output_from: i64 }
        "request {request:?} takes no output of batch {batch}: the first is {output_from}";
    /// This batch does not sample the next position; `expected` does, or none if that is None.
    OutputOutOfOrder { request: String, batch: i64, num_tokens: i64, expected: Option<i64> }
        "batch {batch} does not sample token {num_tokens} of request {request:?} \
         (expected batch: {expected})";
    /// The batch was not taken yet, so it has sampled nothing.
    BatchNotTaken { batch: i64, open_batch: i64 }
        "batch {batch} was not taken yet: the open batch is {open_batch}";
    /// Only drafts that were scheduled can be accepted.
    BeyondDrafts { request: String, num_scheduled: i64, requested: i64 }
        "request {request:?} has {num_scheduled} scheduled drafts, cannot accept {requested}";
    /// The open batch was not executed yet, so its positions are not written.
    InOpenBatch { kind: &'static str, value: Field }
        "{kind} {value:?} is in the open batch: take the batch first";
    /// The number of the weights can only rise.
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
    /// A state cannot be cut back, so the one after a draft has its own place. Two tokens to come
    /// in one step are a draft and the token after it.
    TooManyDrafts { request: String, num_drafts: i64, most: i64 }
        "request {request:?} schedules {num_drafts} drafts or tokens to come: a step of state \
         groups takes {most}";
    /// Only recurrent states are kept by a call.
    NoStateGroup { request: String }
        "request {request:?} marks a checkpoint, but there is no state group";
    /// A state is kept only where a hit can end, and for known tokens.
    UnalignedCheckpoint { request: String, num_tokens: i64, requested: i64, multiple: i64 }
        "request {request:?} with {num_tokens} tokens marks the state after {requested}: it must \
         be after a multiple of {multiple} known ones";
    /// A request that began with older weights cannot load content, which is of the new ones.
    StaleRequest { request: String, epoch: i64, current: i64 }
        "request {request:?} is of epoch {epoch}, the weights are of epoch {current}";
    /// The maximum number of batches is in flight.
    TooManyInFlight { num_in_flight: i64, max_in_flight: i64 }
        "{num_in_flight} batches are in flight, max_in_flight={max_in_flight}: complete the \
         oldest or cancel first";
    /// No batch in flight has this number.
    NotInFlight { batch: i64, in_flight: Vec<i64> }
        "batch {batch} is not in flight; in flight are: {in_flight}";
    /// Batches must be completed in the order of their numbers.
    BatchOutOfOrder { batch: i64, oldest: i64 }
        "batch {batch} cannot be completed before batch {oldest}";
    /// The request waits for the external store.
    LoadUnfinished { request: String, num_operations: i64 }
        "request {request:?} has {num_operations} unfinished loads: complete or free them";
    /// A block that rests on external tokens cannot be stored while their load may fail.
    LoadUnconfirmed { block: i64 }
        "block {block} rests on external tokens whose load may still fail: store it later";
    /// Only whole blocks with keys can be loaded.
    WrongLoad { request: String, num_tokens: i64, reason: String }
        "request {request:?} cannot load {num_tokens} tokens: {reason}";
    /// Only a block with a key can be stored.
    NotPublished { block: i64 } "block {block} has no key, so it cannot be stored";
    /// No unfinished operation has this number.
    UnknownOperation { operation: i64 } "there is no unfinished operation {operation}";
    /// Other requests also count tokens of blocks that were not written.
    HeldByOthers { blocks: Vec<i64>, requests: Vec<String> }
        "requests {requests} also count blocks {blocks}: name them in the same call";
    /// Encoder tokens need a cross-attention group.
    NoEncoderGroup { request: String, num_encoder_tokens: i64 }
        "request {request:?} brings {num_encoder_tokens} encoder tokens: no group takes them";
    /// The cut is outside the request.
    BeyondRequest { request: String, num_tokens: i64, requested: i64 }
        "request {request:?} has {num_tokens} tokens and cannot be cut to {requested}: keep 1 to \
         {num_tokens}";
    /// Only a request that holds no blocks can take hits.
    HitsOnRunningRequest { request: String, num_blocks: i64 }
        "request {request:?} holds blocks, but the call passes {num_blocks} hit blocks";
    /// The blocks of a hit do not match its token count, or not this request.
    WrongHit { request: String, num_blocks: i64, num_tokens: i64 }
        "request {request:?}: {num_blocks} hit blocks cannot stand for {num_tokens} of its tokens: \
         bring the hit that was found for it";
    /// A hit block does not have, or no longer has, the request's key.
    StaleHits { request: String, block: i64, position: i64 }
        "request {request:?}: block {block} at position {position} does not hold its key: the hit \
         is of other tokens, or out of date; look up again";
    /// The call passes hits although prefix caching is off.
    CachingDisabled { request: String, num_blocks: i64 }
        "request {request:?} gets {num_blocks} hit blocks, but prefix caching is off";
    /// The request's blocks are in the host tier.
    SwappedOut { request: String } "request {request:?} is swapped out: swap it in first";
    /// The request has nothing in the host tier.
    NotSwapped { request: String } "request {request:?} is not swapped out";
    /// The request holds no blocks.
    NotRunning { request: String } "request {request:?} holds no blocks";
    /// A request can be removed only after its blocks are freed.
    StillHoldsBlocks { request: String, num_blocks: i64 }
        "request {request:?} still holds {num_blocks} blocks: free it first";
    /// Other requests count blocks that this call would leave unwritten.
    HitInOpenBatch { blocks: Vec<i64>, requests: Vec<String> }
        "blocks {blocks} were published in the open batch and are counted by requests {requests}: \
         free those first, or take the batch";
    /// The configuration has no host blocks.
    NoHostTier { } "there is no host tier: num_host_blocks is 0";
    /// The pool has no such block, or it is the null block.
    UnknownBlock { block: i64, first: i64, last: i64 }
        "block {block} is not one of the blocks {first} to {last} of this pool";
    /// A block is released more often than it is owned.
    DoubleFree { block: i64, ref_count: i64, requested: i64 }
        "block {block} has {ref_count} owners, but the call releases {requested}";
    /// A block is unpinned more often than it was pinned.
    NotPinned { block: i64, num_pins: i64, requested: i64 }
        "block {block} has {num_pins} pins, but the call removes {requested}";
    /// A block does not have, or no longer has, the key that the call expects.
    WrongKey { block: i64, position: i64 }
        "block {block} at position {position} does not have the key of that position";
    /// A block with neither owner nor key has no content to keep.
    UnusedBlock { block: i64 } "block {block} has neither owner nor key";
    /// A block must have an owner to be copied or taken over.
    NoOwner { block: i64 } "block {block} has no owner";
    /// A block has at most one key.
    AlreadyPublished { block: i64 } "block {block} already has a key";
    /// All keys must have one size, since a batch concatenates them.
    InvalidKey { size: i64, expected: i64 } "a key has {expected} bytes, not {size}";
    /// Bytes that are not an encoded state.
    DamagedState { reason: String, offset: i64 }
        "not an encoded state: {reason} at byte {offset}";
    /// The columns and keys are not a batch.
    DamagedBatch { batch: i64, reason: String } "batch {batch} is damaged: {reason}";
    /// A text trace cannot be read.
    TraceError { source: String, line: i64, reason: String } "{source}, line {line}: {reason}";
    /// A part of a request's extra keys has the wrong form.
    InvalidExtraKey { name: String, expected: &'static str, value: Field }
        "{name} must be {expected}, not {value:?}";
    /// Media items must be sorted by their first position and lie in the prompt.
    UnsortedMedia {
        request: String, position: i64, offset: i64, length: i64, first: i64, num_tokens: i64
    }
        "request {request:?}: media item {position} covers {length} tokens from {offset} on; it \
         must begin at {first} or later, like the item before it, and end by {num_tokens}";
    /// The sizes of two parts of a request do not match.
    CountMismatch { request: String, name: &'static str, given: i64, expected: i64 }
        "request {request:?} was given {given} {name}, expected {expected}";
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
