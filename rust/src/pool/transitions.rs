// SPDX-License-Identifier: Apache-2.0
//! The pool layer: transitions of one tier's blocks, for managers with requests of their own.
//!
//! Invariants: arguments are checked first, so a call that fails or is refused leaves the pool as
//! it was. Keys are opaque bytes.
//! Source: S000-34, 35, 38, 41, S001-82, 83, S002-38. Twin: kvcore/pool/transitions.py.

use crate::pool::block_pool::{BlockPool, count_blocks};
use crate::pool::priority_eviction;
use crate::types::effects::Effects;
use crate::types::errors::Error;
use crate::types::ids::BlockId;
use crate::types::keys::Key;
use crate::types::values::{Admitted, Reason, Refused};

/// Take `count` blocks from the front of the free queue and give each one owner, or refuse.
pub fn take(pool: &mut BlockPool, count: u64, effects: &mut Effects) -> Admitted<Vec<BlockId>> {
    if count > u64::from(pool.num_free()) {
        let never = count > u64::from(pool.num_usable());
        let reason = if never { Reason::Never } else { Reason::Later };
        return Err(Refused::new(reason, count, pool.num_free()));
    }
    Ok(priority_eviction::take(pool, count as u32, effects).into_vec())
}

/// Touch blocks and take `count` others, or refuse both. Value: the taken blocks.
///
/// keys: which the blocks are to have, one each; None: any. Fails with WrongKey, UnknownBlock,
/// UnusedBlock.
pub fn admit(
    pool: &mut BlockPool,
    blocks: &[i64],
    count: u64,
    keys: Option<&[Key]>,
    effects: &mut Effects,
) -> Result<Admitted<Vec<BlockId>>, Error> {
    for (position, (&block, key)) in (0..).zip(blocks.iter().zip(keys.unwrap_or_default())) {
        if pool.key(pool.check_block(block)?) != Some(key) {
            return Err(Error::WrongKey { block, position });
        }
    }
    let known = pool.check_pins(blocks)?;
    let mut touched = known.clone();
    touched.sort_unstable();
    touched.dedup();
    let num_idle = touched.iter().filter(|&&block| pool.ref_count(block) == 0).count();
    let needed = count + num_idle as u64;
    if needed > u64::from(pool.num_free()) {
        let never = count + touched.len() as u64 > u64::from(pool.num_usable());
        let reason = if never { Reason::Never } else { Reason::Later };
        return Ok(Err(Refused::new(reason, needed, pool.num_free())));
    }
    for block in known {
        pool.touch(block, effects);
    }
    Ok(Ok(priority_eviction::take(pool, count as u32, effects).into_vec()))
}

/// Add an owner to each block that has one, or has a key. Fails with UnknownBlock, UnusedBlock.
pub fn touch(pool: &mut BlockPool, blocks: &[i64], effects: &mut Effects) -> Result<(), Error> {
    for block in pool.check_pins(blocks)? {
        pool.touch(block, effects);
    }
    Ok(())
}

/// Take one owner from each block, in order. Fails with UnknownBlock, DoubleFree (pins stay).
pub fn release(pool: &mut BlockPool, blocks: &[i64], effects: &mut Effects) -> Result<(), Error> {
    let times = count_blocks(blocks);
    let check = |&number: &i64| {
        let block = pool.check_block(number)?;
        let ref_count = i64::from(pool.ref_count(block)) - i64::from(pool.num_pins(block));
        if ref_count < times[&number] {
            return Err(Error::DoubleFree { block: number, ref_count, requested: times[&number] });
        }
        Ok(block)
    };
    let known: Vec<BlockId> = blocks.iter().map(check).collect::<Result<_, _>>()?;
    priority_eviction::release(pool, &known, effects);
    Ok(())
}

/// Make a block with an owner findable. Fails with UnknownBlock, UnusedBlock, AlreadyPublished.
pub fn publish(pool: &mut BlockPool, block: i64, key: Key) -> Result<(), Error> {
    let known = check_unkeyed(pool, block)?;
    pool.publish(known, key);
    Ok(())
}

