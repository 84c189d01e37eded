// SPDX-License-Identifier: Apache-2.0
//! Encodes a state as canonical bytes: equal states, and only those, have equal bytes.
//!
//! The bytes are the same in both languages. The format is little-endian. A count precedes the
//! items that it counts. Requests are in row order, everything else in the order of the state. The
//! index is written as each block's key and the block's position among the blocks of that key.
//! Newer fields follow in sections (`sections.rs`). `decode.rs` is the inverse.
//! Twin: kvcore/codec/encode.py.

use crate::codec::sections::write_sections;
use crate::pool::block_pool::BlockPool;
use crate::pool::quarantine::Quarantine;
use crate::state::batch_records::{BatchInFlight, PublishedKey, RequestEntry, in_order};
use crate::state::state::{RequestState, State};
use crate::types::commands::close;
use crate::types::config::{Config, Duplicates, Publish};
use crate::types::extra_inputs::ExtraKeys;
use crate::types::groups::KINDS;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::HASHINGS;
use crate::types::wire::Writer;

/// The first bytes of a state.
pub const MAGIC: &[u8] = b"kvcore state 4\n";
/// Treatments of duplicates, by their number in the bytes.
pub const DUPLICATES: [Duplicates; 2] = [Duplicates::Keep, Duplicates::Merge];
/// Times of publication, by their number in the bytes.
pub const PUBLISH: [Publish; 2] = [Publish::Scheduled, Publish::Completed];
/// Exclusive bound of a block's number of owners.
pub const OWNERS_END: u32 = 1 << 30;
/// Exclusive bound of the open batch's number.
pub const BATCHES_END: u64 = 1 << 63;

/// The canonical bytes of a state.
#[must_use]
pub fn encode(state: &State) -> Vec<u8> {
    let mut out = Writer::new(MAGIC);
    write_config(&mut out, &state.config);
    write_pool(&mut out, &state.device);
    if let Some(host) = &state.host {
        write_pool(&mut out, host);
    }
    out.count(state.requests.len());
    for request in &state.requests {
        out.flag(request.is_some());
        if let Some(request) = request {
            write_request(&mut out, request);
        }
    }
    out.numbers(&state.free_rows.iter().map(|row| row.0).collect::<Vec<u32>>());
    write_batch(&mut out, state);
    out.count(state.in_flight.len());
    state.in_flight.iter().for_each(|batch| write_batch_in_flight(&mut out, batch));
    out.count(state.effects.events.len());
    out.data.extend_from_slice(state.effects.events.as_bytes());
    let stats = &state.stats;
    let plain = [stats.requests, stats.queries, stats.hits];
    let preempted = [stats.preempted_requests, stats.preempted_queries, stats.preempted_hits];
    plain.into_iter().chain(preempted).for_each(|value| out.u64(value));
    out.flag(stats.reset);
    state.new_blocks.groups().iter().for_each(|blocks| out.ids(blocks));
    write_operations(&mut out, state);
    write_sections(&mut out, state);
    out.data
}

fn write_config(out: &mut Writer, config: &Config) {
    out.u32(config.num_blocks);
    out.count(config.groups.len());
    for group in &config.groups {
        out.u32(group.block_size);
        let kind = KINDS.iter().position(|&kind| kind == group.kind);
        out.u8(kind.expect("every kind has a number") as u8);
        out.u32(group.window.unwrap_or(group.draft_states));
        out.flag(group.eagle);
        out.flag(group.zero_new_blocks);
        out.u64(group.page_bytes.unwrap_or(0));
    }
    out.u32(config.num_host_blocks);
    out.u32(config.max_model_len.unwrap_or(0));
    out.u32(config.max_num_batched_tokens.unwrap_or(0));
    out.flag(config.enable_caching);
    out.flag(config.null_block);
    out.u8(config.eviction as u8);
    out.flag(config.duplicates == DUPLICATES[1]);
    let hashing = HASHINGS.iter().position(|&hashing| hashing == config.hashing);
    out.u8(hashing.expect("every hashing has a number") as u8);
    out.u32(config.num_preallocate_tokens);
    out.u32(config.watermark_blocks);
    out.flag(config.use_eagle);
    out.flag(config.enable_events);
    out.flag(config.record_new_blocks);
    out.sized(&config.hash_seed);
    out.u32(config.max_in_flight);
    out.flag(config.publish == PUBLISH[1]);
}

