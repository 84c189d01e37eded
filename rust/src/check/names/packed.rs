// SPDX-License-Identifier: Apache-2.0
//! States packed into few bytes, the form in which they wait until they are explored.
//!
//! A part of core_model.rs. Numbers take a byte if they are small; a block hash is its number in
//! the tree of prefixes, so packed states are read by the search that wrote them alone. A state
//! with anything rare (operations, batches in flight, extra keys, a policy's order) is its
//! canonical bytes.

pub(crate) mod packed_node;

use crate::codec::decode::decode;
use crate::codec::encode::encode;
use crate::oracle::calls::Name;
use crate::oracle::prefixes::Prefixes;
use crate::pool::block_pool::BlockPool;
use crate::pool::free_queue::make_free_queue;
use crate::state::state::{NO_HOST_BLOCK, RequestState, State};
use crate::transitions::append::fast_path::note_quiet_until;
use crate::transitions::requests::empty_request;
use crate::types::ids::{BlockId, Row, Table};
use crate::types::keys::make_key;
use crate::types::violation::Violation;

const COMMON: u8 = 0;
const RARE: u8 = 1;

const SKIP_READING: u8 = 1;
const PREEMPTED: u8 = 2;
const SWAPPED: u8 = 4;

/// Add a state to some bytes.
pub(crate) fn pack(state: &State, prefixes: &mut Prefixes, out: &mut Vec<u8>) {
    if is_rare(state) {
        out.push(RARE);
        out.extend(encode(state));
        return;
    }
    let mut out = Packer { out, prefixes };
    out.out.push(COMMON);
    out.number(state.batch.number as u32);
    out.number(state.requests.len() as u32);
    out.number(state.free_rows.len() as u32);
    state.free_rows.iter().for_each(|row| out.number(row.0));
    state.requests().for_each(|request| out.request(request));
    out.pool(&state.device);
    if let Some(host) = &state.host {
        out.pool(host);
    }
}

/// Return the state of these bytes. empty: a state of its world that holds nothing.
pub(crate) fn unpack(
    data: &[u8],
    empty: &State,
    prefixes: &mut Prefixes,
) -> Result<State, Violation> {
    if data[0] == RARE {
        let damaged =
            |error: crate::types::errors::Error| Violation::new("NOCRASH", error.to_string());
        let mut state = decode(&data[1..]).map_err(damaged)?;
        settle_all(&mut state);
        return Ok(state);
    }
    let mut source = Unpacker { data: &data[1..], prefixes };
    let mut state = empty.clone();
    state.batch.number = u64::from(source.number());
    let num_rows = source.number();
    let free_rows: Vec<Row> = source.numbers().into_iter().map(Row).collect();
    state.free_rows = (0..num_rows).map(Row).filter(|row| !free_rows.contains(row)).collect();
    state.free_rows.reverse();
    state.requests.resize_with(num_rows as usize, || None);
    state.epochs.resize(num_rows as usize, 0);
    for _ in free_rows.len()..num_rows as usize {
        source.request(&mut state);
    }
    state.free_rows = free_rows;
    source.pool(&mut state.device);
    if let Some(host) = &mut state.host {
        source.pool(host);
    }
    settle_all(&mut state);
    Ok(state)
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
        let output = each.output_from > 0 || !each.samplers.is_empty();
        each.own_hashes || each.extra_keys.is_some() || loads || output
    };
    !state.operations.is_empty()
        || !state.named_pins.is_empty()
        || !state.held_rows.is_empty()
        || state.next_operation > 0
        || state.config.max_in_flight > 0
        || state.device.policy.is_some()
        || state.epoch > 0
        || state.device.retention.is_some()
        || state.device.floors.is_some()
        || !state.device.silent.is_empty()
        || state.device.tails.is_some()
        || !state.effects.commands.is_empty()
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
        (0..self.number()).map(|_| self.number()).collect()
    }

    fn table(&mut self) -> Table {
        let block = |number: u32| BlockId(number.wrapping_sub(1));
        (0..self.number()).map(|_| block(self.number())).collect()
    }

    /// Read a request into the last free row.
    fn request(&mut self, state: &mut State) {
        let (name, flags) = (Name(self.byte()), self.byte());
        let row = empty_request(state, name.id());
        let num_groups = state.config.groups.len();
        let request = &mut state[row];
        request.skip_reading = flags & SKIP_READING > 0;
        request.preempted = flags & PREEMPTED > 0;
        request.tokens = self.numbers();
        request.drafts = self.numbers();
        for _ in 0..self.number() {
            let number = self.number();
            request.block_hashes.push(self.prefixes.hash_of(number));
        }
        request.num_computed = self.number();
        for group_id in 0..num_groups {
            request.tables[group_id] = self.table();
            request.num_cached[group_id] = self.number();
        }
        if flags & SWAPPED > 0 {
            request.host_tables = (0..num_groups).map(|_| self.table()).collect();
        }
        debug_assert!(!request.host_tables.iter().flatten().any(|&id| id > NO_HOST_BLOCK));
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
        let again = unpack(&packed, &empty, &mut other).unwrap();
        assert_eq!(encode(&again), encode(&state));
        assert!(packed.len() < 60, "{} bytes", packed.len());
    }
}
