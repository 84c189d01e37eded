// SPDX-License-Identifier: Apache-2.0
//! The state of the eviction policy that orders a pool's queue; changed in policy_pool.rs.
//!
//! Twin: kvcore/pool/policy_state.py.

use std::collections::BTreeMap;

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use crate::pool::free_queue::{CURRENT, FreeQueue, OLDER, make_free_queue};
use crate::pool::hash_index::HashIndex;
use crate::types::config::Eviction;
use crate::types::ids::BlockId;
use crate::types::keys::Key;
use crate::types::policies::{self, DUE, KEYLESS, Place, Seen, Uses};

/// The state of a pool's eviction policy.
///
/// Why: most blocks join behind all others of a section and leave at its front, so the last block
/// of each section is kept apart. The tree changes when a place gets its first block, loses its
/// last one, or is not the greatest of its section.
#[derive(Debug, Clone)]
pub struct PolicyState {
    /// The number of the open batch plus one.
    pub(crate) now: u64,
    pub(crate) memory: Vec<u64>,
    pub(crate) history: History,
    /// The place of each block in the queue; KEYLESS for blocks that have none.
    pub(crate) places: Vec<Place>,
    /// The last block of each place that has blocks, but for the greatest place of each section.
    tails: BTreeMap<Place, BlockId>,
    /// The last block of each section that has blocks.
    lasts: [BlockId; NUM_SECTIONS],
    /// Number of blocks in each section.
    pub(crate) lengths: [u32; NUM_SECTIONS],
    /// The numbers of the waiting requests that will look a key up, in order.
    pub(crate) dues: HashMap<Key, SmallVec<[u64; 2]>, FxBuildHasher>,
}

const NUM_SECTIONS: usize = 3;

/// The state of a policy for a pool whose free blocks have no places yet; None if the queue needs
/// no policy.
pub(crate) fn make_policy_state(eviction: Eviction, num_blocks: u32) -> Option<Box<PolicyState>> {
    let make = || {
        Box::new(PolicyState {
            now: 1,
            memory: policies::start(eviction),
            history: History::new(if eviction.remembers() { num_blocks } else { 0 }),
            places: vec![KEYLESS; num_blocks as usize],
            tails: BTreeMap::new(),
            lasts: [BlockId(0); NUM_SECTIONS],
            lengths: [0; NUM_SECTIONS],
            dues: HashMap::default(),
        })
    };
    eviction.has_places().then(make)
}

impl PolicyState {
    /// The first waiting request that will look a key up.
    pub(crate) fn due(&self, key: &Key) -> Option<u64> {
        self.dues.get(key).map(|dues| dues[0])
    }

    /// Free blocks that waiting requests will look up.
    pub(crate) fn num_due(&self) -> u32 {
        if self.dues.is_empty() { 0 } else { self.lengths[usize::from(DUE)] }
    }

    /// Whether any value differs from its default.
    pub(crate) fn is_remembered(&self) -> bool {
        let history = &self.history;
        let has_uses = history.next_number > 0 || history.uses.iter().any(|each| each.uses > 0);
        has_uses || self.memory.iter().any(|&each| each > 0)
    }

    /// What the policy sees of a block with a key.
    pub(crate) fn seen(&self, block: BlockId, key: &Key) -> Seen {
        Seen { now: self.now, known: self.history.of(block), due: self.due(key) }
    }

    /// Whether a block is in the queue, with a key.
    pub(crate) fn has_place(&self, block: BlockId) -> bool {
        self.places[block.index()] != KEYLESS
    }

    /// Whether no block has a place yet, as while a state is decoded.
    pub(crate) fn has_no_places(&self) -> bool {
        self.lengths == [0; NUM_SECTIONS]
    }

    /// The last block of a section that has blocks.
    pub(crate) fn last(&self, section: u8) -> BlockId {
        self.lasts[usize::from(section)]
    }

    /// Note that no block has a key or a place any more.
    #[cold]
    pub(crate) fn start_epoch(&mut self) {
        self.places.fill(KEYLESS);
        self.tails.clear();
        self.lengths = [0; NUM_SECTIONS];
        self.history.clear();
    }

    /// Replace each place by another one; the order stays.
    pub(crate) fn rename_places(&mut self, renamed: impl Fn(Place) -> Place) {
        self.places.iter_mut().for_each(|place| *place = renamed(*place));
        let tails = std::mem::take(&mut self.tails);
        self.tails = tails.into_iter().map(|(place, block)| (renamed(place), block)).collect();
    }

    /// Note that a block leaves the queue. before, after: its neighbours there, each a block or a
    /// sentinel.
    pub(crate) fn leave(&mut self, block: BlockId, before: u32, after: u32) {
        let place = std::mem::replace(&mut self.places[block.index()], KEYLESS);
        let section = usize::from(place.section());
        self.lengths[section] -= 1;
        // A sentinel has no place.
        if self.places.get(after as usize) == Some(&place) {
            return;
        }
        let place_before = self.places.get(before as usize).copied();
        if self.lasts[section] != block {
            if place_before == Some(place) {
                self.tails.insert(place, BlockId(before));
            } else {
                self.tails.remove(&place);
            }
        } else if self.lengths[section] > 0 {
            self.lasts[section] = BlockId(before);
            if let Some(greatest) = place_before.filter(|&greatest| greatest != place) {
                self.tails.remove(&greatest);
            }
        }
    }

