// SPDX-License-Identifier: Apache-2.0
//! What a runtime must do, as plain data with ids only.
//!
//! Invariants: a batch is a list of commands, to be executed in order. Segments mark where order
//! matters: inside a segment no block is written twice, read after it was written, or written after
//! it was read. A batch is exported as int32 columns, so torch, numpy or another rank can take it
//! without a loop over commands. The numbers of the kinds are part of the format.
//! Twin: kvcore/types/commands.py.

mod runs;
mod segments;

use std::ops::RangeInclusive;

use crate::types::clone_in_place::clone_in_place;
use crate::types::errors::Error;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::{KEY_SIZE, Key};

/// The rows of a batch's buffer, in order.
pub const COLUMNS: [&str; 6] = ["kind", "segment", "a", "b", "c", "d"];

/// The kinds that read or write content.
const MOVING: RangeInclusive<i32> = 6..=11;
const BY_PUSH: &str = "CMD-ROW: rows are written by push alone";

/// Where a block lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// The accelerator's memory.
    Device,
    /// The host's memory.
    Host,
}

/// One thing that a runtime must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[rustfmt::skip] // one line per command, as a table
#[allow(missing_docs)] // the fields are the ids that each line names
pub enum Command {
    /// The block has a new owner; its content is undefined until it is written.
    Allocate { block: BlockId },
    /// The block has an owner again; its content is kept (a hit or a pin).
    Touch { block: BlockId },
    /// The content of the block is no longer findable under this key.
    Evict { block: BlockId, key: Key },
    /// No content is findable any more.
    EvictAll,
    /// The block has no owner any more; cached: its content can still be hit.
    Free { block: BlockId, cached: bool },
    /// Fill the block with zeros before it is first read.
    Zero { block: BlockId },
    /// Copy a block that is about to be written and has other owners.
    CopyOnWrite { source: BlockId, target: BlockId },
    /// Copy a device block to a host block.
    SwapOut { block: BlockId, host_block: BlockId },
    /// Copy a host block to a device block.
    SwapIn { host_block: BlockId, block: BlockId },
    /// Copy a block to the external store under this key; the operation may fail.
    Store { operation: u32, block: BlockId, key: Key },
    /// Fill a block with the content of this key in the external store; the operation may fail.
    Load { operation: u32, key: Key, block: BlockId },
    /// Put a block at a position of a request's block table in one group.
    SetTable { row: Row, group_id: u32, position: u32, block: BlockId },
    /// Shorten a request's block table in one group to `length` blocks.
    CutTable { row: Row, group_id: u32, length: u32 },
}

impl Command {
    /// The number of the kind in a batch, and its name.
    #[inline(always)]
    fn described(&self) -> (i32, &'static str) {
        match self {
            Command::Allocate { .. } => (ALLOCATE, "Allocate"),
            Command::Touch { .. } => (2, "Touch"),
            Command::Evict { .. } => (EVICT, "Evict"),
            Command::EvictAll => (4, "EvictAll"),
            Command::Free { .. } => (FREE, "Free"),
            Command::Zero { .. } => (6, "Zero"),
            Command::CopyOnWrite { .. } => (7, "CopyOnWrite"),
            Command::SwapOut { .. } => (8, "SwapOut"),
            Command::SwapIn { .. } => (9, "SwapIn"),
            Command::Store { .. } => (10, "Store"),
            Command::Load { .. } => (11, "Load"),
            Command::SetTable { .. } => (SET_TABLE, "SetTable"),
            Command::CutTable { .. } => (13, "CutTable"),
        }
    }

    /// The number of the kind in a batch.
    #[must_use]
    #[inline(always)]
    pub fn kind(&self) -> i32 {
        self.described().0
    }

    /// The name of the kind.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.described().1
    }

    /// The block whose content this command reads.
    #[must_use]
    #[inline(always)]
    pub fn reads(&self) -> Option<(Tier, BlockId)> {
        match *self {
            Command::CopyOnWrite { source, .. } => Some((Tier::Device, source)),
            Command::SwapOut { block, .. } | Command::Store { block, .. } => {
                Some((Tier::Device, block))
            }
            Command::SwapIn { host_block, .. } => Some((Tier::Host, host_block)),
            _ => None,
        }
    }

    /// The block whose content this command writes.
    #[must_use]
    #[inline(always)]
    pub fn writes(&self) -> Option<(Tier, BlockId)> {
        match *self {
            Command::Zero { block } => Some((Tier::Device, block)),
            Command::CopyOnWrite { target, .. } => Some((Tier::Device, target)),
            Command::SwapOut { host_block, .. } => Some((Tier::Host, host_block)),
            Command::SwapIn { block, .. } | Command::Load { block, .. } => {
                Some((Tier::Device, block))
            }
            _ => None,
        }
    }
}

