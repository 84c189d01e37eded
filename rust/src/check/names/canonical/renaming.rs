// SPDX-License-Identifier: Apache-2.0
//! The names that one order of the requests gives to everything, and what they are written into.
//!
//! What batches in flight and operations remember is named here; what else a node holds is named by
//! the caller.

use crate::codec::sections::keyed_only;
use crate::oracle::prefixes::Prefixes;
use crate::state::batch_records::{PublishedKey, in_order};
use crate::state::state::State;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;
use crate::types::violation::Violation;

/// The number that replaces what is gone.
pub(crate) const LOST: usize = 9999;

/// One order of a state's requests, and the name that is being written in it.
#[derive(Debug)]
pub struct Renaming<'a> {
    pub(crate) state: &'a State,
    /// The rows of the requests, in this order.
    pub(crate) rows: &'a [usize],
    /// Other rows, in the order of first meeting.
    pub(crate) others: Vec<Row>,
    pub(crate) name: &'a mut Vec<u8>,
    pub(crate) device: &'a mut Blocks,
    pub(crate) host: &'a mut Blocks,
    pub(crate) tree: &'a mut Tree,
    pub(crate) prefixes: &'a mut Prefixes,
    /// What went wrong while the name was written.
    pub(crate) found: Result<(), Violation>,
}

impl<'a> Renaming<'a> {
    /// Add a number.
    pub fn put(&mut self, number: usize) {
        put(self.name, number);
    }

    /// Add some numbers.
    pub fn put_all<const N: usize>(&mut self, numbers: [usize; N]) {
        numbers.into_iter().for_each(|number| self.put(number));
    }

    /// Add some counts.
    pub fn put_counts<const N: usize>(&mut self, counts: [u32; N]) {
        counts.into_iter().for_each(|count| self.put(count as usize));
    }

    /// Return the rows of the requests, in order.
    #[must_use]
    pub fn order(&self) -> &'a [usize] {
        self.rows
    }

    /// Tell whether a row has a request.
    #[must_use]
    pub fn has_request(&self, row: Row) -> bool {
        self.rows.contains(&row.index())
    }

    /// Return a row's name: the position of its request, or a number after these, in the order of
    /// first meeting.
    pub fn row_name(&mut self, row: Row) -> usize {
        if let Some(place) = self.rows.iter().position(|&each| each == row.index()) {
            return place;
        }
        let met = self.others.iter().position(|&each| each == row);
        self.rows.len()
            + met.unwrap_or_else(|| {
                self.others.push(row);
                self.others.len() - 1
            })
    }

    /// Add a row's name.
    pub fn row(&mut self, row: Row) {
        let name = self.row_name(row);
        self.put(name);
    }

    /// Add a request's place, by its row.
    pub fn place(&mut self, row: Option<Row>) {
        let place = row.and_then(|row| self.rows.iter().position(|&each| each == row.index()));
        self.put(place.unwrap_or(LOST));
    }

    /// Return a device block's number, and a host block's.
    pub fn device_name(&mut self, block: BlockId) -> usize {
        usize::from(self.device.number(block))
    }

    /// Return a host block's number.
    pub fn host_name(&mut self, block: BlockId) -> usize {
        usize::from(self.host.number(block))
    }

    /// Add a device block's number.
    pub fn device(&mut self, block: BlockId) {
        let name = self.device_name(block);
        self.put(name);
    }

    /// Add a host block's number.
    pub fn host(&mut self, block: BlockId) {
        let name = self.host_name(block);
        self.put(name);
    }

    /// Add what a prefix is called, by its number in the tree; 0 for none.
    pub fn node(&mut self, node: u32) {
        if node == 0 {
            return self.put(0);
        }
        if !self.tree.has_met(node) {
            let path = self.prefixes.path(node);
            path.iter().for_each(|&node| _ = self.tree.number(node));
        }
        self.tree.write(node, self.name);
    }

    /// Add what a key stands for: its group and prefix.
    pub fn key(&mut self, key: &Key) {
        self.put(key.group_id() as usize);
        match self.prefixes.chain(key) {
            Ok(chain) => {
                let (end, last) = (chain.end(), chain.last());
                self.put(end as usize);
                self.node(last);
            }
            Err(violation) => self.found = Err(violation),
        }
    }

    /// Add what batches in flight and operations remember.
    pub(crate) fn in_flight(&mut self) {
        let state = self.state;
        self.put(state.in_flight.len());
        self.published_keys(&state.batch.published_keys);
        for batch in &state.in_flight {
            let entries = in_order(&batch.entries);
            let rows = batch.rows.iter().filter(|&&row| self.has_request(row));
            let mut rows: Vec<Row> = rows.copied().collect();
            rows.sort_by_key(|row| self.rows.iter().position(|&each| each == row.index()));
            self.put_all([entries.len(), rows.len()]);
            for (row, entry) in entries {
                self.place(Some(row));
                self.put_counts([entry.before, entry.restore, u32::from(entry.publishes)]);
                batch.entries.held(row).iter().for_each(|&held| self.put(held as usize));
                self.put(batch.replaced_of(row).count());
                for (group_id, position) in batch.replaced_of(row) {
                    self.put_counts([group_id, position]);
                }
            }
            self.published_keys(&batch.published_keys);
            for owed in &batch.owed {
                self.put(1);
                self.device(owed.block);
                self.key(&owed.key);
            }
            rows.into_iter().for_each(|row| self.row(row));
        }
        self.operations();
        self.unconfirmed_loads();
    }

    fn published_keys(&mut self, given: &[PublishedKey]) {
        self.put(given.len());
        for (block, key) in given {
            self.device(*block);
            self.key(key);
        }
    }

    fn operations(&mut self) {
        let state = self.state;
        let numbers: Vec<u64> = state.in_flight.iter().map(|batch| batch.number).collect();
        self.put(state.operations.len());
        for operation in state.operations.values() {
            let later = numbers.iter().filter(|&&number| number <= operation.batch).count();
            self.put_all([later, usize::from(numbers.contains(&operation.batch))]);
            self.place(operation.request);
            self.put(operation.first_token as usize);
            self.key(&operation.key);
        }
        if state.operations.is_empty() {
            return;
        }
        for request in self.rows.iter().filter_map(|&row| state.requests[row].as_ref()) {
            put(self.name, request.num_loading as usize);
            put(self.name, request.load_end as usize);
        }
    }

    fn unconfirmed_loads(&mut self) {
        let state = self.state;
        for load in state.loads.iter() {
            let later = state.in_flight.iter().filter(|batch| batch.number <= load.batch).count();
            self.put_all([later, load.reporters.len(), keyed_only(state, load).count()]);
            self.put_counts([load.first, load.end]);
            for each in &load.reporters {
                self.place(Some(each.row));
                self.put_counts([each.counted, each.most]);
            }
            for (block, end) in keyed_only(state, load) {
                self.device(block);
                self.put(end as usize);
            }
        }
    }
}

