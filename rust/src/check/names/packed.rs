// SPDX-License-Identifier: Apache-2.0
//! States packed into few bytes, the form in which they wait until they are explored.
//!
//! A part of core_model.rs. Numbers take a byte if they are small; a block hash is its number in
//! the tree of prefixes, so packed states are read by the search that wrote them alone. A state
//! with anything rare (operations, extra keys, recurrent states, a policy's order) is its canonical
//! bytes.

mod packed_batches;
pub(crate) mod packed_node;
mod packed_value;

use std::sync::Arc;

use crate::check::names::packed::packed_batches::{has_batches, read_batches, write_batches};
use crate::codec::decode::decode;
use crate::codec::encode::encode;
use crate::oracle::calls::Name;
use crate::oracle::prefixes::Prefixes;
use crate::pool::block_pool::BlockPool;
use crate::pool::free_queue::make_free_queue;
use crate::state::state::{NO_HOST_BLOCK, RequestState, State};
use crate::transitions::append::fast_path::note_quiet_until;
use crate::types::ids::{BlockId, Row, Table};
use crate::types::keys::make_key;
use crate::types::violation::Violation;

const COMMON: u8 = 0;
const RARE: u8 = 1;
/// A common state, with batches behind it.
const IN_FLIGHT: u8 = 2;

const SKIP_READING: u8 = 1;
const PREEMPTED: u8 = 2;
const SWAPPED: u8 = 4;
/// In the place of a request's name.
const NO_REQUEST: u8 = u8::MAX;

/// Add a state to some bytes.
pub(crate) fn pack(state: &State, prefixes: &mut Prefixes, out: &mut Vec<u8>) {
    if is_rare(state) {
        out.push(RARE);
        out.extend(encode(state));
        return;
    }
    let has_batches = has_batches(state);
    let mut out = Packer { out, prefixes };
    out.out.push(if has_batches { IN_FLIGHT } else { COMMON });
    out.number(state.batch.number as u32);
    out.number(state.requests.len() as u32);
    out.number(state.free_rows.len() as u32);
    state.free_rows.iter().for_each(|row| out.number(row.0));
    for request in &state.requests {
        match request {
            Some(request) => out.request(request),
            None => out.out.push(NO_REQUEST),
        }
    }
    out.pool(&state.device);
    if let Some(host) = &state.host {
        out.pool(host);
    }
    if has_batches {
        write_batches(state, out.out);
    }
}

/// Read the state of these bytes into another one, whose room is used. empty: a state of its world
/// that holds nothing.
pub(crate) fn unpack(
    data: &[u8],
    empty: &State,
    prefixes: &mut Prefixes,
    state: &mut State,
) -> Result<(), Violation> {
    if data[0] == RARE {
        let damaged =
            |error: crate::types::errors::Error| Violation::new("NOCRASH", error.to_string());
        *state = decode(&data[1..]).map_err(damaged)?;
        settle_all(state);
        return Ok(());
    }
    let mut source = Unpacker { data: &data[1..], prefixes };
    let mut requests = std::mem::take(&mut state.requests);
    state.clone_from(empty);
    state.batch.number = u64::from(source.number());
    let num_rows = source.number();
    state.free_rows.extend(source.numbers().into_iter().map(Row));
    requests.resize_with(num_rows as usize, || None);
    state.epochs.resize(num_rows as usize, 0);
    for (row, request) in (0..).map(Row).zip(&mut requests) {
        *request = source.request(request.take(), state.config.groups.len());
        if let Some(request) = request {
            state.rows.insert(Arc::clone(&request.request_id), row);
        }
    }
    state.requests = requests;
    source.pool(&mut state.device);
    if let Some(host) = &mut state.host {
        source.pool(host);
    }
    if data[0] == IN_FLIGHT {
        read_batches(&mut source.data, state);
    }
    settle_all(state);
    Ok(())
}

/// Recompute how far requests can grow by their count alone, so that edges take this path as well.
pub(crate) fn settle_all(state: &mut State) {
    for row in (0..state.requests.len() as u32).map(Row) {
        let request = state.requests[row.index()].as_ref();
        let runs = |each: &RequestState| each.holds_blocks() && each.num_loading == 0;
        if request.is_some_and(runs) {
            note_quiet_until(state, row);
        }
    }
}

fn is_rare(state: &State) -> bool {
    let rare = |each: &RequestState| {
        let loads = each.num_loading > 0 || each.load_end > 0;
        each.own_hashes || each.extra_keys.is_some() || loads
    };
    !state.operations.is_empty()
        || !state.named_pins.is_empty()
        || !state.loads.is_empty()
        || state.next_operation > 0
        || (state.has_states && has_batches(state))
        || state.device.policy.is_some()
        || state.epoch > 0
        || state.device.retention.is_some()
        || state.device.floors.is_some()
        || !state.device.silent.is_empty()
        || state.device.tails.is_some()
        || !state.effects.events.is_empty()
        || !state.new_blocks.is_empty()
        || state.requests().any(rare)
}

