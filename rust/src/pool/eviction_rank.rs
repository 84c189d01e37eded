// SPDX-License-Identifier: Apache-2.0
//! The rank of a block among the cached ones: what `priority_eviction.rs` orders them by.

use crate::types::ids::BlockId;

/// When a block was last used, and how many tokens its chain has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rank {
    /// A finite number.
    pub time: f64,
    /// Tokens up to and including the block.
    pub length: u32,
}

/// Access time assumed for a block that was never given one.
pub const NEVER: f64 = -1.0;
/// The rank of a block of which nothing was said: it goes before all that were used.
pub const NO_RANK: Rank = Rank { time: NEVER, length: 0 };

/// What a ranked pool knows of its blocks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Ranks {
    pub(crate) of_blocks: Vec<Rank>,
    /// The block that was put into its place by rank last.
    pub(crate) last_placed: Option<BlockId>,
}
