// SPDX-License-Identifier: Apache-2.0
//! The state of the eviction policy that orders a pool's queue; changed in policy_pool.rs.
//!
//! Twin: kvcore/pool/policy_state.py.

use std::collections::{BTreeMap, VecDeque};

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use crate::types::config::Eviction;
use crate::types::ids::BlockId;
use crate::types::keys::Key;
use crate::types::policies::{self, DUE, KEYLESS, Place, Seen, Uses};

/// The state of a pool's eviction policy.
#[derive(Debug, Clone, Default)]
pub struct PolicyState {
    /// The number of the open batch plus one.
    pub(crate) now: u64,
    pub(crate) memory: Vec<u64>,
    pub(crate) history: History,
    /// The place of each block in the queue; KEYLESS for blocks that have none.
    pub(crate) places: Vec<Place>,
    /// The last block of each place that has blocks.
    pub(crate) tails: BTreeMap<Place, BlockId>,
    /// Number of blocks in each section.
    pub(crate) lengths: [u32; 3],
    /// The numbers of the waiting requests that will look a key up, in order.
    pub(crate) dues: HashMap<Key, SmallVec<[u64; 2]>, FxBuildHasher>,
}

/// The state of a policy for a pool whose free blocks have no places yet; None if the queue needs
/// no policy.
pub(crate) fn make_policy_state(eviction: Eviction, num_blocks: u32) -> Option<Box<PolicyState>> {
    let make = || {
        let num_known = if eviction.remembers() { num_blocks as usize } else { 0 };
        let uses = vec![Uses::default(); num_known];
        Box::new(PolicyState {
            now: 1,
            memory: policies::start(eviction),
            history: History { uses, ..History::default() },
            places: vec![KEYLESS; num_blocks as usize],
            ..PolicyState::default()
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

    /// Note that no block has a key or a place any more.
    #[cold]
    pub(crate) fn start_epoch(&mut self) {
        self.places.fill(KEYLESS);
        self.tails.clear();
        self.lengths = Default::default();
        self.history.clear();
    }

    /// Note that a block leaves the queue. before: the block or sentinel before it there.
    pub(crate) fn leave(&mut self, block: BlockId, before: u32) {
        let place = std::mem::replace(&mut self.places[block.index()], KEYLESS);
        self.lengths[usize::from(place.0)] -= 1;
        if self.tails.get(&place) == Some(&block) {
            // A sentinel has no place.
            if self.places.get(before as usize) == Some(&place) && before != block.0 {
                self.tails.insert(place, BlockId(before));
            } else {
                self.tails.remove(&place);
            }
        }
    }

    /// Note that a block joins the queue; returns the block to put it behind, if any.
    pub(crate) fn join(&mut self, block: BlockId, place: Place) -> Option<BlockId> {
        self.places[block.index()] = place;
        if let Some(known) = self.history.uses.get_mut(block.index()) {
            known.place = place;
        }
        self.lengths[usize::from(place.0)] += 1;
        if place == KEYLESS {
            self.tails.entry(place).or_insert(block);
            return None;
        }
        let before = self.tails.range(..=place).next_back().map(|(_, &last)| last);
        self.tails.insert(place, block);
        before
    }
}

/// The uses of contents; nothing is kept for a policy that does not remember them.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    /// The uses of each block's content.
    pub(crate) uses: Vec<Uses>,
    /// The contents that were evicted last, each with its number in the order of eviction.
    pub(crate) ghosts: HashMap<Key, (u64, Uses), FxBuildHasher>,
    /// The order of eviction; a content that was computed again has another number in `ghosts`, or
    /// none.
    left: VecDeque<(u64, Key)>,
    /// The number of the next evicted content.
    pub(crate) next_number: u64,
}

impl History {
    /// What is known of a block's content.
    pub(crate) fn of(&self, block: BlockId) -> Uses {
        self.uses.get(block.index()).copied().unwrap_or_default()
    }

    /// Note that a content was computed; returns whether it is one that was evicted.
    pub(crate) fn computed(&mut self, block: BlockId, key: &Key, depth: u32, now: u64) -> bool {
        let ghost = self.ghosts.remove(key);
        let known = ghost.map_or(Uses { uses: 1, last: now, ..Uses::default() }, |(_, uses)| uses);
        self.uses[block.index()] = Uses { depth, place: KEYLESS, ..known };
        ghost.is_some()
    }

    /// The contents that were evicted last, in the order of eviction, each with its number.
    pub(crate) fn left(&self) -> impl Iterator<Item = (u64, &Key)> {
        let is_there = |each: &&(u64, Key)| self.ghosts.get(&each.1).is_some_and(|g| g.0 == each.0);
        self.left.iter().filter(is_there).map(|(number, key)| (*number, key))
    }

    /// Note that a content was evicted, after all others.
    pub(crate) fn leaves(&mut self, number: u64, key: Key, known: Uses) -> bool {
        self.left.push_back((number, key));
        self.ghosts.insert(key, (number, known)).is_none()
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

    /// Remember the uses of the content of a block that loses its key; forget the oldest ones.
    pub(crate) fn remember(&mut self, block: BlockId, key: Key) {
        let Some(known) = self.uses.get_mut(block.index()) else { return };
        let known = Uses { place: KEYLESS, ..std::mem::take(known) };
        if known.uses == 0 {
            return;
        }
        self.leaves(self.next_number, key, known);
        self.next_number += 1;
        let most = self.uses.len();
        while self.ghosts.len() > most
            && let Some((number, key)) = self.left.pop_front()
        {
            if self.ghosts.get(&key).is_some_and(|ghost| ghost.0 == number) {
                self.ghosts.remove(&key);
            }
        }
        if self.left.len() > 2 * most {
            let ghosts = &self.ghosts;
            self.left.retain(|(number, key)| ghosts.get(key).is_some_and(|g| g.0 == *number));
        }
    }

    /// Forget all of it.
    pub(crate) fn clear(&mut self) {
        self.uses.fill(Uses::default());
        self.ghosts.clear();
        self.left.clear();
    }
}
