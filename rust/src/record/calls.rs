// SPDX-License-Identifier: Apache-2.0
//! The calls of a record: an opcode, the required fields, and a bit set of the options that follow.
//!
//! An opcode is never used again for another call, and a new argument takes the next bit. An
//! argument at its default is not written. Twin: kvcore/record/calls.py.

use crate::record::fields::{
    ReadTokens, put_hashes, put_hit, put_new_request, put_number, put_numbers, put_request,
    put_requests, put_retention, put_rows, put_text, put_tokens,
};
use crate::record::pen::Pen;
use crate::state::state::State;
use crate::transitions::append::Requests;
use crate::transitions::slot_request::SlotRequest;
use crate::types::keys::BlockHash;
use crate::types::retention::Piece;
use crate::types::values::{Hit, Request};

macro_rules! opcodes {
    ($($name:ident = $number:literal),* $(,)?) => {
        $(#[doc = stringify!($name)] pub(crate) const $name: u8 = $number;)*
    };
}

opcodes! {
    ADD_REQUEST = 1, ADD_TOKENS = 2, REMOVE_REQUEST = 3, ADD_BLOCK_HASHES = 4, ADD_DRAFTS = 5,
    ACCEPT = 6, ALLOCATE_SLOTS = 7, APPEND = 8, FORK = 9, FREE = 10, TRUNCATE = 11,
    CACHE_BLOCKS = 12, EVICT_BLOCKS = 13, RESET_PREFIX_CACHE = 14, SWAP_OUT = 15, SWAP_IN = 16,
    PIN = 17, UNPIN = 18, REMOVE_SKIPPED_BLOCKS = 19, REWIND = 20, UNSCHEDULE = 21, STORE = 22,
    LOAD = 23, COMPLETE_OPERATION = 24, TAKE_BATCH = 25, COMPLETE = 26, CANCEL = 27,
    TAKE_EVENTS = 28, TAKE_STATS = 29, TAKE_NEW_BLOCK_IDS = 30, GET_COMPUTED_BLOCKS = 31,
    ADVANCE_EPOCH = 32, TICK = 33, EXTEND_RETENTION = 34,
}

/// A call, by its opcode and its arguments as the transition takes them.
pub(crate) enum Call<'a> {
    /// Of nothing.
    Plain(u8),
    /// Of one request.
    Of(u8, &'a str),
    /// Of one request and a number.
    Count(u8, &'a str, i64),
    /// Of a number.
    Number(u8, i64),
    /// Of some blocks.
    Blocks(u8, &'a [i64]),
    /// Of some requests.
    All(u8, &'a [&'a str]),
    /// `rewind`.
    Rewind(&'a [&'a str], i64),
    /// `add_request`, with the tokens apart.
    AddRequest(&'a Request<'a>, ReadTokens<'a>),
    /// `add_tokens`: num_rejected, batch.
    AddTokens(&'a str, ReadTokens<'a>, i64, Option<i64>),
    /// `add_drafts`.
    AddDrafts(&'a str, ReadTokens<'a>),
    /// `add_block_hashes`.
    AddBlockHashes(&'a str, &'a [Option<BlockHash>]),
    /// `append`: its tokens, if any, and batch.
    Append(Requests<'a>, Option<ReadTokens<'a>>, Option<i64>),
    /// `fork`.
    Fork(&'a str, &'a str),
    /// `allocate_slots`.
    AllocateSlots(&'a str, &'a SlotRequest),
    /// `load`.
    Load(&'a str, &'a SlotRequest),
    /// `complete_operation`.
    CompleteOperation(i64, bool),
    /// `advance_epoch`.
    AdvanceEpoch(Option<i64>),
    /// `extend_retention`.
    ExtendRetention(&'a str, &'a [Piece]),
}

/// A call that was written: its opcode, and the row of its request.
pub(crate) type Written = (u8, Option<u32>);

impl Call<'_> {
    /// Whether its tokens could be read. If not, it raises, and a record does not have it.
    pub(crate) fn has_form(&self) -> bool {
        !matches!(
            self,
            Call::AddRequest(_, None)
                | Call::AddTokens(_, None, ..)
                | Call::AddDrafts(_, None)
                | Call::Append(_, Some(None), _)
        )
    }

    /// Write a call that has a form.
    pub(crate) fn write<'h>(
        &self,
        out: &mut Pen<'_>,
        state: &State,
        last_hit: impl Fn(u32) -> Option<&'h Hit>,
    ) -> Written {
        let (mut row, opcode) = (None, self.opcode());
        out.put(opcode);
        match *self {
            Call::Plain(_) => {}
            Call::Of(_, id) => row = put_request(out, state, id),
            Call::Count(_, id, count) => {
                put_request(out, state, id);
                put_number(out, count);
            }
            Call::Number(_, number) => put_number(out, number),
            Call::Blocks(_, blocks) => put_numbers(out, blocks.iter().copied()),
            Call::All(_, ids) => put_requests(out, state, ids),
            Call::Rewind(ids, count) => {
                put_requests(out, state, ids);
                put_number(out, count);
            }
            Call::AddRequest(request, tokens) => {
                put_new_request(out, request, tokens.unwrap_or_default());
            }
            Call::AddTokens(id, tokens, rejected, batch) => {
                put_request(out, state, id);
                put_tokens(out, tokens.unwrap_or_default());
                put_counts(out, Some(rejected).filter(|&count| count != 0), batch);
            }
            Call::AddDrafts(id, tokens) => {
                put_request(out, state, id);
                put_tokens(out, tokens.unwrap_or_default());
            }
            Call::AddBlockHashes(id, hashes) => {
                put_request(out, state, id);
                put_hashes(out, hashes);
            }
            Call::Append(ids, tokens, batch) => put_append(out, state, ids, tokens, batch),
            Call::Fork(parent, child) => {
                put_request(out, state, parent);
                put_text(out, child);
            }
            Call::AllocateSlots(id, slots) | Call::Load(id, slots) => {
                let row = put_request(out, state, id);
                let put = if opcode == LOAD { put_load } else { put_slots };
                put(out, slots, row.and_then(last_hit));
            }
            Call::CompleteOperation(operation, done) => {
                put_number(out, operation);
                put_bits(out, &[done]);
            }
            Call::AdvanceEpoch(epoch) => put_counts(out, epoch, None),
            Call::ExtendRetention(id, pieces) => {
                put_request(out, state, id);
                put_retention(out, pieces);
            }
        }
        (opcode, row)
    }

    fn opcode(&self) -> u8 {
        match *self {
            Call::Plain(opcode)
            | Call::Of(opcode, _)
            | Call::Count(opcode, ..)
            | Call::Number(opcode, _)
            | Call::Blocks(opcode, _)
            | Call::All(opcode, _) => opcode,
            Call::Rewind(..) => REWIND,
            Call::AddRequest(..) => ADD_REQUEST,
            Call::AddTokens(..) => ADD_TOKENS,
            Call::AddDrafts(..) => ADD_DRAFTS,
            Call::AddBlockHashes(..) => ADD_BLOCK_HASHES,
            Call::Append(..) => APPEND,
            Call::Fork(..) => FORK,
            Call::AllocateSlots(..) => ALLOCATE_SLOTS,
            Call::Load(..) => LOAD,
            Call::CompleteOperation(..) => COMPLETE_OPERATION,
            Call::AdvanceEpoch(_) => ADVANCE_EPOCH,
            Call::ExtendRetention(..) => EXTEND_RETENTION,
        }
    }
}

