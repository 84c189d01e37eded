// SPDX-License-Identifier: Apache-2.0
//! Stories of the tiers: a few blocks each.

use super::*;
use crate::types::config::Eviction;

const LRU: PoolEviction = PoolEviction::Of(Eviction::Lru);
const A: BlockId = BlockId(0);
const B: BlockId = BlockId(1);

fn taken(tiers: &mut Tiers) -> Vec<Command> {
    take_batch(tiers).commands().unwrap()
}

#[test]
fn an_owner_moves_to_a_copy_and_the_last_one_frees_the_source() {
    let mut tiers = make_tiers(2, 0, false, LRU, false).unwrap();
    assert_eq!(take(&mut tiers, 1, Tier::Device).unwrap(), Ok(vec![A]));
    touch(&mut tiers, &[0], Tier::Device).unwrap();
    assert_eq!(copy(&mut tiers, 0).unwrap(), Ok(B));
    assert_eq!(copy(&mut tiers, 0).unwrap(), Err(Refused::new(Reason::Later, 1, 0)));
    release(&mut tiers, &[1], Tier::Device).unwrap();
    taken(&mut tiers);
    assert_eq!(copy(&mut tiers, 0).unwrap(), Ok(B));
    let copies = [
        Command::Allocate { block: B },
        Command::CopyOnWrite { source: A, target: B },
        Command::Free { block: A, cached: false },
    ];
    assert_eq!((tiers.number(), taken(&mut tiers)), (1, copies.to_vec()));
}

#[test]
fn the_host_tier_is_silent_but_for_copies() {
    let mut tiers = make_tiers(2, 2, false, LRU, true).unwrap();
    assert_eq!(take(&mut tiers, 1, Tier::Host).unwrap(), Ok(vec![B]), "highest first");
    take(&mut tiers, 1, Tier::Device).unwrap().unwrap();
    taken(&mut tiers);
    copy_out(&mut tiers, 1, 1).unwrap();
    copy_in(&mut tiers, 1, 1).unwrap();
    release(&mut tiers, &[1], Tier::Host).unwrap();
    let out = Command::SwapOut { block: B, host_block: B };
    assert_eq!(taken(&mut tiers), [out, Command::SwapIn { host_block: B, block: B }]);
}

#[test]
fn blocks_of_either_tier_are_found_by_their_keys() {
    let mut tiers = make_tiers(2, 2, false, LRU, false).unwrap();
    let keys = [Key([1; 36]), Key([2; 36])];
    for tier in [Tier::Device, Tier::Host] {
        take(&mut tiers, 2, tier).unwrap().unwrap();
        publish_all(&mut tiers, &[1, 0], &keys, tier).unwrap();
        assert_eq!(lookup_prefix(&tiers, &keys, tier).unwrap(), [B, A]);
    }
}

#[test]
fn misuse_names_the_host_tier() {
    let mut tiers = make_tiers(2, 1, false, LRU, false).unwrap();
    take(&mut tiers, 1, Tier::Device).unwrap().unwrap();
    let said = |outcome: Result<(), Misuse>| outcome.unwrap_err().to_string();
    let twice = said(release(&mut tiers, &[0], Tier::Host));
    assert_eq!(twice, "host block 0 has 0 owners, but the call releases 1");
    assert_eq!(said(copy_out(&mut tiers, 0, 0)), "host block 0 has no owner");
    assert_eq!(said(copy_out(&mut tiers, 1, 0)), "block 1 has no owner");
    let mut one = make_tiers(2, 0, false, LRU, false).unwrap();
    assert!(said(copy_in(&mut one, 0, 0)).starts_with("there is no host tier"));
}
