// SPDX-License-Identifier: Apache-2.0
//! Liveness: properties of the runs that start in a state.
//!
//! No transition calls anything here. A checker makes calls of the core on a copy of a state, as an
//! engine could, and throws the copy away. What an exploration shows by itself is not run again: a
//! world that tries `free` and `remove_request` in every state proves DRAIN step by step, so only
//! its states without requests are checked. Most states show progress with their first call; only
//! if none does are requests preempted, one of them kept at a time. Twin:
//! kvcore/check/properties/liveness.py.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::check::properties::claims::pins_alone;
use crate::check::world::calls::slot_request;
use crate::check::world::world::World;
use crate::invariants::pool_and_state::is_in_a_queue;
use crate::invariants::requests::pools;
use crate::oracle::calls::{Name, Slots};
use crate::state::state::named_pins::named_blocks;
use crate::state::state::{RequestState, State};
use crate::transitions::allocate::allocate_slots;
use crate::transitions::append::{Requests, append};
use crate::transitions::batches::{complete, take_batch};
use crate::transitions::free::free;
use crate::transitions::pins::{unpin, unpin_prefix};
use crate::transitions::prefix_lookup::longest_hit;
use crate::transitions::publish::reset_prefix_cache;
use crate::transitions::requests::remove_request;
use crate::transitions::swap::swap_in;
use crate::transitions::transfers::complete_operation;
use crate::types::config::Config;
use crate::types::errors::Error;
use crate::types::groups::Group;
use crate::types::ids::{BlockId, Row};
use crate::types::slot_request::SlotRequest;
use crate::types::values::{Admitted, KVCacheBlocks, Reason, Status};
use crate::types::violation::{Checks, Finding, Violation};

/// One property of the runs that start in a state.
pub type RunChecker = fn(&World, &State) -> Finding;

/// The properties of this file, by name.
pub const RUN_PROPERTIES: [(&str, RunChecker); 6] = [
    ("DRAIN", drain),
    ("DEADLOCK-FREE", deadlock_free),
    ("PREEMPT-GAIN", preempt_gain),
    ("SWAP-RETURN", swap_return),
    ("ADMIT-NEVER", admit_never),
    ("L-ADMIT", admit_fitting),
];

thread_local! {
    /// Copies that are done with: their room is used again.
    #[expect(clippy::vec_box)] // a state is moved without its bytes
    static SPARE: RefCell<Vec<Box<State>>> = const { RefCell::new(Vec::new()) };
}

/// Return what some calls on a copy of a state give; the copy is thrown away.
fn on_copy<T>(state: &State, make: impl FnOnce(&mut State) -> T) -> T {
    let mut copy = SPARE.with_borrow_mut(Vec::pop).unwrap_or_else(|| Box::new(state.clone()));
    (*copy).clone_from(state);
    let value = make(&mut copy);
    SPARE.with_borrow_mut(|spare| spare.push(copy));
    value
}

/// Fails with the first property that counts and does not hold of the runs that start in a state.
pub fn check(world: &World, state: &State, checks: &Checks) -> Result<(), Violation> {
    for (name, holds) in RUN_PROPERTIES {
        if checks.count(name) {
            holds(world, state).map_err(|detail| Violation::new(name, detail))?;
        }
    }
    Ok(())
}

/// DRAIN: when all unfinished work is done and all requests are removed, every block is free; a
/// reset then leaves no key.
fn drain(world: &World, state: &State) -> Finding {
    let proved = world.tries("free") && world.tries("remove_request");
    if proved && state.config.max_in_flight == 0 && state.requests().next().is_some() {
        return Ok(());
    }
    on_copy(state, drained)
}

