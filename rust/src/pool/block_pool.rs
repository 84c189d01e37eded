// SPDX-License-Identifier: Apache-2.0
//! The block pool: owners, keys and the free queue of all blocks of one tier.
//!
//! Invariants: a block with reference count 0 is in the free queue, with or without a key; a block
//! with owners is not. Taking a block with a key evicts it. Released blocks join the queue in the
//! given order, at the side that the eviction policy names, or by priority
//! (`priority_eviction.rs`). When an epoch ends, no key is found any more; free blocks are taken
//! first, and so are blocks that had a key, once they are released. Methods trust their arguments.
//! Source: S000-34, 35, 38, 41, S001-82, 83. Twin: kvcore/pool/block_pool.py.

use std::collections::BTreeSet;

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use crate::mutants::{Mutant, seeded};
use crate::pool::floors::{Floors, NO_TENANT};
use crate::pool::free_queue::{CURRENT, FreeQueue, OLDER, make_free_queue};
use crate::pool::hash_index::HashIndex;
use crate::pool::policy_state::{PolicyState, make_policy_state};
use crate::pool::priority_eviction::eviction_priority::Priorities;
use crate::pool::quarantine::{Quarantine, make_quarantine};
use crate::pool::retention_state::RetentionState;
use crate::pool::tails::Tails;
use crate::types::clone_in_place::{clone_in_place, touched_zeros};
use crate::types::commands::Command;
use crate::types::config::Eviction;
use crate::types::effects::Effects;
use crate::types::ids::BlockId;
use crate::types::keys::Key;

mod floored;
mod older;
mod pins;
mod prefetches;
mod runs;
mod tailed;
mod taken;

pub use floored::make_device;
pub(crate) use pins::count_blocks;

/// Blocks that were taken: few in most steps, so they need no room on the heap.
pub type Taken = SmallVec<[BlockId; 8]>;

/// All blocks of one tier.
#[derive(Debug)]
pub struct BlockPool {
    /// 1 if block 0 is the null block, else 0.
    first_block: u32,
    eviction: Eviction,
    /// Owners of each block, pins included; `KEYED` is added if it has a key, and `TAILED` if it
    /// has tail keys.
    owners: Vec<u32>,
    pub(crate) queue: FreeQueue,
    pub(crate) index: HashIndex,
    /// Block id -> its number of pins.
    pub(crate) pins: HashMap<BlockId, u32, FxBuildHasher>,
    /// None if batches are never in flight.
    pub(crate) quarantine: Option<Quarantine>,
    /// Eviction priority of each block; None for the other policies.
    pub(crate) priorities: Option<Box<Priorities>>,
    /// The state of a policy that orders the queue, if there is one.
    pub(crate) policy: Option<Box<PolicyState>>,
    /// The state of levels, for the policy "retention".
    pub(crate) retention: Option<Box<RetentionState>>,
    /// What tenants keep cached; None without floors.
    pub(crate) floors: Option<Box<Floors>>,
    /// The blocks whose keys no event names; none without events.
    pub(crate) silent: BTreeSet<BlockId>,
    /// The keys of content that ends inside blocks; None if no hit may.
    pub(crate) tails: Option<Box<Tails>>,
}

clone_in_place!(BlockPool {
    first_block,
    eviction,
    owners,
    queue,
    index,
    pins,
    quarantine,
    priorities,
    policy,
    retention,
    floors,
    silent,
    tails
});

/// Set in the word of a block that has a key: one word has all that a write or a release reads.
const KEYED: u32 = 1 << 31;
/// Set in the word of a block that has tail keys; with `KEYED`, all that is above any count.
const TAILED: u32 = 1 << 30;
const COUNT: u32 = TAILED - 1;
/// How many blocks ahead memory is prefetched, so that it has arrived when a block's turn comes.
pub(crate) const AHEAD: usize = 16;

