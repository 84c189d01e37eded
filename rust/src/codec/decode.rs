// SPDX-License-Identifier: Apache-2.0
//! A state from its canonical bytes; the inverse of `encode.rs`.
//!
//! Invariants: bytes that encode no state fail with DamagedState with the offset, also if what they
//! do not encode is a configuration. Only the structure is checked here;
//! `kvcore.invariants.pool_and_state` checks the content.
//! Twin: kvcore/codec/decode.py.

pub(crate) mod decode_request;

use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use crate::codec::decode::decode_request::read_request;
use crate::codec::decode_batch::{read_batch, read_batches_in_flight};
use crate::codec::encode::{DUPLICATES, MAGIC, OWNERS_END, PUBLISH};
use crate::codec::sections::read_sections;
use crate::pool::block_pool::{BlockPool, make_pool};
use crate::pool::free_queue::make_free_queue;
use crate::pool::policy_state::make_policy_state;
use crate::pool::quarantine::make_quarantine;
use crate::state::state::{MAX_OPERATION, Operation, State, make_state};
use crate::types::config::{Config, EVICTIONS, Eviction};
use crate::types::errors::Error;
use crate::types::event_log::read_events;
use crate::types::groups::{Group, KINDS, Kind};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::{HASHINGS, Key};
use crate::types::memory::check_memory;
use crate::types::values::PrefixCacheStats;
use crate::types::wire::Reader;

/// The state of canonical bytes. Fails with DamagedState, PoolTooLarge.
pub fn decode(data: &[u8]) -> Result<State, Error> {
    let mut source = Reader::new(data);
    if source.take(MAGIC.len())? != MAGIC {
        let reason = "the first bytes are not those of a state".to_owned();
        return Err(Error::DamagedState { reason, offset: 0 });
    }
    let config = read_config(&mut source)?;
    config.check().map_err(|error| source.damaged(error.to_string()))?;
    let sizes = (config.eviction, config.num_blocks);
    let device = read_pool(&mut source, &config, sizes, config.null_block)?;
    let hosts = config.num_host_blocks;
    let sizes = (config.eviction.of_host(), hosts);
    let host = if hosts > 0 { Some(read_pool(&mut source, &config, sizes, false)?) } else { None };
    let requests = source.list(|source| match source.flag()? {
        true => Ok(Some(read_request(source, &config)?)),
        false => Ok(None),
    })?;
    let mut rows = HashMap::new();
    for (row, request) in (0..).map(Row).zip(&requests) {
        let Some(request) = request else { continue };
        if rows.insert(Arc::clone(&request.request_id), row).is_some() {
            return Err(source.damaged("a request occurs twice"));
        }
    }
    let free_rows = source.ids(requests.len() as u32)?.into_iter().map(Row).collect();
    let epochs = vec![0; requests.len()];
    let start = make_state(config)?;
    let mut state = State { device, host, requests, epochs, rows, free_rows, ..start };
    read_batch(&mut source, &mut state)?;
    read_batches_in_flight(&mut source, &mut state)?;
    state.effects.events = read_events(&mut source)?;
    state.stats = read_stats(&mut source)?;
    for group_id in 0..state.config.groups.len() as u32 {
        let blocks = source.blocks(state.config.num_blocks)?;
        blocks.into_iter().for_each(|block| state.new_blocks.push(group_id, block));
    }
    read_operations(&mut source, &mut state)?;
    state.next_operation = source.u32()?;
    read_sections(&mut source, &mut state)?;
    Ok(state)
}

fn read_config(source: &mut Reader<'_>) -> Result<Config, Error> {
    let num_blocks = source.u32()?;
    let groups = source.list(read_group)?;
    if groups.is_empty() {
        return Err(source.damaged("there is no group"));
    }
    Ok(Config {
        num_blocks,
        groups,
        num_host_blocks: source.u32()?,
        max_model_len: Some(source.u32()?).filter(|&longest| longest > 0),
        max_num_batched_tokens: Some(source.u32()?).filter(|&most| most > 0),
        enable_caching: source.flag()?,
        null_block: source.flag()?,
        eviction: EVICTIONS[usize::from(source.choice(EVICTIONS.len() as u8)?)].0,
        duplicates: DUPLICATES[usize::from(source.flag()?)],
        hashing: HASHINGS[usize::from(source.choice(HASHINGS.len() as u8)?)],
        num_preallocate_tokens: source.u32()?,
        watermark_blocks: source.u32()?,
        use_eagle: source.flag()?,
        enable_events: source.flag()?,
        record_new_blocks: source.flag()?,
        hash_seed: source.sized()?.to_vec(),
        max_in_flight: source.u32()?,
        publish: PUBLISH[usize::from(source.flag()?)],
        hide_salts: false,
        epoch: 0,
        max_pinned_blocks: None,
        floors: Vec::new(),
        hash_unit: None,
    })
}

