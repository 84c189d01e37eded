// SPDX-License-Identifier: Apache-2.0
//! Transitions of tiers for a whole table: append, write, and move to the other tier.
//!
//! Invariants: those of `tiers.rs`. A block that has other owners, or a key, is never written.
//! Source: S003-17, 19 to 21, 26, 28. Twin: kvcore/legacy/blocks/by_table.py.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use rustc_hash::FxBuildHasher;

use crate::legacy::blocks::tiers::{Misuse, Tiers, copy, take, touch};
use crate::pool::block_pool::count_blocks;
use crate::pool::priority_eviction;
use crate::types::commands::{Command, Tier};
use crate::types::errors::Error;
use crate::types::ids::BlockId;
use crate::types::values::Admitted;

/// Pairs of a block and its copy, in the order of the argument.
pub type Moves = Vec<(BlockId, BlockId)>;

/// Make room for an owner of device blocks to write after their content.
///
/// last, num_held: the last block of the table, and its length. num_blocks: its length after the
/// write. Value: None if the last block can be written as it is; otherwise a new block, to append
/// if the table is shorter than num_blocks, or a copy that replaces the last block, as in `own`.
/// Fails with InvalidCount, UnknownBlock, NoOwner.
pub fn append(
    tiers: &mut Tiers,
    last: Option<i64>,
    num_held: i64,
    num_blocks: i64,
) -> Result<Admitted<Option<BlockId>>, Misuse> {
    if num_blocks < 0 {
        let error = Error::InvalidCount { name: "num_blocks", value: num_blocks, least: 0 };
        return Err(Misuse { error, tier: Tier::Device });
    }
    if num_held < num_blocks {
        return Ok(take(tiers, 1, Tier::Device)?.map(|taken| taken.first().copied()));
    }
    let Some(last) = last else { return Ok(Ok(None)) };
    let owned = own(tiers, last)?;
    Ok(owned.map(|block| (i64::from(block.0) != last).then_some(block)))
}

/// Let one of a device block's owners write; value: the block to write to.
///
/// If the block has one owner and no key, it is written in place; otherwise the owner moves to a
/// copy.
/// Fails with UnknownBlock, NoOwner.
pub fn own(tiers: &mut Tiers, block: i64) -> Result<Admitted<BlockId>, Misuse> {
    let (pool, known) = tiers.known(block, Tier::Device)?;
    if pool.is_writable(known) {
        return Ok(Ok(known));
    }
    copy(tiers, block)
}

/// Move one owner of each device block to the host; refused as a whole.
///
/// A block that is named twice moves once, with one more owner. Value: each block with its copy.
/// Fails with NoHostTier, UnknownBlock, DoubleFree.
pub fn move_out(tiers: &mut Tiers, blocks: &[i64]) -> Result<Admitted<Moves>, Misuse> {
    move_owners(tiers, blocks, Tier::Device, Tier::Host)
}

/// Move one owner of each host block to the device; refused as a whole.
///
/// Value: each block with its copy. Fails with NoHostTier, UnknownBlock, DoubleFree.
pub fn move_in(tiers: &mut Tiers, host_blocks: &[i64]) -> Result<Admitted<Moves>, Misuse> {
    move_owners(tiers, host_blocks, Tier::Host, Tier::Device)
}

