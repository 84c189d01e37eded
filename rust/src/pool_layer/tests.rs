// SPDX-License-Identifier: Apache-2.0
//! Stories of a pool of four blocks.

use super::*;
use crate::block_pool::make_pool;
use crate::commands::Command;
use crate::config::Eviction;

const KEY: Key = Key([9; 36]);

fn queue(pool: &BlockPool) -> Vec<u32> {
    pool.queue.iter().map(|block| block.0).collect()
}

#[test]
fn a_cached_block_keeps_its_content_until_it_is_taken() {
    let (mut pool, mut effects) = (make_pool(5, true, Eviction::Lru, false), Effects::new(true));
    assert_eq!(take(&mut pool, 2, &mut effects), Ok(vec![BlockId(1), BlockId(2)]));
    publish(&mut pool, 2, KEY).unwrap();
    release(&mut pool, &[2, 1], &mut effects).unwrap();
    assert_eq!(queue(&pool), [3, 4, 2, 1]);
    assert_eq!(lookup(&pool, &KEY), Some(BlockId(2)));
    take(&mut pool, 3, &mut effects).unwrap();
    assert_eq!(lookup(&pool, &KEY), None);
    let last: Vec<Command> = effects.commands.iter().skip(6).collect();
    let block = BlockId(2);
    assert_eq!(last, [Command::Evict { block, key: KEY }, Command::Allocate { block }]);
    assert_eq!(effects.events.len(), 1);
}

#[test]
fn uncached_blocks_go_to_the_front_where_asked() {
    let (mut pool, mut effects) =
        (make_pool(4, false, Eviction::UncachedFirst, false), Effects::new(false));
    take(&mut pool, 3, &mut effects).unwrap();
    publish(&mut pool, 1, KEY).unwrap();
    release(&mut pool, &[2, 1, 0], &mut effects).unwrap();
    assert_eq!(queue(&pool), [0, 2, 3, 1]);
}

#[test]
fn a_pool_refuses_what_it_cannot_give() {
    let (mut pool, mut effects) = (make_pool(4, true, Eviction::Lru, false), Effects::new(false));
    take(&mut pool, 2, &mut effects).unwrap();
    let later = Refused { reason: Reason::Later, needed: 2, available: 1, pending: 0 };
    assert_eq!(take(&mut pool, 2, &mut effects), Err(later));
    let never = take(&mut pool, 4, &mut effects).unwrap_err();
    assert_eq!((never.reason, queue(&pool)), (Reason::Never, vec![3]));
}

#[test]
fn misuse_changes_nothing() {
    let (mut pool, mut effects) = (make_pool(4, true, Eviction::Lru, false), Effects::new(false));
    take(&mut pool, 1, &mut effects).unwrap();
    pin(&mut pool, &[1], &mut effects).unwrap();
    let foreign = Error::UnknownBlock { block: 0, first: 1, last: 3 };
    assert_eq!(release(&mut pool, &[1, 0], &mut effects), Err(foreign));
    let double = Error::DoubleFree { block: 1, ref_count: 1, asked: 2 };
    assert_eq!(release(&mut pool, &[1, 1], &mut effects), Err(double));
    let pins = Error::NotPinned { block: 1, num_pins: 1, asked: 2 };
    assert_eq!(unpin(&mut pool, &[1, 1], &mut effects), Err(pins));
    assert_eq!(touch(&mut pool, &[1, 2], &mut effects), Err(Error::UnusedBlock { block: 2 }));
    assert_eq!((pool.ref_count(BlockId(1)), queue(&pool)), (2, vec![2, 3]));
    unpin(&mut pool, &[1], &mut effects).unwrap();
    release(&mut pool, &[1], &mut effects).unwrap();
    assert_eq!(queue(&pool), [2, 3, 1]);
}
