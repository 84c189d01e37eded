// SPDX-License-Identifier: Apache-2.0
//! Tiers by contents: the blocks of several keys at once, found or new, and what several have.
//!
//! Rules: as those of `tiers.rs`, which these functions go on. Keys are asked for one behind the
//! other: what a free block holds may be evicted for one before it, and is new then. Source:
//! S002-08, 10, 11, 13, 42. Twin: kvcore/legacy/blocks/by_key.py.

use hashbrown::HashSet;
use rustc_hash::FxBuildHasher;

use crate::legacy::blocks::tiers::{Misuse, Tiers};
use crate::pool::block_pool::BlockPool;
use crate::pool::eviction_rank::{NEVER, NO_RANK, Rank};
use crate::pool::priority_eviction;
use crate::types::commands::{Command, Tier};
use crate::types::effects::Effects;
use crate::types::ids::BlockId;
use crate::types::keys::Key;
use crate::types::values::{Admitted, Reason, Refused};

/// What `find_or_take` gives.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Placed {
    /// A block for each key.
    pub blocks: Vec<BlockId>,
    /// Those of them that are new.
    pub taken: Vec<BlockId>,
    /// Those that were found without an owner.
    pub revived: Vec<BlockId>,
}

/// Give the block of each key an owner more: the one that answers for it, or a new one, which does
/// so from now on; for None a new one without key. Refused as a whole.
///
/// lengths: tokens of the chain that ends in each block, one a key, where blocks are ranked. A
/// block that is found without owner has no time then, as a new one.
pub fn find_or_take(
    tiers: &mut Tiers,
    keys: &[Option<Key>],
    lengths: &[u32],
    tier: Tier,
) -> Result<Admitted<Placed>, Misuse> {
    tiers.run(tier, |pool, effects| Ok(place(pool, keys, lengths, effects)))
}

/// Copy device blocks to host blocks, or back, pair by pair, all or none; owners stay.
///
/// to: the tier of the targets. Both lists have one length. Fails with NoHostTier, UnknownBlock,
/// NoOwner.
pub fn copy_pairs(
    tiers: &mut Tiers,
    blocks: &[i64],
    host_blocks: &[i64],
    to: Tier,
) -> Result<(), Misuse> {
    let pairs = blocks.iter().zip(host_blocks);
    let pairs: Vec<_> = pairs
        .map(|(&block, &host_block)| tiers.held_pair(block, host_block))
        .collect::<Result<_, _>>()?;
    for (block, host_block) in pairs {
        tiers.effects.emit(match to {
            Tier::Host => Command::SwapOut { block, host_block },
            Tier::Device => Command::SwapIn { host_block, block },
        });
    }
    Ok(())
}

/// How many own the block that answers for each key; None where none answers. Does not modify the
/// tiers.
pub fn owners_of(tiers: &Tiers, keys: &[Key], tier: Tier) -> Result<Vec<Option<u32>>, Misuse> {
    let pool = tiers.pool(tier)?;
    let owners = |key| pool.index.first(key).map(|block| pool.ref_count(block));
    Ok(keys.iter().map(owners).collect())
}

/// Owners of each block. Does not modify the tiers. Fails with UnknownBlock.
pub fn ref_counts(tiers: &Tiers, blocks: &[i64], tier: Tier) -> Result<Vec<u32>, Misuse> {
    let pool = tiers.pool(tier)?;
    let count = |&block| pool.check_block(block).map(|known| pool.ref_count(known));
    let counts: Result<_, _> = blocks.iter().map(count).collect();
    counts.map_err(|error| Misuse { error, tier })
}

/// When a block was last used, and how many tokens its chain has, as was said. Does not modify the
/// tiers. Fails with UnknownBlock.
pub fn rank_of(tiers: &Tiers, block: i64, tier: Tier) -> Result<Rank, Misuse> {
    let pool = tiers.pool(tier)?;
    let known = pool.check_block(block).map_err(|error| Misuse { error, tier })?;
    Ok(pool.ranks.as_ref().map_or(NO_RANK, |ranks| ranks.of_blocks[known.index()]))
}

fn place(
    pool: &mut BlockPool,
    keys: &[Option<Key>],
    lengths: &[u32],
    effects: &mut Effects,
) -> Admitted<Placed> {
    let needed = count_needed(pool, keys);
    if needed > u64::from(pool.num_free()) {
        let never = needed > u64::from(pool.num_usable());
        let reason = if never { Reason::Never } else { Reason::Later };
        return Err(Refused::new(reason, needed, pool.num_free()));
    }
    let mut placed = Placed::default();
    for (key, &length) in keys.iter().zip(lengths) {
        let found = key.as_ref().and_then(|key| pool.index.first(key));
        let block = match found {
            Some(block) => {
                if pool.ref_count(block) == 0 {
                    placed.revived.push(block);
                    priority_eviction::note(pool, block, Some(NEVER), None);
                }
                pool.touch(block, effects);
                block
            }
            None => {
                let block = priority_eviction::take(pool, 1, effects)[0];
                if let Some(key) = key {
                    pool.publish(block, *key);
                    priority_eviction::note(pool, block, None, Some(length));
                }
                placed.taken.push(block);
                block
            }
        };
        placed.blocks.push(block);
    }
    Ok(placed)
}