    /// Note that a block joins the queue; returns the block to put it behind, if any.
    pub(crate) fn join(&mut self, block: BlockId, place: Place) -> Option<BlockId> {
        self.places[block.index()] = place;
        if let Some(known) = self.history.uses.get_mut(block.index()) {
            known.place = place;
        }
        let section = usize::from(place.section());
        let is_first = self.lengths[section] == 0;
        self.lengths[section] += 1;
        if is_first {
            self.lasts[section] = block;
            return self.last_below(section);
        }
        if place == KEYLESS {
            return None;
        }
        let last = self.lasts[section];
        let greatest = self.places[last.index()];
        if greatest <= place {
            if greatest < place {
                self.tails.insert(greatest, last);
            }
            self.lasts[section] = block;
            return Some(last);
        }
        let before = self
            .tails
            .range(Place::new(place.section(), 0)..=place)
            .next_back()
            .map(|(_, &tail)| tail);
        self.tails.insert(place, block);
        before.or_else(|| self.last_below(section))
    }

    /// The last block of the sections below this one.
    fn last_below(&self, section: usize) -> Option<BlockId> {
        let below = (0..section).rev().find(|&each| self.lengths[each] > 0);
        below.map(|each| self.lasts[each])
    }

    /// Note the place of the block that is last in the queue, if places rise along it.
    pub(crate) fn place_last(&mut self, block: BlockId, place: Place) {
        self.join(block, place);
        self.lasts[usize::from(place.section())] = block;
    }
}

/// The uses of contents; nothing is kept for a policy that does not remember them.
#[derive(Debug, Clone)]
pub(crate) struct History {
    /// The uses of each block's content.
    pub(crate) uses: Vec<Uses>,
    /// The contents that were evicted last.
    ghosts: Ghosts,
    /// The number of the next evicted content.
    pub(crate) next_number: u64,
}

impl History {
    /// No uses yet, of this number of blocks.
    fn new(num_blocks: u32) -> Self {
        let uses = vec![Uses::default(); num_blocks as usize];
        History { uses, ghosts: Ghosts::new(num_blocks), next_number: 0 }
    }

    /// What is known of a block's content.
    pub(crate) fn of(&self, block: BlockId) -> Uses {
        self.uses.get(block.index()).copied().unwrap_or_default()
    }

    /// Note that a content was computed; returns whether it is one that was evicted.
    pub(crate) fn computed(&mut self, block: BlockId, key: &Key, depth: u32, now: u64) -> bool {
        let ghost = self.ghosts.remove(key);
        let known = ghost.unwrap_or(Uses { uses: 1, last: now, ..Uses::default() });
        self.uses[block.index()] = Uses { depth, place: KEYLESS, ..known };
        ghost.is_some()
    }

    /// The contents that were evicted last, in the order of eviction, each with its number.
    pub(crate) fn left(&self) -> impl Iterator<Item = (u64, &Key, &Uses)> {
        let ghosts = &self.ghosts;
        let slots = ghosts.order.iter().skip(ghosts.num_unused());
        slots.map(|slot| {
            let (number, known) = &ghosts.known[slot.index()];
            (*number, ghosts.index.key(slot), known)
        })
    }

    /// The number of contents in `left`.
    pub(crate) fn num_left(&self) -> usize {
        self.ghosts.index.len()
    }

    /// Note that a content was evicted, after all others; the oldest is forgotten if there are as
    /// many as blocks. Returns false if it was evicted before.
    pub(crate) fn leaves(&mut self, number: u64, key: &Key, known: Uses) -> bool {
        self.ghosts.add(number, key, known)
    }

    /// Note that a content was found; returns false if that changes nothing.
    pub(crate) fn found(&mut self, block: BlockId, now: u64) -> bool {
        let known = &mut self.uses[block.index()];
        if known.uses == 0 || known.last == now {
            return false;
        }
        known.uses = known.uses.saturating_add(1);
        known.before = std::mem::replace(&mut known.last, now);
        true
    }

    /// Remember the uses of the content of a block that loses its key.
    pub(crate) fn remember(&mut self, block: BlockId, key: &Key) {
        let Some(known) = self.uses.get_mut(block.index()) else { return };
        let known = Uses { place: KEYLESS, ..std::mem::take(known) };
        if known.uses > 0 {
            self.leaves(self.next_number, key, known);
            self.next_number += 1;
        }
    }

    /// Prefetch what is read when contents with these keys are evicted: their buckets, and those of
    /// the contents that are forgotten then.
    pub(crate) fn prefetch_left<'a>(&self, keys: impl Iterator<Item = &'a Key>) {
        let Ghosts { index, order, .. } = &self.ghosts;
        for (key, slot) in keys.zip(order.iter()) {
            index.prefetch_bucket(key.head());
            index.prefetch_bucket(index.key(slot).head());
        }
    }

    /// Forget all of it, but for the number of the next evicted content.
    pub(crate) fn clear(&mut self) {
        self.uses.fill(Uses::default());
        self.ghosts.clear();
    }
}

