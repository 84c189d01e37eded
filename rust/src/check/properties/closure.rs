// SPDX-License-Identifier: Apache-2.0
//! Properties of the cache after evictions: a block that can be hit has its parents.
//!
//! No transition calls anything here. A hit is a run of blocks from the first token on, so a cached
//! block whose parent is gone costs memory and is never found. The properties hold after each call,
//! for groups with full attention, on runs without `BREAKS_CLOSURE`: calls that evict, pin, or
//! write in place over keyed blocks. Forks beside hashes of the engine's own are such calls, too: a
//! child has none at first. A parent whose key waits for the open batch, since another block still
//! had it when the parent was filled, counts as cached: the batch gives it the key, or moves the
//! table to the other block. Twin: kvcore/check/properties/closure.py.

use smallvec::SmallVec;

use crate::check::world::world::World;
use crate::oracle::prefixes::Prefixes;
use crate::pool::block_pool::BlockPool;
use crate::state::state::State;
use crate::types::ids::BlockId;
use crate::types::violation::{Checks, Finding, Violation};

/// The properties of this file, by name.
pub const CLOSURE_PROPERTIES: [&str; 3] = ["PREFIX-CLOSED", "EVICT-ORDER", "LEVEL-CHAIN"];
/// Calls behind which a child may be cached without its parent.
pub const BREAKS_CLOSURE: [&str; 6] =
    ["evict_blocks", "pin", "truncate", "rewind", "load", "store"];

/// A cached block: its group, the number of its prefix and of that before it, 0 for none.
struct Cached {
    group_id: u32,
    node: u32,
    parent: u32,
    block: BlockId,
    /// Its place in the free queue; None while it is used.
    place: Option<u32>,
    /// Whether an owned block with the content of its parent waits for its key.
    waits: bool,
}

impl Cached {
    /// Whether there is a parent, none of whose copies waits for its key.
    fn has_settled_parent(&self) -> bool {
        self.parent > 0 && !self.waits
    }
}

/// Tell whether the properties hold in a world of such calls and such a policy.
#[must_use]
pub fn holds_in(world: &World) -> bool {
    let breaks = BREAKS_CLOSURE.iter().any(|call| world.tries(call));
    let is_unknown = world.tries("fork") && world.tries("add_block_hashes");
    world.config.eviction.is_closed() && !breaks && !is_unknown
}

/// Fails with the first property that counts and does not hold.
pub fn check(state: &State, prefixes: &mut Prefixes, checks: &Checks) -> Result<(), Violation> {
    let mut cached = SmallVec::new();
    cached_blocks(state, prefixes, &mut cached)?;
    checks.hear_finding("PREFIX-CLOSED", prefix_closed(&cached))?;
    checks.hear_finding("EVICT-ORDER", evict_order(&cached))?;
    checks.hear_finding("LEVEL-CHAIN", level_chain(&state.device, &cached))
}

/// PREFIX-CLOSED: a cached block's parent is cached, too.
fn prefix_closed(cached: &[Cached]) -> Finding {
    for each in cached.iter().filter(|each| each.has_settled_parent()) {
        if parents(cached, each).next().is_none() {
            let block = each.block.0;
            return Err(format!("block {block} is cached, but its parent is not"));
        }
    }
    Ok(())
}

/// EVICT-ORDER: a free cached block is evicted before at least one copy of its parent.
fn evict_order(cached: &[Cached]) -> Finding {
    for each in cached.iter().filter(|each| each.has_settled_parent()) {
        let Some(place) = each.place else { continue };
        let stays = |parent: &Cached| parent.place.is_none_or(|its| its > place);
        if !parents(cached, each).any(stays) {
            let block = each.block.0;
            return Err(format!("block {block} stays longer than every copy of its parent"));
        }
    }
    Ok(())
}

/// LEVEL-CHAIN: at least one copy of a free cached block's parent has an owner, or retention wishes
/// at least as high.
fn level_chain(pool: &BlockPool, cached: &[Cached]) -> Finding {
    if pool.retention.is_none() {
        return Ok(());
    }
    for each in cached.iter().filter(|each| each.has_settled_parent() && each.place.is_some()) {
        let mine = pool.kept(each.block);
        let has_more = |parent: &Cached| {
            let its = pool.kept(parent.block);
            let is_more = its.base >= mine.base && its.level >= mine.level;
            parent.place.is_none() || (is_more && its.until >= mine.until)
        };
        if parents(cached, each).next().is_some() && !parents(cached, each).any(has_more) {
            let block = each.block.0;
            return Err(format!(
                "block {block} has {mine:?}, but the copies of its parent have less"
            ));
        }
    }
    Ok(())
}

