// SPDX-License-Identifier: Apache-2.0
//! Blocks that are taken, get keys or are given back, many at a time.
//!
//! A part of block_pool.rs. Each step is done for many blocks before the next one begins. A pool
//! that has to note more of a block is left to the methods for one block.

use super::{AHEAD, BlockPool, COUNT, KEYED};
use crate::mutants::{Mutant, seeded};
use crate::pool::free_queue::CURRENT;
use crate::pool::hash_index::runs::Places;
use crate::types::effects::Effects;
use crate::types::ids::BlockId;
use crate::types::keys::BlockHash;

impl BlockPool {
    /// Whether only the owners, the queue and the index know of a block that is taken or published.
    pub(crate) fn is_plain(&self) -> bool {
        let BlockPool { policy, retention, floors, silent, tails, .. } = self;
        let has_notes = policy.is_some() || retention.is_some() || floors.is_some();
        !has_notes && tails.is_none() && silent.is_empty()
    }

    /// Do as `give_owner` for each of these blocks.
    pub(super) fn give_owners(&mut self, blocks: &[BlockId], effects: &mut Effects) {
        let is_plain = self.is_plain() && !effects.is_silent();
        self.prefetch_first(blocks);
        let mut places = self.places_of_last(blocks);
        for (number, run) in blocks.chunks(AHEAD).enumerate() {
            let behind = &blocks[number * AHEAD + run.len()..];
            behind.iter().skip(AHEAD).take(AHEAD).for_each(|&block| self.prefetch(block));
            let next = self.places_of_last(behind);
            if !is_plain || !self.evict_run(&places, run, effects) {
                run.iter().for_each(|&block| self.give_owner(block, effects));
            }
            places = next;
        }
    }

    /// Return the places of the keys of the first `AHEAD` blocks, if each has one.
    #[inline(always)]
    fn places_of_last(&self, blocks: &[BlockId]) -> Places {
        match blocks.first() {
            Some(first) if self.owners[first.index()] >= KEYED => {
                self.index.places_of_blocks(blocks)
            }
            _ => Places::default(),
        }
    }

    /// Do so for at most `AHEAD` blocks of a plain pool. Returns false, with no change, unless each
    /// of them has a key.
    fn evict_run(&mut self, places: &Places, blocks: &[BlockId], effects: &mut Effects) -> bool {
        let has_ended = self.index.has_ended();
        let is_older = |block| has_ended && self.index.is_older(block);
        for (number, &block) in blocks.iter().enumerate() {
            let owners = &mut self.owners[block.index()];
            if *owners < KEYED || is_older(block) {
                blocks[..number].iter().for_each(|block| self.owners[block.index()] = KEYED);
                return false;
            }
            *owners = u32::from(!seeded(Mutant::AllocRef0));
        }
        effects.commands.push_taken(blocks, |block| self.index.key(block));
        if !seeded(Mutant::EvictKeepsIndex) {
            let events = effects.events_enabled();
            let mut announce = |key: &_| effects.announce_removed(key);
            self.index.remove_run(places, blocks, if events { Some(&mut announce) } else { None });
        }
        true
    }

    /// Do as `release` for these blocks.
    pub(crate) fn release_all(&mut self, mut blocks: &[BlockId], effects: &mut Effects) {
        let waits = self.quarantine.is_some() || effects.is_silent() || self.index.has_ended();
        if waits || !self.is_plain() || seeded(Mutant::FreeForgetsABlock) {
            return self.release(blocks.iter().copied(), effects);
        }
        const LEAVES: u32 = KEYED + 1; // a block with a key and one owner joins the queue's end
        while !blocks.is_empty() {
            let leaves = |block: &&BlockId| self.owners[block.index()] == LEAVES;
            let (run, rest) = blocks.split_at(blocks.iter().take_while(leaves).count());
            run.iter().for_each(|block| self.owners[block.index()] = KEYED);
            self.queue.append_all(run, CURRENT);
            effects.commands.push_freed(run);
            blocks = rest;
            while let Some((&block, behind)) = blocks.split_first() {
                match &mut self.owners[block.index()] {
                    &mut LEAVES => break,
                    owners if *owners & COUNT > 1 => *owners -= 1,
                    _ => self.release_one(block, effects),
                }
                blocks = behind;
            }
        }
    }

    /// Do as `publish` for at most `AHEAD` blocks and their hashes, in a plain pool. Returns false,
    /// with no change, unless each of them can get a key.
    pub(crate) fn publish_run(
        &mut self,
        places: &Places,
        blocks: &[BlockId],
        hashes: &[BlockHash],
        group_id: u32,
    ) -> bool {
        for (number, &block) in blocks.iter().enumerate() {
            let owners = self.owners[block.index()];
            if owners >= KEYED || self.is_null(block) {
                blocks[..number].iter().for_each(|block| self.owners[block.index()] &= !KEYED);
                return false;
            }
            self.owners[block.index()] = owners | KEYED;
        }
        self.index.insert_run(places, blocks, hashes, group_id);
        true
    }
}

#[cfg(test)]
mod tests;
