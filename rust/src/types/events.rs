// SPDX-License-Identifier: Apache-2.0
//! What happened to the hash index, for routers and stores that mirror it.
//!
//! Rules: a stored event names every block of one publication; a removed event comes only when the
//! last block of that content lost its key. Replaying all events from nothing gives exactly the
//! index. Events are kept as the canonical bytes, one after the other, since most of them are
//! passed on unread: to announce one is to append to the log, to read the log makes them objects.
//! Twin: kvcore/types/events.py.

use std::collections::BTreeSet;

use crate::codec::decode::Reader;
use crate::codec::decode_events::read_event;
use crate::codec::encode::{Writer, write_event};
use crate::hashing::block_hash::{BlockHash, Key, make_key};
use crate::hashing::extra_keys::{ExtraKey, ExtraKeys};
use crate::types::clone_in_place::clone_in_place;

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
        /// The adapter that the content is of.
        lora_name: Option<String>,
        /// What tells content of equal tokens apart, of each block: tags with values; none where no
        /// block has any.
        extra_keys: Vec<Vec<ExtraKey>>,
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

/// Blocks of a request that became findable: what a stored event says, before it is written.
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
    /// Tokens a block.
    pub block_size: u32,
    /// The group of the table.
    pub group: u32,
    /// The request's.
    pub extra_keys: &'a ExtraKeys,
}

/// An event as it is announced: what it says is borrowed until it is written.
#[derive(Debug, Clone, Copy)]
pub enum News<'a> {
    /// Consecutive blocks of one request became findable.
    BlockStored(Stored<'a>),
    /// The last block under a key is no longer findable.
    BlockRemoved(&'a Key),
    /// Nothing is findable any more.
    AllBlocksCleared,
}

/// Events in the order of their making, as their canonical bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EventLog {
    bytes: Writer,
    count: u32,
}

clone_in_place!(EventLog { bytes, count });

impl EventLog {
    /// The events of canonical bytes that were read before.
    pub(crate) fn of(data: &[u8], count: u32) -> Self {
        EventLog { bytes: Writer::new(data), count }
    }

    /// Events so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The canonical bytes of the events, without their count.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.as_bytes()
    }

    /// The events, in order.
    pub fn iter(&self) -> impl Iterator<Item = Event> + '_ {
        let mut source = Reader::new(self.as_bytes());
        (0..self.count).map(move |_| {
            read_event(&mut source).expect("EVT-REPLAY: the log is written by push alone")
        })
    }

    /// Add an event.
    pub fn push(&mut self, news: &News<'_>) {
        write_event(&mut self.bytes, news);
        self.count += 1;
    }

    /// Hand the events out; the log is empty, with as much room as they took.
    pub fn take(&mut self) -> EventLog {
        let empty = EventLog { bytes: Writer::with_room(self.as_bytes().len()), count: 0 };
        std::mem::replace(self, empty)
    }
}

/// The event for the last copy under a key.
#[must_use]
pub fn removed(key: &Key) -> News<'_> {
    News::BlockRemoved(key)
}

/// The keys that a mirror of the index holds after these events, from nothing.
///
/// None: an event removes what the mirror does not hold.
#[must_use]
pub fn replay(events: &EventLog) -> Option<BTreeSet<Key>> {
    let mut keys = BTreeSet::new();
    for event in events.iter() {
        match event {
            Event::BlockStored { block_hashes, group, .. } => {
                keys.extend(block_hashes.iter().map(|hash| make_key(hash, group)));
            }
            Event::BlockRemoved { block_hash, group } => {
                if !keys.remove(&make_key(&block_hash, group)) {
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
    use crate::hashing::extra_keys::LoRA;

    const HASHES: [BlockHash; 4] = [[1; 32], [2; 32], [3; 32], [4; 32]];

    #[test]
    fn a_mirror_follows_the_events() {
        let mut log = EventLog::default();
        let extra_keys = &ExtraKeys::default();
        log.push(&News::BlockStored(Stored {
            blocks: (0, 2),
            tokens: &[1, 2],
            hashes: &HASHES,
            scale: 1,
            block_size: 1,
            group: 3,
            extra_keys,
        }));
        log.push(&removed(&make_key(&HASHES[0], 3)));
        assert_eq!(replay(&log), Some(BTreeSet::from([make_key(&HASHES[1], 3)])));
        log.push(&News::AllBlocksCleared);
        assert_eq!(replay(&log), Some(BTreeSet::new()));
        log.push(&removed(&make_key(&HASHES[1], 3)));
        assert_eq!((replay(&log), log.len()), (None, 4));
    }

    #[test]
    fn a_stored_event_reads_as_it_was_written() {
        let mut log = EventLog::default();
        let lora = LoRA { name: "a".to_owned(), path: "b".to_owned() };
        let extra_keys = ExtraKeys { lora: Some(lora), ..ExtraKeys::default() };
        log.push(&News::BlockStored(Stored {
            blocks: (1, 2),
            tokens: &[1, 2, 3, 4, 5],
            hashes: &HASHES,
            scale: 2,
            block_size: 2,
            group: 0,
            extra_keys: &extra_keys,
        }));
        let expected = Event::BlockStored {
            block_hashes: vec![HASHES[3]],
            parent_hash: Some(HASHES[1]),
            tokens: vec![3, 4],
            block_size: 2,
            group: 0,
            lora_name: Some("a".to_owned()),
            extra_keys: vec![extra_keys.of_block(2, 4, 1)],
        };
        let taken = log.take();
        assert_eq!(taken.iter().collect::<Vec<_>>(), [expected]);
        assert!(log.is_empty());
    }
}
