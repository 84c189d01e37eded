// SPDX-License-Identifier: Apache-2.0
//! Named properties of every reachable state.
//!
//! Invariants: each property is one function that returns what is wrong first, in words with
//! numbers; its name is the one in docs/invariants.md. No transition calls anything here. Text is
//! made only if something is wrong, and the counters that a property needs are kept from state to
//! state. Properties of requests and their tables are in requests.rs.
//! Twin: kvcore/invariants/pool_and_state.py.

pub mod in_flight;
mod remembered;
mod tails;

use std::sync::Arc;

use self::remembered::remembered;
use self::tails::tail_sound;
use crate::invariants::claims::{named_pins, operations};
use crate::invariants::requests;
use crate::invariants::requests::{Scratch, pools};
use crate::invariants::retention::rank_order;
use crate::invariants::states;
use crate::pool::block_pool::BlockPool;
use crate::pool::free_queue::num_older;
use crate::state::state::{NO_HOST_BLOCK, RequestState, State};
use crate::types::ids::{BlockId, Row, Table};
use crate::types::values::Status;
use crate::types::violation::{Checks, Finding, Violation};

/// One property of a state.
pub type Property = fn(&State, &mut Scratch) -> Finding;

/// The properties of this file and of those it names, by name, in the order of their check.
pub static PROPERTIES: [(&str, Property); 30] = [
    ("REF", ref_counts),
    ("PARTITION", partition),
    ("FQ-UNIQ", queue_unique),
    ("NULL", null_block),
    ("QUARANTINE", in_flight::quarantine),
    ("IN-FLIGHT", in_flight::in_flight),
    ("UNCONFIRMED", in_flight::unconfirmed),
    ("IDX-SOUND", index_sound),
    ("IDX-COMPLETE", index_complete),
    ("TAIL-SOUND", tail_sound),
    ("LEAK", leak),
    ("ROWS", rows),
    ("EPOCHS", epochs),
    ("RANK-ORDER", rank_order),
    ("OPEN-BATCH", records),
    ("OPERATIONS", operations),
    ("NAMED-PINS", named_pins),
    ("TABLEN", requests::table_length),
    ("WAIT-EMPTY", requests::wait_empty),
    ("NULL-PREFIX", requests::null_prefix),
    ("GROUP-AGREE", requests::group_agree),
    ("CROSS", requests::cross),
    ("NO-ALIAS", requests::no_alias),
    ("CACHED-COUNT", requests::cached_count),
    ("REQ-HASH", requests::request_hashes),
    ("CACHE-KEY", requests::published_content),
    ("DRAFT", requests::drafts),
    ("COMPUTED", requests::computed_bound),
    ("STATE-LIVE", states::live_states),
    ("STATE-OWN", states::checkpoints),
];

/// The names of all properties that do not hold.
#[must_use]
pub fn failing(state: &State, scratch: &mut Scratch) -> Vec<&'static str> {
    let found = PROPERTIES.into_iter().map(|(name, holds)| (name, holds(state, scratch)));
    found.filter(|(_, finding)| finding.is_err()).map(|(name, _)| name).collect()
}

/// Fails with the first property that counts and does not hold; with REFINE, if a request remembers
/// what is not so.
pub fn check(state: &State, checks: &Checks, scratch: &mut Scratch) -> Result<(), Violation> {
    for &(name, holds) in &PROPERTIES {
        if checks.count(name) {
            holds(state, scratch).map_err(|detail| Violation::new(name, detail))?;
        }
    }
    checks.hear_finding("REFINE", remembered(state))
}

/// Whether a block is free or quarantined.
pub(crate) fn is_in_a_queue(pool: &BlockPool, block: BlockId) -> bool {
    let waits = || pool.quarantine.as_ref().is_some_and(|waiting| waiting.contains(block));
    pool.queue.contains(block) || waits()
}

/// A request's tables in a tier.
fn tables_in<'a>(request: &'a RequestState, tier: &str) -> &'a [Table] {
    if tier == "device" { &request.tables } else { &request.host_tables }
}

/// REF: a block's reference count is the number of tables that hold it, plus its pins and the
/// batches in flight that own it.
fn ref_counts(state: &State, scratch: &mut Scratch) -> Finding {
    for (tier, pool) in pools(state) {
        let held = scratch.zeros(pool.num_blocks() as usize);
        for block in state.requests().flat_map(|request| tables_in(request, tier)).flatten() {
            if !pool.is_null(*block) && *block != NO_HOST_BLOCK {
                held[block.index()] += 1;
            }
        }
        let batches = state.in_flight.iter().filter(|_| tier == "device");
        for owed in batches.flat_map(|batch| &batch.owed) {
            held[owed.block.index()] += 1;
        }
        for (block, held) in (0..).map(BlockId).zip(held) {
            let (count, expected) = (pool.ref_count(block), *held + pool.num_pins(block));
            if count != expected {
                let block = block.0;
                return Err(format!(
                    "{tier} block {block} counts {count} owners, but {expected} hold it"
                ));
            }
        }
    }
    Ok(())
}

