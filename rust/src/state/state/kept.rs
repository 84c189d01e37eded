// SPDX-License-Identifier: Apache-2.0
//! What a request can keep of its tables, and how many blocks are about to become free.
//!
//! Twin: kvcore/state/transaction.py.

use hashbrown::HashMap;

use crate::state::state::State;
use crate::types::groups::skipped_blocks;
use crate::types::ids::{BlockId, Row};

impl State {
    /// Tokens that the request had computed before the open batch, drafts aside; 0 if the window
    /// that they need was given back since, or the batch overwrites their state.
    #[must_use]
    pub fn num_settled(&self, row: Row) -> u32 {
        let before = self.batch.scheduled.get(row).map(|record| record.num_computed_before);
        let accepted = || self[row].num_accepted();
        let num_tokens = before.map_or_else(accepted, |before| before.min(self[row].num_tokens()));
        if before == Some(num_tokens) && self.has_states && self.keeps_state(row, num_tokens) {
            return self.has_blocks_for(row, num_tokens);
        }
        self.resumable(row, num_tokens)
    }

    /// Return the number of tokens, or 0 if a group gave back blocks that the next query would see,
    /// or keeps states and has another one.
    #[must_use]
    pub fn resumable(&self, row: Row, num_tokens: u32) -> u32 {
        if self.has_states && num_tokens != self[row].state_count() {
            return 0;
        }
        self.has_blocks_for(row, num_tokens)
    }

    /// Return the number of tokens, or 0 if a group gave back blocks that the next query would see.
    fn has_blocks_for(&self, row: Row, num_tokens: u32) -> u32 {
        for (group, table) in self.config.groups.iter().zip(&self[row].tables) {
            let first = skipped_blocks(group, num_tokens);
            if !group.is_windowed() || first * group.block_size >= num_tokens {
                continue;
            }
            if table.get(first as usize).is_some_and(|&block| self.is_null(block)) {
                return 0;
            }
        }
        num_tokens
    }

    /// Whether the state before the open batch has a block that the batch does not write.
    fn keeps_state(&self, row: Row, num_tokens: u32) -> bool {
        let mut groups = self.config.groups.iter().zip(&self[row].tables);
        groups.all(|(group, table)| {
            let position = num_tokens.checked_sub(1).map(|last| (last / group.block_size) as usize);
            let is_before =
                |position: usize| position + 1 < table.len() && !self.is_null(table[position]);
            !group.is_state() || position.is_some_and(is_before)
        })
    }

    /// Count the blocks that become free when operations or batches end, since nothing else uses
    /// them.
    #[must_use]
    pub fn num_pending(&self) -> u32 {
        let mut held = self.num_held();
        for owed in self.in_flight.iter().flat_map(|batch| &batch.owed) {
            *held.entry(owed.block).or_insert(0) += 1;
        }
        let alone = |(&block, &count): (&BlockId, &u32)| self.device.ref_count(block) == count;
        held.iter().filter(|&item| alone(item)).count() as u32 + self.device.num_quarantined()
    }

    /// How many unfinished operations hold each block.
    pub(crate) fn num_held(&self) -> HashMap<BlockId, u32> {
        let mut held = HashMap::new();
        for operation in self.operations.values() {
            *held.entry(operation.block).or_insert(0) += 1;
        }
        held
    }

    /// Blocks of a table that `num_tokens` tokens need: all of the encoder's, if there are any.
    #[must_use]
    pub fn num_kept(&self, group_id: u32, table: &[BlockId], num_tokens: u32) -> usize {
        let group = &self.config.groups[group_id as usize];
        if group.is_cross() {
            return if num_tokens > 0 { table.len() } else { 0 };
        }
        table.len().min(num_tokens.div_ceil(group.block_size) as usize)
    }
}
