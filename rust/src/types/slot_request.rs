// SPDX-License-Identifier: Apache-2.0
//! The arguments of an allocation; `transitions/slot_request.rs` checks them.
//!
//! Twin: kvcore/types/slot_request.py.

use crate::types::errors::{Error, check_count};
use crate::types::values::Hit;

/// A hit as an engine hands it in, unchecked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestedHit {
    /// Block ids, one list per group.
    pub blocks: Vec<Vec<i64>>,
    /// The tokens that they hold, according to the caller.
    pub num_tokens: i64,
}

impl From<&Hit> for RequestedHit {
    fn from(hit: &Hit) -> Self {
        let groups = hit.blocks.blocks.iter();
        RequestedHit {
            blocks: groups.map(|ids| ids.iter().copied().map(i64::from).collect()).collect(),
            num_tokens: i64::from(hit.num_tokens),
        }
    }
}

/// Most encoder tokens that are planned for.
pub const MAX_COUNT: i64 = (1 << 31) - 1;

/// An option of an allocation besides its hit.
pub enum SlotOption<'a> {
    /// A count; 0 by default.
    Count(&'a mut i64),
    /// A flag; false by default.
    Flag(&'a mut bool),
}

/// The type of an option's value.
trait OptionValue {
    const IS_COUNT: bool;
    fn option(&mut self) -> SlotOption<'_>;
    fn check(&self, name: &'static str) -> Result<(), Error>;
}

impl OptionValue for i64 {
    const IS_COUNT: bool = true;

    fn option(&mut self) -> SlotOption<'_> {
        SlotOption::Count(self)
    }

    fn check(&self, name: &'static str) -> Result<(), Error> {
        check_count(name, *self, 0)
    }
}

impl OptionValue for bool {
    const IS_COUNT: bool = false;

    fn option(&mut self) -> SlotOption<'_> {
        SlotOption::Flag(self)
    }

    fn check(&self, _: &'static str) -> Result<(), Error> {
        Ok(())
    }
}

macro_rules! slot_request {
    ($($(#[$doc:meta])* $option:ident: $kind:ty,)*) => {
        /// The arguments of one allocation under the names of `allocate_slots`, without the
        /// request.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct SlotRequest {
            /// Tokens to schedule.
            pub num_new_tokens: i64,
            /// A hit of `get_computed_blocks`, for a request that holds nothing.
            pub hit: Option<RequestedHit>,
            $($(#[$doc])* pub $option: $kind,)*
            /// A load fills the blocks of the external tokens, so they are not zeroed.
            pub loads: bool,
        }

        /// The number of options besides the hit.
        pub const NUM_OPTIONS: usize = [$(stringify!($option)),*].len();

        impl SlotRequest {
            /// The options besides the hit, by name, in the order of their bits in a record.
            pub fn options(&mut self) -> [(&'static str, SlotOption<'_>); NUM_OPTIONS] {
                [$((stringify!($option), self.$option.option())),*]
            }

            /// Their values, a flag as 0 or 1, and whether each is a count.
            #[inline]
            pub fn values(&self) -> [(i64, bool); NUM_OPTIONS] {
                [$((i64::from(self.$option), <$kind>::IS_COUNT)),*]
            }

            /// Fails with InvalidCount for a count below zero.
            #[inline]
            pub fn check_counts(&self) -> Result<(), Error> {
                check_count("num_new_tokens", self.num_new_tokens, 0)?;
                $(self.$option.check(stringify!($option))?;)*
                Ok(())
            }
        }

    };
}

slot_request! { // in the order of their bits in a record; a new one goes last
    /// Slots behind the new tokens.
    num_lookahead_tokens: i64,
    /// Tokens that are computed elsewhere.
    num_external_computed_tokens: i64,
    /// Tokens of the cross-attention groups.
    num_encoder_tokens: i64,
    /// How many blocks to leave free.
    reserved_blocks: i64,
    /// Up to this many positions may lie behind the known tokens; their ids come later.
    num_output_placeholders: i64,
    /// Publish nothing; `cache_blocks` does it later.
    delay_cache_blocks: bool,
    /// Refuse unless all the request's tokens would fit now.
    full_sequence_must_fit: bool,
    /// Keep the recurrent states after these tokens, wherever hits can end.
    checkpoint: bool,
}

impl SlotRequest {
    /// Make a request of new tokens and nothing else.
    #[must_use]
    pub fn new(num_new_tokens: i64) -> Self {
        SlotRequest { num_new_tokens, ..SlotRequest::default() }
    }

    /// The encoder tokens that are planned for: no pool has blocks for more.
    #[must_use]
    pub fn num_encoder_tokens(&self) -> u32 {
        self.num_encoder_tokens.min(MAX_COUNT) as u32
    }

    /// The tokens of the hit.
    #[must_use]
    pub fn num_hit_tokens(&self) -> i64 {
        self.hit.as_ref().map_or(0, |hit| hit.num_tokens)
    }
}
