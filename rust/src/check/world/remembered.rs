// SPDX-License-Identifier: Apache-2.0
//! What an eviction policy remembers, in the least numbers that it tells apart.
//!
//! Times only rise, so without this no state would be met twice. `Lru2` and `S3Fifo` compare times,
//! and count uses up to a number: ranks in the place of times change no answer, nor does what they
//! do not read. `Learned` counts on, so its worlds are explored to a depth.
//! Twin: kvcore/check/world/remembered.py.

use crate::pool::block_pool::BlockPool;
use crate::types::config::Eviction;
use crate::types::ids::BlockId;
use crate::types::keys::Key;
use crate::types::policies::{KEYLESS, Place, Uses};

/// Put ranks in the place of times, up to this number of the open batch; returns the least number
/// that it can have then: at least 1, since requests of later batches name batch 0 where they await
/// none.
pub(crate) fn forget_times(pool: &mut BlockPool, number: u64) -> u64 {
    let eviction = pool.eviction();
    let orders = matches!(eviction, Eviction::Lru2 | Eviction::S3Fifo);
    let Some(mut policy) = pool.policy.take_if(|_| orders) else {
        let is_remembered = pool.policy.as_ref().is_some_and(|policy| policy.is_remembered());
        let number = if is_remembered { number } else { 1 };
        pool.set_batch(number);
        return number;
    };
    let left = policy.history.left();
    let ghosts: Vec<(Key, Uses)> = left
        .map(|(_, key, known)| (*key, Uses { before: 0, ..read(eviction, *known, false) }))
        .collect();
    let mut uses = std::mem::take(&mut policy.history.uses);
    for (block, known) in (0..).map(BlockId).zip(&mut uses).filter(|(_, each)| each.uses > 0) {
        *known = read(eviction, *known, pool.queue.contains(block));
    }
    let mut times: Vec<u64> = policy.places.iter().map(|place| place.order()).collect();
    for known in uses.iter().chain(ghosts.iter().map(|(_, known)| known)) {
        times.extend([0, known.last, known.before, known.place.order()]);
    }
    times.sort_unstable();
    times.dedup();
    let rank = |time: u64| times.partition_point(|&each| each < time) as u64;
    let at = |place: Place| Place::new(place.section(), rank(place.order()));
    let ranked = |known: &Uses| Uses {
        last: rank(known.last),
        before: rank(known.before),
        place: at(known.place),
        ..*known
    };
    policy.rename_places(at);
    policy.history.clear();
    policy.history.next_number = 0;
    policy.history.uses = uses.iter().map(ranked).collect();
    for (number, (key, known)) in (0..).zip(&ghosts) {
        policy.history.leaves(number, key, ranked(known));
        policy.history.next_number = number + 1;
    }
    pool.policy = Some(policy);
    let number = (times.len() as u64 - 1).max(1);
    pool.set_batch(number);
    number
}

/// Return the part of uses that a policy reads: `Lru2` orders by times alone, `S3Fifo` never looks
/// at the use before the last.
fn read(eviction: Eviction, known: Uses, is_free: bool) -> Uses {
    match eviction {
        Eviction::Lru2 => {
            let place = if is_free { known.place } else { KEYLESS };
            Uses { uses: 1, depth: 0, place, ..known }
        }
        _ => Uses { uses: known.uses.min(3), depth: 0, before: 0, ..known },
    }
}
