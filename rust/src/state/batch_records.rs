// SPDX-License-Identifier: Apache-2.0
//! What the state remembers of batches that were taken, and of loads that may still fail.
//! External tokens count as loaded when they are scheduled, so their blocks are findable at once.
//! Until a load is confirmed, the state remembers the requests that count or counted its tokens,
//! and the blocks with a key that were loaded or computed from them. `transitions/in_flight.rs` and
//! `transitions/unconfirmed_loads.rs` keep these records true. A taken batch is shared by the
//! copies of a state until one of them changes it. Twin: kvcore/state/batch_records.py.

use std::collections::BTreeSet;
use std::ops::Range;

use smallvec::SmallVec;

use crate::mutants::{Mutant, seeded};
use crate::state::row_map::RowMap;
use crate::types::clone_in_place::clone_in_place;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;

/// A block, and the key under which a batch published it.
pub type PublishedKey = (BlockId, Key);

/// Row, group and position in a table.
pub type TableCell = (Row, u32, u32);

/// A batch that samples tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    /// Its number.
    pub(crate) batch: u64,
    /// Number of the request's tokens that it computes up to.
    pub(crate) end: u32,
}

/// Some of them, oldest first; an engine that plans one step ahead has two.
pub type Samplers = SmallVec<[Sampler; 2]>;

/// What a batch remembers of a request.
#[derive(Debug, Clone, Copy)]
pub struct RequestEntry {
    /// Place among the entries of the batch.
    pub(crate) order: u32,
    /// The request's count before its first slots in the batch, and before its hits; 0 if it
    /// was swapped.
    pub(crate) before: u32,
    /// The count that a cancel takes it back to.
    pub(crate) restore: u32,
    /// Whether the batch's completion may publish the request's blocks.
    pub(crate) publishes: bool,
}

/// The entries of one batch.
#[derive(Debug, Default)]
pub struct RequestEntries {
    pub(crate) rows: RowMap<RequestEntry>,
    /// Number of entries that were ever made.
    num_made: u32,
    /// In a taken batch, for each entry in the order of creation: the number of leading blocks of
    /// each table that the forward pass uses and that are still there.
    pub(crate) held: Vec<u32>,
}

clone_in_place!(RequestEntries { rows, num_made, held });

impl RequestEntries {
    /// The entry of a row.
    #[must_use]
    pub fn get(&self, row: Row) -> Option<&RequestEntry> {
        self.rows.get(row)
    }

    /// Add an entry for a row that has none.
    pub(crate) fn insert_new(&mut self, row: Row, made: RequestEntry) {
        self.num_made = made.order + 1;
        self.rows.insert_new(row, made);
    }

    /// Number of leading blocks of each of a row's tables that the forward pass uses; empty in the
    /// open batch.
    #[must_use]
    pub fn held(&self, row: Row) -> &[u32] {
        self.get(row).map_or(&[], |entry| &self.held[self.places(entry)])
    }

    /// The same number for one group.
    pub(crate) fn held_in(&self, row: Row, group_id: u32) -> u32 {
        self.held(row).get(group_id as usize).copied().unwrap_or(0)
    }

    /// The range of a request's numbers in `held`.
    fn places(&self, entry: &RequestEntry) -> Range<usize> {
        let width = self.held.len() / self.num_made as usize;
        let order = if seeded(Mutant::HeldOfTheFirst) { 0 } else { entry.order as usize };
        order * width..(order + 1) * width
    }

    /// Set the blocks that the forward pass uses, one entry after the other.
    pub(crate) fn restore(&mut self, held: Vec<u32>) {
        self.held = held;
    }

    /// Note that the forward pass uses at most `length` blocks of a table.
    pub(crate) fn cut(&mut self, row: Row, group_id: u32, length: u32) {
        if let Some(place) = self.get(row).map(|entry| self.places(entry).start + group_id as usize)
        {
            self.held[place] = length;
        }
    }

    /// Note the blocks per group that the forward pass uses, for entries of a batch that is taken.
    pub(crate) fn hold(&mut self, num_groups: usize, held: impl Fn(Row, &mut [u32])) {
        self.held = vec![0; self.num_made as usize * num_groups];
        for (row, entry) in self.rows.iter() {
            let first = entry.order as usize * num_groups;
            held(row, &mut self.held[first..first + num_groups]);
        }
    }
}

