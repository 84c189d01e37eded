// SPDX-License-Identifier: Apache-2.0
//! Groups: layers that share block size and retention rule, and those rules.
//!
//! Invariants: positions count tokens. With n computed tokens the next query is at n and sees
//! positions from `skipped_tokens(group, n)` on. Earlier positions are never read again: their
//! blocks are given back and replaced by the null block. Cross-attention has one table for the
//! encoder's tokens, which does not grow with the request and is never cached. A state group keeps
//! no tokens: its block at (n - 1) / block_size holds the state after n tokens, so it gives blocks
//! back as a window of two tokens does.
//! Source: S000-11, 28, 36, 40; S001-79 to 81. Twin: kvcore/types/groups.py.

use crate::types::errors::{Error, Field};

/// What a group's layers see of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Everything.
    FullAttention,
    /// Everything, in one compressed vector a token.
    Mla,
    /// A window of this many tokens, the query's own included.
    SlidingWindow,
    /// The chunk of this many tokens that the query stands in.
    ChunkedLocal,
    /// The encoder's tokens.
    CrossAttention,
    /// One recurrent state, and a checkpoint of it at each multiple of block_size at which a step
    /// ends.
    State,
}

/// The kinds, by their number in the canonical bytes.
pub const KINDS: [Kind; 6] = [
    Kind::FullAttention,
    Kind::Mla,
    Kind::SlidingWindow,
    Kind::ChunkedLocal,
    Kind::CrossAttention,
    Kind::State,
];
/// Most tokens of a block, and of a window.
pub const MAX_BLOCK_SIZE: u32 = (1 << 31) - 1;
/// Most bytes of a block.
pub const MAX_PAGE_BYTES: u64 = (1 << 63) - 1;

impl Kind {
    /// The name that configurations give it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::FullAttention => "full_attention",
            Kind::Mla => "mla",
            Kind::SlidingWindow => "sliding_window",
            Kind::ChunkedLocal => "chunked_local",
            Kind::CrossAttention => "cross_attention",
            Kind::State => "state",
        }
    }
}

/// Layers that share block size and retention rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Tokens per block.
    pub block_size: u32,
    /// What the layers see of a request.
    pub kind: Kind,
    /// Tokens of a window or chunk; None for kinds without one.
    pub window: Option<u32>,
    /// A draft model reads these layers, so a hit leaves the last matched block to be computed.
    pub eagle: bool,
    /// A `Zero` follows each `Allocate` that nothing else fills.
    pub zero_new_blocks: bool,
    /// Bytes of one block of these layers, None if it is not given.
    pub page_bytes: Option<u64>,
    /// Most drafts that a step of a state group may compute, each with a state of its own.
    pub draft_states: u32,
}

impl Group {
    /// A full attention group of this block size that needs no zeroing.
    #[must_use]
    pub fn new(block_size: u32) -> Self {
        Group {
            block_size,
            kind: Kind::FullAttention,
            window: None,
            eagle: false,
            zero_new_blocks: false,
            page_bytes: None,
            draft_states: 0,
        }
    }

    /// A sliding window or chunked local group of this block size and window.
    #[must_use]
    pub fn windowed(block_size: u32, kind: Kind, window: u32) -> Self {
        Group { kind, window: Some(window), ..Group::new(block_size) }
    }

    /// Whether blocks that no later query reads are given back.
    #[must_use]
    pub fn is_windowed(&self) -> bool {
        self.has_window() || self.is_state()
    }

    /// Whether queries see a window or chunk of tokens.
    fn has_window(&self) -> bool {
        matches!(self.kind, Kind::SlidingWindow | Kind::ChunkedLocal)
    }

    /// Whether a block holds a recurrent state instead of tokens.
    #[must_use]
    pub fn is_state(&self) -> bool {
        self.kind == Kind::State
    }

    /// Whether a block has a slot for each of the request's own tokens.
    pub(crate) fn has_tokens(&self) -> bool {
        !(self.is_cross() || self.is_state())
    }

    /// Whether the table holds the encoder's tokens.
    #[must_use]
    pub fn is_cross(&self) -> bool {
        self.kind == Kind::CrossAttention
    }

    /// Fails with `InvalidConfig` unless such a group can be.
    pub fn check(&self) -> Result<(), Error> {
        if !(1..=MAX_BLOCK_SIZE).contains(&self.block_size) {
            let reason = format!("must be from 1 to {MAX_BLOCK_SIZE}");
            return refuse("block_size", self.block_size, reason);
        }
        let name = self.kind.name();
        match self.window {
            Some(window) if !self.has_window() => {
                refuse("window", window, format!("a {name} group has none"))
            }
            Some(1..=MAX_BLOCK_SIZE) => Ok(()),
            None if !self.has_window() => Ok(()),
            window => {
                let given = window.map_or(Field::Missing, Field::from);
                refuse(
                    "window",
                    given,
                    format!("a {name} group needs 1 to {MAX_BLOCK_SIZE} tokens"),
                )
            }
        }?;
        if self.is_state() && self.eagle {
            return refuse("eagle", self.eagle, "a state group has no hit block to drop");
        }
        match self.page_bytes {
            Some(bytes) if !(1..=MAX_PAGE_BYTES).contains(&bytes) => {
                refuse("page_bytes", bytes, "must be at least 1 if it is given")
            }
            _ => Ok(()),
        }?;
        let reason = match self.draft_states {
            0 => return Ok(()),
            _ if !self.is_state() => format!("a {name} group has none"),
            most if most < self.block_size => return Ok(()),
            _ => format!("must be smaller than block_size={}", self.block_size),
        };
        refuse("draft_states", self.draft_states, reason)
    }
}

