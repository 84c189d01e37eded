// SPDX-License-Identifier: Apache-2.0
//! A pool with floors: what is counted of its blocks, and what a tenant may take.
//!
//! A part of block_pool.rs.

use smallvec::SmallVec;

use super::{BlockPool, Taken, make_pool};
use crate::mutants::{Mutant, seeded};
use crate::pool::floors::{Counts, Spare, Standing, make_floors, spare};
use crate::types::config::Config;
use crate::types::ids::BlockId;

impl BlockPool {
    /// Set the floors of a pool, by tenant; no block has been taken.
    pub(crate) fn set_floors(&mut self, sizes: impl Iterator<Item = u32>) {
        self.floors = make_floors(sizes, self.num_blocks());
    }

    /// Set the tenant that took each block last.
    pub(crate) fn restore_takers(&mut self, takers: &[u8]) {
        if let Some(floors) = &mut self.floors {
            floors.takers.copy_from_slice(takers);
            self.recount_all();
        }
    }

    /// For each block the tenant that took it last; None without floors.
    pub(crate) fn takers(&self) -> Option<&[u8]> {
        self.floors.as_ref().map(|floors| &*floors.takers)
    }

    /// Whether what each tenant holds is what was counted.
    pub(crate) fn counts_right(&self) -> bool {
        let Some(floors) = &self.floors else { return true };
        let mut again = floors.clone();
        let counted = |block: u32| self.standing(BlockId(block));
        again.standings.fill(Standing::Nothing);
        again.tenants.iter_mut().for_each(|counts| (counts.held, counts.cached) = (0, 0));
        (0..self.num_blocks()).for_each(|block| again.count(BlockId(block), counted(block)));
        again.tenants == floors.tenants
    }

    /// Count a block anew.
    #[cold]
    pub(crate) fn recount(&mut self, block: BlockId) {
        let standing = self.standing(block);
        if let Some(floors) = &mut self.floors {
            floors.count(block, standing);
        }
    }

    /// Count all blocks anew.
    #[cold]
    #[inline(never)]
    pub(crate) fn recount_all(&mut self) {
        (0..self.num_blocks()).for_each(|block| self.recount(BlockId(block)));
    }

    fn standing(&self, block: BlockId) -> Standing {
        let is_found = self.key(block).is_some();
        match self.ref_count(block) {
            0 if is_found && self.queue.contains(block) => Standing::Cached,
            0 if !is_found => Standing::Nothing,
            _ => Standing::Held,
        }
    }

    /// Note for which tenant a block was taken.
    #[cold]
    pub(crate) fn note_taker(&mut self, block: BlockId, tenant: u8) {
        let standing = self.standing(block);
        if let Some(floors) = &mut self.floors {
            floors.count(block, Standing::Nothing);
            if !seeded(Mutant::TakersNotNoted) {
                floors.takers[block.index()] = tenant;
            }
            floors.count(block, standing);
        }
    }

    /// Return how many free blocks the floors of others keep from a tenant, after some blocks got
    /// an owner (each named once), and others lost their last one and joined the free queue.
    #[cold]
    pub(crate) fn num_kept(
        &self,
        taker: u8,
        touched: impl Iterator<Item = BlockId>,
        freed: impl Iterator<Item = BlockId>,
    ) -> u32 {
        let Some(floors) = &self.floors else { return 0 };
        let mut tenants: SmallVec<[Counts; 17]> = floors.tenants.iter().copied().collect();
        let of = |block: BlockId| usize::from(floors.takers[block.index()]);
        for block in touched {
            tenants[of(block)].cached -= u32::from(self.standing(block) == Standing::Cached);
        }
        for block in freed {
            match self.key(block) {
                Some(_) => tenants[of(block)].cached += 1,
                None => tenants[of(block)].held -= 1,
            }
        }
        let others = tenants.iter().enumerate().skip(1);
        let others = others.filter(|each| each.0 != usize::from(taker));
        others.map(|(_, counts)| counts.cached - counts.spare()).sum()
    }

    /// Take blocks out of the free queue for a tenant: those that it may take and that leave first.
    #[cold]
    pub(crate) fn take_past_floors(&mut self, count: u32, taker: u8, blocks: &mut Taken) {
        let Some(floors) = &self.floors else { return };
        let mut left = spare(&floors.tenants, taker);
        if self.policy.is_none() {
            for block in self.queue.iter() {
                if blocks.len() == count as usize {
                    break;
                }
                if self.may_take(block, &left) {
                    self.note_spare(block, &mut left);
                    blocks.push(block);
                }
            }
            blocks.iter().for_each(|&block| self.queue.remove(block));
            return;
        }
        for _ in 0..count {
            let Some(block) = self.next_by_policy(Some(&left)) else { return };
            self.note_spare(block, &mut left);
            self.dequeue(block);
            blocks.push(block);
        }
    }

    /// Whether a free block may be taken, if this much of each tenant's may.
    pub(crate) fn may_take(&self, block: BlockId, left: &Spare) -> bool {
        let Some(floors) = &self.floors else { return true };
        let tenant = usize::from(floors.takers[block.index()]);
        self.key(block).is_none() || left[tenant] > 0 || seeded(Mutant::FloorsNotKept)
    }

    fn note_spare(&self, block: BlockId, left: &mut Spare) {
        if let (Some(floors), Some(_)) = (&self.floors, self.key(block)) {
            let number = &mut left[usize::from(floors.takers[block.index()])];
            *number = number.saturating_sub(1);
        }
    }
}

/// The empty device pool of a configuration.
#[must_use]
pub fn make_device(config: &Config) -> BlockPool {
    let waits = config.max_in_flight > 0;
    let mut pool = make_pool(config.num_blocks, config.null_block, config.eviction, waits);
    pool.set_floors(config.floors.iter().map(|each| each.1));
    pool.tails = config.has_tails().then(Box::default);
    pool
}
