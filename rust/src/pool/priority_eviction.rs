// SPDX-License-Identifier: Apache-2.0
//! The policy "priority" of a pool: cached blocks leave by last access, chain length and id.
//!
//! Invariants: free blocks without a key are in front, the one freed last first; then come those
//! with a key: least recent time first, then longest chain, then lowest id. A block that is taken
//! loses its priority. Pools of other policies keep no priorities: each function here treats them
//! as the method of its name does.
//! Why: the place of a block is searched alternately from the back and from the block placed last.
//! This takes few steps if times rise, or if a chain is freed block by block.
//! Source: S002-16, 19, 23, 48. Twin: kvcore/pool/priority_eviction.py.

pub mod eviction_priority;

use std::cmp::Reverse;

use crate::pool::block_pool;
use crate::pool::block_pool::{BlockPool, Taken};
use crate::pool::free_queue::CURRENT;
use crate::pool::priority_eviction::eviction_priority::{NO_PRIORITY, Priorities, Priority};
use crate::types::config::Eviction;
use crate::types::effects::Effects;
use crate::types::ids::BlockId;

/// Which freed block leaves first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolEviction {
    /// As a `Config` says.
    Of(Eviction),
    /// By priority, for managers of the pool layer, which say when a block was used.
    Priority,
}

/// An empty pool of either kind of policy, whose blocks are first taken lowest first.
#[must_use]
pub fn make_pool(num_blocks: u32, null_block: bool, eviction: PoolEviction) -> BlockPool {
    match eviction {
        PoolEviction::Of(eviction) => {
            block_pool::make_pool(num_blocks, null_block, eviction, false)
        }
        PoolEviction::Priority => {
            let uncached_first = Eviction::UncachedFirst;
            let mut pool = block_pool::make_pool(num_blocks, null_block, uncached_first, false);
            let of_blocks = vec![NO_PRIORITY; num_blocks as usize];
            pool.priorities = Some(Box::new(Priorities { of_blocks, last_placed: None }));
            pool
        }
    }
}

/// Sort key of a cached block: the lowest is evicted first.
fn sort_key(priorities: &[Priority], block: BlockId) -> (f64, Reverse<u32>, BlockId) {
    let Priority { time, length } = priorities[block.index()];
    (time, Reverse(length), block)
}

/// Take `count` blocks from the front; each gets one owner and no priority.
pub fn take(pool: &mut BlockPool, count: u32, effects: &mut Effects) -> Taken {
    let blocks = pool.take(count, effects);
    if let Some(priorities) = &mut pool.priorities {
        blocks.iter().for_each(|block| priorities.of_blocks[block.index()] = NO_PRIORITY);
    }
    blocks
}

/// Remove one owner from each block; those without owners join the free queue.
pub fn release(pool: &mut BlockPool, blocks: &[BlockId], effects: &mut Effects) {
    pool.release(blocks.iter().copied(), effects);
    insert_by_priority(pool, blocks);
}

/// Remove an owner that a pin added.
pub fn unpin(pool: &mut BlockPool, block: BlockId, effects: &mut Effects) {
    pool.unpin(block, effects);
    insert_by_priority(pool, &[block]);
}

/// Put those of the blocks that are free and cached into their places: one search, then one walk
/// towards the front.
fn insert_by_priority(pool: &mut BlockPool, blocks: &[BlockId]) {
    if pool.priorities.is_none() {
        return;
    }
    let mut cached: Vec<BlockId> = Vec::new();
    for &block in blocks {
        if pool.key(block).is_some() && pool.queue.contains(block) {
            pool.queue.remove(block);
            cached.push(block);
        }
    }
    let priorities = &pool.priorities.as_ref().expect("PRIORITY-ORDER: looked at above").of_blocks;
    cached.sort_unstable_by(|&left, &right| {
        let (left, right) = (sort_key(priorities, left), sort_key(priorities, right));
        right.partial_cmp(&left).expect("PRIORITY-ORDER: times are finite")
    });
    let Some(&last) = cached.first() else { return };
    let mut before = find_before(pool, last);
    for block in cached {
        while !leaves_before(pool, before, block) {
            before = pool.queue.links(before).0;
        }
        pool.queue.insert(before, block);
        pool.priorities.as_mut().expect("PRIORITY-ORDER: looked at above").last_placed =
            Some(block);
    }
}

/// Find the free block or sentinel right before a block's place, alternately from both starts.
fn find_before(pool: &BlockPool, block: BlockId) -> u32 {
    let sentinel = pool.queue.sentinel(CURRENT);
    let mut back = pool.queue.links(sentinel).0;
    let last_placed = pool.priorities.as_ref().and_then(|priorities| priorities.last_placed);
    let is_cached = |last: &BlockId| pool.queue.contains(*last) && pool.key(*last).is_some();
    let mut near = last_placed.filter(is_cached).map_or(back, |last| last.0);
    let rises = leaves_before(pool, near, block);
    for _ in 0..=pool.num_free() {
        if leaves_before(pool, back, block) {
            return back;
        }
        back = pool.queue.links(back).0;
        let (before, after) = pool.queue.links(near);
        if rises && (after == sentinel || !leaves_before(pool, after, block)) {
            return near;
        }
        if !rises && leaves_before(pool, near, block) {
            return near;
        }
        near = if rises { after } else { before };
    }
    sentinel
}