/// PARTITION: a usable block is free or quarantined if and only if it has no owner.
fn partition(state: &State, _: &mut Scratch) -> Finding {
    for (tier, pool) in pools(state) {
        for block in (0..pool.num_blocks()).map(BlockId).filter(|&block| !pool.is_null(block)) {
            let (owners, free) = (pool.ref_count(block), is_in_a_queue(pool, block));
            if (owners == 0) != free {
                let block = block.0;
                return Err(format!(
                    "{tier} block {block} has {owners} owners, in a queue: {free}"
                ));
            }
        }
    }
    Ok(())
}

/// FQ-UNIQ: no block is in the free queue or in quarantine twice, links agree in both directions,
/// and counters equal lengths.
///
/// Each block's link back is the block before it, so none can be met twice.
fn queue_unique(state: &State, _: &mut Scratch) -> Finding {
    for (tier, pool) in pools(state) {
        let (end, mut length) = (pool.num_blocks(), 0);
        for sentinel in (0..pool.queue.num_rings()).map(|ring| pool.queue.sentinel(ring)) {
            let mut block = sentinel;
            loop {
                let (_, after) = pool.queue.links(block);
                let in_ring = after < end || after == sentinel;
                if !in_ring || pool.queue.links(after).0 != block {
                    return Err(format!("{tier} links around block {block} disagree"));
                }
                block = after;
                if block == sentinel || length > end {
                    break;
                }
                length += 1;
            }
        }
        if length != pool.num_free() {
            return Err(format!("{tier} free queue of {length} counts {}", pool.num_free()));
        }
        let Some(quarantine) = &pool.quarantine else { continue };
        let waiting = quarantine.blocks();
        if waiting.len() != quarantine.len() as usize {
            let (found, counted) = (waiting.len(), quarantine.len());
            return Err(format!("{tier} quarantine of {found} counts {counted}"));
        }
        if let Some(block) = waiting.iter().find(|&&block| pool.queue.contains(block)) {
            return Err(format!("{tier} block {} is free and quarantined", block.0));
        }
    }
    Ok(())
}

/// NULL: the null block is not free, and has no key, no owner and no pin.
fn null_block(state: &State, _: &mut Scratch) -> Finding {
    let (pool, null) = (&state.device, BlockId(0));
    if !pool.is_null(null) {
        return Ok(());
    }
    if is_in_a_queue(pool, null) {
        return Err("the null block is in the free queue".to_owned());
    }
    if pool.has_key(null) {
        return Err("the null block has a key".to_owned());
    }
    if pool.ref_count(null) > 0 || pool.num_pins(null) > 0 {
        return Err("the null block has an owner".to_owned());
    }
    Ok(())
}

/// IDX-SOUND: a block in the index has the key under which it is found; links agree in both
/// directions, and join only blocks with one key.
fn index_sound(state: &State, _: &mut Scratch) -> Finding {
    for (tier, pool) in pools(state) {
        let mut num_found = 0;
        for (first, several) in pool.index.firsts() {
            if pool.key(first).is_none() || pool.index.first(pool.index.key(first)) != Some(first) {
                let block = first.0;
                return Err(format!("{tier} block {block} is found under another key"));
            }
            num_found += if several { ring_length(tier, pool, first)? } else { 1 };
        }
        let blocks = (0..pool.num_blocks()).map(BlockId);
        let num_keyed = blocks.filter(|&block| pool.key(block).is_some()).count() as u32;
        if num_found > num_keyed {
            return Err(format!("{tier} index holds {num_found} blocks, {num_keyed} have a key"));
        }
    }
    Ok(())
}

/// Blocks of the ring of a key that has several.
fn ring_length(tier: &str, pool: &BlockPool, first: BlockId) -> Result<u32, String> {
    let mut block = first;
    for length in 1..=pool.num_blocks() {
        let after = BlockId(pool.index.links(block).1);
        if after.0 >= pool.num_blocks() || pool.index.links(after).0 != block.0 {
            return Err(format!("{tier} index links from block {}, but not back", block.0));
        }
        if pool.key(after) != pool.key(first) {
            return Err(format!("{tier} block {} is under another block's key", after.0));
        }
        block = after;
        if block == first && length > 1 {
            return Ok(length);
        }
    }
    Err(format!("{tier} index has no ring at block {}", first.0))
}

/// IDX-COMPLETE: a block with a key is found under it exactly once.
fn index_complete(state: &State, _: &mut Scratch) -> Finding {
    for (tier, pool) in pools(state) {
        for block in (0..pool.num_blocks()).map(BlockId) {
            let Some(key) = pool.key(block) else { continue };
            let first = pool.index.first(key);
            let is_found = |first| pool.index.blocks(first).any(|each| each == block);
            if !first.is_some_and(|first| first == block || is_found(first)) {
                return Err(format!("{tier} block {} is not found under its key", block.0));
            }
        }
    }
    Ok(())
}

