// SPDX-License-Identifier: Apache-2.0
//! Notes, from the commands of the open batch, which keys a manager lost and when blocks got free.
//!
//! Why: the manager tells which keys are findable; which ones were, only their losses tell.
//! Twin: kvcore/explain/lost_keys.py.

use crate::pool::prefetch::prefetch;
use crate::types::commands::Commands;
use crate::types::keys::{Key, fold_key};

/// The mark of a key that was never findable.
pub const NEVER: u32 = 0;
/// The mark of a key that is findable.
pub const FINDABLE: u32 = 1;
/// The lowest mark of a key that was lost; behind it the number of the loss.
pub const REMOVED: u32 = 2;
/// Kinds of commands.
const ALLOCATE: i32 = 1;
const TOUCH: i32 = 2;
const EVICT: i32 = 3;
const FREE: i32 = 5;
/// The step of a block that has an owner.
const OWNED: u32 = u32::MAX;

/// A block that lost keys, and the steps since it had an owner; None if it has one.
pub type Loss = (u32, Option<u32>);

/// The last loss of each key, by a number that the caller gives.
#[derive(Debug)]
pub struct LostKeys {
    freed: Vec<u32>,
    lost: Marks,
    /// The keys of one call.
    keys: Vec<u64>,
}

impl LostKeys {
    /// Nothing is lost, and no block has an owner.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        LostKeys { freed: vec![0; num_blocks], lost: Marks::default(), keys: Vec::new() }
    }

    /// Forget all keys.
    pub fn clear(&mut self) {
        self.lost = Marks::default();
    }

    /// The mark of a folded key: REMOVED plus the number of its last loss, or NEVER.
    #[must_use]
    pub fn mark(&self, key: u64) -> u32 {
        self.lost.get(key)
    }

    /// Note what the open batch did from its command `start` on; return the losses.
    ///
    /// step: when it was. first: the number of the first loss; keys that were lost one after the
    /// other share it if their blocks were idle equally long. apart: only those of one block do.
    pub fn note(
        &mut self,
        commands: &Commands,
        start: usize,
        step: u32,
        first: u32,
        apart: bool,
    ) -> Vec<Loss> {
        let rows = &commands.rows[start.min(commands.len())..];
        self.keys.clear();
        for &[_, _, place, ..] in rows.iter().filter(|row| row[0] == EVICT) {
            self.keys.push(fold_key(&Key(commands.keys[place as usize])));
        }
        self.lost.expect(&self.keys);
        let (mut losses, mut keys) = (Vec::<Loss>::new(), self.keys.iter());
        for &[kind, block, ..] in rows {
            if kind == FREE {
                self.freed[block as usize] = step;
            } else if kind == EVICT {
                let loss = (block as u32, self.idle(block as u32, step));
                let is_new = |&(block, idle): &Loss| idle != loss.1 || apart && block != loss.0;
                if losses.last().is_none_or(is_new) {
                    losses.push(loss);
                }
                let mark = REMOVED + first + losses.len() as u32 - 1;
                self.lost.set(*keys.next().expect("one for each"), mark);
            }
        }
        for &[kind, block, ..] in rows {
            if kind == FREE {
                self.freed[block as usize] = step;
            } else if kind == ALLOCATE || kind == TOUCH {
                self.freed[block as usize] = OWNED; // idle while the call ran that got it
            }
        }
        losses
    }

    /// Note the loss of keys that no command named.
    pub fn lose(&mut self, keys: &[u64], number: u32) {
        self.lost.expect(keys);
        keys.iter().for_each(|&key| self.lost.set(key, REMOVED + number));
    }

    /// Note that blocks had an owner, for which no command tells: they left its window in the call
    /// that hit them.
    pub fn use_blocks(&mut self, blocks: &[u32], step: u32) {
        for &block in blocks {
            let freed = &mut self.freed[block as usize];
            *freed = step.max(*freed);
        }
    }

    /// The steps since a block had an owner; None if it has one.
    #[must_use]
    pub fn idle(&self, block: u32, step: u32) -> Option<u32> {
        let freed = self.freed[block as usize];
        (freed != OWNED).then(|| step - freed)
    }
}

/// Marks by folded key, which is evenly spread: each stands in the first free slot from its own on.
#[derive(Debug, Default)]
struct Marks {
    /// A power of two, or none; with mark NEVER where a slot is free.
    slots: Vec<(u64, u32)>,
    num_used: usize,
}

impl Marks {
    /// Make room for more keys, at most three of four slots used, and fetch where they belong.
    fn expect(&mut self, keys: &[u64]) {
        let needed = (self.num_used + keys.len()) * 4 / 3 + 1;
        if needed > self.slots.len() {
            let slots = vec![(0, NEVER); needed.next_power_of_two()];
            let old = std::mem::replace(&mut self.slots, slots);
            self.num_used = 0;
            old.into_iter()
                .filter(|slot| slot.1 != NEVER)
                .for_each(|(key, mark)| self.set(key, mark));
        }
        keys.iter().for_each(|&key| prefetch(&self.slots, key as usize & (self.slots.len() - 1)));
    }

    fn set(&mut self, key: u64, mark: u32) {
        let place = self.find(key);
        self.num_used += usize::from(self.slots[place].1 == NEVER);
        self.slots[place] = (key, mark);
    }

    fn get(&self, key: u64) -> u32 {
        if self.slots.is_empty() { NEVER } else { self.slots[self.find(key)].1 }
    }

    /// The slot of a key, or the free one that it would get.
    fn find(&self, key: u64) -> usize {
        let mask = self.slots.len() - 1;
        let mut place = key as usize & mask;
        while self.slots[place].1 != NEVER && self.slots[place].0 != key {
            place = (place + 1) & mask;
        }
        place
    }
}
