// SPDX-License-Identifier: Apache-2.0
//! The tail keys of blocks in the name of a state.
//!
//! A part of canonical.rs.

use crate::check::names::canonical::Namer;
use crate::check::names::canonical::renaming::put;
use crate::oracle::prefixes::{Numbers, Prefixes};
use crate::state::state::State;
use crate::types::violation::Violation;

/// The rank of a block that a look-up of its tail key does not find.
const LOST: usize = 9999;

impl Namer {
    /// Note the tail keys of a state's blocks.
    pub(super) fn read_tails(
        &mut self,
        state: &State,
        prefixes: &mut Prefixes,
    ) -> Result<(), Violation> {
        self.tails.clear();
        for (block, keys) in state.device.tails.iter().flat_map(|tails| tails.iter()) {
            for key in keys {
                let nodes = Numbers::from_slice(&prefixes.chain(key)?.nodes);
                let rank = state
                    .device
                    .tails
                    .as_ref()
                    .and_then(|tails| tails.blocks(key).iter().position(|&each| each == block));
                self.tails.push((block, rank.unwrap_or(LOST), key.group_id(), nodes));
            }
        }
        Ok(())
    }

    /// Write the tail keys of the blocks that were met.
    pub(super) fn write_tails(&mut self, state: &State) {
        if state.device.tails.is_none() {
            return;
        }
        let Namer { name, device, tree, tails, .. } = self;
        for block in &device.met {
            let mine = tails.iter().filter(|each| each.0 == *block);
            put(name, mine.clone().count());
            for (_, rank, group_id, nodes) in mine {
                put(name, *rank);
                put(name, *group_id as usize);
                put(name, nodes.len());
                nodes.iter().for_each(|&node| _ = tree.number(node));
                nodes.last().iter().for_each(|&&last| tree.write(last, name));
            }
        }
    }
}