/// Commands in the order of their making, as rows of kind, a, b, c, d; keys apart.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Commands {
    pub(crate) rows: Vec<[i32; 5]>,
    pub(crate) keys: Vec<[u8; KEY_SIZE]>,
    /// The places of those that move content, whose order can matter: in most batches none does.
    pub(crate) moving: Vec<u32>,
}

clone_in_place!(Commands { rows, keys, moving });

impl Commands {
    /// Add a command.
    #[inline(always)] // the kind is known where it is called, and folds
    pub fn push(&mut self, command: Command) {
        let [a, b, c, d] = to_row(&command, &mut self.keys);
        if MOVING.contains(&command.kind()) {
            self.moving.push(self.rows.len() as u32);
        }
        self.rows.push([command.kind(), a, b, c, d]);
    }

    /// Commands so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The commands, in order.
    pub fn iter(&self) -> impl Iterator<Item = Command> + '_ {
        self.since(0)
    }

    /// The commands from one of them on, in order; none behind the last.
    pub fn since(&self, start: usize) -> impl Iterator<Item = Command> + '_ {
        self.rows[start.min(self.len())..].iter().map(|&[kind, a, b, c, d]| {
            from_row(kind, [a, b, c, d], self.keys.as_flattened()).expect(BY_PUSH)
        })
    }

    /// Forget all commands, keep the room.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.keys.clear();
        self.moving.clear();
    }
}

impl FromIterator<Command> for Commands {
    fn from_iter<T: IntoIterator<Item = Command>>(commands: T) -> Self {
        let mut rows = Commands::default();
        commands.into_iter().for_each(|command| rows.push(command));
        rows
    }
}

/// The commands of one engine step, closed and numbered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Batches are numbered from 0 without gaps.
    pub number: u64,
    /// int32 little-endian, C order, shape [6, n], rows as in `COLUMNS`.
    pub buffer: Vec<[u8; 4]>,
    /// Keys of `KEY_SIZE` bytes; key fields in the columns are indices into them.
    pub keys: Vec<u8>,
    /// Number of the weights that its forward pass runs with.
    pub epoch: u32,
}

impl Batch {
    /// Commands of the batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.buffer.len() / COLUMNS.len()
    }

    /// Whether the batch has no command.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// The values of one column, by its place in `COLUMNS`.
    pub fn column(&self, column: usize) -> impl Iterator<Item = i32> + '_ {
        let count = self.len();
        let values = self.buffer[column * count..(column + 1) * count].iter();
        values.map(|bytes| i32::from_le_bytes(*bytes))
    }

    /// The commands, in order. Fails with DamagedBatch.
    pub fn commands(&self) -> Result<Vec<Command>, Error> {
        let (size, keys) = (4 * self.buffer.len(), self.keys.len());
        if !size.is_multiple_of(4 * COLUMNS.len()) || !keys.is_multiple_of(KEY_SIZE) {
            let sizes = format!("{size} bytes of columns and {keys} bytes of keys");
            return Err(self.damaged(format!("it is cut off: {sizes}")));
        }
        let columns: [Vec<i32>; 6] = std::array::from_fn(|column| self.column(column).collect());
        let [kinds, _, a, b, c, d] = columns;
        let read = |at: usize| {
            let command = from_row(kinds[at], [a[at], b[at], c[at], d[at]], &self.keys);
            command.map_err(|what| self.damaged(format!("command {at} has {what}")))
        };
        (0..self.len()).map(read).collect()
    }

    /// Return the error for this batch.
    fn damaged(&self, reason: String) -> Error {
        Error::DamagedBatch { batch: self.number as i64, reason }
    }
}

/// Return the four value columns of a command, and append its key, if any, to `keys`.
#[inline(always)]
pub fn to_row(command: &Command, keys: &mut Vec<[u8; KEY_SIZE]>) -> [i32; 4] {
    match *command {
        Command::Allocate { block } | Command::Touch { block } | Command::Zero { block } => {
            row([block.0, 0, 0, 0])
        }
        Command::Evict { block, key } => row([block.0, keep(keys, &key), 0, 0]),
        Command::EvictAll => [0; 4],
        Command::Free { block, cached } => row([block.0, u32::from(cached), 0, 0]),
        Command::CopyOnWrite { source, target } => row([source.0, target.0, 0, 0]),
        Command::SwapOut { block, host_block } => row([block.0, host_block.0, 0, 0]),
        Command::SwapIn { host_block, block } => row([host_block.0, block.0, 0, 0]),
        Command::Store { operation, block, key } => row([operation, block.0, keep(keys, &key), 0]),
        Command::Load { operation, key, block } => row([operation, keep(keys, &key), block.0, 0]),
        Command::SetTable { row: of, group_id, position, block } => {
            row([of.0, group_id, position, block.0])
        }
        Command::CutTable { row: of, group_id, length } => row([of.0, group_id, length, 0]),
    }
}