/// LEAK: if there are no requests, pins and batches in flight, every usable block is free.
fn leak(state: &State, _: &mut Scratch) -> Finding {
    if state.requests().next().is_some() {
        return Ok(());
    }
    for (tier, pool) in pools(state) {
        let (free, usable) = (pool.num_free(), pool.num_usable());
        let waits = !pool.pins.is_empty()
            || !state.in_flight.is_empty()
            || in_flight::is_used_by(pool, state.batch.number);
        if !waits && free != usable {
            return Err(format!("{tier} tier has {free} of {usable} blocks free"));
        }
    }
    Ok(())
}

/// EPOCHS: blocks of older epochs have no key, and either have owners or leave first; a request
/// with computed tokens belongs to an epoch that has begun, any other request to none.
fn epochs(state: &State, _: &mut Scratch) -> Finding {
    let (pool, start, epoch) = (&state.device, state.config.epoch, state.epoch);
    let num_first = num_older(&pool.queue) as usize;
    if let Some(block) = pool.queue.iter().take(num_first).find(|&each| pool.has_key(each)) {
        return Err(format!("block {} of an older epoch has a key", block.0));
    }
    let has_older = !pool.older().is_empty() || (num_first > 0 && pool.retention.is_none());
    if epoch < start || (epoch == start && has_older) {
        return Err(format!("epoch {epoch} follows {start}, {num_first} blocks are of older ones"));
    }
    for row in (0..state.requests.len() as u32).map(Row) {
        let counts = state.requests[row.index()].as_ref().is_some_and(|each| each.num_computed > 0);
        if counts && !(start..=epoch).contains(&state.epochs[row.index()]) {
            return Err(format!("row {} is of epoch {}", row.0, state.epochs[row.index()]));
        }
    }
    Ok(())
}

/// ROWS: each row is exactly one of: taken by a request, free, held for an unfinished batch.
fn rows(state: &State, scratch: &mut Scratch) -> Finding {
    let num_taken = state.requests().count();
    for (name, row) in &state.rows {
        let request = state.requests.get(row.index()).and_then(Option::as_ref);
        let is_its = |id: &Arc<str>| Arc::ptr_eq(id, name) || id == name;
        if !request.is_some_and(|request| is_its(&request.request_id)) {
            return Err(format!("row {} is not that of {name}", row.0));
        }
    }
    if num_taken != state.rows.len() {
        return Err(format!("{} rows are named for {num_taken} requests", state.rows.len()));
    }
    let freed = scratch.zeros(state.requests.len());
    let held = state.held_rows.iter().map(|(row, _)| row);
    for row in state.free_rows.iter().chain(held) {
        match freed.get_mut(row.index()) {
            Some(times) => *times += 1,
            None => return Err(format!("free row {} was never given", row.0)),
        }
    }
    for (row, (&times, request)) in freed.iter().zip(&state.requests).enumerate() {
        if times != u32::from(request.is_none()) {
            return Err(format!("row {row} is {times} times among the free rows"));
        }
    }
    let batches: Vec<u64> = state.held_rows.iter().map(|&(_, batch)| batch).collect();
    let known = |&number: &u64| {
        number == state.batch.number || state.in_flight.iter().any(|batch| batch.number == number)
    };
    if !batches.is_sorted() || !batches.iter().all(known) {
        return Err(format!("rows are held for batches {batches:?}"));
    }
    Ok(())
}

/// OPEN-BATCH: the open batch has records of running requests alone, none of which counts fewer
/// tokens than when the batch was opened.
fn records(state: &State, _: &mut Scratch) -> Finding {
    let num_groups = state.config.groups.len();
    for row in state.batch.scheduled.keys() {
        let request = state.requests.get(row.index()).and_then(Option::as_ref);
        let running = request.filter(|request| request.status() == Status::Running);
        let Some(request) = running else {
            return Err(format!("row {} is in the open batch, but does not run", row.0));
        };
        let Some(record) = state.batch.scheduled.get(row) else { continue };
        if record.num_computed_before > request.num_computed {
            return Err(format!("{} counts less than before the open batch", request.name()));
        }
        if !(record.num_computed_before..=request.num_computed).contains(&record.num_kept) {
            let (name, count, kept) = (request.name(), request.num_computed, record.num_kept);
            return Err(format!("{name} counts {count}, but keeps at least {kept}"));
        }
        for item in state.batch.unwritten_of(record) {
            let Some(group) = state.config.groups.get(item.group_id as usize) else {
                return Err(format!("{} published in group {}", request.name(), item.group_id));
            };
            let end = (u64::from(item.position) + 1) * u64::from(group.block_size);
            if end <= u64::from(record.num_computed_before) {
                return Err(format!("block {} was written before the open batch", item.block.0));
            }
            let held = request.tables[item.group_id as usize].get(item.position as usize);
            if held != Some(&item.block) {
                let (name, block) = (request.name(), item.block.0);
                return Err(format!("{name} published block {block}, which it does not hold"));
            }
        }
    }
    match state.batch.merges.iter().find(|merge| merge.group_id as usize >= num_groups) {
        Some(merge) => Err(format!("a merge names group {} of {num_groups}", merge.group_id)),
        None => Ok(()),
    }
}
