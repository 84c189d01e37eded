// SPDX-License-Identifier: Apache-2.0
//! Planning an allocation: every check, and what it would take, before anything changes.
//!
//! Rules: a plan that fails or refuses has changed nothing. Slots along a request: computed | hit |
//! external | new | lookahead; external tokens and lookahead are clipped at the model length, new
//! tokens are not. A write goes to blocks with one owner and no key: a shared block is replaced
//! (copied if it holds earlier positions), a keyed one loses its key. Hits in the free queue cost
//! capacity, since they are about to leave it. Source: S000-01 to S000-20, S004-07; design, 7.5.
//! Twin: kvcore/plan.py.

use crate::errors::Error;
use crate::ids::{BlockId, Row};
use crate::state::{RequestState, State, Table};
use crate::values::{Admitted, Hit, Reason, Refused};

/// A hit as an engine hands it in: nothing of it is believed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AskedHit {
    /// Block ids, one list a group.
    pub blocks: Vec<Vec<i64>>,
    /// The tokens that they are said to hold.
    pub num_tokens: i64,
}

impl From<&Hit> for AskedHit {
    fn from(hit: &Hit) -> Self {
        let groups = hit.blocks.blocks.iter();
        AskedHit {
            blocks: groups.map(|ids| ids.iter().copied().map(i64::from).collect()).collect(),
            num_tokens: i64::from(hit.num_tokens),
        }
    }
}

/// The arguments of one allocation, by the names of `allocate_slots`; the request comes apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Asked {
    /// Tokens to schedule.
    pub num_new_tokens: i64,
    /// Of `get_computed_blocks`, for a request that holds nothing.
    pub hit: Option<AskedHit>,
    /// Slots behind the new tokens.
    pub num_lookahead_tokens: i64,
    /// Tokens that are computed elsewhere.
    pub num_external_computed_tokens: i64,
    /// Publish nothing; `cache_blocks` does it later.
    pub delay_cache_blocks: bool,
    /// Refuse unless all the request's tokens would fit now.
    pub full_sequence_must_fit: bool,
}

impl Asked {
    /// So many new tokens and nothing else.
    #[must_use]
    pub fn new(num_new_tokens: i64) -> Self {
        Asked { num_new_tokens, ..Asked::default() }
    }
}

/// A block of the request that is about to be written although it is shared or keyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rewrite {
    /// The group of the table.
    pub group: u32,
    /// The place in the table.
    pub position: u32,
    /// A fresh block takes its place.
    pub shared: bool,
    /// It holds earlier positions, so the fresh one is a copy.
    pub copied: bool,
}

/// How one group's table grows behind the hits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Growth {
    /// Blocks for external tokens.
    pub external: u32,
    /// Blocks behind those, preallocation included.
    pub grown: u32,
}

/// What an allocation will do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The row of the request.
    pub row: Row,
    /// Hit blocks a group; empty where there are none.
    pub hits: Vec<Vec<BlockId>>,
    /// Computed, hit, external and new tokens.
    pub num_scheduled: u32,
    /// In table order.
    pub rewrites: Vec<Rewrite>,
    /// One a group; empty where no table grows, as in most steps.
    pub growth: Vec<Growth>,
}

/// The plan of an allocation, or its refusal. Changes nothing.
///
/// Fails as `allocate_slots` does.
pub fn plan_allocation(state: &State, row: Row, asked: &Asked) -> Result<Admitted<Plan>, Error> {
    state.check_on_device(row)?;
    let request = &state[row];
    let hits = check_asked(state, request, asked)?;
    let limit = i64::from(state.config.length_limit());
    let num_hit_tokens = asked.hit.as_ref().map_or(0, |hit| hit.num_tokens);
    let num_local = i64::from(request.num_computed) + num_hit_tokens;
    let num_total = num_local.saturating_add(asked.num_external_computed_tokens).min(limit);
    let num_scheduled = num_total.saturating_add(asked.num_new_tokens);
    check_length(state, request, num_total, num_scheduled)?;
    let num_slots = num_scheduled.saturating_add(asked.num_lookahead_tokens).min(limit);
    let rewrites = plan_rewrites(state, request, num_local, num_slots);
    if asked.full_sequence_must_fit {
        let num_full = num_slots.max(limit.min(i64::from(request.num_tokens())));
        if let Some(refused) = refuse(state, request, &hits, &rewrites, num_full) {
            return Ok(Err(refused));
        }
    }
    if let Some(refused) = refuse(state, request, &hits, &rewrites, num_slots) {
        return Ok(Err(refused));
    }
    let growth = plan_growth(state, request, &hits, &rewrites, (num_total, num_slots));
    Ok(Ok(Plan { row, hits, num_scheduled: num_scheduled as u32, rewrites, growth }))
}