/// Write which options are given, the first one in the lowest bit.
fn put_bits(out: &mut Pen<'_>, given: &[bool]) {
    let bits = given.iter().rev().fold(0, |bits, &is_given| bits << 1 | u64::from(is_given));
    out.put_varint(bits);
}

/// Write which of two numbers are given, and those.
fn put_counts(out: &mut Pen<'_>, first: Option<i64>, second: Option<i64>) {
    put_bits(out, &[first.is_some(), second.is_some()]);
    first.into_iter().chain(second).for_each(|count| put_number(out, count));
}

fn put_append(
    out: &mut Pen<'_>,
    state: &State,
    requests: Requests<'_>,
    tokens: Option<ReadTokens<'_>>,
    batch: Option<i64>,
) {
    match requests {
        Requests::Rows(rows) => put_rows(out, rows),
        Requests::Ids(ids) => put_requests(out, state, ids),
    }
    put_bits(out, &[tokens.is_some(), batch.is_some()]);
    if let Some(tokens) = tokens {
        put_tokens(out, tokens.unwrap_or_default());
    }
    batch.into_iter().for_each(|batch| put_number(out, batch));
}

fn put_slots(out: &mut Pen<'_>, slots: &SlotRequest, last: Option<&Hit>) {
    let counts = [
        slots.num_lookahead_tokens,
        slots.num_external_computed_tokens,
        slots.num_encoder_tokens,
        slots.reserved_blocks,
        slots.num_output_placeholders,
    ];
    let [a, b, c, d, e] = counts.map(|count| count != 0);
    let flags = (slots.delay_cache_blocks, slots.full_sequence_must_fit);
    put_number(out, slots.num_new_tokens);
    put_bits(out, &[slots.hit.is_some(), a, b, c, d, e, flags.0, flags.1]);
    slots.hit.iter().for_each(|hit| put_hit(out, hit, last));
    counts.into_iter().filter(|&count| count != 0).for_each(|count| put_number(out, count));
}

fn put_load(out: &mut Pen<'_>, slots: &SlotRequest, last: Option<&Hit>) {
    let reserved = slots.reserved_blocks;
    put_number(out, slots.num_external_computed_tokens);
    put_bits(out, &[slots.hit.is_some(), reserved != 0, slots.full_sequence_must_fit]);
    slots.hit.iter().for_each(|hit| put_hit(out, hit, last));
    if reserved != 0 {
        put_number(out, reserved);
    }
}
