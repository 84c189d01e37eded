// SPDX-License-Identifier: Apache-2.0
//! The batches of a packed state: the open one, those in flight, and what requests await of them.
//!
//! A part of packed.rs. What is written is what the canonical bytes say (`encode.rs`), without
//! checks: a search reads nothing but what it wrote.

use std::sync::Arc;

use crate::check::names::packed::packed_value::Packed;
use crate::pool::block_pool::BlockPool;
use crate::pool::quarantine::{Quarantine, make_quarantine};
use crate::state::batch_records::{
    BatchInFlight, RequestEntries, RequestEntry, Sampler, Samplers, in_order,
};
use crate::state::open_batch::{Merge, OpenBatch, ScheduledRequest};
use crate::state::state::State;
use crate::types::ids::{BlockId, Row};

/// Tell whether a state has more of batches than an empty open one.
pub(super) fn has_batches(state: &State) -> bool {
    let batch = &state.batch;
    state.config.max_in_flight > 0
        || !state.effects.commands.is_empty()
        || !state.held_rows.is_empty()
        || batch.scheduled.num_entries() + batch.entries.rows.num_entries() > 0
        || !batch.merges.is_empty()
        || !batch.published_keys.is_empty()
        || state.requests().any(|each| each.output_from > 0 || !each.samplers.is_empty())
}

/// Write the batches of a state without recurrent states, loads and operations.
pub(super) fn write_batches(state: &State, out: &mut Vec<u8>) {
    state.held_rows.write(out);
    for request in state.requests() {
        request.output_from.write(out);
        request.samplers.write(out);
    }
    state.effects.commands.write(out);
    write_open_batch(&state.batch, out);
    (state.in_flight.len() as u32).write(out);
    for batch in &state.in_flight {
        batch.number.write(out);
        write_entries(&batch.entries, out);
        batch.published_keys.write(out);
        batch.rows.write(out);
        (batch.replaced.len() as u32).write(out);
        batch.replaced.iter().for_each(|cell| cell.write(out));
    }
    tiers(state).for_each(|pool| write_quarantine(pool.quarantine.as_ref(), out));
}

/// Read the same into a state that has its requests and pools.
pub(super) fn read_batches(source: &mut &[u8], state: &mut State) {
    state.held_rows = Vec::read(source);
    for request in state.requests.iter_mut().flatten() {
        request.output_from = u64::read(source);
        request.samplers = Samplers::read(source);
    }
    state.effects.commands = Packed::read(source);
    read_open_batch(source, &mut state.batch);
    for _ in 0..u32::read(source) {
        state.in_flight.push(Arc::new(BatchInFlight {
            number: u64::read(source),
            entries: read_entries(source),
            published_keys: Vec::read(source),
            rows: Vec::read(source),
            replaced: (0..u32::read(source)).map(|_| Packed::read(source)).collect(),
            ..BatchInFlight::default()
        }));
    }
    for pool in [Some(&mut state.device), state.host.as_mut()].into_iter().flatten() {
        read_quarantine(source, &mut pool.quarantine);
    }
}

fn tiers(state: &State) -> impl Iterator<Item = &BlockPool> {
    std::iter::once(&state.device).chain(&state.host)
}

fn write_open_batch(batch: &OpenBatch, out: &mut Vec<u8>) {
    let mut rows: Vec<Row> = batch.scheduled.keys().collect();
    rows.sort_unstable();
    rows.write(out);
    for record in rows.iter().filter_map(|&row| batch.scheduled.get(row)) {
        record.num_computed_before.write(out);
        record.num_kept.write(out);
        (batch.unwritten_of(record).count() as u32).write(out);
        for item in batch.unwritten_of(record) {
            item.group_id.write(out);
            item.position.write(out);
            item.block.write(out);
            item.key.write(out);
        }
    }
    (batch.merges.len() as u32).write(out);
    for merge in &batch.merges {
        merge.request_id.as_bytes().to_vec().write(out);
        (merge.group_id, merge.position, merge.block, merge.key).write(out);
    }
    write_entries(&batch.entries, out);
    batch.published_keys.write(out);
}

/// batch: has its number alone.
fn read_open_batch(source: &mut &[u8], batch: &mut OpenBatch) {
    for row in Vec::<Row>::read(source) {
        let record = ScheduledRequest::new(u32::read(source));
        let num_kept = u32::read(source);
        batch.scheduled.insert_new(row, ScheduledRequest { num_kept, ..record });
        for _ in 0..u32::read(source) {
            let place = (u32::read(source), u32::read(source));
            batch.note_unwritten(row, place, BlockId::read(source), Packed::read(source));
        }
    }
    for _ in 0..u32::read(source) {
        let request_id = String::from_utf8(Vec::read(source)).expect("a name is text");
        let (group_id, position, block, key) = Packed::read(source);
        batch.merges.push(Merge { request_id: request_id.into(), group_id, position, block, key });
    }
    batch.entries = read_entries(source);
    batch.published_keys = Vec::read(source);
}

fn write_entries(entries: &RequestEntries, out: &mut Vec<u8>) {
    let entries_in_order = in_order(entries);
    (entries_in_order.len() as u32).write(out);
    for &(row, entry) in &entries_in_order {
        row.write(out);
        entry.before.write(out);
        entry.restore.write(out);
        entry.publishes.write(out);
    }
    let held = entries_in_order.iter().flat_map(|&(row, _)| entries.held(row));
    (held.clone().count() as u32).write(out);
    held.for_each(|number| number.write(out));
}

fn read_entries(source: &mut &[u8]) -> RequestEntries {
    let mut entries = RequestEntries::default();
    for order in 0..u32::read(source) {
        let row = Row::read(source);
        let (before, restore) = (u32::read(source), u32::read(source));
        let publishes = bool::read(source);
        entries.insert_new(row, RequestEntry { order, before, restore, publishes });
    }
    entries.restore(Vec::read(source));
    entries
}

fn write_quarantine(quarantine: Option<&Quarantine>, out: &mut Vec<u8>) {
    let Some(quarantine) = quarantine else { return };
    quarantine.blocks().write(out);
    let busy = quarantine.busy();
    (busy.len() as u32).write(out);
    for (block, numbers) in busy {
        block.write(out);
        numbers.to_vec().write(out);
    }
}

fn read_quarantine(source: &mut &[u8], quarantine: &mut Option<Quarantine>) {
    let Some(quarantine) = quarantine else { return };
    *quarantine = make_quarantine();
    let blocks = Vec::<BlockId>::read(source);
    for _ in 0..u32::read(source) {
        let block = BlockId::read(source);
        Vec::<u64>::read(source).into_iter().for_each(|number| quarantine.note_use(block, number));
    }
    blocks.into_iter().for_each(|block| quarantine.append(block));
}

impl Packed for Sampler {
    fn write(&self, out: &mut Vec<u8>) {
        (self.batch, self.end).write(out);
    }

    fn read(source: &mut &[u8]) -> Self {
        let (batch, end) = Packed::read(source);
        Sampler { batch, end }
    }
}