/// A state that a batch in flight writes and that is findable once the batch is completed.
///
/// The batch owns the block until then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwedCheckpoint {
    pub(crate) block: BlockId,
    /// Of the state.
    pub(crate) key: Key,
    /// The bytes of what is then announced, if that is asked for; the request may be gone by then.
    pub(crate) event: Option<Vec<u8>>,
}

/// A taken batch.
#[derive(Debug, Clone, Default)]
pub struct BatchInFlight {
    pub(crate) number: u64,
    pub(crate) entries: RequestEntries,
    /// The keys that it published, in order, if they can be withdrawn.
    pub(crate) published_keys: Vec<PublishedKey>,
    /// The rows that its commands name, and those of removed requests that it had entries for,
    /// rising.
    pub(crate) rows: Vec<Row>,
    /// Places in tables that the batch uses and that have another block by now.
    pub(crate) replaced: BTreeSet<TableCell>,
    /// Whether an epoch began in it.
    pub(crate) starts_epoch: bool,
    /// The states that it publishes when it is completed, in the order of the calls.
    pub(crate) owed: Vec<OwedCheckpoint>,
}

impl BatchInFlight {
    /// The number of the batch.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Group and position of a request's places that have another block by now, rising.
    pub(crate) fn replaced_of(&self, row: Row) -> impl Iterator<Item = (u32, u32)> + '_ {
        let places = self.replaced.range((row, 0, 0)..=(row, u32::MAX, u32::MAX));
        places.map(|&(_, group_id, position)| (group_id, position))
    }

    /// Whether the forward pass uses the block in this place of a table.
    pub(crate) fn uses(&self, row: Row, group_id: u32, position: u32) -> bool {
        position < self.entries.held_in(row, group_id)
            && !self.replaced.contains(&(row, group_id, position))
    }
}

/// A request that can report that a load failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reporter {
    pub(crate) row: Row,
    /// The end of the loaded tokens that it counts, 0 if it does not depend on the load.
    pub(crate) counted: u32,
    /// The greatest end that it ever counted.
    pub(crate) most: u32,
}

/// Tokens [first, end) that a batch loads from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnconfirmedLoad {
    pub(crate) batch: u64,
    pub(crate) first: u32,
    pub(crate) end: u32,
    /// The request that started the load, and the others that ever depended on it, in that order,
    /// until they are removed.
    pub(crate) reporters: Vec<Reporter>,
    /// Each block with a key that depends on the load, with the position behind its last token.
    pub(crate) blocks: Vec<(BlockId, u32)>,
}

impl UnconfirmedLoad {
    /// The loaded tokens that a request counts, and ever counted.
    pub(crate) fn reporter(&self, row: Row) -> Reporter {
        let found = self.reporters.iter().copied().find(|each| each.row == row);
        found.unwrap_or(Reporter { row, counted: 0, most: 0 })
    }

    /// Whether a rewind of these requests to num_tokens tokens reports that the load failed.
    pub(crate) fn is_reported(&self, rows: &[Row], num_tokens: u32) -> bool {
        rows.iter().any(|&row| self.reporter(row).most > num_tokens)
    }

    /// Let a request count the load's tokens up to an end, at least.
    pub(crate) fn count(&mut self, row: Row, end: u32) {
        if end <= self.reporter(row).counted.max(self.first) {
            return;
        }
        match self.reporters.iter_mut().find(|each| each.row == row) {
            Some(known) => (known.counted, known.most) = (end, end.max(known.most)),
            None => self.reporters.push(Reporter { row, counted: end, most: end }),
        }
    }

    /// Let no request count the load's tokens past an end, which becomes that of the load.
    pub(crate) fn cut(&mut self, end: u32) {
        self.end = end;
        for each in &mut self.reporters {
            (each.counted, each.most) = (each.counted.min(end), each.most.min(end));
        }
    }
}

/// The order of the next entry.
pub(crate) fn next_order(entries: &RequestEntries) -> u32 {
    entries.num_made
}

/// Return the entries of a batch in the order in which they were made.
pub(crate) fn in_order(entries: &RequestEntries) -> SmallVec<[(Row, &RequestEntry); 4]> {
    if entries.rows.num_entries() == 0 {
        return SmallVec::new();
    }
    let mut ordered: SmallVec<[(Row, &RequestEntry); 4]> = entries.rows.iter().collect();
    ordered.sort_by_key(|(_, entry)| entry.order);
    ordered
}
