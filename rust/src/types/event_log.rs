// SPDX-License-Identifier: Apache-2.0
//! Events in the order of their making, and one by one, as canonical bytes.
//!
//! Why: most events are passed on unread, so they are kept as bytes, one behind the other: to
//! announce one is to append to the log, to read the log makes them objects. Twin:
//! kvcore/types/event_log.py.

use crate::types::clone_in_place::clone_in_place;
use crate::types::errors::Error;
use crate::types::events::{Event, News, Stored};
use crate::types::extra_inputs::{ExtraKey, is_extra_key};
use crate::types::keys::{BlockHash, HASH_SIZE};
use crate::types::wire::{Reader, Writer};

/// The number of a stored event.
pub const STORED: u8 = 0;
/// The number of a removed event.
pub const REMOVED: u8 = 1;
/// The number of a cleared event.
pub const CLEARED: u8 = 2;
/// The number of a stored event that names an epoch above 0.
pub const STORED_IN_EPOCH: u8 = 3;

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

    /// Add an event by its bytes.
    pub(crate) fn push_bytes(&mut self, event: &[u8]) {
        self.bytes.data.extend_from_slice(event);
        self.count += 1;
    }

    /// Hand the events out; the log is empty, with as much room as they took.
    pub fn take(&mut self) -> EventLog {
        let empty = EventLog { bytes: Writer::with_room(self.as_bytes().len()), count: 0 };
        std::mem::replace(self, empty)
    }
}

/// The log of the events that follow their count: their bytes, once each was read.
pub(crate) fn read_events(source: &mut Reader<'_>) -> Result<EventLog, Error> {
    let count = source.u32()?;
    let start = source.offset();
    for _ in 0..count {
        read_event(source)?;
    }
    Ok(EventLog::of(source.since(start), count))
}

/// The event of the next bytes. Fails with DamagedState.
pub fn read_event(source: &mut Reader<'_>) -> Result<Event, Error> {
    let kind = source.choice(4)?;
    match kind {
        STORED | STORED_IN_EPOCH => {
            let epoch = if kind == STORED { 0 } else { source.u32()? };
            if (epoch == 0) != (kind == STORED) {
                return Err(source.damaged("an epoch of 0 is not written"));
            }
            let block_hashes = source.hashes()?;
            Ok(Event::BlockStored {
                parent_hash: read_parent(source)?,
                tokens: source.numbers()?,
                block_size: source.u32()?,
                group_id: source.u32()?,
                lora_name: source.text()?,
                extra_keys: match source.flag()? {
                    true if block_hashes.is_empty() => {
                        return Err(source.damaged("extra keys of no block"));
                    }
                    true => {
                        block_hashes.iter().map(|_| read_keys(source)).collect::<Result<_, _>>()?
                    }
                    false => Vec::new(),
                },
                block_hashes,
                epoch,
            })
        }
        REMOVED => Ok(Event::BlockRemoved { block_hash: source.array()?, group_id: source.u32()? }),
        kind => {
            debug_assert_eq!(kind, CLEARED);
            Ok(Event::AllBlocksCleared)
        }
    }
}

/// The extra keys of one block.
fn read_keys(source: &mut Reader<'_>) -> Result<Vec<ExtraKey>, Error> {
    let keys = source.list(|source| Ok((source.u8()?, source.sized()?.to_vec())))?;
    if !keys.iter().all(|(tag, value)| is_extra_key(*tag, value)) {
        return Err(source.damaged("an extra key of the wrong form"));
    }
    Ok(keys)
}

fn read_parent(source: &mut Reader<'_>) -> Result<Option<BlockHash>, Error> {
    let bytes = source.sized()?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let hash = bytes.try_into();
    hash.map(Some).map_err(|_| source.damaged("a parent is not a hash"))
}

/// Write one event.
pub fn write_event(out: &mut Writer, news: &News<'_>) {
    match news {
        News::BlockStored(stored) => write_stored(out, stored),
        News::BlockRemoved(key) => {
            out.u8(REMOVED);
            out.data.extend_from_slice(&key.block_hash());
            out.u32(key.group_id());
        }
        News::AllBlocksCleared => out.u8(CLEARED),
    }
}

fn write_stored(out: &mut Writer, stored: &Stored<'_>) {
    let (first, end) = (stored.blocks.0 as usize, stored.blocks.1 as usize);
    let (scale, size) = (stored.scale as usize, stored.block_size as usize);
    out.data.reserve(64 + (end - first) * (HASH_SIZE + 4 * size));
    out.u8(if stored.epoch == 0 { STORED } else { STORED_IN_EPOCH });
    if stored.epoch > 0 {
        out.u32(stored.epoch);
    }
    out.count(end - first);
    for position in first..end {
        out.data.extend_from_slice(&stored.hashes[(position + 1) * scale - 1]);
    }
    match first {
        0 => out.sized(&[]),
        _ => out.sized(&stored.hashes[first * scale - 1]),
    }
    out.numbers(&stored.tokens[first * size..end * size]);
    out.u32(stored.block_size);
    out.u32(stored.group_id);
    out.text(stored.extra_keys.lora.as_ref().map(|lora| lora.name.as_str()));
    write_keys(out, stored);
}

/// A flag, and the extra keys of each block if any block has some.
fn write_keys(out: &mut Writer, stored: &Stored<'_>) {
    let flag = out.data.len();
    out.flag(false);
    if stored.extra_keys.is_empty() {
        return;
    }
    let ((first, end), size) = (stored.blocks, stored.block_size);
    for start in (first * size..end * size).step_by(size as usize) {
        let keys = stored.extra_keys.of_block(start, start + size, size / stored.scale);
        out.data[flag] |= u8::from(!keys.is_empty());
        out.count(keys.len());
        for (tag, value) in keys {
            out.u8(tag);
            out.sized(&value);
        }
    }
    if out.data[flag] == 0 {
        out.data.truncate(flag + 1);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::types::events::{removed, replay};
    use crate::types::extra_inputs::ExtraKeys;
    use crate::types::extra_inputs::LoRA;
    use crate::types::keys::make_key;

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
            group_id: 3,
            extra_keys,
            epoch: 0,
        }));
        log.push(&removed(&make_key(&HASHES[0], 3)));
        assert_eq!(replay(log.iter()), Some(BTreeSet::from([make_key(&HASHES[1], 3)])));
        log.push(&News::AllBlocksCleared);
        assert_eq!(replay(log.iter()), Some(BTreeSet::new()));
        log.push(&removed(&make_key(&HASHES[1], 3)));
        assert_eq!((replay(log.iter()), log.len()), (None, 4));
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
            group_id: 0,
            extra_keys: &extra_keys,
            epoch: 7,
        }));
        let expected = Event::BlockStored {
            block_hashes: vec![HASHES[3]],
            parent_hash: Some(HASHES[1]),
            tokens: vec![3, 4],
            block_size: 2,
            group_id: 0,
            lora_name: Some("a".to_owned()),
            extra_keys: vec![extra_keys.of_block(2, 4, 1)],
            epoch: 7,
        };
        let taken = log.take();
        assert_eq!(taken.iter().collect::<Vec<_>>(), [expected]);
        assert!(log.is_empty());
    }
}
