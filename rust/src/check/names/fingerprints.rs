// SPDX-License-Identifier: Apache-2.0
//! The known states by fingerprint, each with the edge that first led to it.
//!
//! A part of search.rs. A state is a number, its place in the column; the table has nothing but
//! places, so that a state takes 24 bytes and a little more. With whole names the number of the
//! name takes the place of the fingerprint, so the search is the same.

use std::sync::{Arc, Mutex, PoisonError};

use hashbrown::{HashMap, HashTable};
use twox_hash::XxHash3_128;

use crate::check::world::model::Fingerprint;

/// The record of a state.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// The fingerprint in two halves, so that the column has no gaps.
    name: [u64; 2],
    parent: u32,
    edge: u32,
}

/// All known states.
#[derive(Debug, Default)]
pub struct Visited {
    states: Vec<Known>,
    places: HashTable<u32>,
}

impl Visited {
    /// Count the known states.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Tell whether a state of this name is known.
    pub fn contains(&self, name: Fingerprint) -> bool {
        let halves = halves(name);
        let same = |&place: &u32| self.states[place as usize].name == halves;
        self.places.find(halves[0], same).is_some()
    }

    /// Add a state that an edge of another leads to; false: it is known.
    pub fn insert(&mut self, name: Fingerprint, parent: u32, edge: u32) -> bool {
        if self.contains(name) {
            return false;
        }
        let name = halves(name);
        let place = self.states.len() as u32;
        self.states.push(Known { name, parent, edge });
        let Visited { states, places } = self;
        places.insert_unique(name[0], place, |&place| states[place as usize].name[0]);
        true
    }

    /// Return the edges that lead from the start to a state, by their numbers.
    pub fn edges_to(&self, mut state: u32) -> Vec<u32> {
        let mut edges = Vec::new();
        while state > 0 {
            let known = &self.states[state as usize];
            edges.push(known.edge);
            state = known.parent;
        }
        edges.reverse();
        edges
    }

    /// Return the bytes in use.
    pub fn num_bytes(&self) -> usize {
        self.states.capacity() * size_of::<Known>() + self.places.allocation_size()
    }
}

/// A fingerprint of a state.
#[derive(Debug, Clone)]
pub enum Keys {
    /// 128 bits of its name: XXH3-128.
    Fingerprints,
    /// The number of its whole name, among those that any worker met.
    Whole(Arc<Mutex<HashMap<Vec<u8>, u32>>>),
}

impl Keys {
    /// Fingerprints, or whole names.
    #[must_use]
    pub fn new(full: bool) -> Self {
        if full { Keys::Whole(Arc::default()) } else { Keys::Fingerprints }
    }

    /// Return the fingerprint of a state's name.
    pub fn of(&self, name: &[u8]) -> Fingerprint {
        let Keys::Whole(names) = self else { return XxHash3_128::oneshot(name) };
        let mut names = names.lock().unwrap_or_else(PoisonError::into_inner);
        let number = names.len() as u32;
        u128::from(*names.entry_ref(name).or_insert(number))
    }

    /// Return the bytes that whole names take.
    pub fn num_bytes(&self) -> usize {
        let Keys::Whole(names) = self else { return 0 };
        let names = names.lock().unwrap_or_else(PoisonError::into_inner);
        names.allocation_size() + names.keys().map(Vec::capacity).sum::<usize>()
    }
}

fn halves(name: Fingerprint) -> [u64; 2] {
    [name as u64, (name >> 64) as u64]
}
