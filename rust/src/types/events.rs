// SPDX-License-Identifier: Apache-2.0
//! What happened to the hash index, for routers and stores that mirror it.
//!
//! Invariants: a stored event names every block of one publication. A removed event is emitted only
//! when the last block of a content loses its key. Replaying all events from the start gives
//! exactly the index.
//! Twin: kvcore/types/events.py.

use std::collections::BTreeSet;

use crate::types::extra_inputs::{ExtraKey, ExtraKeys};
use crate::types::keys::{BlockHash, Key, make_key};

/// A change of the index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Consecutive blocks of one request became findable.
    BlockStored {
        /// In chain order.
        block_hashes: Vec<BlockHash>,
        /// Of the block before the first, None at the start.
        parent_hash: Option<BlockHash>,
        /// Of all the blocks, in order.
        tokens: Vec<u32>,
        /// Tokens per block.
        block_size: u32,
        /// The group that the blocks belong to.
        group_id: u32,
        /// The adapter that the content is of.
        lora_name: Option<String>,
        /// What distinguishes content of equal tokens, per block: tags with values; empty if no
        /// block has any.
        extra_keys: Vec<Vec<ExtraKey>>,
        /// Number of the weights.
        epoch: u32,
    },
    /// The last block of a content is no longer findable.
    BlockRemoved {
        /// The content.
        block_hash: BlockHash,
        /// The group that the block belonged to.
        group_id: u32,
    },
    /// Nothing is findable any more.
    AllBlocksCleared,
}

/// Blocks of a request that became findable: the data of a stored event, before it is written.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    /// Positions of the blocks in the group's table: the first, and the one behind the last.
    pub blocks: (u32, u32),
    /// The request's tokens.
    pub tokens: &'a [u32],
    /// The request's block hashes.
    pub hashes: &'a [BlockHash],
    /// Hashes a block.
    pub scale: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// The group of the table.
    pub group_id: u32,
    /// The request's.
    pub extra_keys: &'a ExtraKeys,
    /// Number of the weights.
    pub epoch: u32,
}

/// An event as it is announced: its data are borrowed until it is written.
#[derive(Debug, Clone, Copy)]
pub enum News<'a> {
    /// Consecutive blocks of one request became findable.
    BlockStored(Stored<'a>),
    /// The last block under a key is no longer findable.
    BlockRemoved(&'a Key),
    /// Nothing is findable any more.
    AllBlocksCleared,
}

/// Make the event for the removal of the last block of a key.
#[must_use]
pub fn removed(key: &Key) -> News<'_> {
    News::BlockRemoved(key)
}

/// Return the keys that an empty mirror of the index holds after these events.
///
/// None: an event removes what the mirror does not hold.
#[must_use]
pub fn replay(events: impl IntoIterator<Item = Event>) -> Option<BTreeSet<Key>> {
    let mut keys = BTreeSet::new();
    for event in events {
        match event {
            Event::BlockStored { block_hashes, group_id, .. } => {
                keys.extend(block_hashes.iter().map(|hash| make_key(hash, group_id)));
            }
            Event::BlockRemoved { block_hash, group_id } => {
                if !keys.remove(&make_key(&block_hash, group_id)) {
                    return None;
                }
            }
            Event::AllBlocksCleared => keys.clear(),
        }
    }
    Some(keys)
}
