// SPDX-License-Identifier: Apache-2.0
//! One or two tiers of blocks and an open batch: all that a manager of sequences needs.
//!
//! The transitions are those of the pool for one tier, and copies of a block inside the device and
//! between the tiers. Their commands gather in the open batch, which holds only the copies of the
//! host tier. Ids count from 0 in each tier. Errors about a host block name its tier.
//!
//! Invariants: a call that fails or is refused changes nothing. Source: S002-33, 34, 50, 65,
//! S003-20, 21, 26, 28. Twin: kvcore/legacy/blocks/tiers.py.

use std::fmt;

use crate::pool::block_pool::BlockPool;
use crate::pool::free_queue::make_free_queue;
use crate::pool::priority_eviction;
use crate::pool::priority_eviction::PoolEviction;
use crate::pool::transitions as layer;
use crate::types::commands::{Batch, Command, Tier, close};
use crate::types::effects::Effects;
use crate::types::errors::Error;
use crate::types::ids::BlockId;
use crate::types::keys::Key;
use crate::types::memory::check_memory;
use crate::types::values::{Admitted, Reason, Refused};

/// The blocks of the device and the host (None without a host tier), and the open batch.
#[derive(Debug, Clone)]
pub struct Tiers {
    pub(crate) device: BlockPool,
    host: Option<BlockPool>,
    number: u64,
    pub(crate) effects: Effects,
    host_effects: Effects,
}

/// Misuse of the blocks of one tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misuse {
    /// The error.
    pub error: Error,
    /// The tier of the block that the error names, if it names one.
    pub tier: Tier,
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names_block = self.error.fields().iter().any(|(name, _)| *name == "block");
        let tier = if self.tier == Tier::Host && names_block { "host " } else { "" };
        write!(f, "{tier}{}", self.error)
    }
}

impl std::error::Error for Misuse {}

impl Tiers {
    /// Return the blocks of one tier. Fails with NoHostTier.
    pub fn pool(&self, tier: Tier) -> Result<&BlockPool, Misuse> {
        match (tier, &self.host) {
            (Tier::Device, _) => Ok(&self.device),
            (Tier::Host, Some(host)) => Ok(host),
            (Tier::Host, None) => Err(Misuse { error: Error::NoHostTier {}, tier }),
        }
    }

    /// Return the number of the open batch.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Return the open batch without closing it.
    #[must_use]
    pub fn open_batch(&self) -> Batch {
        close(self.number, &self.effects.commands)
    }

    /// Apply a transition of the pool layer to one tier.
    pub(crate) fn run<T>(
        &mut self,
        tier: Tier,
        transition: impl FnOnce(&mut BlockPool, &mut Effects) -> Result<T, Error>,
    ) -> Result<T, Misuse> {
        let outcome = match (tier, &mut self.host) {
            (Tier::Device, _) => transition(&mut self.device, &mut self.effects),
            (Tier::Host, Some(host)) => transition(host, &mut self.host_effects),
            (Tier::Host, None) => Err(Error::NoHostTier {}),
        };
        outcome.map_err(|error| Misuse { error, tier })
    }

    /// The block of this number.
    pub(crate) fn known(&self, block: i64, tier: Tier) -> Result<(&BlockPool, BlockId), Misuse> {
        let pool = self.pool(tier)?;
        Ok((pool, pool.check_block(block).map_err(|error| Misuse { error, tier })?))
    }

    /// Check that a block is known and has an owner.
    fn held(&self, number: i64, tier: Tier) -> Result<BlockId, Misuse> {
        let (pool, block) = self.known(number, tier)?;
        if pool.ref_count(block) == 0 {
            return Err(Misuse { error: Error::NoOwner { block: number }, tier });
        }
        Ok(block)
    }

    /// Check that a device block and a host block both have owners, and return them.
    pub(crate) fn held_pair(
        &self,
        block: i64,
        host_block: i64,
    ) -> Result<(BlockId, BlockId), Misuse> {
        self.pool(Tier::Host)?;
        Ok((self.held(block, Tier::Device)?, self.held(host_block, Tier::Host)?))
    }
}

