// SPDX-License-Identifier: Apache-2.0
//! The keys of a pool's blocks in the name of a state.
//!
//! A part of canonical.rs. What does not depend on the order of requests is read once.

use crate::check::names::canonical::renaming::{Blocks, Tree, put};
use crate::oracle::prefixes::Prefixes;
use crate::pool::block_pool::BlockPool;
use crate::state::state::NO_HOST_BLOCK;
use crate::types::ids::BlockId;
use crate::types::violation::Violation;

/// What stands for a key of an older epoch.
const OLD: usize = 9998;

/// The keys of one pool's blocks.
#[derive(Debug, Clone, Default)]
pub(super) struct PoolKeys {
    blocks: Vec<Option<NamedKey>>,
    /// The prefixes that the keys end, those of one key adjacent.
    nodes: Vec<u32>,
}

/// The key of a block: its place among the blocks of the key, its group, and where its prefixes
/// lie.
#[derive(Debug, Clone, Copy)]
struct NamedKey {
    rank: u32,
    group_id: u32,
    first: usize,
    end: usize,
}

impl PoolKeys {
    pub(super) fn read(
        &mut self,
        pool: &BlockPool,
        prefixes: &mut Prefixes,
    ) -> Result<(), Violation> {
        self.blocks.clear();
        self.nodes.clear();
        let mut num_keyed = 0;
        for block in (0..pool.num_blocks()).map(BlockId) {
            let Some(key) = pool.key(block) else {
                self.blocks.push(None);
                continue;
            };
            let first = self.nodes.len();
            self.nodes.extend_from_slice(&prefixes.chain(key)?.nodes);
            let (group_id, end) = (key.group_id(), self.nodes.len());
            self.blocks.push(Some(NamedKey { rank: 0, group_id, first, end }));
            num_keyed += 1;
        }
        if pool.index.len() != num_keyed {
            if pool.index.is_empty() {
                let detail = format!("{num_keyed} blocks have keys, but the index has none");
                return Err(Violation::new("NOCRASH", detail));
            }
            for (known, rank) in self.blocks.iter_mut().zip(pool.index.ranks()) {
                known.iter_mut().for_each(|known| known.rank = rank);
            }
        }
        Ok(())
    }

    /// Write the keys of the blocks that were met.
    pub(super) fn write(
        &self,
        name: &mut Vec<u8>,
        pool: &BlockPool,
        blocks: &Blocks,
        tree: &mut Tree,
    ) {
        for &block in &blocks.met {
            let key = if block == NO_HOST_BLOCK { None } else { self.blocks[block.index()] };
            let Some(key) = key else {
                match block != NO_HOST_BLOCK && pool.is_older(block) {
                    true => put(name, OLD),
                    false => name.push(0),
                }
                continue;
            };
            put(name, 1 + key.rank as usize);
            put(name, key.group_id as usize);
            put(name, key.end - key.first);
            let chain = &self.nodes[key.first..key.end];
            let Some((&last, before)) = chain.split_last() else { continue };
            if !tree.has_met(last) {
                before.iter().for_each(|&node| _ = tree.number(node));
            }
            tree.write(last, name);
        }
    }
}
