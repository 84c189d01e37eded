// SPDX-License-Identifier: Apache-2.0
//! Swap: the blocks of a set of requests move between the device and the host tier.
//!
//! Invariants: each distinct block of the set is copied once and shared again on the other side; a
//! block that other requests hold is copied and stays for them. A request that is swapped out
//! leaves the open batch first; its remaining blocks are copied, and if none remain, it waits. On
//! the way in, a block whose content is findable on the device is a hit, not a copy, unless the
//! open batch published it.
//! Source: S003-25 to 28. Twin: kvcore/transitions/swap.py.

use hashbrown::{HashMap, HashSet};

use crate::mutants::{Mutant, seeded};
use crate::pool::block_pool::BlockPool;
use crate::pool::floors::NO_TENANT;
use crate::state::state::{NO_HOST_BLOCK, NULL_BLOCK, State};
use crate::state::table_edit::TableEdit;
use crate::transitions::batches::settle_own_merges;
use crate::transitions::drain::forget_new;
use crate::transitions::free::{check_leaving, cut_tables, leave_open_batch, release_host};
use crate::transitions::in_flight::note_request;
use crate::transitions::states::num_left;
use crate::transitions::unconfirmed_loads::{lower_counted, note_owner};
use crate::transitions::window::last_state;
use crate::types::commands::Command;
use crate::types::errors::Error;
use crate::types::ids::{BlockId, Row, Table};
use crate::types::values::{Admitted, Reason, Refused, Status, Swapped};

/// Host blocks in the order of their first use, each with the device block that has its content.
type Hits = Vec<(BlockId, Option<BlockId>)>;

/// Move the requests' blocks, without what the open batch would write, to the host tier.
///
/// Value: the moved blocks. Refused if the host tier has too few free blocks. Fails with
/// NoHostTier, UnknownRequest, RepeatedRequest, NotRunning, LoadUnfinished, HitInOpenBatch.
pub fn swap_out(state: &mut State, request_ids: &[&str]) -> Result<Admitted<Swapped>, Error> {
    state.host_tier()?;
    let rows = state.distinct(request_ids)?;
    for &row in &rows {
        if state[row].status() != Status::Running {
            return Err(Error::NotRunning { request: state[row].name() });
        }
        state.check_idle(row)?;
    }
    check_leaving(state, &rows)?;
    let counts: Vec<(Row, u32)> = rows.iter().map(|&row| (row, num_saved(state, row))).collect();
    let mut seen = HashSet::new();
    let held = counts.iter().flat_map(|&(row, num_tokens)| kept(state, row, num_tokens));
    let blocks: Vec<BlockId> = held.filter(|&block| seen.insert(block)).collect();
    let host = state.host_tier()?;
    if blocks.len() as u32 > host.num_free() {
        let refused = refuse(host, blocks.len() as u32, 0, 0);
        return Ok(Err(refused.while_pending(host.num_quarantined())));
    }
    for &row in &rows {
        leave_open_batch(state, row);
    }
    let State { host, host_effects, effects, device, batch, .. } = state;
    let host = host.as_mut().expect("TIER-PART: checked at the start");
    let taken = host.take(blocks.len() as u32, host_effects);
    for (&block, &host_block) in blocks.iter().zip(&taken) {
        effects.emit(Command::SwapOut { block, host_block });
        device.note_use(block, batch.number);
        host.note_use(host_block, batch.number);
    }
    let swapped = Swapped { num_copied: blocks.len() as u32, num_found: 0 };
    move_out(state, &counts, &blocks.into_iter().zip(taken).collect());
    Ok(Ok(swapped))
}

/// Move swapped requests back to the device.
///
/// Value: the moved blocks. Refused if the device has too few free blocks. Fails with NoHostTier,
/// UnknownRequest, RepeatedRequest, NotSwapped.
pub fn swap_in(state: &mut State, request_ids: &[&str]) -> Result<Admitted<Swapped>, Error> {
    state.host_tier()?;
    let rows = state.distinct(request_ids)?;
    for &row in &rows {
        if state[row].status() != Status::Swapped {
            return Err(Error::NotSwapped { request: state[row].name() });
        }
    }
    let hits = find_hits(state, &rows);
    let found: HashSet<BlockId> = hits.iter().filter_map(|&(_, block)| block).collect();
    let in_queue = found.iter().filter(|&&block| state.device.is_queued(block)).count();
    let num_copied = hits.iter().filter(|(_, block)| block.is_none()).count();
    let (needed, watermark) = ((num_copied + in_queue) as u32, state.config.watermark_blocks);
    let taker = taker_of(state, &rows);
    let kept = state.device.num_kept(taker, found.into_iter(), std::iter::empty());
    if needed > 0 && needed + watermark + kept > state.device.num_free() {
        let refused = refuse(&state.device, needed, watermark, kept);
        return Ok(Err(refused.while_pending(state.num_pending())));
    }
    let num_found = (hits.len() - num_copied) as u32;
    move_in(state, &rows, hits, taker);
    Ok(Ok(Swapped { num_copied: num_copied as u32, num_found }))
}