/// Blocks numbered in the order of first meeting, after those that keep their numbers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Blocks {
    /// By block and one, so that `NO_HOST_BLOCK` is the first.
    numbers: Vec<u16>,
    pub(crate) met: Vec<BlockId>,
}

const UNMET: u16 = u16::MAX;

impl Blocks {
    pub(crate) fn clear(&mut self, num_blocks: u32, kept: impl Iterator<Item = BlockId>) {
        self.numbers.clear();
        self.numbers.resize(num_blocks as usize + 1, UNMET);
        self.met.clear();
        kept.for_each(|block| _ = self.number(block));
    }

    pub(crate) fn number(&mut self, block: BlockId) -> u16 {
        let number = &mut self.numbers[block.0.wrapping_add(1) as usize];
        if *number == UNMET {
            *number = self.met.len() as u16;
            self.met.push(block);
        }
        *number
    }

    pub(crate) fn write(&mut self, blocks: impl Iterator<Item = BlockId>, name: &mut Vec<u8>) {
        blocks.for_each(|block| put(name, usize::from(self.number(block))));
    }
}

/// Prefixes numbered in the order of first meeting, unless they keep their numbers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tree {
    renamed: bool,
    /// By prefix: the round in which it was met, and its number.
    numbers: Vec<(u32, u16)>,
    round: u32,
    num_met: u16,
}

impl Tree {
    pub(crate) fn new(renamed: bool) -> Self {
        Tree { renamed, ..Tree::default() }
    }

    pub(crate) fn clear(&mut self) {
        self.round += 1;
        self.num_met = 0;
    }

    /// Tell whether a prefix was met; then all shorter ones of it were met before.
    pub(crate) fn has_met(&self, node: u32) -> bool {
        self.numbers.get(node as usize).is_some_and(|&(round, _)| round == self.round)
    }

    pub(crate) fn number(&mut self, node: u32) -> u16 {
        let place = node as usize;
        if self.numbers.len() <= place {
            self.numbers.resize(place + 1, (0, 0));
        }
        let (round, number) = &mut self.numbers[place];
        if *round != self.round {
            self.num_met += 1;
            (*round, *number) = (self.round, self.num_met);
        }
        *number
    }

    pub(crate) fn write(&mut self, node: u32, name: &mut Vec<u8>) {
        if self.renamed {
            let number = self.number(node);
            put(name, usize::from(number));
        } else {
            name.extend(node.to_le_bytes());
        }
    }
}

/// Return the place of a batch among those in flight, the open one behind them; numbers may skip.
pub(crate) fn batch_place(state: &State, number: u64) -> usize {
    if number == state.batch.number {
        return state.in_flight.len();
    }
    state.in_flight.iter().position(|batch| batch.number == number).unwrap_or(LOST)
}

/// Add a number, so that no other numbers give the same bytes; small ones take one.
pub(crate) fn put(name: &mut Vec<u8>, number: usize) {
    match u8::try_from(number) {
        Ok(small) if small < u8::MAX => name.push(small),
        _ => {
            name.push(u8::MAX);
            name.extend((number as u32).to_le_bytes());
        }
    }
}