/// Make empty tiers that share one eviction policy and one order of first use.
///
/// num_host_blocks: 0 for no host tier. null_block: reserve device block 0 as the null block, which
/// is never taken. descending: the highest block is taken first. Fails with PoolTooLarge.
pub fn make_tiers(
    num_blocks: u32,
    num_host_blocks: u32,
    null_block: bool,
    eviction: PoolEviction,
    descending: bool,
) -> Result<Tiers, Error> {
    check_memory(u64::from(num_blocks) + u64::from(num_host_blocks))?;
    let pool = |size: u32, null_block: bool| {
        let mut pool = priority_eviction::make_pool(size, null_block, eviction);
        if descending {
            let ids = (u32::from(null_block)..size).rev().map(BlockId);
            pool.queue = make_free_queue(size, ids, 0);
        }
        pool
    };
    Ok(Tiers {
        device: pool(num_blocks, null_block),
        host: (num_host_blocks > 0).then(|| pool(num_host_blocks, false)),
        number: 0,
        effects: Effects::new(false),
        host_effects: Effects::silent(),
    })
}

/// Give `count` free blocks one owner each; refused as a whole.
pub fn take(tiers: &mut Tiers, count: u64, tier: Tier) -> Result<Admitted<Vec<BlockId>>, Misuse> {
    tiers.run(tier, |pool, effects| Ok(layer::take(pool, count, effects)))
}

/// Touch blocks and take `count` others; refused as a whole; value: the blocks taken.
///
/// keys: the key that each block must have; None: not compared. Fails with WrongKey, UnknownBlock,
/// UnusedBlock.
pub fn admit(
    tiers: &mut Tiers,
    blocks: &[i64],
    count: u64,
    keys: Option<&[Key]>,
    tier: Tier,
) -> Result<Admitted<Vec<BlockId>>, Misuse> {
    tiers.run(tier, |pool, effects| layer::admit(pool, blocks, count, keys, effects))
}

/// Add an owner to each block; it must have one, or a key. Fails with UnknownBlock, UnusedBlock.
pub fn touch(tiers: &mut Tiers, blocks: &[i64], tier: Tier) -> Result<(), Misuse> {
    tiers.run(tier, |pool, effects| layer::touch(pool, blocks, effects))
}

/// Take one owner from each block, in order. Fails with UnknownBlock, DoubleFree.
pub fn release(tiers: &mut Tiers, blocks: &[i64], tier: Tier) -> Result<(), Misuse> {
    tiers.run(tier, |pool, effects| layer::release(pool, blocks, effects))
}

/// Publish a block that has an owner under a key. Fails with UnknownBlock, UnusedBlock,
/// AlreadyPublished.
pub fn publish(tiers: &mut Tiers, block: i64, key: Key, tier: Tier) -> Result<(), Misuse> {
    tiers.run(tier, |pool, _| layer::publish(pool, block, key))
}

/// Publish blocks that have owners, each under its key, in order; all of them or none. Fails with
/// UnknownBlock, UnusedBlock, AlreadyPublished.
pub fn publish_all(
    tiers: &mut Tiers,
    blocks: &[i64],
    keys: &[Key],
    tier: Tier,
) -> Result<(), Misuse> {
    tiers.run(tier, |pool, _| layer::publish_all(pool, blocks, keys))
}

/// Forget a block's key, if it has one. Fails with UnknownBlock.
pub fn unpublish(tiers: &mut Tiers, block: i64, tier: Tier) -> Result<(), Misuse> {
    tiers.run(tier, |pool, effects| layer::unpublish(pool, block, effects))
}

/// Set the access time of blocks and the length of their chain in tokens; None keeps a value. Fails
/// with UnknownBlock, and with InvalidConfig unless eviction is "priority".
pub fn set_priority(
    tiers: &mut Tiers,
    blocks: &[i64],
    time: Option<f64>,
    length: Option<u32>,
    tier: Tier,
) -> Result<(), Misuse> {
    tiers.run(tier, |pool, _| layer::set_priority(pool, blocks, time, length))
}

/// Forget every key.
pub fn clear_index(tiers: &mut Tiers, tier: Tier) -> Result<(), Misuse> {
    tiers.run(tier, |pool, effects| {
        layer::clear_index(pool, effects);
        Ok(())
    })
}

