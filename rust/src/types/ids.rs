// SPDX-License-Identifier: Apache-2.0
//! Ids that must not be mixed up: blocks of a tier and rows of the block tables.
//!
//! Python has plain ints for both, so this file has no twin.

/// A block of one tier, 0-based. Block 0 of a pool with a null block is that block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// The stable row of a request's block tables, 0-based.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Row(pub u32);

impl BlockId {
    /// The place of the block in a column.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl Row {
    /// The place of the request in a column.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl From<BlockId> for i64 {
    fn from(block: BlockId) -> i64 {
        i64::from(block.0)
    }
}

/// The blocks of a request in one group, in order.
pub type Table = Vec<BlockId>;