/// Return the blocks that hold what is before the prefix of one.
fn parents<'a>(cached: &'a [Cached], of: &'a Cached) -> impl Iterator<Item = &'a Cached> {
    cached.iter().filter(|each| each.group_id == of.group_id && each.node == of.parent)
}

/// Find the cached blocks of the groups that keep all.
fn cached_blocks(
    state: &State,
    prefixes: &mut Prefixes,
    found: &mut SmallVec<[Cached; 8]>,
) -> Result<(), Violation> {
    let mut waiting = SmallVec::<[(u32, u32); 4]>::new();
    for merge in state.batch.merges.iter().filter(|each| state.device.ref_count(each.block) > 0) {
        waiting.push((merge.group_id, prefixes.chain(&merge.key)?.last()));
    }
    for block in (0..state.device.num_blocks()).map(BlockId) {
        let Some(key) = state.device.key(block) else { continue };
        let group_id = key.group_id();
        let Some(rule) = state.config.groups.get(group_id as usize) else { continue };
        if rule.is_windowed() {
            continue;
        }
        let chain = prefixes.chain(key)?;
        let before = chain.nodes.len().checked_sub(rule.block_size as usize + 1);
        let parent = before.map_or(0, |at| chain.nodes[at]);
        let free = state.device.queue.contains(block);
        let mut places = (0..).zip(state.device.queue.iter()).filter(|each| each.1 == block);
        let place = if free { places.next().map(|each| each.0) } else { None };
        let waits = waiting.contains(&(group_id, parent));
        found.push(Cached { group_id, node: chain.last(), parent, block, place, waits });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::properties::checker::Checker;
    use crate::check::tests::checked_states::{A, B, config, scheduled};
    use crate::oracle::calls::{Call, Slots};
    use crate::pool::free_queue::CURRENT;
    use crate::types::config::{Config, Duplicates};
    use crate::types::effects::Effects;

    fn found(damage: impl FnOnce(&mut State)) -> Option<&'static str> {
        let mut run = scheduled(config());
        run.close();
        run.call(&Call::Free { name: A });
        run.close();
        damage(&mut run.state);
        let found = check(&run.state, &mut run.prefixes, &Checks::default());
        found.err().map(|found| found.property)
    }

    #[test]
    fn a_child_without_its_parent_is_found() {
        assert_eq!(found(|_| ()), None);
        let without = |state: &mut State| {
            state.device.unpublish(BlockId(1), &mut Effects::silent());
        };
        assert_eq!(found(without), Some("PREFIX-CLOSED"));
    }

    #[test]
    fn a_child_that_stays_longer_is_found() {
        let late = |state: &mut State| {
            state.device.queue.remove(BlockId(2));
            state.device.queue.append(BlockId(2), CURRENT);
        };
        assert_eq!(found(late), Some("EVICT-ORDER"));
    }

    #[test]
    fn a_parent_that_waits_for_its_key_counts_as_cached() {
        let mut run = scheduled(Config { duplicates: Duplicates::Merge, ..config() });
        run.close();
        run.call(&Call::Free { name: A });
        run.close();
        run.state.device.unpublish(BlockId(2), &mut Effects::silent());
        run.add(B, &[1, 2, 3, 4, 5]);
        run.call(&Call::AllocateSlots(Slots::new(B, 5)));
        run.state.device.unpublish(BlockId(1), &mut Effects::silent());
        let checks = Checks::default();
        assert_eq!(check(&run.state, &mut run.prefixes, &checks), Ok(()));
        run.state.batch.merges.clear();
        let found = check(&run.state, &mut run.prefixes, &checks);
        assert_eq!(found.unwrap_err().property, "PREFIX-CLOSED");
    }

    #[test]
    fn each_call_is_judged_not_only_the_batch() {
        let mut run = scheduled(config());
        run.close();
        run.call(&Call::Free { name: A });
        run.close();
        run.state.device.unpublish(BlockId(1), &mut Effects::silent());
        let (before, world) = (run.state.clone(), World::new(config(), 2, 8, 8));
        let call = Call::AddRequest { name: B, tokens: vec![9], kind: 0 };
        let mut checker = Checker::new(Checks::default());
        let made = checker.perform(&before, &mut run.state, &call, &world, &mut run.prefixes);
        assert_eq!(made.err().map(|found| found.property), Some("PREFIX-CLOSED"));
    }
}