/// Copy a device block and move one of its owners to the copy; value: the copy.
///
/// The copy is taken before the owner leaves. Fails with UnknownBlock, NoOwner.
pub fn copy(tiers: &mut Tiers, block: i64) -> Result<Admitted<BlockId>, Misuse> {
    let source = tiers.held(block, Tier::Device)?;
    let Tiers { device, effects, .. } = tiers;
    if device.num_free() == 0 {
        return Ok(Err(Refused::new(Reason::Later, 1, 0)));
    }
    let fresh = priority_eviction::take(device, 1, effects)[0];
    effects.emit(Command::CopyOnWrite { source, target: fresh });
    priority_eviction::release(device, &[source], effects);
    Ok(Ok(fresh))
}

/// Copy a device block to a host block; both must have owners, and keep them. Fails with
/// NoHostTier, UnknownBlock, NoOwner.
pub fn copy_out(tiers: &mut Tiers, block: i64, host_block: i64) -> Result<(), Misuse> {
    let (block, host_block) = tiers.held_pair(block, host_block)?;
    tiers.effects.emit(Command::SwapOut { block, host_block });
    Ok(())
}

/// Copy a host block to a device block; both must have owners, and keep them. Fails with
/// NoHostTier, UnknownBlock, NoOwner.
pub fn copy_in(tiers: &mut Tiers, host_block: i64, block: i64) -> Result<(), Misuse> {
    let (block, host_block) = tiers.held_pair(block, host_block)?;
    tiers.effects.emit(Command::SwapIn { host_block, block });
    Ok(())
}

/// Return the block that answers for a key, or None. Does not modify the tiers.
pub fn lookup(tiers: &Tiers, key: &Key, tier: Tier) -> Result<Option<BlockId>, Misuse> {
    Ok(layer::lookup(tiers.pool(tier)?, key))
}

/// Return the blocks that hold the keys' contents, up to the first key without one. Does not modify
/// the tiers.
pub fn lookup_prefix(tiers: &Tiers, keys: &[Key], tier: Tier) -> Result<Vec<BlockId>, Misuse> {
    Ok(layer::lookup_prefix(tiers.pool(tier)?, keys))
}

/// Return the number of blocks in the free queue. Does not modify the tiers.
pub fn num_free(tiers: &Tiers, tier: Tier) -> Result<u32, Misuse> {
    Ok(tiers.pool(tier)?.num_free())
}

/// Return the owner count of a block. Does not modify the tiers. Fails with UnknownBlock.
pub fn ref_count(tiers: &Tiers, block: i64, tier: Tier) -> Result<u32, Misuse> {
    let (pool, known) = tiers.known(block, tier)?;
    Ok(pool.ref_count(known))
}

/// Return the owner count of each block. Does not modify the tiers. Fails with UnknownBlock.
pub fn ref_counts(tiers: &Tiers, blocks: &[i64], tier: Tier) -> Result<Vec<u32>, Misuse> {
    let pool = tiers.pool(tier)?;
    let count = |&block| pool.check_block(block).map(|known| pool.ref_count(known));
    let counts: Result<_, _> = blocks.iter().map(count).collect();
    counts.map_err(|error| Misuse { error, tier })
}

/// Return the key of a block. Does not modify the tiers. Fails with UnknownBlock.
pub fn key_of(tiers: &Tiers, block: i64, tier: Tier) -> Result<Option<&Key>, Misuse> {
    let (pool, known) = tiers.known(block, tier)?;
    Ok(pool.key(known))
}

/// Return the free queue, front first. Does not modify the tiers. Cost: O(free blocks).
pub fn free_blocks(tiers: &Tiers, tier: Tier) -> Result<Vec<BlockId>, Misuse> {
    Ok(tiers.pool(tier)?.queue.iter().collect())
}

/// Close and number the open batch; value: its commands.
pub fn take_batch(tiers: &mut Tiers) -> Batch {
    let taken = tiers.open_batch();
    tiers.effects.commands.clear();
    tiers.number += 1;
    taken
}

#[cfg(test)]
mod tests;