/// Blocks that leave the free ones: each content that nobody owns takes one.
fn count_needed(pool: &BlockPool, keys: &[Option<Key>]) -> u64 {
    let mut idle: HashSet<&Key, FxBuildHasher> = HashSet::default();
    let mut needed = 0;
    for key in keys {
        let Some(key) = key else {
            needed += 1;
            continue;
        };
        let owned = pool.index.first(key).is_some_and(|block| pool.ref_count(block) > 0);
        needed += u64::from(!owned && idle.insert(key));
    }
    needed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::legacy::blocks::tiers::{make_tiers, rank, release, take, take_batch};
    use crate::pool::priority_eviction::PoolEviction;
    use crate::types::keys::KEY_SIZE;

    const HERE: Tier = Tier::Device;

    fn key(letter: u8) -> Key {
        Key([letter; KEY_SIZE])
    }

    fn ids(blocks: &[BlockId]) -> Vec<u32> {
        blocks.iter().map(|block| block.0).collect()
    }

    #[test]
    fn what_is_found_is_shared_and_what_is_not_is_new() {
        let mut tiers = make_tiers(4, 0, false, PoolEviction::Ranked, false);
        let first = [Some(key(1)), Some(key(2)), None];
        let placed = find_or_take(&mut tiers, &first, &[2, 4, 5], HERE).unwrap().unwrap();
        assert_eq!((ids(&placed.blocks), ids(&placed.taken)), (vec![0, 1, 2], vec![0, 1, 2]));
        rank(&mut tiers, &[1], Some(5.0), None, HERE).unwrap();
        release(&mut tiers, &[1], HERE).unwrap();
        assert_eq!(rank_of(&tiers, 1, HERE).unwrap(), Rank { time: 5.0, length: 4 });
        let again = [Some(key(1)), Some(key(2)), Some(key(1))];
        let placed = find_or_take(&mut tiers, &again, &[2, 4, 2], HERE).unwrap().unwrap();
        assert_eq!((ids(&placed.blocks), ids(&placed.revived)), (vec![0, 1, 0], vec![1]));
        assert!(placed.taken.is_empty());
        let owners = owners_of(&tiers, &[key(1), key(3), key(2)], HERE).unwrap();
        assert_eq!(owners, [Some(3), None, Some(1)]);
        assert_eq!(ref_counts(&tiers, &[2, 3, 0], HERE).unwrap(), [1, 0, 3]);
        let rank = rank_of(&tiers, 1, HERE).unwrap();
        assert_eq!(rank, Rank { time: NEVER, length: 4 }, "its time is forgotten");
    }

    #[test]
    fn pairs_are_copied_both_ways_or_none_of_them_is() {
        let mut tiers = make_tiers(3, 2, false, PoolEviction::Ranked, false);
        take(&mut tiers, 2, HERE).unwrap().unwrap();
        take(&mut tiers, 2, Tier::Host).unwrap().unwrap();
        take_batch(&mut tiers);
        let nobody_s = copy_pairs(&mut tiers, &[0, 2], &[1, 0], Tier::Host).unwrap_err();
        assert_eq!(nobody_s.to_string(), "block 2 has no owner");
        copy_pairs(&mut tiers, &[1, 0], &[0, 1], Tier::Host).unwrap();
        copy_pairs(&mut tiers, &[0], &[1], HERE).unwrap();
        let (a, b) = (BlockId(0), BlockId(1));
        let copies = [
            Command::SwapOut { block: b, host_block: a },
            Command::SwapOut { block: a, host_block: b },
            Command::SwapIn { host_block: b, block: a },
        ];
        assert_eq!(take_batch(&mut tiers).commands().unwrap(), copies);
    }

    #[test]
    fn what_is_evicted_for_an_earlier_key_is_new_for_a_later_one() {
        let mut tiers = make_tiers(2, 0, false, PoolEviction::Ranked, false);
        let both = [Some(key(1)), Some(key(2))];
        find_or_take(&mut tiers, &both, &[2, 4], HERE).unwrap().unwrap();
        release(&mut tiers, &[0, 1], HERE).unwrap();
        let shared = find_or_take(&mut tiers, &[Some(key(3)); 3], &[2; 3], HERE).unwrap().unwrap();
        assert_eq!(ids(&shared.blocks), [1, 1, 1], "one content takes one block");
        release(&mut tiers, &[1, 1, 1], HERE).unwrap();
        take_batch(&mut tiers);
        let wanted = [None, Some(key(1)), Some(key(3))];
        let refused = find_or_take(&mut tiers, &wanted, &[2; 3], HERE).unwrap();
        assert_eq!(refused, Err(Refused::new(Reason::Never, 3, 2)));
        let placed = find_or_take(&mut tiers, &wanted[..2], &[2; 2], HERE).unwrap().unwrap();
        assert_eq!((ids(&placed.taken), ids(&placed.revived)), (vec![0, 1], vec![]));
        let evicted = Command::Evict { block: BlockId(0), key: key(1) };
        assert_eq!(take_batch(&mut tiers).commands().unwrap()[0], evicted);
    }
}
