// SPDX-License-Identifier: Apache-2.0
//! What is done for many blocks leaves the pool and the effects that single blocks leave.

use super::*;
use crate::pool::block_pool::make_pool;
use crate::types::config::Eviction;
use crate::types::keys::{HASH_SIZE, make_key};

const NUM_BLOCKS: u32 = 80;

/// Draws numbers below a limit.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.0 >> 33) as usize % limit
    }

    /// A hash of few, of which several share a bucket, and some a tag.
    fn hash(&mut self) -> BlockHash {
        let mut hash = [0; HASH_SIZE];
        [0, 3, 5, 20].into_iter().zip([3, 6, 4, 3]).for_each(|(at, limit)| {
            hash[at] = self.below(limit) as u8;
        });
        hash
    }
}

/// A pool and its effects, which goes by runs or block by block.
struct Side {
    pool: BlockPool,
    effects: Effects,
    by_runs: bool,
}

impl Side {
    fn take(&mut self, count: u32) -> Vec<BlockId> {
        if self.by_runs {
            return self.pool.take(count, &mut self.effects).to_vec();
        }
        let mut taken = Default::default();
        self.pool.take_few(count, &mut taken, &mut self.effects);
        taken.to_vec()
    }

    fn publish(&mut self, blocks: &[BlockId], hashes: &[BlockHash]) {
        let places = self.pool.index.places_of(hashes, 1);
        if self.by_runs && self.pool.publish_run(&places, blocks, hashes, 1) {
            return;
        }
        for (&block, hash) in blocks.iter().zip(hashes) {
            if !self.pool.is_null(block) && self.pool.key(block).is_none() {
                self.pool.publish(block, make_key(hash, 1));
            }
        }
    }

    fn release(&mut self, blocks: &[BlockId]) {
        match self.by_runs {
            true => self.pool.release_all(blocks, &mut self.effects),
            false => self.pool.release(blocks.iter().copied(), &mut self.effects),
        }
    }
}

/// Take some blocks, and publish most of them.
fn take_and_publish(sides: &mut [Side; 2], dice: &mut Dice) -> Vec<BlockId> {
    let free = sides[0].pool.num_free() as usize;
    let count = 1 + dice.below(free.min(40));
    let hashes: Vec<BlockHash> = (0..count).map(|_| dice.hash()).collect();
    let [taken, same] = sides.each_mut().map(|side| side.take(count as u32));
    assert_eq!(taken, same);
    let early = dice.below(2 * count);
    if early < count {
        sides.iter_mut().for_each(|side| {
            side.publish(&taken[early..early + 1], &hashes[early..early + 1]);
        });
    }
    let num_full = if dice.below(3) > 0 { count } else { dice.below(count + 1) };
    for first in (0..num_full).step_by(AHEAD) {
        let end = count.min(first + AHEAD);
        let run = first..end;
        sides.iter_mut().for_each(|side| {
            side.publish(&taken[run.clone()], &hashes[run.clone()]);
        });
    }
    taken
}

#[test]
fn runs_leave_what_single_blocks_leave() {
    let (lru, uncached_first) = (Eviction::Lru, Eviction::UncachedFirst);
    for (eviction, events, epochs) in [
        (lru, true, true),
        (uncached_first, false, true),
        (lru, false, false),
        (uncached_first, true, false),
    ] {
        let side = |by_runs| Side {
            pool: make_pool(NUM_BLOCKS, true, eviction, false),
            effects: Effects::new(events),
            by_runs,
        };
        let (mut sides, mut dice) = ([true, false].map(side), Dice(7));
        let mut held: Vec<Vec<BlockId>> = Vec::new();
        let mut num_evicted = 0;
        for time in 0..2_000 {
            let choice = dice.below(8);
            if sides[0].pool.num_free() > 0 && choice < 4 {
                held.push(take_and_publish(&mut sides, &mut dice));
            } else if choice < 7 && !held.is_empty() {
                let blocks = held.swap_remove(dice.below(held.len()));
                if choice == 4 {
                    let shared = &blocks[..dice.below(blocks.len() + 1)];
                    for side in &mut sides {
                        shared.iter().for_each(|&block| side.pool.touch(block, &mut side.effects));
                    }
                    held.push(shared.to_vec());
                }
                sides.iter_mut().for_each(|side| side.release(&blocks));
            } else if epochs && time % 50 == 0 {
                sides.iter_mut().for_each(|side| side.pool.start_epoch(&mut side.effects));
            }
            let [runs, single] = &sides;
            assert_eq!(format!("{:?}", runs.pool), format!("{:?}", single.pool), "at {time}");
            assert_eq!(runs.effects.commands, single.effects.commands, "at {time}");
            assert_eq!(runs.effects.events, single.effects.events, "at {time}");
            num_evicted += runs.effects.commands.keys.len();
            sides.iter_mut().for_each(|side| side.effects = Effects::new(events));
        }
        assert!(num_evicted > 1_000, "only {num_evicted} blocks were evicted");
    }
}
