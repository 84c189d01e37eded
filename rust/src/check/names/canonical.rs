// SPDX-License-Identifier: Apache-2.0
//! Canonical names: one name for all states that differ only in names, so that these are explored
//! once.
//!
//! Three things are renamed, none of which the core may depend on (EQUIVARIANCE); each can be left
//! as it is (`Symmetry`). Requests, and rows with them: by their place in an order that is tried
//! for every permutation of requests that look alike. A row that has no request counts while a
//! batch writes by its table; which one a new request gets, and until when rows are held back, does
//! not. Blocks: by their first place in tables in request order, then in the free queue, then among
//! the pinned ones; the null block keeps its number. Tokens: they matter through equality of
//! prefixes alone, so the nodes of the prefix tree are numbered in the order of first meeting.
//! Requires a state whose open batch is empty. Batch number, events and statistics are left out,
//! and so is `preempted`, which only chooses a column of the statistics. Two states have one name
//! here exactly if they have in Python; the bytes are other ones. Twin:
//! kvcore/check/names/canonical.py.

mod keys;
pub(crate) mod order;
pub mod renaming;
mod tails;

use smallvec::SmallVec;

use crate::check::names::canonical::keys::PoolKeys;
use crate::check::names::canonical::order::Orders;
use crate::check::names::canonical::renaming::{Blocks, Renaming, Tree, batch_place, put};
use crate::check::world::world::Symmetry;
use crate::oracle::prefixes::{Numbers, Prefixes};
use crate::pool::block_pool::BlockPool;
use crate::pool::free_queue::num_older;
use crate::pool::quarantine::Quarantine;
use crate::state::state::named_pins::named_blocks;
use crate::state::state::{NO_HOST_BLOCK, RequestState, State};
use crate::types::ids::{BlockId, Row};
use crate::types::policies::Uses;
use crate::types::retention::wishes_of;
use crate::types::violation::Violation;

/// What makes names: the buffers of one worker.
#[derive(Debug, Clone)]
pub struct Namer {
    symmetry: Symmetry,
    /// The name that is being written.
    name: Vec<u8>,
    least: Vec<u8>,
    device: Blocks,
    host: Blocks,
    tree: Tree,
    /// The prefixes of each request, by row.
    nodes: Vec<Numbers>,
    device_keys: PoolKeys,
    host_keys: PoolKeys,
    /// The tail keys of device blocks: the block, the rank among those of the key, its group, and
    /// the prefixes that it ends.
    tails: Vec<(BlockId, usize, u32, Numbers)>,
}

impl Namer {
    /// Empty buffers.
    #[must_use]
    pub fn new(symmetry: Symmetry) -> Self {
        Namer {
            symmetry,
            name: Vec::new(),
            least: Vec::new(),
            device: Blocks::default(),
            host: Blocks::default(),
            tree: Tree::new(symmetry.tokens),
            nodes: Vec::new(),
            device_keys: PoolKeys::default(),
            host_keys: PoolKeys::default(),
            tails: Vec::new(),
        }
    }

    /// Return the least name of a state under renaming; equal names mean states that are equal up
    /// to renaming.
    pub fn canonical(
        &mut self,
        state: &State,
        prefixes: &mut Prefixes,
    ) -> Result<&[u8], Violation> {
        self.canonical_with(state, prefixes, &mut |_| {})
    }

