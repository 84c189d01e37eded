// SPDX-License-Identifier: Apache-2.0
//! A pool whose free queue is ordered by an eviction policy.
//!
//! Invariants: free blocks without a key stand in front, the one freed last first; behind them
//! stand those with a key, in the order of their places, of equal places the one that came first. A
//! free block that loses its key goes to the front. So the queue is the order of leaving. Blocks of
//! older epochs have no place: they leave first, and no policy is asked.
//! Why: the queue stays a ring of links. The last block of each place is known, so a block is
//! inserted after that of its own place or of the next lower one.
//! Twin: kvcore/pool/policy_pool.py.

use hashbrown::hash_map::Entry;
use smallvec::SmallVec;

use crate::pool::block_pool::{AHEAD, BlockPool, Taken};
use crate::pool::floors::Spare;
use crate::pool::free_queue::{CURRENT, OLDER, num_older};
use crate::pool::policy_state::PolicyState;
use crate::pool::prefetch::prefetch;
use crate::types::ids::BlockId;
use crate::types::keys::Key;
use crate::types::policies::{self, Front, KEYLESS, MAX_FRONTS, Place, Seen, Uses};

/// What a place in a list of fronts has before it is filled.
const NO_FRONT: Front = Front { section: 0, block: BlockId(0), length: 0 };

impl BlockPool {
    /// Free blocks that waiting requests will look up.
    #[must_use]
    pub fn num_due(&self) -> u32 {
        self.policy.as_ref().map_or(0, |policy| policy.num_due())
    }

    /// Note the number of the open batch.
    pub(crate) fn set_batch(&mut self, number: u64) {
        if let Some(policy) = &mut self.policy {
            policy.now = number + 1;
        }
    }

    /// Note that the content of a block was computed. depth: its place in its request's table.
    #[cold]
    pub(crate) fn note_computed(&mut self, block: BlockId, depth: u32) {
        let (eviction, Some(policy)) = (self.eviction(), &mut self.policy) else { return };
        if !eviction.remembers() {
            return;
        }
        let key = self.index.key(block);
        let is_known = policy.history.computed(block, key, depth, policy.now);
        if is_known && !policy.history.found(block, policy.now) {
            return;
        }
        policies::on_use(eviction, &mut policy.memory, &policy.history.uses[block.index()]);
    }

    /// Note that the content of a block is found, if it has any.
    #[cold]
    pub(crate) fn note_found(&mut self, block: BlockId) {
        if self.key(block).is_none() {
            return;
        }
        let (eviction, Some(policy)) = (self.eviction(), &mut self.policy) else { return };
        if !policy.history.uses.is_empty() && policy.history.found(block, policy.now) {
            policies::on_use(eviction, &mut policy.memory, &policy.history.uses[block.index()]);
        }
    }

    /// Take `count` blocks out of the free queue.
    #[cold]
    pub(crate) fn take_by_policy(&mut self, count: u32, blocks: &mut Taken) {
        let mut ahead = self.queue.front();
        (0..AHEAD).for_each(|_| self.prefetch_next(&mut ahead));
        for _ in 0..count {
            self.prefetch_next(&mut ahead);
            let Some(block) = self.next_by_policy(None) else { return };
            self.dequeue(block);
            blocks.push(block);
        }
        if let Some(policy) = self.policy.as_ref().filter(|each| !each.history.uses.is_empty()) {
            let keys = blocks.iter().filter_map(|&block| self.key(block));
            policy.history.prefetch_left(keys);
        }
    }

    /// Prefetch what is read of a free block that is taken soon, and go to the one behind it.
    fn prefetch_next(&self, ahead: &mut Option<BlockId>) {
        let (Some(block), Some(policy)) = (*ahead, &self.policy) else { return };
        prefetch(&policy.places, block.index());
        prefetch(&policy.history.uses, block.index());
        self.index.prefetch_key(block);
        *ahead = self.queue.behind(block);
    }

    /// Return the block that leaves next, as the policy decides; of those that may be taken, if
    /// there are floors.
    pub(crate) fn next_by_policy(&mut self, left: Option<&Spare>) -> Option<BlockId> {
        let eviction = self.eviction();
        let num_fronts = policies::num_fronts(eviction);
        for _ in 0..if num_fronts > 0 { self.queue.len() } else { 0 } {
            let (fronts, count) = self.fronts(left, num_fronts);
            if count == 0 {
                break;
            }
            let PolicyState { now, memory, history, places, .. } = &mut **self.policy.as_mut()?;
            let seen = |block: BlockId| {
                let known = Uses { place: places[block.index()], ..history.of(block) };
                Seen { now: *now, known, due: None }
            };
            let (chosen, place) = policies::take(eviction, memory, &fronts[..count], seen);
            let Some(place) = place else { return Some(chosen) };
            self.dequeue(chosen);
            self.put(chosen, place);
        }
        self.next_to_leave(left)
    }

    /// Return the first block of the queue that may be taken.
    fn next_to_leave(&self, left: Option<&Spare>) -> Option<BlockId> {
        match left {
            None => self.queue.front(),
            Some(left) => self.queue.iter().find(|&block| self.may_take(block, left)),
        }
    }