/// Add a key to those of a batch; returns its place.
fn keep(keys: &mut Vec<[u8; KEY_SIZE]>, key: &Key) -> u32 {
    keys.push(key.0);
    keys.len() as u32 - 1
}

/// Ids and counts are at most `MAX_BLOCKS`, so they fit.
fn row(values: [u32; 4]) -> [i32; 4] {
    values.map(|value| value as i32)
}

/// The kinds in the columns of commands that are also added many at a time. The values of
/// `SetTable` are in the order of its fields.
const ALLOCATE: i32 = 1;
const EVICT: i32 = 3;
const FREE: i32 = 5;
const SET_TABLE: i32 = 12;

/// Return the command of one row of the columns; the inverse of `to_row`. Fails with the kind or
/// key that is none.
#[inline]
pub fn from_row(kind: i32, values: [i32; 4], keys: &[u8]) -> Result<Command, String> {
    let [a, b, c, d] = values.map(|value| value as u32);
    let (block, second) = (BlockId(a), BlockId(b));
    let keys = keys.as_chunks().0;
    let key = |place: u32| match keys.get(place as usize) {
        Some(key) => Ok(Key(*key)),
        None => Err(format!("key {} of {}", place as i32, keys.len())),
    };
    Ok(match kind {
        ALLOCATE => Command::Allocate { block },
        2 => Command::Touch { block },
        EVICT => Command::Evict { block, key: key(b)? },
        4 => Command::EvictAll,
        FREE => Command::Free { block, cached: b != 0 },
        6 => Command::Zero { block },
        7 => Command::CopyOnWrite { source: block, target: second },
        8 => Command::SwapOut { block, host_block: second },
        9 => Command::SwapIn { host_block: block, block: second },
        10 => Command::Store { operation: a, block: second, key: key(c)? },
        11 => Command::Load { operation: a, key: key(b)?, block: BlockId(c) },
        SET_TABLE => Command::SetTable { row: Row(a), group_id: b, position: c, block: BlockId(d) },
        13 => Command::CutTable { row: Row(a), group_id: b, length: c },
        _ => return Err(format!("kind {kind}")),
    })
}

/// Return the segment number of each command, ascending from 0; a hazard opens a new segment.
#[must_use]
pub fn segments(commands: &Commands) -> Vec<i32> {
    if segments::is_one(commands) { vec![0; commands.len()] } else { segments::split(commands) }
}

/// Return the batch of these commands, as columns with segments.
#[must_use]
pub fn close(number: u64, commands: &Commands) -> Batch {
    let mut batch = Batch::default();
    close_into(&mut batch, number, commands);
    batch
}

/// The same in the memory of a batch that is not needed any more.
pub(crate) fn close_into(batch: &mut Batch, number: u64, commands: &Commands) {
    let Batch { buffer, keys, .. } = batch;
    keys.clear();
    keys.extend_from_slice(commands.keys.as_flattened());
    buffer.clear();
    buffer.reserve(commands.len() * COLUMNS.len());
    let column = |number: usize| commands.rows.iter().map(move |row| row[number].to_le_bytes());
    buffer.extend(column(0));
    if segments::is_one(commands) {
        buffer.resize(2 * commands.len(), [0; 4]);
    } else {
        buffer.extend(segments::split(commands).into_iter().map(i32::to_le_bytes));
    }
    (1..COLUMNS.len() - 1).for_each(|number| buffer.extend(column(number)));
    batch.number = number;
}

/// Return the rows whose tables the commands change, ascending.
pub(crate) fn named_rows(commands: &Commands) -> Vec<Row> {
    let named = |command| match command {
        Command::SetTable { row, .. } | Command::CutTable { row, .. } => Some(row),
        _ => None,
    };
    let mut rows: Vec<Row> = commands.iter().filter_map(named).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// The places of tables that the commands behind the first ones set, in order: row, group,
/// position, block.
pub(crate) fn places_set(commands: &Commands, start: usize) -> impl Iterator<Item = [u32; 4]> {
    let rows = commands.rows[start..].iter().filter(|&&[kind, ..]| kind == SET_TABLE);
    rows.map(|&[_, values @ ..]| values.map(i32::cast_unsigned))
}

#[cfg(test)]
mod tests;