    /// Return the same. more: what a name says besides, in the same renaming.
    pub fn canonical_with(
        &mut self,
        state: &State,
        prefixes: &mut Prefixes,
        more: &mut dyn FnMut(&mut Renaming<'_>),
    ) -> Result<&[u8], Violation> {
        self.read(state, prefixes)?;
        let mut orders = Orders::new(state, self.symmetry);
        self.write(state, &orders, prefixes, more)?;
        if orders.is_single() {
            return Ok(&self.name);
        }
        std::mem::swap(&mut self.name, &mut self.least);
        while orders.advance() {
            self.write(state, &orders, prefixes, more)?;
            if self.name < self.least {
                std::mem::swap(&mut self.name, &mut self.least);
            }
        }
        Ok(&self.least)
    }

    /// Note what does not depend on the order of requests.
    fn read(&mut self, state: &State, prefixes: &mut Prefixes) -> Result<(), Violation> {
        self.nodes.resize_with(state.requests.len(), Numbers::new);
        for (nodes, request) in self.nodes.iter_mut().zip(&state.requests) {
            match request {
                Some(request) => prefixes.nodes_into(request, 0, nodes),
                None => nodes.clear(),
            }
        }
        self.device_keys.read(&state.device, prefixes)?;
        if let Some(host) = &state.host {
            self.host_keys.read(host, prefixes)?;
        }
        self.read_tails(state, prefixes)
    }

    fn write(
        &mut self,
        state: &State,
        orders: &Orders,
        prefixes: &mut Prefixes,
        more: &mut dyn FnMut(&mut Renaming<'_>),
    ) -> Result<(), Violation> {
        let rows = orders.rows();
        self.start(state);
        put(&mut self.name, rows.len());
        if !self.symmetry.requests {
            self.write_names(state, rows);
        }
        for &row in rows {
            if let Some(request) = &state.requests[row] {
                self.write_request(request, row);
            }
        }
        if state.epoch > 0 {
            let counts = [state.epoch, num_older(&state.device.queue)];
            counts.into_iter().for_each(|count| put(&mut self.name, count as usize));
            let begun = state.in_flight.iter().map(|batch| batch.starts_epoch);
            self.name.extend(begun.chain([state.batch.starts_epoch]).map(u8::from));
            let epochs = rows.iter().map(|&row| state.epoch_of(Row(row as u32)));
            epochs.for_each(|epoch| put(&mut self.name, epoch as usize));
        }
        let pinned = pinned_blocks(state, orders);
        write_pool(&mut self.name, state, &state.device, &mut self.device, &pinned);
        self.device_keys.write(&mut self.name, &state.device, &self.device, &mut self.tree);
        self.write_tails(state);
        self.write_kept(state, rows);
        if let Some(host) = &state.host {
            write_pool(&mut self.name, state, host, &mut self.host, &[]);
            self.host_keys.write(&mut self.name, host, &self.host, &mut self.tree);
        }
        self.write_dues(state, rows);
        self.write_remembered(&state.device, prefixes)?;
        let Namer { name, device, host, tree, .. } = self;
        let mut renaming = Renaming {
            state,
            rows,
            others: Vec::new(),
            name,
            device,
            host,
            tree,
            prefixes,
            found: Ok(()),
        };
        if !(state.in_flight.is_empty()
            && state.operations.is_empty()
            && state.batch.published_keys.is_empty()
            && state.loads.is_empty())
        {
            renaming.in_flight();
        }
        more(&mut renaming);
        renaming.found
    }

    /// Begin a name: nothing was met yet.
    fn start(&mut self, state: &State) {
        self.name.clear();
        self.tree.clear();
        let kept = if self.symmetry.blocks {
            u32::from(state.device.is_null(BlockId(0)))
        } else {
            state.device.num_blocks()
        };
        let num_hosts = state.host.as_ref().map_or(0, BlockPool::num_blocks);
        let kept_hosts = if self.symmetry.blocks { 0 } else { num_hosts };
        self.device.clear(state.device.num_blocks(), (0..kept).map(BlockId));
        let hosts = (0..kept_hosts).map(BlockId);
        self.host.clear(num_hosts, std::iter::once(NO_HOST_BLOCK).chain(hosts));
    }

    /// Write the order in which requests arrived, if an eviction policy uses it.
    fn write_dues(&mut self, state: &State, rows: &[usize]) {
        let Some(waiting) = state.waiting.as_ref().filter(|waiting| waiting.next_due > 0) else {
            return;
        };
        let due = |&row: &usize| waiting.requests.get(&Row(row as u32)).map(|each| each.due);
        let dues: SmallVec<[u64; 8]> = rows.iter().filter_map(due).collect();
        for due in &dues {
            put(&mut self.name, dues.iter().filter(|other| *other < due).count());
        }
    }

    /// Write the eviction policy's memory of each block, and of evicted content, oldest first.
    fn write_remembered(
        &mut self,
        pool: &BlockPool,
        prefixes: &mut Prefixes,
    ) -> Result<(), Violation> {
        let Some(policy) = pool.policy.as_ref().filter(|policy| policy.is_remembered()) else {
            return Ok(());
        };
        let Namer { name, device, tree, .. } = self;
        policy.memory.iter().for_each(|number| name.extend(number.to_le_bytes()));
        for &block in &device.met {
            write_uses(name, &policy.history.of(block));
        }
        for (_, key, known) in policy.history.left() {
            put(name, key.group_id() as usize);
            let nodes = &prefixes.chain(key)?.nodes;
            put(name, nodes.len());
            for &node in nodes {
                _ = tree.number(node);
            }
            if let Some(&last) = nodes.last() {
                tree.write(last, name);
            }
            write_uses(name, known);
        }
        Ok(())
    }

    /// Write the ids and rows of requests, if they are not renamed.
    fn write_names(&mut self, state: &State, rows: &[usize]) {
        for &row in rows {
            let id = state.requests[row].as_ref().map_or("", |each| &*each.request_id);
            put(&mut self.name, row);
            put(&mut self.name, id.len());
            self.name.extend(id.bytes());
        }
        put(&mut self.name, state.requests.len());
        put(&mut self.name, state.free_rows.len());
        let held = state.held_rows.iter().map(|(row, _)| row);
        state.free_rows.iter().chain(held).for_each(|row| put(&mut self.name, row.index()));
    }

    /// Write the pins of prefixes, the tenants of requests and of blocks with content, the time,
    /// the wishes for the blocks that were met, and those of requests.
    fn write_kept(&mut self, state: &State, rows: &[usize]) {
        for (pin_name, pin) in &state.named_pins {
            put(&mut self.name, pin_name.len());
            self.name.extend(pin_name.bytes());
            put(&mut self.name, pin.epoch as usize);
            put(&mut self.name, pin.blocks.len());
            self.device.write(pin.blocks.iter().copied(), &mut self.name);
        }
        if let Some(takers) = state.device.takers() {
            self.name.extend(rows.iter().map(|&row| state.tenant(Row(row as u32))));
            let pool = &state.device;
            let has_content = |block| pool.ref_count(block) > 0 || pool.has_key(block);
            let taker =
                |&block: &BlockId| if has_content(block) { takers[block.index()] } else { 0 };
            self.name.extend(self.device.met.iter().map(taker));
        }
        if state.device.retention.is_none() {
            return;
        }
        put(&mut self.name, state.device.now() as usize);
        for &block in &self.device.met {
            let kept = state.device.kept(block);
            self.name.extend([kept.base, kept.level]);
            put(&mut self.name, kept.until as usize);
        }
        for &row in rows {
            let steps = wishes_of(&state.wishes, Row(row as u32));
            put(&mut self.name, steps.len());
            for (first, wish) in steps {
                put(&mut self.name, *first as usize);
                self.name.extend([wish.base, wish.level]);
                put(&mut self.name, wish.duration as usize);
            }
        }
    }

    fn write_request(&mut self, request: &RequestState, row: usize) {
        let counts = [request.num_tokens(), request.num_drafts(), request.num_computed];
        counts.into_iter().for_each(|count| put(&mut self.name, count as usize));
        let swapped = !request.host_tables.is_empty();
        self.name.extend([u8::from(swapped), u8::from(request.skip_reading)]);
        for &node in &self.nodes[row] {
            self.tree.write(node, &mut self.name);
        }
        if request.own_hashes {
            put(&mut self.name, request.block_hashes.len());
        }
        for (table, &cached) in request.tables.iter().zip(&request.num_cached) {
            put(&mut self.name, cached as usize);
            put(&mut self.name, table.len());
            self.device.write(table.iter().copied(), &mut self.name);
        }
        for table in &request.host_tables {
            put(&mut self.name, table.len());
            self.host.write(table.iter().copied(), &mut self.name);
        }
    }
}

/// Return the blocks of operations, then those that pins hold, in an order that names do not
/// change.
fn pinned_blocks(state: &State, orders: &Orders) -> SmallVec<[BlockId; 8]> {
    let held = state.operations.values().map(|operation| operation.block);
    held.chain(named_blocks(&state.named_pins)).chain(orders.pinned().iter().copied()).collect()
}

fn write_uses(name: &mut Vec<u8>, known: &Uses) {
    put(name, known.uses as usize);
    put(name, known.depth as usize);
    put(name, usize::from(known.place.section()));
    for time in [known.last, known.before, known.place.order()] {
        name.extend(time.to_le_bytes());
    }
}

/// pool: of either tier of the state.
fn write_pool(
    name: &mut Vec<u8>,
    state: &State,
    pool: &BlockPool,
    blocks: &mut Blocks,
    pinned: &[BlockId],
) {
    put(name, pool.num_free() as usize);
    blocks.write(pool.queue.iter(), name);
    let busy = pool.quarantine.as_ref().map_or_else(Vec::new, Quarantine::busy);
    let waiting = pool.quarantine.as_ref().filter(|waiting| !waiting.is_empty());
    if waiting.is_some() || !busy.is_empty() {
        put(name, pool.num_quarantined() as usize);
        blocks.write(waiting.map_or_else(Vec::new, Quarantine::blocks).into_iter(), name);
    }
    if !pool.pins.is_empty() {
        pinned.iter().for_each(|&block| _ = blocks.number(block));
        blocks.met.iter().for_each(|&block| put(name, pool.num_pins(block) as usize));
    }
    for block in blocks.met.iter().filter(|_| !busy.is_empty()) {
        let users = busy.iter().find(|(each, _)| each == block).map_or(&[][..], |each| each.1);
        put(name, users.len());
        users.iter().for_each(|&user| put(name, batch_place(state, user)));
    }
}
