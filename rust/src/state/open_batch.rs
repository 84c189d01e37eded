// SPDX-License-Identifier: Apache-2.0
//! The open batch: the commands and keys of the transitions since the last batch.
//!
//! Invariants: the keys that it published lie in one column, so that noting one costs no
//! allocation. The keys that a request publishes in one call are adjacent, and the last of them
//! links to the first of its next call. Those of a request that left stay until the batch is taken,
//! but nothing links to them. Twin: kvcore/state/open_batch.py.

use std::collections::BTreeSet;
use std::sync::Arc;

use hashbrown::HashSet;

use crate::mutants::{Mutant, seeded};
use crate::state::batch_records::{PublishedKey, RequestEntries};
use crate::state::row_map::RowMap;
use crate::types::clone_in_place::clone_in_place;
use crate::types::config::Config;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;

/// A block that the open batch published before the batch itself has written it.
#[derive(Debug, Clone)]
pub struct UnwrittenBlock {
    pub(crate) group_id: u32,
    pub(crate) position: u32,
    pub(crate) block: BlockId,
    pub(crate) key: Key,
    /// The place of the same request's next one, unless that is adjacent.
    pub(crate) next: Option<u32>,
}

/// What the open batch did for a request that it schedules.
#[derive(Debug, Clone)]
pub struct ScheduledRequest {
    /// The count before the request's first slots in the batch, and before its hits.
    pub(crate) num_computed_before: u32,
    /// The count that it cannot be shortened below, behind its hits and external tokens and, if it
    /// holds no others or the batch brings encoder tokens, its first own position.
    pub(crate) num_kept: u32,
    /// The places of the first and the last of its blocks.
    pub(crate) unwritten: Option<(u32, u32)>,
}

/// A full block whose key another block held when it was filled (`Duplicates::Merge`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merge {
    pub(crate) request_id: Arc<str>,
    pub(crate) group_id: u32,
    pub(crate) position: u32,
    pub(crate) block: BlockId,
    pub(crate) key: Key,
}

/// The batch that is being filled; its commands are in the state's effects.
#[derive(Debug, Default)]
pub struct OpenBatch {
    pub(crate) number: u64,
    pub(crate) scheduled: RowMap<ScheduledRequest>,
    /// Those of all requests, in order; a request's own are linked. Those of requests that left
    /// stay.
    pub(crate) unwritten: Vec<UnwrittenBlock>,
    pub(crate) merges: Vec<Merge>,
    /// Its effects on requests, if batches are remembered.
    pub(crate) entries: RequestEntries,
    /// The keys that it publishes, in order, if batches can be in flight.
    pub(crate) published_keys: Vec<PublishedKey>,
    /// Whether an epoch began in it.
    pub(crate) starts_epoch: bool,
    /// The requests whose state after it is a checkpoint, in the order of the calls.
    pub(crate) ends: Vec<Row>,
    /// Those of them whose state is one in all groups, because the call said so.
    pub(crate) marked: BTreeSet<Row>,
    /// The scheduled requests whose most recent call delays its keys; only noted if blocks may have
    /// tail keys.
    pub(crate) delayed: BTreeSet<Row>,
}

clone_in_place!(OpenBatch {
    number,
    scheduled,
    unwritten,
    merges,
    entries,
    published_keys,
    starts_epoch,
    ends,
    marked,
    delayed
});

impl UnwrittenBlock {
    /// The first token behind its block.
    pub(crate) fn end(&self, config: &Config) -> u32 {
        (self.position + 1) * config.groups[self.group_id as usize].block_size
    }
}

impl ScheduledRequest {
    /// The record of a request with this many computed tokens before the batch.
    #[must_use]
    pub fn new(num_computed_before: u32) -> Self {
        ScheduledRequest {
            num_computed_before,
            num_kept: num_computed_before.max(1),
            unwritten: None,
        }
    }
}

impl OpenBatch {
    /// Note a block that was published for a request before the batch has written it.
    pub(crate) fn note_unwritten(
        &mut self,
        row: Row,
        (group_id, position): (u32, u32),
        block: BlockId,
        key: Key,
    ) {
        let place = self.unwritten.len() as u32;
        self.unwritten.push(UnwrittenBlock { group_id, position, block, key, next: None });
        self.chain_unwritten(row, place);
    }

    /// Chain the blocks from this place on behind those that the request published before.
    pub(crate) fn chain_unwritten(&mut self, row: Row, start: u32) {
        let end = self.unwritten.len() as u32;
        let Some(record) = self.scheduled.get_mut(row).filter(|_| start < end) else { return };
        if let Some((_, last)) = record.unwritten {
            self.unwritten[last as usize].next = Some(start);
        }
        record.unwritten = Some((record.unwritten.map_or(start, |(first, _)| first), end - 1));
    }

    /// The blocks that a request published, in order.
    pub(crate) fn unwritten_of(
        &self,
        record: &ScheduledRequest,
    ) -> impl Iterator<Item = &UnwrittenBlock> + use<'_> {
        let (first, last) = record.unwritten.unzip();
        let follows = move |&place: &u32| {
            let left = Some(place) != last && !seeded(Mutant::ChainLosesKeys);
            left.then(|| self.unwritten[place as usize].next.unwrap_or(place + 1))
        };
        std::iter::successors(first, follows).map(|place| &self.unwritten[place as usize])
    }

    /// The blocks whose content the batch writes and that it published.
    pub(crate) fn unwritten_blocks(&self) -> HashSet<BlockId> {
        let all = self.scheduled.values().flat_map(|record| self.unwritten_of(record));
        all.map(|item| item.block).collect()
    }

    /// Open the next batch.
    pub(crate) fn advance(&mut self) {
        self.number += 1;
        self.starts_epoch = false;
        self.scheduled.clear();
        self.unwritten.clear();
        self.delayed.clear();
    }
}
