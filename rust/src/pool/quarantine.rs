// SPDX-License-Identifier: Apache-2.0
//! Quarantine: blocks without owner that a batch in flight still reads or writes.
//!
//! Invariants: quarantined blocks keep their content and can be hit, and are not available. A block
//! is busy while batches still use it: a table let the block go, or a batch copies from or to it.
//! Each release checks this anew. When no such batch is left, the blocks join the free queue in the
//! order of their release.
//! Why: one map has both facts of a block, so a block is removed in O(1) and nothing is as long as
//! the pool.
//! Twin: kvcore/pool/quarantine.py.

use std::num::NonZeroU64;

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use crate::types::ids::BlockId;

/// The quarantine of one pool.
#[derive(Debug, Clone, Default)]
pub struct Quarantine {
    uses: HashMap<BlockId, Use, FxBuildHasher>,
    /// Blocks in quarantine.
    length: u32,
    /// Number of releases into the quarantine so far.
    num_released: u64,
}

/// Why a block is in the map.
#[derive(Debug, Clone, Default)]
struct Use {
    /// The batches that use it, rising.
    batches: SmallVec<[u64; 2]>,
    /// The number of its release, if it is in quarantine.
    released: Option<NonZeroU64>,
}

/// An empty quarantine.
#[must_use]
pub fn make_quarantine() -> Quarantine {
    Quarantine::default()
}

impl Quarantine {
    /// Blocks in quarantine.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.length
    }

    /// Whether no block is in quarantine.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The blocks in quarantine, in the order of their release.
    #[must_use]
    pub fn blocks(&self) -> Vec<BlockId> {
        let waits = |(&block, each): (&BlockId, &Use)| Some((each.released?, block));
        in_order(self.uses.iter().filter_map(waits).collect())
    }

    /// The blocks that batches use, rising, each with the numbers of those batches, rising.
    #[must_use]
    pub fn busy(&self) -> Vec<(BlockId, &[u64])> {
        let used = self.uses.iter().filter(|(_, each)| !each.batches.is_empty());
        let mut busy: Vec<_> = used.map(|(&block, each)| (block, &each.batches[..])).collect();
        busy.sort_unstable_by_key(|&(block, _)| block);
        busy
    }

    /// Whether a block is in quarantine.
    #[must_use]
    pub fn contains(&self, block: BlockId) -> bool {
        self.length > 0 && self.uses.get(&block).is_some_and(|each| each.released.is_some())
    }

    /// Whether a batch uses a block.
    #[must_use]
    pub fn is_busy(&self, block: BlockId) -> bool {
        !self.uses.is_empty() && self.uses.get(&block).is_some_and(|each| !each.batches.is_empty())
    }

    /// Put a block at the back.
    pub(crate) fn append(&mut self, block: BlockId) {
        debug_assert!(!self.contains(block), "FQ-UNIQ: {block:?} is in quarantine already");
        self.num_released += 1;
        self.uses.entry(block).or_default().released = NonZeroU64::new(self.num_released);
        self.length += 1;
    }

    /// Remove a block from any place. False: it is not in quarantine.
    pub(crate) fn remove(&mut self, block: BlockId) -> bool {
        if self.length == 0 {
            return false;
        }
        let released = self.uses.get_mut(&block).and_then(|each| each.released.take());
        self.length -= u32::from(released.is_some());
        released.is_some()
    }

    /// Note that a batch uses a block.
    pub fn note_use(&mut self, block: BlockId, number: u64) {
        let batches = &mut self.uses.entry(block).or_default().batches;
        if let Err(place) = batches.binary_search(&number) {
            batches.insert(place, number);
        }
    }

    /// Note that the batches with these numbers have ended; no block leaves yet.
    pub fn end_use(&mut self, ended: impl Fn(u64) -> bool) {
        self.uses.retain(|_, each| {
            each.batches.retain(|number| !ended(*number));
            !each.batches.is_empty() || each.released.is_some()
        });
    }

    /// Remove and return the blocks that no batch uses, in the order of their release.
    pub fn end(&mut self) -> Vec<BlockId> {
        if self.length == 0 {
            return Vec::new();
        }
        let unused = self.uses.extract_if(|_, each| each.batches.is_empty());
        let left =
            in_order(unused.filter_map(|(block, each)| Some((each.released?, block))).collect());
        self.length -= left.len() as u32;
        left
    }
}

/// The blocks by the numbers of their releases.
fn in_order(mut released: Vec<(NonZeroU64, BlockId)>) -> Vec<BlockId> {
    released.sort_unstable();
    released.into_iter().map(|(_, block)| block).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_leaves_with_the_last_batch_that_uses_it() {
        let mut quarantine = make_quarantine();
        for (block, number) in [(7, 1), (3, 2), (3, 1), (3, 2), (5, 2)] {
            quarantine.note_use(BlockId(block), number);
        }
        for block in [7, 3, 5] {
            quarantine.append(BlockId(block));
        }
        assert_eq!(quarantine.busy()[0], (BlockId(3), &[1, 2][..]));
        quarantine.end_use(|number| number == 1);
        assert_eq!((quarantine.end(), quarantine.len()), (vec![BlockId(7)], 2));
        quarantine.end_use(|number| number == 2);
        assert_eq!(quarantine.end(), [3, 5].map(BlockId));
        assert!(quarantine.is_empty() && quarantine.busy().is_empty());
    }

    #[test]
    fn a_hit_takes_a_block_out_and_it_stays_busy() {
        let mut quarantine = make_quarantine();
        quarantine.note_use(BlockId(2), 9);
        quarantine.append(BlockId(2));
        assert!(quarantine.remove(BlockId(2)) && !quarantine.remove(BlockId(2)));
        assert!(quarantine.is_busy(BlockId(2)) && !quarantine.contains(BlockId(2)));
        quarantine.end_use(|_| true);
        assert_eq!((quarantine.end(), quarantine.is_busy(BlockId(2))), (vec![], false));
    }
}
