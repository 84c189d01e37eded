// SPDX-License-Identifier: Apache-2.0
//! A request as the slot checker follows it: its tokens, its tables, and their verified lengths.
//!
//! Twin: kvcore/sanitizer/requests.py (`Followed`).

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;
use smallvec::{SmallVec, smallvec};

use crate::pool::prefetch::prefetch;
use crate::sanitizer::digests::mix;

/// The engine's own growing list of a request's tokens.
pub trait Tokens {
    /// How many they are.
    fn len(&self) -> usize;
    /// Append the tokens of positions [first, end), which are there.
    fn read(&self, first: usize, end: usize, into: &mut Vec<i64>);
}

/// The blocks of a request in a group. trimmed: the first that is still claimed.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub blocks: Vec<u32>,
    pub trimmed: usize,
}

impl Table {
    /// Whether a block is among the claimed ones.
    pub fn claims(&self, block: u32) -> bool {
        self.blocks[self.trimmed..].contains(&block)
    }
}

/// A request. verified: up to where its tables hold its prefix, None if they were disturbed.
pub struct Followed<T> {
    pub serial: u32,
    pub tokens: T,
    pub base: u64,
    pub epoch: u16,
    pub oldest_epoch: u16,
    pub checked: bool,
    pub repeats: bool,
    pub verified: Option<usize>,
    pub tables: SmallVec<[Table; 1]>,
    summed: usize,
    total: u64,
}

impl<T: Tokens> Followed<T> {
    /// A request without blocks.
    pub fn new(serial: u32, tokens: T, base: u64, epoch: u16, num_groups: usize) -> Self {
        let tables = smallvec![Table::default(); num_groups];
        let (oldest_epoch, repeats, verified) = (0, false, Some(0));
        let (checked, summed, total) = (true, 0, base);
        Self {
            serial,
            tokens,
            base,
            epoch,
            oldest_epoch,
            checked,
            repeats,
            verified,
            tables,
            summed,
            total,
        }
    }

    /// Give up all blocks.
    pub fn empty_tables(&mut self) {
        self.tables.iter_mut().for_each(|table| *table = Table::default());
        (self.verified, self.oldest_epoch, self.repeats) = (Some(0), 0, false);
        (self.summed, self.total) = (0, self.base);
    }

    /// Take away what is verified from a position on: all, unless its weights are those of now.
    pub fn forget_from(&mut self, position: usize, epoch: u16) {
        if self.verified.is_some_and(|verified| position < verified) {
            self.verified = (self.oldest_epoch == epoch).then_some(position);
        }
    }

    /// Append the sums of the prefixes that end at [first, end), up to the first token that is not
    /// known. afresh: from the first token on, whatever was summed before.
    pub fn totals(
        &mut self,
        (first, end): (usize, usize),
        drafts: &[i64],
        afresh: bool,
        (tokens, totals): (&mut Vec<i64>, &mut Vec<u64>),
    ) {
        tokens.clear();
        let known_end = end - drafts.len();
        let (mut at, mut total) = (0, self.base);
        if !afresh && self.summed <= first {
            (at, total) = (self.summed, self.total);
        }
        let there = known_end.min(self.tokens.len());
        if there > at {
            self.tokens.read(at, there, tokens);
        }
        if there == known_end {
            tokens.extend_from_slice(drafts);
        }
        for (position, &token) in (at..).zip(tokens.iter()) {
            if position == known_end && known_end > 0 {
                (self.summed, self.total) = (position, total);
            }
            if token < 0 {
                return;
            }
            total = total.wrapping_add(mix(token, position as u64));
            if position >= first {
                totals.push(total);
            }
        }
        if drafts.is_empty() && there == known_end {
            (self.summed, self.total) = (end, total);
        }
    }
}

/// All requests that live, in one column: a step finds those of its chunks there.
pub struct Requests<T> {
    places: HashMap<u32, u32, FxBuildHasher>,
    column: Vec<Followed<T>>,
}

impl<T> Default for Requests<T> {
    fn default() -> Self {
        Self { places: HashMap::default(), column: vec![] }
    }
}

impl<T> Requests<T> {
    /// The place of a request in the column, until one leaves. Its memory is asked for.
    pub fn place(&self, serial: u32) -> usize {
        let place = self.places[&serial] as usize;
        prefetch(&self.column, place);
        place
    }

    /// The request at a place.
    pub fn at(&self, place: usize) -> &Followed<T> {
        &self.column[place]
    }

    /// The request at a place, to change.
    pub fn at_mut(&mut self, place: usize) -> &mut Followed<T> {
        &mut self.column[place]
    }

    /// A request.
    pub fn get(&self, serial: u32) -> &Followed<T> {
        &self.column[self.places[&serial] as usize]
    }

    /// A request that may have left.
    pub fn find(&self, serial: u32) -> Option<&Followed<T>> {
        Some(&self.column[*self.places.get(&serial)? as usize])
    }

    /// A request, to change.
    pub fn get_mut(&mut self, serial: u32) -> &mut Followed<T> {
        &mut self.column[self.places[&serial] as usize]
    }

    /// All of them.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut Followed<T>> {
        self.column.iter_mut()
    }

    /// Let a request come.
    pub fn insert(&mut self, request: Followed<T>) {
        self.places.insert(request.serial, self.column.len() as u32);
        self.column.push(request);
    }

    /// Let a request leave; the last one takes its place.
    pub fn remove(&mut self, serial: u32) {
        if let Some(place) = self.places.remove(&serial) {
            self.column.swap_remove(place as usize);
            if let Some(moved) = self.column.get(place as usize) {
                self.places.insert(moved.serial, place);
            }
        }
    }
}
