// SPDX-License-Identifier: Apache-2.0
//! The orders of requests that differ by nothing but names, after a coarse sort.
//!
//! Requests that look alike are permuted, and so are the blocks that pins alone hold, since nothing
//! else orders them; one order after the other, without recursion.

use std::cmp::Ordering;

use smallvec::SmallVec;

use crate::check::world::world::Symmetry;
use crate::state::state::named_pins::named_blocks;
use crate::state::state::{RequestState, State};
use crate::types::ids::{BlockId, Row, Table};

/// All orders of a state, one after the other.
#[derive(Debug)]
pub struct Orders {
    rows: SmallVec<[usize; 8]>,
    /// Where each run of requests that look alike begins, and its end.
    ties: SmallVec<[(usize, usize); 4]>,
    pinned: SmallVec<[BlockId; 4]>,
}

impl Orders {
    /// At the first order of a state.
    #[must_use]
    pub fn new(state: &State, symmetry: Symmetry) -> Self {
        let used = |row: &usize| state.requests[*row].is_some();
        let mut rows: SmallVec<[usize; 8]> = (0..state.requests.len()).filter(used).collect();
        let mut ties = SmallVec::new();
        if symmetry.requests && rows.len() > 1 {
            let look = |one: usize, other: usize| {
                looks(&state[Row(one as u32)], &state[Row(other as u32)])
            };
            rows.sort_by(|&one, &other| look(one, other));
            let mut first = 0;
            for end in 1..=rows.len() {
                if end == rows.len() || look(rows[end], rows[first]).is_ne() {
                    if end > first + 1 {
                        ties.push((first, end));
                    }
                    first = end;
                }
            }
        }
        Orders { rows, ties, pinned: pinned_alone(state) }
    }

    /// Tell whether there is one order alone.
    #[must_use]
    pub fn is_single(&self) -> bool {
        self.ties.is_empty() && self.pinned.len() < 2
    }

    /// Return the rows in this order.
    #[must_use]
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Return the blocks that pins alone hold, in this order.
    #[must_use]
    pub fn pinned(&self) -> &[BlockId] {
        &self.pinned
    }

    /// Go to the next order; false: that was the last one.
    pub fn advance(&mut self) -> bool {
        if permute(&mut self.pinned) {
            return true;
        }
        self.ties.iter().any(|&(first, end)| permute(&mut self.rows[first..end]))
    }
}

/// Return the device blocks that pins of blocks alone hold, no operation's, lowest first.
#[must_use]
pub fn pinned_alone(state: &State) -> SmallVec<[BlockId; 4]> {
    let pool = &state.device;
    if pool.pins.is_empty() {
        return SmallVec::new();
    }
    let alone = |block: &BlockId| {
        let pins = pool.num_pins(*block);
        let operates = state.operations.values().any(|operation| operation.block == *block)
            || named_blocks(&state.named_pins).any(|each| each == *block);
        pins > 0 && pins == pool.ref_count(*block) && !operates
    };
    (0..pool.num_blocks()).map(BlockId).filter(alone).collect()
}

/// Compare what two requests look like without names.
fn looks(one: &RequestState, other: &RequestState) -> Ordering {
    let counts = |each: &RequestState| [each.num_tokens(), each.num_drafts(), each.num_computed];
    let lengths = |each| tables_of(each).map(Table::len);
    counts(one).cmp(&counts(other)).then_with(|| lengths(one).cmp(lengths(other)))
}

fn tables_of(request: &RequestState) -> impl Iterator<Item = &Table> {
    request.tables.iter().chain(&request.host_tables)
}

/// Make the next permutation in lexical order; false: the first one again.
fn permute<T: Ord>(items: &mut [T]) -> bool {
    let Some(last) = items.windows(2).rposition(|pair| pair[0] < pair[1]) else {
        items.reverse();
        return false;
    };
    let next = items.iter().rposition(|item| *item > items[last]).unwrap_or(last);
    items.swap(last, next);
    items[last + 1..].reverse();
    true
}