/// The contents that were evicted last, at most one for each block of the pool.
///
/// Invariants: each content has a slot. The slots of no content are in the first ring of `order`,
/// the others in the second, in the order of eviction; so its front is the slot to use next.
/// Why: the columns take half the memory of a hash map of entries, and are written in order.
#[derive(Debug, Clone)]
struct Ghosts {
    index: HashIndex,
    order: FreeQueue,
    /// The number of each content in the order of eviction, and its uses.
    known: Vec<(u64, Uses)>,
}

const UNUSED: u32 = OLDER;
const USED: u32 = CURRENT;

impl Ghosts {
    fn new(num_slots: u32) -> Self {
        Ghosts {
            index: HashIndex::new(num_slots),
            order: make_free_queue(num_slots, (0..num_slots).map(BlockId), num_slots),
            known: vec![(0, Uses::default()); num_slots as usize],
        }
    }

    fn num_unused(&self) -> usize {
        self.known.len() - self.index.len()
    }

    /// Add a content as the newest; false if it was there.
    fn add(&mut self, number: u64, key: &Key, known: Uses) -> bool {
        let old = self.index.first_if_any(key);
        let Some(slot) = old.or(self.order.front()) else { return true };
        if old.is_none() {
            if self.num_unused() == 0 {
                self.index.remove(slot);
            }
            self.index.insert_new(key, slot);
        }
        self.order.remove(slot);
        self.order.append(slot, USED);
        self.known[slot.index()] = (number, known);
        old.is_none()
    }

    /// Remove a content; returns its uses if it was there.
    fn remove(&mut self, key: &Key) -> Option<Uses> {
        let slot = self.index.first_if_any(key)?;
        self.index.remove(slot);
        self.order.remove(slot);
        self.order.append(slot, UNUSED);
        Some(self.known[slot.index()].1)
    }

    fn clear(&mut self) {
        self.index.clear();
        self.order.splice(USED, UNUSED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::policies::ORDERS_END;

    const NUM_BLOCKS: u32 = 12;
    const PLACES: [(u8, u64); 8] =
        [(0, 0), (1, 0), (1, 1), (1, 2), (1, 9), (2, 0), (2, 1), (2, ORDERS_END - 1)];

    #[test]
    fn blocks_stand_by_place_and_those_of_a_place_as_they_came() {
        let mut policy = make_policy_state(Eviction::S3Fifo, NUM_BLOCKS).expect("it has places");
        let mut queue = make_free_queue(NUM_BLOCKS, [], 0);
        let mut expected: Vec<(Place, i64, BlockId)> = Vec::new();
        let mut dice = 1_u64;
        for time in 0..20_000 {
            dice = dice.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let block = BlockId((dice >> 40) as u32 % NUM_BLOCKS);
            let (section, order) = PLACES[(dice >> 60) as usize % PLACES.len()];
            let place = Place::new(section, order);
            if queue.contains(block) {
                let (before, after) = queue.links(block.0);
                policy.leave(block, before, after);
                queue.remove(block);
                expected.retain(|each| each.2 != block);
            } else {
                let before = policy.join(block, place);
                queue.insert(before.map_or(queue.sentinel(CURRENT), |before| before.0), block);
                expected.push((place, if place == KEYLESS { -time } else { time }, block));
            }
            expected.sort_unstable_by_key(|&(place, time, _)| (place, time));
            assert!(queue.iter().eq(expected.iter().map(|each| each.2)), "at time {time}");
            assert_eq!(policy.has_no_places(), expected.is_empty());
        }
    }

    #[test]
    fn contents_are_forgotten_in_the_order_of_eviction_but_for_those_computed_again() {
        let mut history = History::new(3);
        let key = |number: u8| Key([number; 36]);
        let uses = |uses| Uses { uses, ..Uses::default() };
        let numbers = |history: &History| history.left().map(|each| each.0).collect::<Vec<_>>();
        for number in 1..=3 {
            assert!(history.leaves(number, &key(number as u8), uses(number as u32)));
        }
        assert!(history.computed(BlockId(0), &key(2), 5, 9));
        assert_eq!(history.of(BlockId(0)), Uses { depth: 5, ..uses(2) });
        assert!(!history.computed(BlockId(1), &key(2), 5, 9));
        assert_eq!(numbers(&history), [1, 3]);
        assert!(!history.leaves(4, &key(1), uses(7)));
        assert_eq!(numbers(&history), [3, 4]);
        assert!(history.leaves(5, &key(5), uses(1)));
        assert!(history.leaves(6, &key(6), uses(1)));
        assert_eq!((numbers(&history), history.num_left()), (vec![4, 5, 6], 3));
        assert!(!history.computed(BlockId(2), &key(3), 0, 9));
        history.clear();
        assert_eq!((numbers(&history), history.num_left()), (vec![], 0));
        assert!(history.leaves(7, &key(4), uses(1)));
        assert_eq!(numbers(&history), [7]);
    }
}
