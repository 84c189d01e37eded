// SPDX-License-Identifier: Apache-2.0
//! Blocks that come under keys, and leave them in any order.

use super::*;
use crate::types::keys::HASH_SIZE;

const KEY: Key = Key([1; KEY_SIZE]);
const OTHER: Key = Key([2; KEY_SIZE]);

/// An index for six blocks that were published under one key in this order.
fn published(blocks: &[u32]) -> HashIndex {
    let mut index = HashIndex::new(6);
    blocks.iter().for_each(|&block| index.insert(KEY, BlockId(block)));
    index
}

fn ids(index: &HashIndex) -> Vec<u32> {
    index.get(&KEY).into_iter().map(|block| block.0).collect()
}

#[test]
fn the_next_block_answers_when_the_first_loses_its_key() {
    let mut index = published(&[5, 3, 4]);
    assert_eq!(ids(&index), [5, 3, 4]);
    assert!(!index.remove(BlockId(5)));
    assert_eq!(index.first(&KEY), Some(BlockId(3)));
    assert!(!index.remove(BlockId(4)));
    assert!(index.remove(BlockId(3)), "the last one");
    assert_eq!((index.first(&KEY), index.is_empty()), (None, true));
}

#[test]
fn blocks_leave_from_the_middle_and_come_back_at_the_end() {
    let mut index = published(&[2, 0, 3, 1]);
    assert!(!index.remove(BlockId(0)));
    assert_eq!(ids(&index), [2, 3, 1]);
    index.insert(KEY, BlockId(0));
    assert_eq!(ids(&index), [2, 3, 1, 0]);
    assert_eq!(index.ranks(), [3, 2, 0, 1, 0, 0]);
    assert!(!index.remove(BlockId(2)));
    index.insert(KEY, BlockId(2));
    assert_eq!(ids(&index), [3, 1, 0, 2]);
}

#[test]
fn the_only_one_left_may_be_joined_by_others_again() {
    for left in [1, 4] {
        let mut index = published(&[1, 4]);
        assert!(!index.remove(BlockId(5 - left)));
        assert_eq!(ids(&index), [left]);
        index.insert(OTHER, BlockId(5 - left));
        index.insert(KEY, BlockId(0));
        assert_eq!((ids(&index), index.len()), (vec![left, 0], 2));
        assert!(!index.remove(BlockId(left)));
        assert!(index.remove(BlockId(0)));
        assert_eq!(index.get(&OTHER), [BlockId(5 - left)]);
    }
}

#[test]
fn many_keys_and_blocks_are_told_apart() {
    const BLOCKS: u32 = 300;
    let key = |number: u32| Key([(number % 200) as u8; KEY_SIZE]);
    let mut index = HashIndex::new(BLOCKS);
    let mut expected = vec![Vec::new(); 200];
    let mut held = vec![None; BLOCKS as usize];
    let mut drawn = 1_u32;
    for _ in 0..20_000 {
        drawn = drawn.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (block, number) = ((drawn >> 8) % BLOCKS, (drawn >> 20) % 200);
        match held[block as usize].take() {
            Some(number) => {
                let blocks: &mut Vec<u32> = &mut expected[number as usize];
                blocks.retain(|&each| each != block);
                assert_eq!(index.remove(BlockId(block)), blocks.is_empty());
            }
            None => {
                index.insert(key(number), BlockId(block));
                expected[number as usize].push(block);
                held[block as usize] = Some(number);
            }
        }
        let blocks: Vec<u32> = index.get(&key(number)).iter().map(|each| each.0).collect();
        assert_eq!(blocks, expected[number as usize]);
    }
    assert_eq!(index.len(), expected.iter().filter(|blocks| !blocks.is_empty()).count());
}

#[test]
fn keys_of_one_tag_are_told_apart_by_every_byte() {
    // Bucket and tag are made of the first eight bytes and the group: these keys share them.
    let mut keys = [KEY; HASH_SIZE - 7];
    (8..HASH_SIZE).zip(&mut keys[1..]).for_each(|(at, key)| key.0[at] ^= 1);
    [0, KEY_SIZE - 1].into_iter().for_each(|at| keys[0].0[at] ^= 1);
    let mut index = HashIndex::new(keys.len() as u32 + 1);
    index.insert(KEY, BlockId(0));
    for (block, key) in (1..).map(BlockId).zip(&keys) {
        assert_eq!(index.place_of(key), index.place_of(&KEY));
        assert_eq!(index.first(key), None);
        index.insert(*key, block);
        assert_eq!((index.get(key), index.get(&KEY)), (vec![block], vec![BlockId(0)]));
    }
    assert_eq!(index.len(), keys.len() + 1);
    for (block, key) in (1..).map(BlockId).zip(&keys) {
        assert!(index.remove(block), "it was alone");
        assert_eq!((index.first(key), index.first(&KEY)), (None, Some(BlockId(0))));
    }
}

#[test]
fn what_is_older_is_not_found_and_leaves_from_beside_the_same_key() {
    let mut index = published(&[1, 2]);
    index.start_epoch();
    assert_eq!((ids(&index), index.len(), index.is_older(BlockId(1))), (vec![], 0, true));
    [4, 3].into_iter().for_each(|block| index.insert(KEY, BlockId(block)));
    assert!(!index.remove(BlockId(2)) && index.remove(BlockId(1)));
    assert_eq!((ids(&index), index.len()), (vec![4, 3], 1));
    index.insert(KEY, BlockId(1));
    assert_eq!((ids(&index), index.is_older(BlockId(1))), (vec![4, 3, 1], false));
}

#[test]
fn a_cleared_index_forgets_its_rings() {
    let mut index = published(&[1, 2, 3]);
    index.clear();
    assert_eq!((ids(&index), index.ranks()), (vec![], vec![0; 6]));
    index.insert(KEY, BlockId(2));
    assert_eq!(ids(&index), [2]);
    assert!(index.remove(BlockId(2)));
}

#[test]
fn the_memory_of_keys_grows_up_to_the_last_block_that_had_one() {
    let num_blocks = NUM_TOUCHED as u32 + 4;
    let mut index = HashIndex::new(num_blocks);
    assert_eq!(index.keys.len(), NUM_TOUCHED);
    let [low, high, last] = [1, num_blocks - 3, num_blocks - 1].map(BlockId);
    for (block, num_keys) in [(low, NUM_TOUCHED), (high, NUM_TOUCHED + 2)] {
        index.insert(KEY, block);
        assert_eq!(index.keys.len(), num_keys);
    }
    index.insert(OTHER, last);
    assert_eq!((index.get(&KEY), index.get(&OTHER)), (vec![low, high], vec![last]));
    assert!(!index.remove(low) && index.remove(high) && index.remove(last));
    index.insert(OTHER, BlockId(high.0 + 1));
    assert_eq!(
        (index.keys.len(), index.keys.capacity()),
        (num_blocks as usize, num_blocks as usize)
    );
}