/// Bytes that are being written.
struct Packer<'a> {
    out: &'a mut Vec<u8>,
    prefixes: &'a mut Prefixes,
}

impl Packer<'_> {
    /// Write seven bits per byte, the last one below 128.
    fn number(&mut self, mut number: u32) {
        while number >= 128 {
            self.out.push(number as u8 | 128);
            number >>= 7;
        }
        self.out.push(number as u8);
    }

    fn numbers(&mut self, numbers: &[u32]) {
        self.number(numbers.len() as u32);
        numbers.iter().for_each(|&number| self.number(number));
    }

    /// NO_HOST_BLOCK is 0.
    fn table(&mut self, table: &[BlockId]) {
        self.number(table.len() as u32);
        table.iter().for_each(|block| self.number(block.0.wrapping_add(1)));
    }

    fn request(&mut self, request: &RequestState) {
        let flag = |on, bit| if on { bit } else { 0 };
        let swapped = !request.host_tables.is_empty();
        let flags = flag(request.skip_reading, SKIP_READING)
            | flag(request.preempted, PREEMPTED)
            | flag(swapped, SWAPPED);
        self.out.extend([Name::of(request).0, flags]);
        self.numbers(&request.tokens);
        self.numbers(&request.drafts);
        self.number(request.block_hashes.len() as u32);
        for hash in &request.block_hashes {
            let number = self.prefixes.hash_number(hash);
            self.number(number);
        }
        self.number(request.num_computed);
        for (table, &cached) in request.tables.iter().zip(&request.num_cached) {
            self.table(table);
            self.number(cached);
        }
        request.host_tables.iter().for_each(|table| self.table(table));
    }

    fn pool(&mut self, pool: &BlockPool) {
        let ranks = if pool.index.is_empty() { Vec::new() } else { pool.index.ranks() };
        for block in (0..pool.num_blocks()).map(BlockId) {
            self.number(2 * pool.ref_count(block) + u32::from(pool.key(block).is_some()));
            if let Some(key) = pool.key(block) {
                let number = self.prefixes.hash_number(&key.block_hash());
                self.number(number);
                self.number(key.group_id());
                self.number(ranks[block.index()]);
            }
        }
        self.number(pool.num_free());
        pool.queue.iter().for_each(|block| self.number(block.0));
        self.number(pool.pins.len() as u32);
        for (block, &count) in &pool.pins {
            self.number(block.0);
            self.number(count);
        }
    }
}

/// Bytes that are being read.
struct Unpacker<'a> {
    data: &'a [u8],
    prefixes: &'a mut Prefixes,
}

