// SPDX-License-Identifier: Apache-2.0
//! What happened to the hash index, for routers and stores that mirror it.
//!
//! Rules: a stored event names every block of one publication; a removed event comes only when the
//! last block of that content lost its key. Replaying all events from nothing gives exactly the
//! index. Twin: kvcore/events.py.

use std::collections::BTreeSet;

use crate::hashing::{BlockHash, Key, make_key};

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
        /// Tokens a block.
        block_size: u32,
        /// The group that the blocks belong to.
        group: u32,
    },
    /// The last block of a content is no longer findable.
    BlockRemoved {
        /// The content.
        block_hash: BlockHash,
        /// The group that the block belonged to.
        group: u32,
    },
    /// Nothing is findable any more.
    AllBlocksCleared,
}

/// The event for the last copy under a key.
#[must_use]
pub fn removed(key: &Key) -> Event {
    Event::BlockRemoved { block_hash: key.block_hash(), group: key.group() }
}

/// The keys that a mirror of the index holds after these events, from nothing.
///
/// None: an event removes what the mirror does not hold.
#[must_use]
pub fn replay(events: &[Event]) -> Option<BTreeSet<Key>> {
    let mut keys = BTreeSet::new();
    for event in events {
        match event {
            Event::BlockStored { block_hashes, group, .. } => {
                keys.extend(block_hashes.iter().map(|hash| make_key(hash, *group)));
            }
            Event::BlockRemoved { block_hash, group } => {
                if !keys.remove(&make_key(block_hash, *group)) {
                    return None;
                }
            }
            Event::AllBlocksCleared => keys.clear(),
        }
    }
    Some(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_follows_the_events() {
        let (first, second) = ([1; 32], [2; 32]);
        let stored = Event::BlockStored {
            block_hashes: vec![first, second],
            parent_hash: None,
            tokens: vec![1, 2],
            block_size: 1,
            group: 3,
        };
        let gone = removed(&make_key(&first, 3));
        let held = replay(&[stored.clone(), gone.clone()]);
        assert_eq!(held, Some(BTreeSet::from([make_key(&second, 3)])));
        assert_eq!(replay(&[stored, Event::AllBlocksCleared, gone]), None);
    }
}