/// Return the tenant of all these requests, or none: a call for several leaves what each keeps.
fn taker_of(state: &State, rows: &[Row]) -> u8 {
    let mut tenants = rows.iter().map(|&row| state.tenant(row));
    let first = tenants.next().unwrap_or(NO_TENANT);
    if tenants.all(|each| each == first) { first } else { NO_TENANT }
}

/// Return for each host block the tenant of the first of these requests that holds it.
fn first_tenants(state: &State, rows: &[Row], host_blocks: &[BlockId]) -> Vec<u8> {
    let first = |host_block: &BlockId| {
        let holds =
            |row: &&Row| state[**row].host_tables.iter().flatten().any(|id| id == host_block);
        rows.iter().find(holds).map_or(NO_TENANT, |&row| state.tenant(row))
    };
    host_blocks.iter().map(first).collect()
}

/// Return the refusal of `needed` blocks by a pool that keeps `watermark` blocks free, and `kept`
/// blocks for the floors of others.
fn refuse(pool: &BlockPool, needed: u32, watermark: u32, kept: u32) -> Refused {
    let never = needed + watermark > pool.num_usable();
    let reason = if never { Reason::Never } else { Reason::Later };
    Refused::new(reason, u64::from(needed), pool.num_free().saturating_sub(watermark + kept))
}

/// Return how many tokens a request keeps when it is swapped out: those computed before the open
/// batch.
///
/// If tokens are to come, it keeps at most all but one, so that the next one is sampled again.
fn num_saved(state: &State, row: Row) -> u32 {
    let (request, record) = (&state[row], state.batch.scheduled.get(row));
    if let Some(record) = record.filter(|_| state.has_states) {
        let left = num_left(record);
        let ahead = request.num_output_placeholders() > 0 && left >= request.num_tokens();
        return if ahead { 0 } else { left };
    }
    if request.num_output_placeholders() == 0 {
        return state.num_settled(row);
    }
    let before = record.map_or(u32::MAX, |each| each.num_computed_before);
    state.resumable(row, before.min(request.num_tokens() - 1))
}

/// Return the blocks of a request that hold its first tokens, in table order.
fn kept(state: &State, row: Row, num_tokens: u32) -> impl Iterator<Item = BlockId> + '_ {
    let held = move |group_id| saved_table(state, row, group_id, num_tokens);
    let groups = 0..state.config.groups.len() as u32;
    groups.flat_map(held).filter(|&block| !state.is_null(block))
}

/// Return the blocks of a table that hold a request's first tokens; of a state group, the last
/// state before those after drafts, alone.
fn saved_table(state: &State, row: Row, group_id: u32, num_tokens: u32) -> Table {
    let table = &state[row].tables[group_id as usize];
    let num_kept = state.num_kept(group_id, table, num_tokens);
    let mut held = table[..num_kept].to_vec();
    let is_state = state.config.groups[group_id as usize].is_state();
    if let Some((last, before)) = held.split_last_mut().filter(|_| is_state) {
        before.fill(NULL_BLOCK);
        if state.is_null(*last) {
            *last = table[last_state(&state[row], table) as usize];
        }
    }
    held
}

/// Move the requests' tables to the host tier and give back their device blocks, tail first.
///
/// counts: the tokens that each keeps.
fn move_out(state: &mut State, counts: &[(Row, u32)], targets: &HashMap<BlockId, BlockId>) {
    let mut owned: HashSet<BlockId> = HashSet::new();
    for &(row, num_computed) in counts {
        let side = |group_id: u32| -> Table {
            let held = saved_table(state, row, group_id, num_computed);
            let target = |block: &BlockId| {
                if state.is_null(*block) { NO_HOST_BLOCK } else { targets[block] }
            };
            held.iter().map(target).collect()
        };
        let groups = 0..state.config.groups.len() as u32;
        let tables: Vec<Table> = groups.map(side).collect();
        let host = state.host.as_mut().expect("TIER-PART: checked at the start");
        for &block in tables.iter().flatten() {
            if block != NO_HOST_BLOCK && !owned.insert(block) {
                host.touch(block, &mut state.host_effects);
            }
        }
        settle_own_merges(state, row);
        let loads = (num_computed > 0).then(|| std::mem::take(&mut state.loads));
        cut_tables(state, row, 0, 0);
        if let Some(loads) = loads {
            state.loads = loads;
            lower_counted(state, row, num_computed);
        }
        note_request(state, row, 0, 0, None);
        let request = &mut state[row];
        if num_computed > 0 {
            request.num_computed = num_computed;
            request.host_tables = tables;
        } else {
            request.preempted = true;
        }
        request.settle_awaited();
        state.settle_waiting(row);
    }
}

