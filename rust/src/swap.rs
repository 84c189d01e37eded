// SPDX-License-Identifier: Apache-2.0
//! Swap: the blocks of a set of requests move between the device and the host tier.
//!
//! Rules: each distinct block of the set is copied once and shared again on the other side; a block
//! that others hold is copied and stays for them. Swapped out, a request leaves the open batch
//! first; what is left of it is copied, and with nothing left it waits. On the way in, a block
//! whose content is findable on the device is a hit, not a copy, unless the open batch published
//! it. Source: design, 7.6; S003-25 to 28. Twin: kvcore/swap.py.

use hashbrown::{HashMap, HashSet};

use crate::block_pool::BlockPool;
use crate::commands::Command;
use crate::errors::Error;
use crate::ids::{BlockId, Row};
use crate::release::{check_leaving, cut_tables, leave_open_batch, release_host};
use crate::state::{State, Table};
use crate::values::{Admitted, Reason, Refused, Status};

/// Host blocks in the order of their first use, each with the device block that has its content.
type Hits = Vec<(BlockId, Option<BlockId>)>;

/// Move what the open batch leaves of the requests' blocks to the host tier.
///
/// Refused where the host tier has too few free blocks. Fails with NoHostTier, UnknownRequest,
/// RepeatedRequest, NotRunning, HitInOpenBatch.
pub fn swap_out(state: &mut State, request_ids: &[&str]) -> Result<Admitted<()>, Error> {
    state.host_tier()?;
    let rows = state.distinct(request_ids)?;
    for &row in &rows {
        if state[row].status() != Status::Running {
            return Err(Error::NotRunning { request: state[row].name() });
        }
    }
    check_leaving(state, &rows)?;
    let mut seen = HashSet::new();
    let blocks: Vec<BlockId> =
        rows.iter().flat_map(|&row| kept(state, row)).filter(|&block| seen.insert(block)).collect();
    let host = state.host_tier()?;
    if blocks.len() as u32 > host.num_free() {
        return Ok(Err(refuse(host, blocks.len() as u32)));
    }
    for &row in &rows {
        leave_open_batch(state, row);
    }
    let State { host, host_effects, effects, .. } = state;
    let host = host.as_mut().expect("TIER-PART: checked at the start");
    let taken = host.take(blocks.len() as u32, host_effects);
    for (&block, &host_block) in blocks.iter().zip(&taken) {
        effects.emit(Command::SwapOut { block, host_block });
    }
    move_out(state, &rows, &blocks.into_iter().zip(taken).collect());
    Ok(Ok(()))
}

/// Move swapped requests back to the device.
///
/// Refused where the device has too few free blocks. Fails with NoHostTier, UnknownRequest,
/// RepeatedRequest, NotSwapped.
pub fn swap_in(state: &mut State, request_ids: &[&str]) -> Result<Admitted<()>, Error> {
    state.host_tier()?;
    let rows = state.distinct(request_ids)?;
    for &row in &rows {
        if state[row].status() != Status::Swapped {
            return Err(Error::NotSwapped { request: state[row].name() });
        }
    }
    let hits = find_hits(state, &rows);
    let found: HashSet<BlockId> = hits.iter().filter_map(|&(_, block)| block).collect();
    let in_queue = found.iter().filter(|&&block| state.device.ref_count(block) == 0).count();
    let num_copied = hits.iter().filter(|(_, block)| block.is_none()).count();
    let needed = (num_copied + in_queue) as u32;
    if needed > state.device.num_free() {
        return Ok(Err(refuse(&state.device, needed)));
    }
    move_in(state, &rows, hits);
    Ok(Ok(()))
}

/// The refusal of so many blocks of a pool.
fn refuse(pool: &BlockPool, needed: u32) -> Refused {
    let never = needed > pool.num_usable();
    Refused {
        reason: if never { Reason::Never } else { Reason::Later },
        needed: u64::from(needed),
        available: u64::from(pool.num_free()),
        pending: 0,
    }
}

/// The blocks of a request that hold tokens computed before the open batch, in table order.
fn kept(state: &State, row: Row) -> impl Iterator<Item = BlockId> + '_ {
    let request = &state[row];
    let record = state.batch.records.get(&row);
    let num_tokens = record.map_or(request.num_computed, |record| record.num_computed_before);
    let num_blocks = num_tokens.div_ceil(state.config.block_size()) as usize;
    request.tables.iter().flat_map(move |table| table.iter().take(num_blocks).copied())
}