fn read_group(source: &mut Reader<'_>) -> Result<Group, Error> {
    let block_size = source.u32()?;
    let kind = KINDS[usize::from(source.choice(KINDS.len() as u8)?)];
    let (number, is_state) = (source.u32()?, kind == Kind::State);
    let group = Group {
        block_size,
        kind,
        window: Some(number).filter(|&window| window > 0 && !is_state),
        draft_states: if is_state { number } else { 0 },
        eagle: source.flag()?,
        zero_new_blocks: source.flag()?,
        page_bytes: Some(source.u64()?).filter(|&bytes| bytes > 0),
    };
    group.check().map_err(|error| source.damaged(error.to_string()))?;
    Ok(group)
}

fn read_pool(
    source: &mut Reader<'_>,
    config: &Config,
    (eviction, num_blocks): (Eviction, u32),
    null_block: bool,
) -> Result<BlockPool, Error> {
    // At least five bytes per block: a damaged count must not become an allocation.
    if (num_blocks as usize).saturating_mul(5) > source.data.len() - source.offset {
        return Err(source.damaged(format!("{num_blocks} blocks are missing")));
    }
    check_memory(num_blocks.into())?;
    let mut pool = make_pool(num_blocks, null_block, eviction, config.max_in_flight > 0);
    pool.policy = make_policy_state(eviction, num_blocks);
    let mut ranked: Vec<(Key, u32, BlockId)> = Vec::new();
    for block in (0..num_blocks).map(BlockId) {
        pool.restore(block, source.below(OWNERS_END)?);
        if source.flag()? {
            ranked.push((source.key()?, source.u32()?, block));
        }
    }
    let order = source.blocks(num_blocks)?;
    if order.iter().collect::<HashSet<_>>().len() != order.len() {
        return Err(source.damaged("a block is in the free queue twice"));
    }
    pool.queue = make_free_queue(num_blocks, order, 0);
    ranked.sort_unstable();
    let mut before: Option<(Key, u32)> = None;
    for (key, rank, block) in ranked {
        let expected = before.filter(|&(last, _)| last == key).map_or(0, |(_, last)| last + 1);
        if rank != expected {
            return Err(source.damaged("the blocks of a key are not ranked from 0"));
        }
        pool.publish(block, key);
        before = Some((key, rank));
    }
    let pinned = source.blocks(num_blocks)?;
    let counts = source.ids(OWNERS_END)?;
    if pinned.len() != counts.len() {
        return Err(source.damaged("pins without counts"));
    }
    if !pinned.is_sorted_by(|before, after| before < after) {
        return Err(source.damaged("the pinned blocks are not in ascending order"));
    }
    pool.pins = pinned.into_iter().zip(counts).collect();
    read_quarantine(source, &mut pool)?;
    Ok(pool)
}

fn read_quarantine(source: &mut Reader<'_>, pool: &mut BlockPool) -> Result<(), Error> {
    let order = source.blocks(pool.num_blocks())?;
    let mut waiting = make_quarantine();
    let mut last: Option<BlockId> = None;
    for _ in 0..source.u32()? {
        let (block, numbers) = (BlockId(source.u32()?), source.list(Reader::u64)?);
        let rises = numbers.is_sorted_by(|before, after| before < after) && !numbers.is_empty();
        if last.is_some_and(|last| last >= block) || block.0 >= pool.num_blocks() || !rises {
            return Err(source.damaged("the blocks in use by batches are not in canonical form"));
        }
        numbers.into_iter().for_each(|number| waiting.note_use(block, number));
        last = Some(block);
    }
    for &block in &order {
        if waiting.contains(block) || pool.queue.contains(block) {
            return Err(source.damaged("a block is free or quarantined twice"));
        }
        waiting.append(block);
    }
    match &mut pool.quarantine {
        Some(empty) => *empty = waiting,
        None if order.is_empty() && last.is_none() => {}
        None => {
            let reason = "blocks wait for a batch, but batches are never in flight";
            return Err(source.damaged(reason));
        }
    }
    Ok(())
}

fn read_operations(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    for _ in 0..source.u32()? {
        let (number, block, key) = (source.u32()?, BlockId(source.u32()?), source.key()?);
        let (batch, request_id, first_token) = (source.u64()?, source.text()?, source.u32()?);
        let request = request_id.as_deref().and_then(|id| state.rows.get(id)).copied();
        let known = block.0 < state.config.num_blocks && request.is_some() == request_id.is_some();
        let operation = Operation { block, key, batch, request, first_token };
        let rises = state.operations.keys().next_back().is_none_or(|&last| last < number);
        state.operations.insert(number, operation);
        if !known || !rises || number > MAX_OPERATION {
            return Err(source.damaged("an operation that cannot occur"));
        }
    }
    Ok(())
}

fn read_stats(source: &mut Reader<'_>) -> Result<PrefixCacheStats, Error> {
    Ok(PrefixCacheStats {
        requests: source.u64()?,
        queries: source.u64()?,
        hits: source.u64()?,
        preempted_requests: source.u64()?,
        preempted_queries: source.u64()?,
        preempted_hits: source.u64()?,
        reset: source.flag()?,
    })
}