/// An empty pool, whose blocks are first taken lowest first.
///
/// quarantine: whether blocks can be released while a batch uses them.
#[must_use]
pub fn make_pool(
    num_blocks: u32,
    null_block: bool,
    eviction: Eviction,
    quarantine: bool,
) -> BlockPool {
    let first_block = u32::from(null_block);
    let mut pool = BlockPool {
        first_block,
        eviction,
        owners: touched_zeros(num_blocks as usize),
        queue: make_free_queue(num_blocks, (first_block..num_blocks).map(BlockId), 0),
        index: HashIndex::new(num_blocks),
        pins: HashMap::default(),
        quarantine: quarantine.then(make_quarantine),
        priorities: None,
        policy: make_policy_state(eviction, num_blocks),
        retention: None,
        floors: None,
        silent: BTreeSet::new(),
        tails: None,
    };
    let _ = pool.place_blocks(); // blocks without keys have one place
    if eviction == Eviction::Retention {
        pool.set_kept(0, &[]);
        pool.place_by_level();
    }
    pool
}

impl BlockPool {
    /// Blocks of the pool, the null block included.
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.owners.len() as u32
    }

    /// Blocks that can have an owner.
    #[must_use]
    pub fn num_usable(&self) -> u32 {
        self.num_blocks() - self.first_block
    }

    /// Whether a block is the null block, which stands in tables for blocks that are not needed.
    #[must_use]
    pub fn is_null(&self, block: BlockId) -> bool {
        block.0 < self.first_block
    }

    /// Which freed block is evicted first, among those without a priority.
    #[must_use]
    pub fn eviction(&self) -> Eviction {
        self.eviction
    }

    /// Blocks in the free queue.
    #[must_use]
    pub fn num_free(&self) -> u32 {
        self.queue.len()
    }

    /// Blocks without owner that join the free queue when batches finish.
    #[must_use]
    pub fn num_quarantined(&self) -> u32 {
        self.quarantine.as_ref().map_or(0, Quarantine::len)
    }

    /// Whether a block is in the free queue.
    #[must_use]
    pub fn is_queued(&self, block: BlockId) -> bool {
        let waits = || self.quarantine.as_ref().is_some_and(|waiting| waiting.contains(block));
        self.ref_count(block) == 0 && !waits()
    }

    /// Whether a block would be quarantined on its release.
    #[must_use]
    pub fn is_busy(&self, block: BlockId) -> bool {
        self.quarantine.as_ref().is_some_and(|waiting| waiting.is_busy(block))
    }

    /// Owners of a block, pins included.
    #[must_use]
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.owners[block.index()] & COUNT
    }

    /// Whether a block has one owner and no key, so that it can be written in place.
    #[must_use]
    pub fn is_writable(&self, block: BlockId) -> bool {
        self.owners[block.index()] == 1 || seeded(Mutant::SharedWrittenInPlace)
    }

    /// Pins of a block.
    #[must_use]
    pub fn num_pins(&self, block: BlockId) -> u32 {
        self.pins.get(&block).copied().unwrap_or(0)
    }

    /// The key of a block.
    #[must_use]
    pub fn key(&self, block: BlockId) -> Option<&Key> {
        let has_key = self.owners[block.index()] >= KEYED && !self.index.is_older(block);
        has_key.then(|| self.index.key(block))
    }

    /// The blocks without owner, in the order in which they are taken.
    pub fn queue(&self) -> &FreeQueue {
        &self.queue
    }

    /// Take `count` blocks from the front and give each one owner; blocks with a key are evicted.
    pub fn take(&mut self, count: u32, effects: &mut Effects) -> Taken {
        self.take_for(NO_TENANT, count, effects)
    }

    /// Add an owner; a block that had none leaves the free queue or the quarantine, and keeps its
    /// content.
    pub fn touch(&mut self, block: BlockId, effects: &mut Effects) {
        if self.ref_count(block) == 0 {
            let waits = self.quarantine.as_mut().is_some_and(|waiting| waiting.remove(block));
            if !waits && !seeded(Mutant::TouchNotDequeued) {
                self.dequeue(block);
            }
            effects.emit(Command::Touch { block });
            self.owners[block.index()] += 1;
            if self.floors.is_some() {
                self.recount(block);
            }
        } else {
            self.owners[block.index()] += 1;
        }
        if self.policy.is_some() {
            self.note_found(block);
        }
    }

    /// Remove one owner from each block; those without owners join the free queue in the given
    /// order, or the quarantine while a batch uses them.
    pub fn release(&mut self, blocks: impl IntoIterator<Item = BlockId>, effects: &mut Effects) {
        blocks.into_iter().for_each(|block| self.release_one(block, effects));
    }

    /// Remove one owner from a block.
    #[inline(always)] // of each block that a request gives back
    pub(crate) fn release_one(&mut self, block: BlockId, effects: &mut Effects) {
        debug_assert!(self.ref_count(block) > 0, "REF: {block:?} has no owner to lose");
        self.owners[block.index()] -= 1;
        if self.ref_count(block) > 0 {
            return;
        }
        match &mut self.quarantine {
            Some(waiting) if waiting.is_busy(block) => waiting.append(block),
            _ if seeded(Mutant::FreeForgetsABlock) => {}
            _ => self.enqueue(block),
        }
        let cached = self.has_key(block);
        effects.emit(Command::Free { block, cached });
        if self.floors.is_some() {
            self.recount(block);
        }
    }

    /// Put a block without owner at the end of the free queue that the policy names.
    #[inline(always)] // of each block that a request gives back
    fn enqueue(&mut self, block: BlockId) {
        if self.retention.is_some() {
            self.enqueue_by_level(block);
        } else if self.is_older(block) {
            self.forget_older(block);
            self.queue.append(block, OLDER);
        } else if self.policy.is_some() {
            self.enqueue_by_policy(block);
        } else if self.eviction == Eviction::UncachedFirst && self.owners[block.index()] < TAILED {
            self.queue.prepend(block);
        } else {
            self.queue.append(block, CURRENT);
        }
    }

    /// Note that a batch uses a block, even if the block loses its owners.
    pub fn note_use(&mut self, block: BlockId, number: u64) {
        if let Some(waiting) = &mut self.quarantine {
            waiting.note_use(block, number);
        }
    }

    /// Note that the batches with these numbers have ended; no block moves yet.
    pub fn end_use(&mut self, ended: impl Fn(u64) -> bool) {
        if let Some(waiting) = &mut self.quarantine {
            waiting.end_use(ended);
        }
    }

    /// Let blocks that no batch uses join the free queue, in the order of their release.
    pub fn end_quarantine(&mut self) {
        let left = self.quarantine.as_mut().map_or_else(Vec::new, Quarantine::end);
        for block in left {
            self.enqueue(block);
            if self.floors.is_some() {
                self.recount(block);
            }
        }
    }

    /// Make a block findable under a key.
    #[inline(always)] // of each block that is filled
    pub fn publish(&mut self, block: BlockId, key: Key) {
        debug_assert!(self.owners[block.index()] < KEYED, "HASH-MONO: {block:?} has a key already");
        self.owners[block.index()] |= KEYED;
        self.index.insert(key, block);
        if self.floors.is_some() {
            self.recount(block);
        }
    }

    /// Set the number of a block's owners, pins included.
    pub(crate) fn restore(&mut self, block: BlockId, ref_count: u32) {
        self.owners[block.index()] = ref_count & COUNT;
    }

    /// Forget the keys of a block, if it has any; its place in the free queue stays.
    #[inline]
    pub fn unpublish(&mut self, block: BlockId, effects: &mut Effects) {
        if self.owners[block.index()] >= TAILED {
            self.unpublish_full(block, effects);
            if self.owners[block.index()] & TAILED > 0 {
                self.withdraw_all_tails(block, effects);
            }
        }
    }

    /// Forget the key of a block, if it has one, but not its tail keys.
    #[inline]
    pub(crate) fn unpublish_full(&mut self, block: BlockId, effects: &mut Effects) {
        if self.key(block).is_none() {
            return;
        }
        self.owners[block.index()] &= !KEYED;
        effects.emit(Command::Evict { block, key: *self.index.key(block) });
        if seeded(Mutant::EvictKeepsIndex) {
            return;
        }
        let is_silent = !self.silent.is_empty() && self.silent.remove(&block);
        if self.index.remove(block) && !is_silent {
            effects.announce_removed(self.index.key(block));
        }
        if let Some(policy) = &mut self.policy {
            policy.history.remember(block, self.index.key(block));
            self.move_by_policy(block);
        } else if self.retention.is_some() {
            self.lower(block);
        }
        if self.floors.is_some() {
            self.recount(block);
        }
    }
}