/// Count the leading positions that no query at num_computed or later sees.
#[must_use]
pub fn skipped_tokens(group: &Group, num_computed: u32) -> u32 {
    match (group.kind, group.window) {
        (Kind::State, _) => num_computed.saturating_sub(1),
        (Kind::SlidingWindow, Some(window)) => (num_computed + 1).saturating_sub(window),
        (_, Some(window)) => num_computed / window * window,
        (_, None) => 0,
    }
}

/// Count the leading blocks of which no query at num_computed or later sees a token.
#[must_use]
pub fn skipped_blocks(group: &Group, num_computed: u32) -> u32 {
    skipped_tokens(group, num_computed) / group.block_size
}

/// Return the most blocks that a request holds at once, whatever its length; None if nothing is
/// given back.
///
/// max_num_batched: most tokens that one step computes of a request. The result includes one more
/// block if the first visible token need not be at the start of a block.
#[must_use]
pub fn admission_cap(group: &Group, max_num_batched: u32, max_model_len: u32) -> Option<u32> {
    let window = group.window?;
    let sliding = group.kind == Kind::SlidingWindow;
    let seen = if sliding { window - 1 } else { window };
    let most = seen.saturating_add(max_num_batched).min(max_model_len);
    let straddles = sliding || !window.is_multiple_of(group.block_size);
    Some(most.div_ceil(group.block_size) + u32::from(straddles))
}

/// Return the most states that a request holds at once: the one after its last step, the one before
/// it or those that its tokens to come will make checkpoints, and those after its drafts.
#[must_use]
pub fn most_states(group: &Group, num_to_come: u32) -> u32 {
    (1 + num_to_come.div_ceil(group.block_size).max(1)).saturating_add(group.draft_states)
}

fn refuse(
    field: &'static str,
    value: impl Into<Field>,
    reason: impl Into<String>,
) -> Result<(), Error> {
    Err(Error::InvalidConfig { field, value: value.into(), reason: reason.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_sees_its_own_token() {
        let group_id = Group::windowed(2, Kind::SlidingWindow, 3);
        let skipped: Vec<u32> =
            (0..7).map(|computed| skipped_tokens(&group_id, computed)).collect();
        assert_eq!(skipped, [0, 0, 0, 1, 2, 3, 4]);
        assert_eq!(skipped_blocks(&group_id, 5), 1);
        assert_eq!(admission_cap(&group_id, 4, 100), Some(4));
        assert_eq!(admission_cap(&group_id, u32::MAX, 9), Some(6), "the model length bounds it");
    }

    #[test]
    fn a_chunk_is_forgotten_at_its_end() {
        let group_id = Group::windowed(2, Kind::ChunkedLocal, 4);
        let skipped: Vec<u32> =
            (2..6).map(|computed| skipped_tokens(&group_id, computed)).collect();
        assert_eq!(skipped, [0, 0, 4, 4]);
        assert_eq!(admission_cap(&group_id, 4, 100), Some(4));
        let odd = Group::windowed(2, Kind::ChunkedLocal, 5);
        assert_eq!(admission_cap(&odd, 4, 100), Some(6), "the second chunk starts within a block");
        assert_eq!(admission_cap(&Group::new(2), 4, 100), None);
    }

    #[test]
    fn a_group_that_cannot_be_is_refused_with_its_field() {
        let message = |group: Group| group.check().expect_err("it cannot be").to_string();
        let empty = Group::windowed(2, Kind::SlidingWindow, 0);
        let reason = "a sliding_window group needs 1 to 2147483647 tokens";
        assert_eq!(message(empty), format!("config window=0: {reason}"));
        let missing = Group { window: None, ..empty };
        assert_eq!(message(missing), format!("config window=None: {reason}"));
        let needless = Group { kind: Kind::Mla, ..empty };
        assert_eq!(message(needless), "config window=0: a mla group has none");
        assert_eq!(message(Group::new(0)), "config block_size=0: must be from 1 to 2147483647");
        let bytes = Group { page_bytes: Some(0), ..Group::new(1) };
        assert!(message(bytes).starts_with("config page_bytes=0"));
        let drafts = Group { draft_states: 2, ..Group::new(2) };
        assert_eq!(message(drafts), "config draft_states=2: a full_attention group has none");
        let reason = "config draft_states=2: must be smaller than block_size=2";
        assert_eq!(message(Group { kind: Kind::State, ..drafts }), reason);
    }
}