fn drained(state: &mut State) -> Finding {
    settle(state)?;
    drop_named_pins(state)?;
    drop_pins(state)?;
    for row in rows(state).collect::<Vec<Row>>() {
        send_away(state, row)?;
    }
    settle(state)?;
    for (tier, pool) in pools(state) {
        let (free, usable) = (pool.num_free(), pool.num_usable());
        if free != usable {
            return Err(format!("{free} of {usable} {tier} blocks are free without requests"));
        }
    }
    let (num_operations, num_batches) = (state.operations.len(), state.in_flight.len());
    if num_operations + num_batches > 0 {
        return Err(format!("{num_operations} operations and {num_batches} batches are left"));
    }
    if !reset_prefix_cache(state) {
        return Err("the reset returns false without requests".to_owned());
    }
    for (tier, pool) in pools(state) {
        let mut blocks = (0..pool.num_blocks()).map(BlockId);
        if let Some(block) = blocks.find(|&block| pool.has_key(block)) {
            return Err(format!("{tier} block {} has a key after the reset", block.0));
        }
        if !pool.index.is_empty() {
            return Err(format!("{} keys of the {tier} stay after the reset", pool.index.len()));
        }
    }
    Ok(())
}

/// DEADLOCK-FREE: while the pool can hold some unfinished request, a call gives one of them a
/// token, if need be after others were preempted.
fn deadlock_free(world: &World, state: &State) -> Finding {
    let unfinished = |row: &Row| can_go_on(world, state, &state[*row]);
    let rows: Vec<Row> = rows(state).filter(unfinished).collect();
    if rows.is_empty() || rows.iter().any(|&row| progresses(world, state, row)) {
        return Ok(());
    }
    if on_copy(state, |settled| goes_on(world, settled, &rows))? {
        return Ok(());
    }
    let rows: Vec<u32> = rows.iter().map(|row| row.0).collect();
    Err(format!("no call brings rows {rows:?} a token further, whichever others are preempted"))
}

/// Finish everything, then tell whether one of these rows gets a token, if need be alone.
fn goes_on(world: &World, settled: &mut State, rows: &[Row]) -> Result<bool, String> {
    settle(settled)?;
    drop_pins(settled)?;
    let mut found = rows.iter().any(|&row| progresses(world, settled, row));
    let mut left = rows.iter();
    while let Some(&row) = left.next().filter(|_| !found) {
        found = on_copy(settled, |alone| {
            preempt_others(alone, row)?;
            settle(alone)?;
            Ok::<bool, String>(progresses(world, alone, row))
        })?;
    }
    Ok(found)
}

/// PREEMPT-GAIN: preempting a request frees the blocks that it alone holds, at once or when a batch
/// or operation ends.
fn preempt_gain(_: &World, state: &State) -> Finding {
    if !state.effects.commands.is_empty() {
        return Ok(());
    }
    for row in rows(state) {
        let alone =
            |block: &&BlockId| !state.is_null(**block) && state.device.ref_count(**block) == 1;
        let mut held = state[row].tables.iter().flatten().filter(alone).peekable();
        if held.peek().is_none() {
            continue;
        }
        let left = on_copy(state, |after| {
            let done = free(after, &state[row].request_id).is_ok();
            held.find(|&&block| !done || !is_in_a_queue(&after.device, block))
        });
        if let Some(block) = left {
            let name = state[row].name();
            return Err(format!("preempting {name} leaves its block {} held", block.0));
        }
    }
    Ok(())
}

/// SWAP-RETURN: a swapped request can return to the device when others make room.
fn swap_return(_: &World, state: &State) -> Finding {
    let swapped = |row: &Row| state[*row].status() == Status::Swapped;
    for row in rows(state).filter(swapped) {
        let name = Arc::clone(&state[row].request_id);
        let mut now = state.clone();
        if expected(swap_in(&mut now, &[&name]))?.is_ok() {
            continue;
        }
        let mut later = state.clone();
        settle(&mut later)?;
        preempt_others(&mut later, row)?;
        drop_pins(&mut later)?;
        let most = state.device.num_usable().saturating_sub(state.config.watermark_blocks);
        if let Err(refused) = expected(swap_in(&mut later, &[&name]))?
            && refused.needed <= u64::from(most)
        {
            return Err(format!(
                "{name} is swapped out, and is refused by an empty pool: {refused:?}"
            ));
        }
    }
    Ok(())
}