/// Put the requests' tables on the host side and give back their device blocks, tail first.
fn move_out(state: &mut State, rows: &[Row], targets: &HashMap<BlockId, BlockId>) {
    let mut owned: HashSet<BlockId> = HashSet::new();
    for &row in rows {
        let num_computed = state[row].num_computed;
        let num_blocks = num_computed.div_ceil(state.config.block_size()) as usize;
        let side = |table: &Table| table.iter().take(num_blocks).map(|b| targets[b]).collect();
        let tables: Vec<Table> = state[row].tables.iter().map(side).collect();
        let host = state.host.as_mut().expect("TIER-PART: checked at the start");
        for &block in tables.iter().flatten() {
            if !owned.insert(block) {
                host.touch(block, &mut state.host_effects);
            }
        }
        cut_tables(state, row, 0);
        let request = &mut state[row];
        if num_computed > 0 {
            request.num_computed = num_computed;
            request.host_tables = tables;
        } else {
            request.preempted = true;
        }
    }
}

/// Host block to the device block that has its content, None where it must be copied.
fn find_hits(state: &State, rows: &[Row]) -> Hits {
    let records = state.batch.records.values();
    let unwritten: HashSet<BlockId> =
        records.flat_map(|record| &record.published).map(|item| item.block).collect();
    let mut hits: Hits = Vec::new();
    let mut places: HashMap<BlockId, usize> = HashMap::new();
    for request in rows.iter().map(|&row| &state[row]) {
        let num_full = request.num_computed / state.config.block_size();
        for (group, table) in (0..).zip(&request.host_tables) {
            for (position, &host_block) in (0..).zip(table) {
                let place = *places.entry(host_block).or_insert_with(|| {
                    hits.push((host_block, None));
                    hits.len() - 1
                });
                if !state.config.enable_caching || position >= num_full {
                    continue;
                }
                let block = state.device.index.first(&request.key(position, group));
                if let Some(block) = block.filter(|block| !unwritten.contains(block)) {
                    hits[place].1 = Some(block);
                }
            }
        }
    }
    hits
}

/// Put the requests' tables on the device side and give back their host blocks, tail first.
fn move_in(state: &mut State, rows: &[Row], hits: Hits) {
    let State { device, effects, .. } = state;
    let mut owned: HashSet<BlockId> = HashSet::new();
    for &(_, block) in &hits {
        if let Some(block) = block
            && owned.insert(block)
        {
            device.touch(block, effects);
        }
    }
    let num_copied = hits.iter().filter(|(_, block)| block.is_none()).count();
    let mut taken = device.take(num_copied as u32, effects).into_iter();
    let mut targets: HashMap<BlockId, BlockId> = HashMap::new();
    for (host_block, hit) in hits {
        let block = hit.unwrap_or_else(|| {
            let block = taken.next().expect("ADMIT-EXACT: a block for each copy was planned");
            effects.emit(Command::SwapIn { host_block, block });
            block
        });
        targets.insert(host_block, block);
    }
    let mut owned: HashSet<BlockId> = HashSet::new();
    for &row in rows {
        put_back(state, row, &targets, &mut owned);
    }
}

/// Put one request's tables on the device side; `owned` has the blocks that have their first owner.
fn put_back(
    state: &mut State,
    row: Row,
    targets: &HashMap<BlockId, BlockId>,
    owned: &mut HashSet<BlockId>,
) {
    let side = |table: &Table| table.iter().map(|block| targets[block]).collect();
    let tables: Vec<Table> = state[row].host_tables.iter().map(side).collect();
    for (group, table) in (0..).zip(&tables) {
        for (position, &block) in (0..).zip(table) {
            if !owned.insert(block) {
                state.device.touch(block, &mut state.effects);
            }
            state.effects.emit(Command::SetTable { row, group, position, block });
        }
    }
    let num_computed = state[row].num_computed;
    let num_cached = tables.iter().map(|table| num_published(state, row, table)).collect();
    release_host(state, row);
    let request = &mut state[row];
    request.num_computed = num_computed;
    request.num_cached = num_cached;
    request.tables = tables;
}

/// Leading full blocks that are findable already.
fn num_published(state: &State, row: Row, blocks: &[BlockId]) -> u32 {
    let num_full = (state[row].num_computed / state.config.block_size()) as usize;
    let full = blocks.iter().take(num_full);
    full.take_while(|&&block| state.device.key(block).is_some()).count() as u32
}