    /// Return the front blocks of the first sections, of those that may be taken; none while a
    /// block without a key is free.
    fn fronts(&self, left: Option<&Spare>, number: usize) -> ([Front; MAX_FRONTS], usize) {
        let (mut fronts, mut count) = ([NO_FRONT; MAX_FRONTS], 0);
        let Some(policy) = &self.policy else { return (fronts, count) };
        if policy.lengths[usize::from(KEYLESS.section())] > 0 || self.queue.first_ring() == OLDER {
            return (fronts, count);
        }
        let mut before = self.queue.sentinel(CURRENT);
        for (section, &length) in (0..).zip(&policy.lengths).filter(|each| *each.1 > 0) {
            let mut block = BlockId(self.queue.links(before).1);
            before = policy.last(section).0;
            let may_take = |block| left.is_none_or(|left| self.may_take(block, left));
            while block.0 != before && !may_take(block) {
                block = BlockId(self.queue.links(block.0).1);
            }
            if count < number && may_take(block) {
                fronts[count] = Front { section, block, length };
                count += 1;
            }
        }
        (fronts, count)
    }

    /// Remove a block from the free queue.
    #[inline]
    pub(crate) fn dequeue(&mut self, block: BlockId) {
        if let Some(policy) = &mut self.policy
            && (policy.has_place(block) || self.queue.first_ring() != OLDER)
        {
            let (before, after) = self.queue.links(block.0);
            policy.leave(block, before, after);
        }
        self.queue.remove(block);
    }

    /// Put a block without owner into the place that the policy returns.
    #[cold]
    pub(crate) fn enqueue_by_policy(&mut self, block: BlockId) {
        let Some(mut policy) = self.policy.take() else { return };
        let key = self.key(block);
        let seen = key.map(|key| policy.seen(block, key));
        let place = seen.map_or(KEYLESS, |seen| {
            policies::on_release(self.eviction(), &mut policy.memory, &seen)
        });
        self.policy = Some(policy);
        self.put(block, place);
    }

    /// Put a block after those of its place; a block without a key goes to the front.
    fn put(&mut self, block: BlockId, place: Place) {
        let Some(policy) = &mut self.policy else { return };
        let before = policy.join(block, place);
        let sentinel = self.queue.sentinel(CURRENT);
        self.queue.insert(before.map_or(sentinel, |before| before.0), block);
    }

    /// Put a free block into the place that it has now.
    pub(crate) fn move_by_policy(&mut self, block: BlockId) {
        if self.is_placed(block) {
            self.dequeue(block);
            self.enqueue_by_policy(block);
        }
    }

    /// Whether a block stands in the queue, and has a place there.
    fn is_placed(&self, block: BlockId) -> bool {
        let has_places = self.policy.as_ref().is_some_and(|policy| !policy.has_no_places());
        has_places && self.queue.contains(block)
    }

    /// Note that a waiting request will look up these keys, those of the prompt's end first.
    pub(crate) fn wait(&mut self, keys: &[Key], due: u64) {
        for (at, key) in keys.iter().enumerate() {
            self.prefetch_due(keys, at);
            let Some(policy) = &mut self.policy else { return };
            let dues = policy.dues.entry(*key).or_default();
            let place = dues.partition_point(|&each| each < due);
            dues.insert(place, due);
            if place == 0 {
                self.due_changed(key, Some(due));
            }
        }
    }

    /// Undo `wait`.
    pub(crate) fn stop_waiting(&mut self, keys: &[Key], due: u64) {
        for (at, key) in keys.iter().enumerate() {
            self.prefetch_due(keys, at);
            let Some(policy) = &mut self.policy else { return };
            let Entry::Occupied(mut dues) = policy.dues.entry(*key) else { continue };
            let Some(place) = dues.get().iter().position(|&each| each == due) else { continue };
            let next = dues.get().get(1).copied();
            if next.is_none() {
                dues.remove();
            } else {
                dues.get_mut().remove(place);
            }
            if place == 0 {
                self.due_changed(key, next);
            }
        }
    }

    /// Prefetch the bucket of a key a few places behind this one.
    fn prefetch_due(&self, keys: &[Key], at: usize) {
        if let Some(ahead) = keys.get(at + AHEAD / 2) {
            self.index.prefetch_bucket(ahead.head());
        }
    }

    /// Put the free blocks of a key into the places that they have now. due: the number of the
    /// first waiting request that will look the key up.
    fn due_changed(&mut self, key: &Key, due: Option<u64>) {
        let Some(first) = self.index.first(key) else { return };
        let blocks = self.index.blocks(first).filter(|&block| self.is_placed(block));
        for block in blocks.collect::<SmallVec<[BlockId; 4]>>() {
            self.dequeue(block);
            let (eviction, Some(policy)) = (self.eviction(), &mut self.policy) else { return };
            let seen = Seen { now: policy.now, known: policy.history.of(block), due };
            let place = policies::on_release(eviction, &mut policy.memory, &seen);
            self.put(block, place);
        }
    }

    /// Give the free blocks their places; false if these do not rise along the queue.
    #[must_use]
    pub(crate) fn place_blocks(&mut self) -> bool {
        let Some(mut policy) = self.policy.take() else { return true };
        let (eviction, mut last, mut rises) = (self.eviction(), KEYLESS, true);
        for block in self.queue.iter().skip(num_older(&self.queue) as usize) {
            let seen = self.key(block).map(|key| policy.seen(block, key));
            let place = match seen {
                Some(seen) if eviction.remembers() => seen.known.place,
                Some(seen) => policies::on_release(eviction, &mut policy.memory, &seen),
                None => KEYLESS,
            };
            rises &= last <= place && (place == KEYLESS) == seen.is_none();
            last = place;
            policy.place_last(block, place);
        }
        self.policy = Some(policy);
        rises
    }
}
