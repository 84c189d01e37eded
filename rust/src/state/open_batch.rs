// SPDX-License-Identifier: Apache-2.0
//! The keys that the open batch published, by request.
//!
//! Rules: they lie in one column, so that noting one costs no allocation. What a request publishes
//! at once lies together, and the last one there names the first one of what it published next.
//! Those of a request that left stay until the batch is taken, out of reach.

use hashbrown::HashSet;

use crate::hashing::block_hash::Key;
use crate::mutants::{Mutant, seeded};
use crate::state::state::{BatchRecord, OpenBatch, Published};
use crate::types::ids::{BlockId, Row};

impl BatchRecord {
    /// The record of a request that had computed so many tokens.
    #[must_use]
    pub fn new(num_computed_before: u32) -> Self {
        BatchRecord { num_computed_before, published: None }
    }
}

impl OpenBatch {
    /// Note a key that was published for content that the batch writes for a request.
    pub(crate) fn note_published(
        &mut self,
        row: Row,
        (group, position): (u32, u32),
        block: BlockId,
        key: Key,
    ) {
        let place = self.published.len() as u32;
        self.published.push(Published { group, position, block, key, next: None });
        self.chain_published(row, place);
    }

    /// Chain the keys from this place on behind those that the request published before.
    pub(crate) fn chain_published(&mut self, row: Row, start: u32) {
        let end = self.published.len() as u32;
        let Some(record) = self.records.get_mut(row).filter(|_| start < end) else { return };
        if let Some((_, last)) = record.published {
            self.published[last as usize].next = Some(start);
        }
        record.published = Some((record.published.map_or(start, |(first, _)| first), end - 1));
    }

    /// What a request published, in order.
    pub(crate) fn published_by(
        &self,
        record: &BatchRecord,
    ) -> impl Iterator<Item = &Published> + use<'_> {
        let (first, last) = record.published.unzip();
        let follows = move |&place: &u32| {
            let left = Some(place) != last && !seeded(Mutant::ChainLosesKeys);
            left.then(|| self.published[place as usize].next.unwrap_or(place + 1))
        };
        std::iter::successors(first, follows).map(|place| &self.published[place as usize])
    }

    /// The blocks whose content the batch writes and that it published.
    pub(crate) fn unwritten(&self) -> HashSet<BlockId> {
        let all = self.records.values().flat_map(|record| self.published_by(record));
        all.map(|item| item.block).collect()
    }

    /// Open the next batch.
    pub(crate) fn advance(&mut self) {
        self.number += 1;
        self.records.clear();
        self.published.clear();
    }
}