/// Whether a free block, or the sentinel, stands before a block's place.
fn leaves_before(pool: &BlockPool, other: u32, block: BlockId) -> bool {
    let Some(priorities) = &pool.priorities else { return false };
    let is_cached = other != pool.queue.sentinel(CURRENT) && pool.key(BlockId(other)).is_some();
    !is_cached
        || sort_key(&priorities.of_blocks, BlockId(other)) < sort_key(&priorities.of_blocks, block)
}

/// Forget the key of a block, if any; a free block moves to the front.
pub fn unpublish(pool: &mut BlockPool, block: BlockId, effects: &mut Effects) {
    let moves =
        pool.priorities.is_some() && pool.key(block).is_some() && pool.queue.contains(block);
    pool.unpublish(block, effects);
    if moves {
        move_to_front(pool, block);
    }
}

/// Forget every key; cached blocks move to the front in their order of eviction.
pub fn clear_index(pool: &mut BlockPool, effects: &mut Effects) {
    let is_cached = |block: &BlockId| pool.priorities.is_some() && pool.key(*block).is_some();
    let cached: Vec<BlockId> = pool.queue.iter().filter(is_cached).collect();
    pool.clear_index(effects);
    cached.into_iter().for_each(|block| move_to_front(pool, block));
}

/// Move a free block to the front.
fn move_to_front(pool: &mut BlockPool, block: BlockId) {
    pool.queue.remove(block);
    pool.queue.prepend(block);
}

/// Set the access time and chain length of blocks; free cached blocks move accordingly.
pub fn set_priority(
    pool: &mut BlockPool,
    blocks: &[BlockId],
    time: Option<f64>,
    length: Option<u32>,
) {
    let Some(priorities) = &mut pool.priorities else { return };
    for block in blocks {
        let old = priorities.of_blocks[block.index()];
        let (time, length) = (time.unwrap_or(old.time), length.unwrap_or(old.length));
        priorities.of_blocks[block.index()] = Priority { time, length };
    }
    insert_by_priority(pool, blocks);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::keys::{KEY_SIZE, Key};

    fn queue(pool: &BlockPool) -> Vec<u32> {
        pool.queue.iter().map(|block| block.0).collect()
    }

    /// A pool of six blocks, evicted by priority, of which the first `count` have owners and keys.
    fn cached(count: u8) -> (BlockPool, Effects) {
        let mut pool = make_pool(6, false, PoolEviction::Priority);
        let mut effects = Effects::new(false);
        for block in take(&mut pool, u32::from(count), &mut effects) {
            pool.publish(block, Key([block.0 as u8; KEY_SIZE]));
        }
        (pool, effects)
    }

    #[test]
    fn blocks_without_key_leave_first_then_the_least_recent_longest_lowest() {
        let (mut pool, mut effects) = cached(5);
        set_priority(&mut pool, &[BlockId(0), BlockId(3)], Some(2.0), Some(8));
        set_priority(&mut pool, &[BlockId(1), BlockId(4)], Some(1.0), Some(4));
        set_priority(&mut pool, &[BlockId(4)], None, Some(16));
        pool.unpublish(BlockId(3), &mut effects);
        release(&mut pool, &[0, 1, 2, 3, 4].map(BlockId), &mut effects);
        assert_eq!(queue(&pool), [3, 5, 2, 4, 1, 0]);
        set_priority(&mut pool, &[BlockId(4)], Some(3.0), None);
        assert_eq!(queue(&pool), [3, 5, 2, 1, 0, 4], "a free block moves");
        unpublish(&mut pool, BlockId(0), &mut effects);
        assert_eq!(queue(&pool), [0, 3, 5, 2, 1, 4]);
    }

    #[test]
    fn a_cleared_index_lets_cached_blocks_leave_last_evicted_first() {
        let (mut pool, mut effects) = cached(3);
        set_priority(&mut pool, &[BlockId(1)], Some(7.0), None);
        release(&mut pool, &[0, 1, 2].map(BlockId), &mut effects);
        assert_eq!(queue(&pool), [3, 4, 5, 0, 2, 1]);
        clear_index(&mut pool, &mut effects);
        assert_eq!(queue(&pool), [1, 2, 0, 3, 4, 5]);
        let taken = take(&mut pool, 1, &mut effects);
        assert_eq!(pool.priorities.unwrap().of_blocks[taken[0].index()], NO_PRIORITY);
    }

    #[test]
    fn pools_of_other_policies_have_no_priorities() {
        let mut pool = make_pool(3, true, PoolEviction::Of(Eviction::Lru));
        let mut effects = Effects::new(false);
        let blocks = take(&mut pool, 2, &mut effects);
        pool.publish(blocks[0], Key([1; KEY_SIZE]));
        set_priority(&mut pool, &blocks, Some(5.0), None);
        release(&mut pool, &blocks, &mut effects);
        unpublish(&mut pool, blocks[1], &mut effects);
        assert_eq!((queue(&pool), pool.priorities), (vec![1, 2], None));
    }
}