/// The hit blocks a group. Fails for counts below zero, nothing to do, and wrong hits.
fn check_asked(
    state: &State,
    request: &RequestState,
    asked: &Asked,
) -> Result<Vec<Vec<BlockId>>, Error> {
    let counts = [
        ("num_new_tokens", asked.num_new_tokens),
        ("num_lookahead_tokens", asked.num_lookahead_tokens),
        ("num_external_computed_tokens", asked.num_external_computed_tokens),
    ];
    if let Some(&(name, value)) = counts.iter().find(|(_, value)| *value < 0) {
        return Err(Error::InvalidCount { name, value, least: 0 });
    }
    if asked.num_new_tokens == 0 && asked.num_external_computed_tokens == 0 {
        return Err(Error::InvalidCount { name: "num_new_tokens", value: 0, least: 1 });
    }
    match &asked.hit {
        None => Ok(Vec::new()),
        Some(hit) if hit.blocks.iter().all(Vec::is_empty) => {
            if hit.num_tokens == 0 {
                return Ok(Vec::new());
            }
            let num_tokens = hit.num_tokens;
            Err(Error::WrongHit { request: request.name(), num_blocks: 0, num_tokens })
        }
        Some(hit) => check_hit(state, request, hit),
    }
}

/// Fails unless the hit is a prefix of the request that the pool still holds under its keys.
fn check_hit(
    state: &State,
    request: &RequestState,
    hit: &AskedHit,
) -> Result<Vec<Vec<BlockId>>, Error> {
    let num_blocks = hit.blocks.iter().map(Vec::len).max().unwrap_or(0) as i64;
    if !state.config.enable_caching {
        return Err(Error::CachingDisabled { request: request.name(), num_blocks });
    }
    if request.holds_blocks() {
        return Err(Error::HitsOnRunningRequest { request: request.name(), num_blocks });
    }
    let num_tokens = num_blocks * i64::from(state.config.block_size());
    let fits = hit.blocks.len() == request.tables.len()
        && num_tokens == hit.num_tokens
        && hit.blocks.iter().all(|blocks| blocks.len() as i64 == num_blocks);
    if !fits || num_tokens >= i64::from(request.num_tokens()) {
        let num_tokens = hit.num_tokens;
        return Err(Error::WrongHit { request: request.name(), num_blocks, num_tokens });
    }
    let check = |group: u32, position: u32, number: i64| {
        let block = state.device.check_block(number)?;
        if state.device.key(block) != Some(&request.key(position, group)) {
            let (block, position) = (number, i64::from(position));
            return Err(Error::StaleHits { request: request.name(), block, position });
        }
        Ok(block)
    };
    let groups = (0..).zip(&hit.blocks);
    groups
        .map(|(group, ids)| (0..).zip(ids).map(|(at, &block)| check(group, at, block)).collect())
        .collect()
}

/// Fails unless the request has the tokens and the model takes them.
fn check_length(
    state: &State,
    request: &RequestState,
    num_total: i64,
    num_scheduled: i64,
) -> Result<(), Error> {
    let max_model_len = i64::from(state.config.length_limit());
    if num_scheduled > max_model_len {
        let (request, asked) = (request.name(), num_scheduled);
        return Err(Error::BeyondModelLength { request, asked, max_model_len });
    }
    let num_tokens = i64::from(request.num_tokens());
    if num_total.max(num_scheduled) > num_tokens {
        let request = request.name();
        return Err(Error::TooManyTokens { request, num_tokens, asked: num_scheduled });
    }
    Ok(())
}

