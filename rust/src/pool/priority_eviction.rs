// SPDX-License-Identifier: Apache-2.0
//! The ranked policy of a pool: cached blocks leave in the order of what was said of their use.
//!
//! Rules: free blocks without key stand in front, the last one freed first; behind them those with
//! a key, in the order of their rank: least recent time, then longest chain, then lowest id. A
//! block that is taken loses its rank. A block looks for its place from the back and from the one
//! that found its place last, in turn: so it costs a few steps where time rises, and where a chain
//! is freed one by one. Pools of other policies have no ranks: each function here leaves them as
//! the method of its name does. Source: S002-16, 19, 23, 48. Twin:
//! kvcore/pool/priority_eviction.py.

use std::cmp::Ordering;

use crate::pool::block_pool;
use crate::pool::block_pool::{BlockPool, Taken};
use crate::pool::eviction_rank::{NO_RANK, Rank, Ranks};
use crate::types::config::Eviction;
use crate::types::effects::Effects;
use crate::types::ids::BlockId;

/// Which freed block leaves first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolEviction {
    /// As a `Config` says.
    Of(Eviction),
    /// By rank, for managers of the pool layer that say when a block was used.
    Ranked,
}

/// An empty pool of either kind of policy, whose blocks are first taken lowest first.
#[must_use]
pub fn make_pool(num_blocks: u32, null_block: bool, eviction: PoolEviction) -> BlockPool {
    match eviction {
        PoolEviction::Of(eviction) => {
            block_pool::make_pool(num_blocks, null_block, eviction, false)
        }
        PoolEviction::Ranked => {
            let uncached_first = Eviction::UncachedFirst;
            let mut pool = block_pool::make_pool(num_blocks, null_block, uncached_first, false);
            let of_blocks = vec![NO_RANK; num_blocks as usize];
            pool.ranks = Some(Box::new(Ranks { of_blocks, last_placed: None }));
            pool
        }
    }
}

/// How two cached blocks follow each other, the first to be evicted first.
fn place(ranks: &[Rank], left: BlockId, right: BlockId) -> Ordering {
    let (first, second) = (ranks[left.index()], ranks[right.index()]);
    let times = first.time.partial_cmp(&second.time).expect("RANKED: times are finite");
    times.then(second.length.cmp(&first.length)).then(left.cmp(&right))
}

/// Give so many blocks from the front one owner each, and no rank.
pub fn take(pool: &mut BlockPool, count: u32, effects: &mut Effects) -> Taken {
    let blocks = pool.take(count, effects);
    if let Some(ranks) = &mut pool.ranks {
        blocks.iter().for_each(|block| ranks.of_blocks[block.index()] = NO_RANK);
    }
    blocks
}

/// Take one owner from each; those left without join the free queue.
pub fn release(pool: &mut BlockPool, blocks: &[BlockId], effects: &mut Effects) {
    pool.release(blocks.iter().copied(), effects);
    insert_ranked(pool, blocks);
}

/// Remove an owner that a pin added.
pub fn unpin(pool: &mut BlockPool, block: BlockId, effects: &mut Effects) {
    pool.unpin(block, effects);
    insert_ranked(pool, &[block]);
}

/// Put those of the blocks that are free and cached into their places: one search, then one walk
/// towards the front.
fn insert_ranked(pool: &mut BlockPool, blocks: &[BlockId]) {
    if pool.ranks.is_none() {
        return;
    }
    let mut cached: Vec<BlockId> = Vec::new();
    for &block in blocks {
        if pool.key(block).is_some() && pool.queue.contains(block) {
            pool.queue.remove(block);
            cached.push(block);
        }
    }
    let ranks = &pool.ranks.as_ref().expect("RANKED: looked at above").of_blocks;
    cached.sort_unstable_by(|&left, &right| place(ranks, right, left));
    let Some(&last) = cached.first() else { return };
    let mut before = find_before(pool, last);
    for block in cached {
        while !leaves_before(pool, before, block) {
            before = pool.queue.links(before).0;
        }
        pool.queue.insert(before, block);
        pool.ranks.as_mut().expect("RANKED: looked at above").last_placed = Some(block);
    }
}