impl Unpacker<'_> {
    fn byte(&mut self) -> u8 {
        let (&first, rest) = self.data.split_first().expect("packed states are written by pack");
        self.data = rest;
        first
    }

    fn number(&mut self) -> u32 {
        let (mut number, mut shift) = (0, 0);
        loop {
            let byte = self.byte();
            number |= u32::from(byte & 127) << shift;
            if byte < 128 {
                return number;
            }
            shift += 7;
        }
    }

    fn numbers(&mut self) -> Vec<u32> {
        let mut numbers = Vec::new();
        self.numbers_into(&mut numbers);
        numbers
    }

    fn numbers_into(&mut self, numbers: &mut Vec<u32>) {
        numbers.clear();
        let length = self.number();
        numbers.extend((0..length).map(|_| self.number()));
    }

    fn table(&mut self, table: &mut Table) {
        table.clear();
        let num_blocks = self.number();
        table.extend((0..num_blocks).map(|_| BlockId(self.number().wrapping_sub(1))));
    }

    /// Read a request, if the row has one. old: the row's last one, whose room is used.
    fn request(&mut self, old: Option<RequestState>, num_groups: usize) -> Option<RequestState> {
        let name = Name(self.byte());
        if name.0 == NO_REQUEST {
            return None;
        }
        let flags = self.byte();
        let old = old.unwrap_or_default();
        let RequestState { mut tokens, mut drafts, mut block_hashes, .. } = old;
        let RequestState { mut tables, mut num_cached, mut request_id, .. } = old;
        if *request_id != *name.id() {
            request_id = name.id().into();
        }
        self.numbers_into(&mut tokens);
        self.numbers_into(&mut drafts);
        block_hashes.clear();
        for _ in 0..self.number() {
            let number = self.number();
            block_hashes.push(self.prefixes.hash_of(number));
        }
        let num_computed = self.number();
        tables.resize_with(num_groups, Table::new);
        num_cached.resize(num_groups, 0);
        for (table, cached) in tables.iter_mut().zip(&mut num_cached) {
            self.table(table);
            *cached = self.number();
        }
        let mut host_tables = Vec::new();
        if flags & SWAPPED > 0 {
            host_tables.resize_with(num_groups, Table::new);
            host_tables.iter_mut().for_each(|table| self.table(table));
        }
        debug_assert!(!host_tables.iter().flatten().any(|&id| id > NO_HOST_BLOCK));
        Some(RequestState {
            tokens,
            drafts,
            block_hashes,
            tables,
            num_cached,
            request_id,
            num_computed,
            host_tables,
            skip_reading: flags & SKIP_READING > 0,
            preempted: flags & PREEMPTED > 0,
            ..RequestState::default()
        })
    }

    /// Read a pool over one that is empty.
    fn pool(&mut self, pool: &mut BlockPool) {
        let mut ranked: Vec<(u32, u32, u32, BlockId)> = Vec::new();
        for block in (0..pool.num_blocks()).map(BlockId) {
            let number = self.number();
            pool.restore(block, number / 2);
            if number % 2 == 1 {
                let (hash, group_id, rank) = (self.number(), self.number(), self.number());
                ranked.push((rank, hash, group_id, block));
            }
        }
        ranked.sort_unstable();
        for (_, hash, group_id, block) in ranked {
            let hash = self.prefixes.hash_of(hash);
            pool.publish(block, make_key(&hash, group_id));
        }
        let order: Vec<BlockId> = self.numbers().into_iter().map(BlockId).collect();
        pool.queue = make_free_queue(pool.num_blocks(), order, 0);
        for _ in 0..self.number() {
            let (block, count) = (BlockId(self.number()), self.number());
            pool.pins.insert(block, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::open_batch::OpenBatch;
    use crate::transitions::free::free;
    use crate::transitions::pins::pin;
    use crate::transitions::requests::remove_request;
    use crate::transitions::tests::*;
    use crate::types::config::Eviction;

    #[test]
    fn a_packed_state_comes_back_as_it_was() {
        let config = Config::new(7, 2, b"seed");
        assert_eq!(config.eviction, Eviction::Lru);
        let empty = make_state(config.clone()).unwrap();
        let mut state = empty.clone();
        for (id, tokens) in [("0", [1, 2, 3]), ("1", [1, 2, 4]), ("2", [1, 2, 3])] {
            add_request(&mut state, Request::new(id, &tokens)).unwrap();
        }
        remove_request(&mut state, "1").unwrap();
        for id in ["0", "2"] {
            allocate_slots(&mut state, id, &SlotRequest::new(3)).unwrap().unwrap();
        }
        pin(&mut state, &[1]).unwrap();
        take_batch(&mut state).unwrap();
        state.batch = OpenBatch::default();
        let mut prefixes = Prefixes::new(&config);
        prefixes.learn(&state).unwrap();
        let mut packed = Vec::new();
        pack(&state, &mut prefixes, &mut packed);
        let mut other = prefixes.clone();
        let mut again = empty.clone();
        unpack(&packed, &empty, &mut other, &mut again).unwrap();
        assert_eq!(encode(&again), encode(&state));
        assert!(packed.len() < 60, "{} bytes", packed.len());
    }

    #[test]
    fn a_packed_state_comes_back_with_its_batches() {
        let mut config = Config::new(9, 1, b"seed");
        (config.max_in_flight, config.num_host_blocks) = (2, 2);
        let empty = make_state(config.clone()).unwrap();
        let mut state = empty.clone();
        admit(&mut state, "0", &[1, 2, 3], 2);
        admit(&mut state, "1", &[1, 2, 4], 3);
        let mut prefixes = Prefixes::new(&config);
        prefixes.learn(&state).unwrap();
        take_batch(&mut state).unwrap();
        allocate_slots(&mut state, "0", &SlotRequest::new(1)).unwrap().unwrap();
        free(&mut state, "1").unwrap();
        remove_request(&mut state, "1").unwrap();
        let device = &state.device;
        assert!(device.num_quarantined() > 0 && !device.index.is_empty());
        assert!(!state.held_rows.is_empty() && !state.batch.published_keys.is_empty());
        let mut packed = Vec::new();
        pack(&state, &mut prefixes, &mut packed);
        let mut again = state.clone();
        admit(&mut again, "2", &[5], 1);
        unpack(&packed, &empty, &mut prefixes, &mut again).unwrap();
        assert!(packed[0] == IN_FLIGHT && encode(&again) == encode(&state));
    }
}