/// Make blocks with owners findable, each by its key, in order; all of them or none. Fails with
/// UnknownBlock, UnusedBlock, AlreadyPublished.
pub fn publish_all(pool: &mut BlockPool, blocks: &[i64], keys: &[Key]) -> Result<(), Error> {
    let mut sorted = blocks.to_vec();
    sorted.sort_unstable();
    let distinct = sorted.is_sorted_by(|before, after| before < after);
    let check = |(place, &block): (usize, &i64)| {
        let known = check_unkeyed(pool, block)?;
        if !distinct && blocks[..place].contains(&block) {
            return Err(Error::AlreadyPublished { block });
        }
        Ok(known)
    };
    let known: Vec<BlockId> = blocks.iter().enumerate().map(check).collect::<Result<_, _>>()?;
    for (block, &key) in known.into_iter().zip(keys) {
        pool.publish(block, key);
    }
    Ok(())
}

/// Forget a block's key, if it has one. Fails with UnknownBlock.
pub fn unpublish(pool: &mut BlockPool, block: i64, effects: &mut Effects) -> Result<(), Error> {
    let known = pool.check_block(block)?;
    priority_eviction::unpublish(pool, known, effects);
    Ok(())
}

/// Set the access time of blocks and the tokens of their chain; None keeps the old value. Fails
/// with UnknownBlock, and with InvalidConfig unless the policy is "priority".
pub fn set_priority(
    pool: &mut BlockPool,
    blocks: &[i64],
    time: Option<f64>,
    length: Option<u32>,
) -> Result<(), Error> {
    if pool.priorities.is_none() {
        let value = pool.eviction().name().into();
        let reason = "blocks have priorities only under 'priority'".to_owned();
        return Err(Error::InvalidConfig { field: "eviction", value, reason });
    }
    let known: Vec<BlockId> =
        blocks.iter().map(|&block| pool.check_block(block)).collect::<Result<_, _>>()?;
    priority_eviction::set_priority(pool, &known, time, length);
    Ok(())
}

/// Forget every key.
pub fn clear_index(pool: &mut BlockPool, effects: &mut Effects) {
    priority_eviction::clear_index(pool, effects);
}

/// Return the block that holds a key's content. Does not modify the pool.
#[must_use]
pub fn lookup(pool: &BlockPool, key: &Key) -> Option<BlockId> {
    pool.index.first(key)
}

/// Return the blocks that hold the keys' contents, up to the first key without one. Does not modify
/// the pool.
#[must_use]
pub fn lookup_prefix(pool: &BlockPool, keys: &[Key]) -> Vec<BlockId> {
    keys.iter().map_while(|key| lookup(pool, key)).collect()
}

/// Hold blocks that have an owner or a key. Fails with UnknownBlock, UnusedBlock.
pub fn pin(pool: &mut BlockPool, blocks: &[i64], effects: &mut Effects) -> Result<(), Error> {
    for block in pool.check_pins(blocks)? {
        pool.pin(block, effects);
    }
    Ok(())
}

/// Undo `pin`. Fails with UnknownBlock, NotPinned.
pub fn unpin(pool: &mut BlockPool, blocks: &[i64], effects: &mut Effects) -> Result<(), Error> {
    for block in pool.check_unpins(blocks, |_| 0)? {
        priority_eviction::unpin(pool, block, effects);
    }
    Ok(())
}

/// The block of this number, which has an owner and no key.
fn check_unkeyed(pool: &BlockPool, block: i64) -> Result<BlockId, Error> {
    let known = pool.check_block(block)?;
    if pool.key(known).is_some() {
        return Err(Error::AlreadyPublished { block });
    }
    if pool.ref_count(known) == 0 {
        return Err(Error::UnusedBlock { block });
    }
    Ok(known)
}

#[cfg(test)]
mod tests;
