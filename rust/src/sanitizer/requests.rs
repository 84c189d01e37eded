// SPDX-License-Identifier: Apache-2.0
//! A request as the judge follows it: its tokens, its tables, and what is known of them.
//!
//! Twin: kvcore/sanitizer/judge.py (`Followed`).

use crate::sanitizer::digests::mix;

/// The engine's own growing list of a request's tokens.
pub trait Tokens {
    /// How many they are.
    fn len(&self) -> usize;
    /// Append the tokens of positions [first, end), which are there.
    fn read(&self, first: usize, end: usize, into: &mut Vec<i64>);
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
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
    pub low: u16,
    pub judged: bool,
    pub repeats: bool,
    pub verified: Option<usize>,
    pub tables: Vec<Table>,
    summed: usize,
    total: u64,
}

impl<T: Tokens> Followed<T> {
    /// A request without blocks.
    pub fn new(serial: u32, tokens: T, base: u64, epoch: u16, num_groups: usize) -> Self {
        let tables = vec![Table::default(); num_groups];
        let (low, repeats, verified) = (0, false, Some(0));
        let (judged, summed, total) = (true, 0, base);
        Self { serial, tokens, base, epoch, low, judged, repeats, verified, tables, summed, total }
    }

    /// Give up all blocks.
    pub fn empty_tables(&mut self) {
        self.tables.fill(Table::default());
        (self.verified, self.low, self.repeats) = (Some(0), 0, false);
        (self.summed, self.total) = (0, self.base);
    }

    /// The sums of the prefixes that end at [first, end), into `totals`, shorter from the first
    /// token on that is not known. afresh: from the first token on, whatever was summed before.
    pub fn totals(
        &mut self,
        (first, end): (usize, usize),
        drafts: &[i64],
        afresh: bool,
        (tokens, totals): (&mut Vec<i64>, &mut Vec<u64>),
    ) {
        totals.clear();
        tokens.clear();
        let known_end = end - drafts.len();
        let mut at = 0;
        let mut total = self.base;
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
