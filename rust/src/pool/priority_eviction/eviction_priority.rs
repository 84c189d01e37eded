// SPDX-License-Identifier: Apache-2.0
//! The eviction priority of a cached block, by which `priority_eviction.rs` orders the free queue.

use crate::types::ids::BlockId;

/// When a block was last used, and how many tokens its chain has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Priority {
    /// A finite number.
    pub time: f64,
    /// Tokens up to and including the block.
    pub length: u32,
}

/// Access time assumed for a block that was never given one.
pub const NEVER: f64 = -1.0;
/// Priority of a block that was never given one: it leaves before all others.
pub const NO_PRIORITY: Priority = Priority { time: NEVER, length: 0 };

/// The priorities of a pool's blocks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Priorities {
    pub(crate) of_blocks: Vec<Priority>,
    /// The block that was most recently put into its place by priority.
    pub(crate) last_placed: Option<BlockId>,
}
