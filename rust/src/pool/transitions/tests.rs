// SPDX-License-Identifier: Apache-2.0
//! Stories of a pool of four blocks.

use super::*;
use crate::pool::block_pool::make_pool;
use crate::types::commands::Command;
use crate::types::config::Eviction;

const KEY: Key = Key([9; 36]);
const OTHER: Key = Key([8; 36]);

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
    let far = Refused { reason: Reason::Never, needed: 1 << 40, available: 1, pending: 0 };
    assert_eq!(take(&mut pool, far.needed, &mut effects), Err(far));
    assert_eq!(admit(&mut pool, &[1], far.needed, None, &mut effects), Ok(Err(far)));
}

#[test]
fn misuse_changes_nothing() {
    let (mut pool, mut effects) = (make_pool(4, true, Eviction::Lru, false), Effects::new(false));
    take(&mut pool, 1, &mut effects).unwrap();
    pin(&mut pool, &[1], &mut effects).unwrap();
    let foreign = Error::UnknownBlock { block: 0, first: 1, last: 3 };
    assert_eq!(release(&mut pool, &[1, 0], &mut effects), Err(foreign));
    let double = Error::DoubleFree { block: 1, ref_count: 1, requested: 2 };
    assert_eq!(release(&mut pool, &[1, 1], &mut effects), Err(double));
    let pins = Error::NotPinned { block: 1, num_pins: 1, requested: 2 };
    assert_eq!(unpin(&mut pool, &[1, 1], &mut effects), Err(pins));
    assert_eq!(touch(&mut pool, &[1, 2], &mut effects), Err(Error::UnusedBlock { block: 2 }));
    assert_eq!((pool.ref_count(BlockId(1)), queue(&pool)), (2, vec![2, 3]));
    unpin(&mut pool, &[1], &mut effects).unwrap();
    release(&mut pool, &[1], &mut effects).unwrap();
    assert_eq!(queue(&pool), [2, 3, 1]);
}

#[test]
fn an_admission_takes_beside_what_it_touches_or_changes_nothing() {
    let (mut pool, mut effects) = (make_pool(6, true, Eviction::Lru, false), Effects::new(false));
    take(&mut pool, 3, &mut effects).unwrap();
    publish_all(&mut pool, &[1, 2], &[KEY, OTHER]).unwrap();
    release(&mut pool, &[1], &mut effects).unwrap();
    assert_eq!(queue(&pool), [4, 5, 1]);
    let later = Refused { reason: Reason::Later, needed: 4, available: 3, pending: 0 };
    assert_eq!(
        admit(&mut pool, &[1, 2, 1], 3, None, &mut effects),
        Ok(Err(later)),
        "1 is in the queue"
    );
    let never = Refused { reason: Reason::Never, needed: 5, ..later };
    assert_eq!(admit(&mut pool, &[1, 2], 4, None, &mut effects), Ok(Err(never)));
    let unused = Error::UnusedBlock { block: 4 };
    assert_eq!(admit(&mut pool, &[1, 4], 0, None, &mut effects), Err(unused));
    assert_eq!((queue(&pool), pool.ref_count(BlockId(2))), (vec![4, 5, 1], 1));
    let wrong = Error::WrongKey { block: 2, position: 1 };
    assert_eq!(admit(&mut pool, &[1, 2], 0, Some(&[KEY, KEY]), &mut effects), Err(wrong));
    assert_eq!(admit(&mut pool, &[1, 2], 0, Some(&[KEY, OTHER]), &mut effects), Ok(Ok(vec![])));
    release(&mut pool, &[2, 1], &mut effects).unwrap();
    let all = vec![BlockId(4), BlockId(5)];
    assert_eq!(admit(&mut pool, &[1, 2, 1], 2, None, &mut effects), Ok(Ok(all)));
    assert_eq!((queue(&pool), pool.ref_count(BlockId(1))), (vec![], 2));
}

#[test]
fn keys_are_published_all_or_none_and_found_up_to_the_first_miss() {
    let (mut pool, mut effects) = (make_pool(5, true, Eviction::Lru, false), Effects::new(false));
    take(&mut pool, 3, &mut effects).unwrap();
    let twice = Error::AlreadyPublished { block: 1 };
    assert_eq!(publish_all(&mut pool, &[1, 1], &[KEY, OTHER]), Err(twice.clone()));
    assert_eq!(publish_all(&mut pool, &[1, 2, 1], &[KEY, OTHER, KEY]), Err(twice));
    let unused = Error::UnusedBlock { block: 4 };
    assert_eq!(publish_all(&mut pool, &[2, 4], &[KEY, OTHER]), Err(unused));
    assert_eq!(lookup_prefix(&pool, &[KEY]), []);
    publish_all(&mut pool, &[2, 1], &[KEY, OTHER]).unwrap();
    let third = Key([7; 36]);
    assert_eq!(lookup_prefix(&pool, &[OTHER, KEY, third, KEY]), [BlockId(1), BlockId(2)]);
}