/// ADMIT-NEVER: a call is refused for good, and at once, if and only if it needs more blocks than
/// an empty pool has.
pub(crate) fn admit_never(_: &World, state: &State) -> Finding {
    for row in rows(state).filter(|&row| state[row].status() == Status::Waiting) {
        let (request, num_tokens) = (&state[row], state[row].num_tokens());
        let needed = call_need(&state.config, num_tokens, 0);
        let never = !fits(state, num_tokens, 0);
        let there = u64::from(state.device.num_free());
        if !never && needed + u64::from(state.config.watermark_blocks) <= there {
            continue;
        }
        let slot_request = SlotRequest::new(i64::from(num_tokens));
        let value =
            on_copy(state, |state| allocate_slots(state, &request.request_id, &slot_request));
        let is_right = match &value {
            Ok(Err(refused)) => (refused.reason == Reason::Never) == never,
            _ => !never,
        };
        if !is_right {
            let name = request.name();
            return Err(format!("{name} needs {needed} blocks and gets {value:?}"));
        }
    }
    Ok(())
}

/// L-ADMIT: if no request holds blocks and pins leave room, any that waits and fits is admitted.
fn admit_fitting(_: &World, state: &State) -> Finding {
    let bounded = state.config.max_pinned_blocks.is_some();
    let pinned: BTreeSet<BlockId> = named_blocks(&state.named_pins).filter(|_| bounded).collect();
    let idle: u32 = pools(state).map(|(_, pool)| pool.num_free()).sum();
    let usable: u32 = pools(state).map(|(_, pool)| pool.num_usable()).sum();
    if idle + pinned.len() as u32 != usable {
        return Ok(());
    }
    for row in rows(state) {
        let request = &state[row];
        let done = request.num_computed >= request.num_tokens() + request.num_drafts();
        let is_idle = request.num_loading == 0 && request.host_tables.is_empty();
        if done || !is_idle || !can_grow_to(state, request.num_tokens(), 0) {
            continue;
        }
        let value = on_copy(state, |state| schedule_all(state, row));
        if !matches!(value, Ok(Ok(_))) {
            return Err(format!("{} is refused by an empty pool: {value:?}", request.name()));
        }
    }
    Ok(())
}

/// Finish everything that is unfinished.
pub(crate) fn settle(state: &mut State) -> Finding {
    let most = 4 + state.in_flight.len() + state.operations.len();
    for _ in 0..most {
        for number in state.in_flight.iter().map(|batch| batch.number).collect::<Vec<u64>>() {
            expected(complete(state, number as i64))?;
        }
        if !state.effects.commands.is_empty() || state.batch.scheduled.keys().next().is_some() {
            expected(take_batch(state))?;
            continue;
        }
        let numbers: Vec<u32> = state.operations.keys().copied().collect();
        for number in numbers {
            expected(complete_operation(state, i64::from(number), true))?;
        }
        if state.effects.commands.is_empty() && state.in_flight.is_empty() {
            return Ok(());
        }
    }
    Err(format!("something is unfinished after {most} rounds of completion"))
}

/// Return the slots of all tokens and drafts that a request has left, behind its longest hit.
pub(crate) fn rest_of(state: &State, request: &RequestState) -> Slots {
    let (mut first, mut hit) = (request.num_computed, None);
    if !request.holds_blocks() {
        let found = longest_hit(state, request);
        first = found.num_tokens;
        hit = (first > 0).then_some(found);
    }
    let num_new = request.num_tokens() + request.num_drafts() - first;
    Slots { hit, ..Slots::new(Name::of(request), num_new) }
}

/// Schedule all tokens that a request has left, behind its longest hit.
pub(crate) fn schedule_all(state: &mut State, row: Row) -> Result<Admitted<KVCacheBlocks>, Error> {
    let slots = rest_of(state, &state[row]);
    allocate_slots(state, slots.name.id(), &slot_request(&slots))
}

/// Take away all pins but those of operations. Pins of prefixes that leave room for one request
/// stay.
pub(crate) fn drop_pins(state: &mut State) -> Finding {
    if state.config.max_pinned_blocks.is_none() {
        drop_named_pins(state)?;
    }
    let mut pins = Vec::new();
    for &block in state.device.pins.keys() {
        let alone = usize::try_from(pins_alone(state, block)).unwrap_or(0);
        pins.extend(std::iter::repeat_n(i64::from(block.0), alone));
    }
    pins.sort_unstable();
    if pins.is_empty() { Ok(()) } else { expected(unpin(state, &pins)) }
}