fn write_pool(out: &mut Writer, pool: &BlockPool) {
    let ranks = pool.index.ranks();
    for block in (0..pool.num_blocks()).map(BlockId) {
        out.u32(pool.ref_count(block));
        out.flag(pool.key(block).is_some());
        if let Some(key) = pool.key(block) {
            out.sized(&key.0);
            out.u32(ranks[block.index()]);
        }
    }
    out.ids(&pool.queue.iter().collect::<Vec<BlockId>>());
    let mut pins: Vec<(BlockId, u32)> = pool.pins.iter().map(|(&b, &count)| (b, count)).collect();
    pins.sort_unstable();
    out.ids(&pins.iter().map(|pin| pin.0).collect::<Vec<BlockId>>());
    out.numbers(&pins.iter().map(|pin| pin.1).collect::<Vec<u32>>());
    let waiting = pool.quarantine.as_ref();
    out.ids(&waiting.map_or_else(Vec::new, Quarantine::blocks));
    let busy = waiting.map_or_else(Vec::new, Quarantine::busy);
    out.count(busy.len());
    for (block, numbers) in busy {
        out.u32(block.0);
        out.count(numbers.len());
        numbers.iter().for_each(|&number| out.u64(number));
    }
}

fn write_request(out: &mut Writer, request: &RequestState) {
    out.sized(request.request_id.as_bytes());
    out.numbers(&request.tokens);
    out.numbers(&request.drafts);
    out.hashes(&request.block_hashes);
    out.flag(request.own_hashes);
    out.flag(request.skip_reading);
    write_extra_keys(out, request.extra_keys());
    out.u32(request.num_computed);
    for (table, &num_cached) in request.tables.iter().zip(&request.num_cached) {
        out.ids(table);
        out.u32(num_cached);
    }
    out.flag(!request.host_tables.is_empty());
    request.host_tables.iter().for_each(|table| out.ids(table));
    out.flag(request.preempted);
    out.u32(request.num_loading);
    out.u32(request.load_end);
}

fn write_extra_keys(out: &mut Writer, extra_keys: &ExtraKeys) {
    out.flag(extra_keys.lora.is_some());
    if let Some(lora) = &extra_keys.lora {
        out.sized(lora.name.as_bytes());
        out.sized(lora.path.as_bytes());
    }
    out.count(extra_keys.media.len());
    for item in &extra_keys.media {
        out.sized(item.identifier.as_bytes());
        out.u32(item.offset);
        out.u32(item.length);
    }
    out.text(extra_keys.cache_salt.as_deref());
    out.hashes(&extra_keys.embeds);
}

fn write_batch(out: &mut Writer, state: &State) {
    let batch = &state.batch;
    let closed = close(batch.number, &state.effects.commands);
    out.u64(batch.number);
    out.sized(closed.buffer.as_flattened());
    out.sized(&closed.keys);
    let mut rows: Vec<Row> = batch.scheduled.keys().collect();
    rows.sort_unstable();
    out.numbers(&rows.iter().map(|row| row.0).collect::<Vec<u32>>());
    for row in rows {
        let record = batch.scheduled.get(row).expect("its row was among the keys");
        out.u32(record.num_computed_before);
        out.u32(record.num_kept);
        out.count(batch.unwritten_of(record).count());
        for item in batch.unwritten_of(record) {
            [item.group_id, item.position, item.block.0].into_iter().for_each(|id| out.u32(id));
            out.sized(&item.key.0);
        }
    }
    out.count(batch.merges.len());
    for merge in &batch.merges {
        out.sized(merge.request_id.as_bytes());
        [merge.group_id, merge.position, merge.block.0].into_iter().for_each(|id| out.u32(id));
        out.sized(&merge.key.0);
    }
    let entries = in_order(&batch.entries);
    out.count(entries.len());
    entries.into_iter().for_each(|(row, entry)| write_entry(out, row, entry));
    write_published_keys(out, &batch.published_keys);
}

fn write_entry(out: &mut Writer, row: Row, entry: &RequestEntry) {
    [row.0, entry.before, entry.restore].into_iter().for_each(|value| out.u32(value));
    out.flag(entry.publishes);
}

fn write_published_keys(out: &mut Writer, published_keys: &[PublishedKey]) {
    out.count(published_keys.len());
    for (block, key) in published_keys {
        out.u32(block.0);
        out.sized(&key.0);
    }
}

fn write_batch_in_flight(out: &mut Writer, batch: &BatchInFlight) {
    out.u64(batch.number);
    let entries = in_order(&batch.entries);
    out.count(entries.len());
    for (row, entry) in entries {
        write_entry(out, row, entry);
        out.numbers(batch.entries.held(row));
        let replaced: Vec<(u32, u32)> = batch.replaced_of(row).collect();
        out.count(replaced.len());
        for (group_id, position) in replaced {
            out.u32(group_id);
            out.u32(position);
        }
    }
    write_published_keys(out, &batch.published_keys);
    out.numbers(&batch.rows.iter().map(|row| row.0).collect::<Vec<u32>>());
}

fn write_operations(out: &mut Writer, state: &State) {
    out.count(state.operations.len());
    for (&number, operation) in &state.operations {
        out.u32(number);
        out.u32(operation.block.0);
        out.sized(&operation.key.0);
        out.u64(operation.batch);
        out.text(operation.request.map(|row| &*state[row].request_id));
        out.u32(operation.first_token);
    }
    out.u32(state.next_operation);
}