/// What a block's place is behind: from the back, and from the last one placed, in turn.
fn find_before(pool: &BlockPool, block: BlockId) -> u32 {
    let sentinel = pool.queue.sentinel();
    let mut back = pool.queue.links(sentinel).0;
    let last_placed = pool.ranks.as_ref().and_then(|ranks| ranks.last_placed);
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

/// Whether a block's place is behind a free block, or the sentinel.
fn leaves_before(pool: &BlockPool, other: u32, block: BlockId) -> bool {
    let Some(ranks) = &pool.ranks else { return false };
    let is_cached = other != pool.queue.sentinel() && pool.key(BlockId(other)).is_some();
    !is_cached || place(&ranks.of_blocks, BlockId(other), block).is_lt()
}

/// Forget the key of a block, if it has one; a free one goes to the front.
pub fn unpublish(pool: &mut BlockPool, block: BlockId, effects: &mut Effects) {
    let moves = pool.ranks.is_some() && pool.key(block).is_some() && pool.queue.contains(block);
    pool.unpublish(block, effects);
    if moves {
        move_to_front(pool, block);
    }
}

/// Forget every key; cached blocks go to the front in the order of their eviction.
pub fn clear_index(pool: &mut BlockPool, effects: &mut Effects) {
    let is_cached = |block: &BlockId| pool.ranks.is_some() && pool.key(*block).is_some();
    let cached: Vec<BlockId> = pool.queue.iter().filter(is_cached).collect();
    pool.clear_index(effects);
    cached.into_iter().for_each(|block| move_to_front(pool, block));
}

/// Let a free block leave next.
fn move_to_front(pool: &mut BlockPool, block: BlockId) {
    pool.queue.remove(block);
    pool.queue.prepend(block);
}

/// Say when a block was used and how long its chain is; it stays in its place.
pub fn note(pool: &mut BlockPool, block: BlockId, time: Option<f64>, length: Option<u32>) {
    let Some(ranks) = &mut pool.ranks else { return };
    let old = ranks.of_blocks[block.index()];
    let (time, length) = (time.unwrap_or(old.time), length.unwrap_or(old.length));
    ranks.of_blocks[block.index()] = Rank { time, length };
}

/// Say when blocks were used and how long their chain is; cached ones change places.
pub fn rank(pool: &mut BlockPool, blocks: &[BlockId], time: Option<f64>, length: Option<u32>) {
    blocks.iter().for_each(|&block| note(pool, block, time, length));
    insert_ranked(pool, blocks);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::keys::{KEY_SIZE, Key};

    fn queue(pool: &BlockPool) -> Vec<u32> {
        pool.queue.iter().map(|block| block.0).collect()
    }

    /// A ranked pool of six blocks of which the first `count` have owners and keys.
    fn cached(count: u8) -> (BlockPool, Effects) {
        let mut pool = make_pool(6, false, PoolEviction::Ranked);
        let mut effects = Effects::new(false);
        for block in take(&mut pool, u32::from(count), &mut effects) {
            pool.publish(block, Key([block.0 as u8; KEY_SIZE]));
        }
        (pool, effects)
    }

    #[test]
    fn blocks_without_key_leave_first_then_the_least_recent_longest_lowest() {
        let (mut pool, mut effects) = cached(5);
        rank(&mut pool, &[BlockId(0), BlockId(3)], Some(2.0), Some(8));
        rank(&mut pool, &[BlockId(1), BlockId(4)], Some(1.0), Some(4));
        rank(&mut pool, &[BlockId(4)], None, Some(16));
        pool.unpublish(BlockId(3), &mut effects);
        release(&mut pool, &[0, 1, 2, 3, 4].map(BlockId), &mut effects);
        assert_eq!(queue(&pool), [3, 5, 2, 4, 1, 0]);
        rank(&mut pool, &[BlockId(4)], Some(3.0), None);
        assert_eq!(queue(&pool), [3, 5, 2, 1, 0, 4], "a free block moves");
        unpublish(&mut pool, BlockId(0), &mut effects);
        assert_eq!(queue(&pool), [0, 3, 5, 2, 1, 4]);
    }

    #[test]
    fn a_cleared_index_lets_cached_blocks_leave_last_evicted_first() {
        let (mut pool, mut effects) = cached(3);
        rank(&mut pool, &[BlockId(1)], Some(7.0), None);
        release(&mut pool, &[0, 1, 2].map(BlockId), &mut effects);
        assert_eq!(queue(&pool), [3, 4, 5, 0, 2, 1]);
        clear_index(&mut pool, &mut effects);
        assert_eq!(queue(&pool), [1, 2, 0, 3, 4, 5]);
        let taken = take(&mut pool, 1, &mut effects);
        assert_eq!(pool.ranks.unwrap().of_blocks[taken[0].index()], NO_RANK);
    }

    #[test]
    fn pools_of_other_policies_have_no_ranks() {
        let mut pool = make_pool(3, true, PoolEviction::Of(Eviction::Lru));
        let mut effects = Effects::new(false);
        let blocks = take(&mut pool, 2, &mut effects);
        pool.publish(blocks[0], Key([1; KEY_SIZE]));
        rank(&mut pool, &blocks, Some(5.0), None);
        release(&mut pool, &blocks, &mut effects);
        unpublish(&mut pool, blocks[1], &mut effects);
        assert_eq!((queue(&pool), pool.ranks), (vec![1, 2], None));
    }
}