/// Take away all pins of prefixes.
fn drop_named_pins(state: &mut State) -> Finding {
    let names: Vec<String> = state.named_pins.keys().cloned().collect();
    names.iter().try_for_each(|name| expected(unpin_prefix(state, name)))
}

/// Tell whether an empty pool can give one call this many tokens, and keep its reserve free.
pub(crate) fn fits(state: &State, num_tokens: u32, num_encoder: u32) -> bool {
    let config = &state.config;
    let most = config.num_usable_blocks().saturating_sub(config.watermark_blocks);
    call_need(config, num_tokens, num_encoder) <= u64::from(most)
}

/// Count the blocks that one call takes for these tokens of a request without blocks or hits.
fn call_need(config: &Config, num_tokens: u32, num_encoder: u32) -> u64 {
    let need = |group: &Group| {
        if group.is_state() {
            return u64::from(num_tokens.min(1));
        }
        let count = if group.is_cross() { num_encoder } else { num_tokens };
        u64::from(count.div_ceil(group.block_size))
    };
    config.groups.iter().map(need).sum()
}

/// Return the value of a call that an engine may make in this state.
pub(crate) fn expected<T>(outcome: Result<T, Error>) -> Result<T, String> {
    outcome.map_err(|error| format!("a call that an engine may make is misuse: {error}"))
}

/// Return the rows that have a request.
pub(crate) fn rows(state: &State) -> impl Iterator<Item = Row> {
    let all = (0..state.requests.len() as u32).map(Row);
    all.filter(|row| state.requests[row.index()].is_some())
}

/// Free every other request; a child goes before what it hit.
fn preempt_others(state: &mut State, keep: Row) -> Finding {
    let rows: Vec<Row> = rows(state).filter(|&row| row != keep).collect();
    rows.into_iter().rev().try_for_each(|row| preempt(state, row))
}

/// Free a request, unless it waits.
pub(crate) fn preempt(state: &mut State, row: Row) -> Finding {
    let name = Arc::clone(&state[row].request_id);
    if state[row].status() == Status::Waiting { Ok(()) } else { expected(free(state, &name)) }
}

/// Free a request and remove it.
pub(crate) fn send_away(state: &mut State, row: Row) -> Finding {
    preempt(state, row)?;
    let name = Arc::clone(&state[row].request_id);
    expected(remove_request(state, &name))
}

/// Tell whether some call brings a request a token further now.
fn progresses(world: &World, state: &State, row: Row) -> bool {
    let request = &state[row];
    if request.num_loading > 0 || request.num_computed > request.num_tokens() {
        return true;
    }
    let name: &str = &request.request_id;
    if request.status() == Status::Swapped {
        return on_copy(state, |state| matches!(swap_in(state, &[name]), Ok(Ok(_))));
    }
    let more = request.num_tokens() + request.num_drafts() - request.num_computed;
    if more > 0 && on_copy(state, |state| matches!(schedule_all(state, row), Ok(Ok(_)))) {
        return true;
    }
    if request.num_computed < request.num_tokens() || request.num_tokens() >= world.num_tokens {
        return false;
    }
    on_copy(state, |state| {
        state[row].drafts.clear();
        append(state, Requests::Ids(&[name]), &[0]).is_ok_and(|value| value.done > 0)
    })
}

/// Tell whether a request has tokens to come that an empty pool could hold.
fn can_go_on(world: &World, state: &State, request: &RequestState) -> bool {
    let num_tokens = request.num_tokens();
    let done = request.num_computed >= num_tokens && num_tokens == world.num_tokens;
    !done && can_grow_to(state, world.num_tokens.min(num_tokens + 1), world.num_encoder)
}

/// Tell whether an empty pool can hold a request while it grows to this many tokens, also behind a
/// hit: of states, it then holds those before and after a step.
pub(crate) fn can_grow_to(state: &State, num_tokens: u32, num_encoder: u32) -> bool {
    let config = &state.config;
    let held = if state.has_states { config.blocks_for(num_tokens) } else { 0 };
    let most = config.num_usable_blocks().saturating_sub(config.watermark_blocks);
    held <= u64::from(most) && fits(state, num_tokens, num_encoder)
}
