// SPDX-License-Identifier: Apache-2.0
//! The facts about a cache that an adapter states, and the work of one step for one request.
//!
//! Twin: kvcore/sanitizer/chunks.py.

/// The blocks of layers that share tables. window: None: all is seen. chunked: the chunk of
/// `window` positions is seen that a query stands in. state: a block holds the recurrent state
/// after the last of its tokens that a step computed.
#[derive(Clone, Copy, Debug)]
pub struct CacheGroup {
    pub block_size: usize,
    pub window: Option<usize>,
    pub ring: bool,
    pub num_null: u32,
    pub zeros_readable: bool,
    pub pool: usize,
    pub chunked: bool,
    pub state: bool,
}

impl CacheGroup {
    /// Whether a step reads before it writes.
    pub fn reads_first(&self) -> bool {
        self.ring || self.state
    }

    /// The first position that the queries from `start` on see.
    pub fn first(&self, start: usize) -> usize {
        match self.window {
            _ if self.state => start.saturating_sub(1),
            None => 0,
            Some(window) if self.chunked => start - start % window,
            Some(window) => (start + 1).saturating_sub(window),
        }
    }
}

/// Positions [start, start + num_tokens) of a request.
///
/// drafts: the tokens of the last ones, negative if not known. slots: the very slots, in one group.
#[derive(Clone, Debug, Default)]
pub struct Chunk {
    pub serial: u32,
    pub start: usize,
    pub num_tokens: usize,
    pub drafts: Vec<i64>,
    pub slots: Option<SlotChunk>,
}

/// The slots that a chunk writes, negative if it writes none, and reads.
#[derive(Clone, Debug)]
pub struct SlotChunk {
    pub group_id: usize,
    pub writes: Vec<i64>,
    pub reads: Vec<i64>,
}
