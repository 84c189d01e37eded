// SPDX-License-Identifier: Apache-2.0
//! The calls of a record: an opcode, the required fields, and a bit set of the options that follow.
//!
//! The bindings hand in the arguments in the order of the transition's. An argument at its default
//! is not written. An opcode is never used again for another call, and a new option stands behind
//! the others of its transition, which gives it the next bit. Twin: kvcore/record/calls.py.

use smallvec::SmallVec;

use crate::record::fields::{
    ReadTokens, find_rows, put_hashes, put_hit, put_number, put_numbers, put_request, put_requests,
    put_rows, put_text, put_tokens,
};
use crate::record::names::Known;
use crate::record::new_request::{put_new_request, put_retention};
use crate::record::pen::Pen;
use crate::state::state::State;
use crate::transitions::append::Requests;
use crate::types::keys::BlockHash;
use crate::types::retention::Piece;
use crate::types::slot_request::{RequestedHit, SlotRequest};
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
    ADVANCE_EPOCH = 32, TICK = 33, EXTEND_RETENTION = 34, PIN_PREFIX = 35, UNPIN_PREFIX = 36,
}

/// An argument, as the transition takes it.
#[derive(Clone, Copy)]
pub(crate) enum Argument<'a> {
    /// A request which is there.
    Request(&'a str),
    /// The id of a request to add.
    Child(&'a str),
    /// The name of a pin.
    Pin(&'a str),
    /// Some requests.
    Requests(Requests<'a>),
    /// A request to add, with its tokens apart.
    New(&'a Request<'a>, ReadTokens<'a>),
    /// A number.
    Number(i64),
    /// Tokens.
    Tokens(ReadTokens<'a>),
    /// Some blocks.
    Blocks(&'a [i64]),
    /// Hashes of blocks.
    Hashes(&'a [Option<BlockHash>]),
    /// What a look-up found.
    Hit(&'a RequestedHit),
    /// How long content stays.
    Retention(&'a [Piece]),
    /// A flag that is set.
    Flag,
}

impl<'a> Argument<'a> {
    /// A number that is 0 by default.
    pub(crate) fn count(number: i64) -> Option<Self> {
        (number != 0).then_some(Argument::Number(number))
    }

    /// A flag that is not set by default.
    pub(crate) fn flag(is_set: bool) -> Option<Self> {
        is_set.then_some(Argument::Flag)
    }

    /// Whether its tokens could be read, if it has some.
    fn has_form(self) -> bool {
        !matches!(self, Argument::New(_, None) | Argument::Tokens(None))
    }

    #[inline(always)] // the call's form is known where it is made
    fn write(
        self,
        out: &mut Pen<'_>,
        known: Known<'a>,
        last_hit: impl FnOnce() -> Option<&'a Hit>,
    ) {
        match self {
            Argument::Request(id) => drop(put_request(out, known, id)),
            Argument::Child(id) => put_text(out, known.name(known.row(id), id)),
            Argument::Pin(name) => put_text(out, known.pin(name)),
            Argument::Requests(Requests::Rows(rows)) => put_rows(out, rows),
            Argument::Requests(Requests::Ids(ids)) => put_requests(out, known, ids),
            Argument::New(request, tokens) => {
                put_new_request(out, known, request, tokens.unwrap_or_default());
            }
            Argument::Number(number) => put_number(out, number),
            Argument::Tokens(tokens) => put_tokens(out, known, tokens.unwrap_or_default()),
            Argument::Blocks(blocks) => put_numbers(out, blocks.iter().copied()),
            Argument::Hashes(hashes) => put_hashes(out, hashes),
            Argument::Hit(hit) => put_hit(out, hit, last_hit()),
            Argument::Retention(pieces) => put_retention(out, pieces),
            Argument::Flag => {}
        }
    }
}

/// What a call has besides its fields, in the order of the bits; None for what is at its default.
pub(crate) enum Options<'a> {
    /// These.
    Given(&'a [Option<Argument<'a>>]),
    /// Those of an allocation.
    Slots(&'a SlotRequest),
}

/// A call, by its opcode and its arguments.
pub(crate) struct Call<'a> {
    opcode: u8,
    fields: &'a [Argument<'a>],
    options: Options<'a>,
}

/// Whether a call adds tokens, so that a record by keys ends it with the hashes of new full blocks.
pub(crate) fn extends(opcode: u8) -> bool {
    matches!(opcode, ADD_REQUEST | ADD_TOKENS | ACCEPT | APPEND)
}

/// A call that was written: its opcode, and the row of its request.
pub(crate) type Written = (u8, Option<u32>);

impl<'a> Call<'a> {
    /// A call without options.
    pub(crate) fn new(opcode: u8, fields: &'a [Argument<'a>]) -> Self {
        Call { opcode, fields, options: Options::Given(&[]) }
    }

    /// The same with options.
    pub(crate) fn with(self, options: Options<'a>) -> Self {
        Call { options, ..self }
    }

    /// Whether its tokens could be read. If not, it raises, and a record does not have it.
    #[inline(always)]
    pub(crate) fn has_form(&self) -> bool {
        let Options::Given(options) = self.options else { return true };
        self.fields.iter().chain(options.iter().flatten()).all(|each| each.has_form())
    }

    /// The pin that it names.
    pub(crate) fn pin(&self) -> Option<&'a str> {
        self.fields.iter().find_map(|field| match field {
            Argument::Pin(name) => Some(*name),
            _ => None,
        })
    }

    /// The rows of the requests to which it adds tokens, if all of them are known.
    pub(crate) fn extended(&self, state: &State) -> SmallVec<[u32; 4]> {
        let found = match (self.opcode, self.fields) {
            (ADD_TOKENS | ACCEPT, [Argument::Request(id), ..]) => find_rows(state, &[*id]),
            (APPEND, [Argument::Requests(Requests::Ids(ids)), ..]) => find_rows(state, ids),
            (APPEND, [Argument::Requests(Requests::Rows(rows)), ..]) => Some((*rows).into()),
            _ => None,
        };
        found.unwrap_or_default()
    }

    /// Write a call that has a form.
    #[inline(always)] // its form is known where it is made
    pub(crate) fn write<'h>(
        &self,
        out: &mut Pen<'_>,
        known: Known<'h>,
        last_hit: impl Fn(u32) -> Option<&'h Hit>,
    ) -> Written {
        let mut row = None;
        out.put(self.opcode);
        for &field in self.fields {
            match field {
                Argument::Request(id) => row = put_request(out, known, id),
                other => other.write(out, known, || None),
            }
        }
        match self.options {
            Options::Given([]) => {}
            Options::Given(options) => {
                let bit = |bits, option: &Option<_>| bits << 1 | u64::from(option.is_some());
                out.put_varint(options.iter().rev().fold(0, bit));
                let last_hit = || row.and_then(&last_hit);
                for option in options.iter().flatten() {
                    option.write(out, known, last_hit);
                }
            }
            Options::Slots(slots) => put_slots(out, slots, || row.and_then(&last_hit)),
        }
        (self.opcode, row)
    }
}

/// Write the options of an allocation, of which the hit is the first.
#[inline(always)]
fn put_slots<'h>(
    out: &mut Pen<'_>,
    slots: &SlotRequest,
    last_hit: impl FnOnce() -> Option<&'h Hit>,
) {
    let values = slots.values();
    let bit = |bits, &(value, _): &_| bits << 1 | u64::from(value != 0);
    let bits = values.iter().rev().fold(0, bit);
    out.put_varint(bits << 1 | u64::from(slots.hit.is_some()));
    if let Some(hit) = &slots.hit {
        put_hit(out, hit, last_hit());
    }
    for &(value, is_count) in &values {
        if is_count && value != 0 {
            put_number(out, value);
        }
    }
}