/// The blocks that a write at positions [start, end) finds shared or keyed, in table order.
fn plan_rewrites(state: &State, request: &RequestState, start: i64, end: i64) -> Vec<Rewrite> {
    let size = i64::from(state.config.block_size());
    let first = start / size;
    let mut rewrites = Vec::new();
    for (group, table) in (0..).zip(&request.tables) {
        let last = num_blocks_for(end, size).min(table.len() as i64);
        for position in first..last {
            let block = table[position as usize];
            let shared = state.device.ref_count(block) > 1;
            if shared || state.device.key(block).is_some() {
                let copied = shared && start > position * size;
                rewrites.push(Rewrite { group, position: position as u32, shared, copied });
            }
        }
    }
    rewrites
}

/// The refusal of so many slots, None where they fit.
fn refuse(
    state: &State,
    request: &RequestState,
    hits: &[Vec<BlockId>],
    rewrites: &[Rewrite],
    num_slots: i64,
) -> Option<Refused> {
    let num_blocks = num_blocks_for(num_slots, i64::from(state.config.block_size()));
    let mut needed = num_shared(rewrites) + num_in_queue(state, hits);
    for (table, hit_blocks) in with_hits(&request.tables, hits) {
        needed += (num_blocks - table.len() as i64 - hit_blocks.len() as i64).max(0);
    }
    let available = state.device.num_free();
    if needed <= i64::from(available) {
        return None;
    }
    let most = num_blocks * request.tables.len() as i64;
    let never = most > i64::from(state.device.num_usable());
    let reason = if never { Reason::Never } else { Reason::Later };
    Some(Refused::new(reason, needed as u64, available))
}

/// The growth of each group, for (num_total, num_slots) tokens that fit.
fn plan_growth(
    state: &State,
    request: &RequestState,
    hits: &[Vec<BlockId>],
    rewrites: &[Rewrite],
    (num_total, num_slots): (i64, i64),
) -> Vec<Growth> {
    let size = i64::from(state.config.block_size());
    let preallocate = state.config.num_preallocate_tokens;
    let needed = num_blocks_for(num_slots, size);
    let covers = |table: &Table| !table.is_empty() && table.len() as i64 >= needed;
    if request.tables.iter().all(covers) {
        return Vec::new();
    }
    let mut growth = Vec::with_capacity(request.tables.len());
    for (table, hit_blocks) in with_hits(&request.tables, hits) {
        let held = (table.len() + hit_blocks.len()) as i64;
        let external = (num_blocks_for(num_total, size) - held).max(0);
        let grown = (needed - held - external).max(0);
        growth.push(Growth { external: external as u32, grown: grown as u32 });
    }
    let mut spare = i64::from(state.device.num_free());
    spare -= num_in_queue(state, hits) + num_shared(rewrites);
    spare -= growth.iter().map(|each| i64::from(each.external + each.grown)).sum::<i64>();
    let extra = num_blocks_for(i64::from(preallocate), size);
    let most = num_blocks_for(i64::from(state.config.length_limit()), size);
    for ((table, hit_blocks), each) in with_hits(&request.tables, hits).zip(&mut growth) {
        let behind = i64::from(each.external + each.grown);
        let held = (table.len() + hit_blocks.len()) as i64 + behind;
        if table.is_empty() || each.grown > 0 {
            let more = extra.min(spare).min(most - held).max(0);
            each.grown += more as u32;
            spare -= more;
        }
    }
    growth
}

/// The tables with the hits of their group, none where there are no hits.
fn with_hits<'a>(
    tables: &'a [Table],
    hits: &'a [Vec<BlockId>],
) -> impl Iterator<Item = (&'a Table, &'a [BlockId])> {
    let hit_blocks = |group: usize| hits.get(group).map_or(&[] as &[BlockId], Vec::as_slice);
    tables.iter().enumerate().map(move |(group, table)| (table, hit_blocks(group)))
}

fn num_blocks_for(num_tokens: i64, block_size: i64) -> i64 {
    (num_tokens + block_size - 1) / block_size
}

fn num_shared(rewrites: &[Rewrite]) -> i64 {
    rewrites.iter().filter(|rewrite| rewrite.shared).count() as i64
}

fn num_in_queue(state: &State, hits: &[Vec<BlockId>]) -> i64 {
    hits.iter().flatten().filter(|&&block| state.device.ref_count(block) == 0).count() as i64
}
