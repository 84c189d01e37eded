// SPDX-License-Identifier: Apache-2.0
//! Events from their canonical bytes.
//!
//! Rules: those of `decode.rs`, of which this is a part.

use crate::codec::decode::Reader;
use crate::codec::encode::{CLEARED, REMOVED, STORED};
use crate::hashing::block_hash::BlockHash;
use crate::hashing::extra_keys::{ExtraKey, is_extra_key};
use crate::types::errors::Error;
use crate::types::events::{Event, EventLog};

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
    match source.choice(3)? {
        STORED => {
            let block_hashes = source.hashes()?;
            Ok(Event::BlockStored {
                parent_hash: read_parent(source)?,
                tokens: source.numbers()?,
                block_size: source.u32()?,
                group: source.u32()?,
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
            })
        }
        REMOVED => Ok(Event::BlockRemoved { block_hash: source.array()?, group: source.u32()? }),
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
        return Err(source.damaged("an extra key that no block has"));
    }
    Ok(keys)
}

fn read_parent(source: &mut Reader<'_>) -> Result<Option<BlockHash>, Error> {
    let bytes = source.sized()?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let hash = bytes.try_into();
    hash.map(Some).map_err(|_| source.damaged("a parent is no hash"))
}
