// SPDX-License-Identifier: Apache-2.0
//! How blocks are taken. A part of block_pool.rs.

use super::{BlockPool, KEYED, TAILED, Taken};
use crate::mutants::{Mutant, seeded};
use crate::types::commands::Command;
use crate::types::effects::Effects;
use crate::types::ids::BlockId;

impl BlockPool {
    /// Do as `take`, for a tenant.
    pub(crate) fn take_for(&mut self, tenant: u8, count: u32, effects: &mut Effects) -> Taken {
        debug_assert!(count <= self.num_free(), "ADMIT-EXACT: {count} blocks were not planned");
        let blocks = self.dequeue_next(tenant, count);
        self.give_owners(&blocks, effects);
        if self.floors.is_some() {
            blocks.iter().for_each(|&block| self.note_taker(block, tenant));
        }
        self.forget_wishes(&blocks);
        blocks
    }

    /// Take `count` blocks out of the free queue for a tenant, as the policy decides; keys stay.
    pub fn dequeue_next(&mut self, tenant: u8, count: u32) -> Taken {
        let mut blocks = Taken::with_capacity(count as usize);
        match (&self.policy, &self.floors) {
            (None, None) => {
                blocks.resize(count as usize, BlockId(0));
                let num_taken = self.queue.take_front(&mut blocks);
                blocks.truncate(num_taken);
            }
            (_, Some(_)) => self.take_past_floors(count, tenant, &mut blocks),
            (Some(_), None) => self.take_by_policy(count, &mut blocks),
        }
        blocks
    }

    /// Take a few blocks, for no tenant: one by one, unless a policy has to see all of them.
    #[inline(always)] // once in each block of a request
    pub(crate) fn take_few(&mut self, count: u32, blocks: &mut Taken, effects: &mut Effects) {
        if self.policy.is_some() || self.floors.is_some() || self.retention.is_some() {
            *blocks = self.take(count, effects);
            return;
        }
        for _ in 0..count {
            let Some(block) = self.queue.take_first() else { return };
            self.give_owner(block, effects);
            blocks.push(block);
        }
    }

    /// Give a block that left the queue its first owner; it is evicted if it has a key.
    #[inline(always)] // of each block that a request takes
    pub(super) fn give_owner(&mut self, block: BlockId, effects: &mut Effects) {
        if self.owners[block.index()] >= TAILED {
            if self.owners[block.index()] >= KEYED && self.index.is_older(block) {
                self.forget_older(block);
            }
            self.unpublish(block, effects);
        }
        self.owners[block.index()] = u32::from(!seeded(Mutant::AllocRef0));
        effects.emit(Command::Allocate { block });
    }
}
