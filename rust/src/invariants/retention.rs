// SPDX-License-Identifier: Apache-2.0
//! The property of free blocks that leave by level. Twin: kvcore/invariants/retention.py.

use crate::invariants::requests::Scratch;
use crate::pool::free_queue::{CURRENT, OLDER};
use crate::pool::retention_state::{Kept, level_of};
use crate::state::state::State;
use crate::types::ids::BlockId;
use crate::types::violation::Finding;

/// RANK-ORDER: each free block is in its level's part of the queue; a block without a key is in the
/// first part, and has no retention wish.
pub(crate) fn rank_order(state: &State, _: &mut Scratch) -> Finding {
    let pool = &state.device;
    if pool.retention.is_none() {
        return Ok(());
    }
    for ring in 0..pool.queue.num_rings() {
        let mut block = pool.queue.links(pool.queue.sentinel(ring)).1;
        while block < pool.num_blocks() {
            let (kept, is_keyed) = (pool.kept(BlockId(block)), pool.key(BlockId(block)).is_some());
            let level = CURRENT + u32::from(level_of(kept, pool.now()));
            let expected = if is_keyed { level } else { OLDER };
            if ring != expected || (ring == OLDER && kept != Kept::default()) {
                let now = pool.now();
                return Err(format!("block {block}, {kept:?}, is in part {ring} at {now} ms"));
            }
            block = pool.queue.links(block).1;
        }
    }
    Ok(())
}