/// Move owners from the blocks of one tier to new copies in the other tier.
fn move_owners(
    tiers: &mut Tiers,
    blocks: &[i64],
    from: Tier,
    to: Tier,
) -> Result<Admitted<Moves>, Misuse> {
    tiers.pool(from)?;
    let times = count_blocks(blocks);
    let leaves = |&number: &i64| {
        let (pool, block) = tiers.known(number, from)?;
        let (ref_count, requested) = (i64::from(pool.ref_count(block)), times[&number]);
        if ref_count < requested {
            let error = Error::DoubleFree { block: number, ref_count, requested };
            return Err(Misuse { error, tier: from });
        }
        Ok(block)
    };
    let sources: Vec<BlockId> = blocks.iter().map(leaves).collect::<Result<_, _>>()?;
    let fresh = match take(tiers, times.len() as u64, to)? {
        Ok(fresh) => fresh,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let mut fresh = fresh.into_iter();
    let mut copies: Moves = Vec::with_capacity(times.len());
    let (mut places, mut again) =
        (HashMap::with_capacity_and_hasher(times.len(), FxBuildHasher), Vec::new());
    for &source in &sources {
        match places.entry(source) {
            Entry::Occupied(known) => again.push(*known.get()),
            Entry::Vacant(unknown) => {
                let target = fresh.next().expect("REF: as many were taken as blocks are named");
                unknown.insert(i64::from(target.0));
                copies.push((source, target));
                tiers.effects.emit(match to {
                    Tier::Host => Command::SwapOut { block: source, host_block: target },
                    Tier::Device => Command::SwapIn { host_block: source, block: target },
                });
            }
        }
    }
    touch(tiers, &again, to)?;
    tiers.run(from, |pool, effects| {
        priority_eviction::release(pool, &sources, effects);
        Ok(())
    })?;
    Ok(Ok(copies))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::legacy::blocks::tiers::{make_tiers, num_free, publish, ref_count, take_batch};
    use crate::pool::priority_eviction::PoolEviction;
    use crate::types::config::Eviction;
    use crate::types::keys::{KEY_SIZE, Key};
    use crate::types::values::{Reason, Refused};

    const LRU: PoolEviction = PoolEviction::Of(Eviction::Lru);
    const A: BlockId = BlockId(0);
    const B: BlockId = BlockId(1);

    fn taken(tiers: &mut Tiers) -> Vec<Command> {
        take_batch(tiers).commands().unwrap()
    }

    #[test]
    fn owners_move_to_one_copy_of_their_block_and_leave_it_or_stay() {
        let mut tiers = make_tiers(3, 2, false, LRU, false).unwrap();
        take(&mut tiers, 2, Tier::Device).unwrap().unwrap();
        touch(&mut tiers, &[0, 0], Tier::Device).unwrap();
        taken(&mut tiers);
        assert_eq!(move_out(&mut tiers, &[0, 1, 0]).unwrap(), Ok(vec![(A, A), (B, B)]));
        assert_eq!(
            (ref_count(&tiers, 0, Tier::Host), num_free(&tiers, Tier::Device)),
            (Ok(2), Ok(2))
        );
        let swaps =
            [(A, A), (B, B)].map(|(block, host_block)| Command::SwapOut { block, host_block });
        let freed = Command::Free { block: B, cached: false };
        assert_eq!(taken(&mut tiers), [&swaps[..], &[freed]].concat());
        assert_eq!(move_out(&mut tiers, &[0]).unwrap(), Err(Refused::new(Reason::Later, 1, 0)));
        assert!(move_in(&mut tiers, &[1, 1]).is_err(), "it has one owner");
        assert_eq!(move_in(&mut tiers, &[1]).unwrap(), Ok(vec![(B, BlockId(2))]));
        let back = Command::SwapIn { host_block: B, block: BlockId(2) };
        assert_eq!(taken(&mut tiers), [Command::Allocate { block: BlockId(2) }, back]);
    }

    #[test]
    fn a_lone_owner_writes_in_place_and_others_to_a_copy() {
        let mut tiers = make_tiers(3, 0, false, LRU, false).unwrap();
        take(&mut tiers, 1, Tier::Device).unwrap().unwrap();
        assert_eq!(own(&mut tiers, 0).unwrap(), Ok(A));
        touch(&mut tiers, &[0], Tier::Device).unwrap();
        assert_eq!(own(&mut tiers, 0).unwrap(), Ok(B));
        publish(&mut tiers, 1, Key([1; KEY_SIZE]), Tier::Device).unwrap();
        assert_eq!(own(&mut tiers, 1).unwrap(), Ok(BlockId(2)), "what can be found stays as it is");
    }

    #[test]
    fn a_table_grows_by_a_block_or_has_its_last_one_copied() {
        let mut tiers = make_tiers(3, 0, false, LRU, false).unwrap();
        assert_eq!(append(&mut tiers, None, 0, 0).unwrap(), Ok(None), "there is nothing to write");
        assert_eq!(append(&mut tiers, None, 0, 1).unwrap(), Ok(Some(A)));
        assert_eq!(append(&mut tiers, Some(0), 1, 1).unwrap(), Ok(None));
        touch(&mut tiers, &[0], Tier::Device).unwrap();
        assert_eq!(append(&mut tiers, Some(0), 1, 1).unwrap(), Ok(Some(B)));
        assert_eq!(append(&mut tiers, Some(0), 1, 2).unwrap(), Ok(Some(BlockId(2))));
        let never = Refused::new(Reason::Later, 1, 0);
        assert_eq!(append(&mut tiers, Some(0), 1, 2).unwrap(), Err(never));
    }
}