/// Map each host block to the device block with its content, or to None if it must be copied.
fn find_hits(state: &State, rows: &[Row]) -> Hits {
    let unwritten = state.batch.unwritten_blocks();
    let mut hits: Hits = Vec::new();
    let mut places: HashMap<BlockId, usize> = HashMap::new();
    for &row in rows {
        let request = &state[row];
        let may_hit = state.config.enable_caching
            && (!state.is_stale(row) || seeded(Mutant::StaleComesBackToHits));
        for (group_id, table) in (0..).zip(&request.host_tables) {
            let scale = state.scales[group_id as usize];
            let group = &state.config.groups[group_id as usize];
            let num_full = request.num_computed / group.block_size;
            let num_full = num_full.min(request.num_hashed(scale));
            for (position, &host_block) in (0..).zip(table) {
                if host_block == NO_HOST_BLOCK {
                    continue;
                }
                let place = *places.entry(host_block).or_insert_with(|| {
                    hits.push((host_block, None));
                    hits.len() - 1
                });
                if !may_hit || position >= num_full {
                    continue;
                }
                let end = (position + 1) * group.block_size;
                if group.is_state() && end != request.num_computed {
                    continue;
                }
                let block = state.device.index.first(&request.key(scale, group_id, position));
                if let Some(block) = block.filter(|block| !unwritten.contains(block)) {
                    hits[place].1 = Some(block);
                }
            }
        }
    }
    hits
}

/// Move the requests' tables to the device and give back their host blocks, tail first.
fn move_in(state: &mut State, rows: &[Row], hits: Hits, taker: u8) {
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
    let taken = device.take_for(taker, num_copied as u32, effects);
    forget_new(state, &taken);
    let State { device, host, effects, batch, .. } = state;
    let host = host.as_mut().expect("TIER-PART: checked at the start");
    let sources: Vec<BlockId> =
        hits.iter().filter(|each| each.1.is_none()).map(|each| each.0).collect();
    let mut taken = taken.into_iter();
    let mut targets: HashMap<BlockId, BlockId> = HashMap::new();
    for (host_block, hit) in hits {
        let block = hit.unwrap_or_else(|| {
            let block = taken.next().expect("ADMIT-EXACT: a block for each copy was planned");
            effects.emit(Command::SwapIn { host_block, block });
            device.note_use(block, batch.number);
            if !seeded(Mutant::CopyHoldsNothing) {
                host.note_use(host_block, batch.number);
            }
            block
        });
        targets.insert(host_block, block);
    }
    if state.device.floors.is_some() {
        let tenants = first_tenants(state, rows, &sources);
        for (source, tenant) in sources.iter().zip(tenants) {
            state.device.note_taker(targets[source], tenant);
        }
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
    let side = |table: &Table| table.iter().map(|&block| place(block, targets)).collect();
    let tables: Vec<Table> = state[row].host_tables.iter().map(side).collect();
    for (group_id, table) in (0..).zip(&tables) {
        for &block in table {
            if !state.is_null(block) && !owned.insert(block) {
                state.device.touch(block, &mut state.effects);
            }
            TableEdit::of(state, row, group_id).extend(&[block], false);
        }
        if !state.loads.is_empty() {
            note_owner(state, row, table, state[row].num_accepted());
        }
    }
    let num_computed = state[row].num_computed;
    let cached = |(group_id, table): (u32, &Table)| num_published(state, row, group_id, table);
    let num_cached = (0..).zip(&tables).map(cached).collect();
    release_host(state, row);
    note_request(state, row, 0, 0, None);
    let request = &mut state[row];
    request.num_computed = num_computed;
    request.num_cached = num_cached;
}

/// Return the device block that has a host block's content.
fn place(host_block: BlockId, targets: &HashMap<BlockId, BlockId>) -> BlockId {
    if host_block == NO_HOST_BLOCK { NULL_BLOCK } else { targets[&host_block] }
}

/// Count the leading full blocks that are findable already or no longer needed.
fn num_published(state: &State, row: Row, group_id: u32, blocks: &[BlockId]) -> u32 {
    let group = &state.config.groups[group_id as usize];
    if group.is_state() {
        return blocks.len() as u32 - 1;
    }
    let num_full = state[row].num_computed / group.block_size;
    let done = |&&block: &&BlockId| state.is_null(block) || state.device.key(block).is_some();
    blocks.iter().take(num_full as usize).take_while(done).count() as u32
}
