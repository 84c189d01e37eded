// SPDX-License-Identifier: Apache-2.0
//! Properties of the outcome of one call, checked on the states before and after it.
//!
//! No transition calls anything here. Misuse changes nothing; a refused call keeps the trim of its
//! windows, as `remove_skipped_blocks` makes it, and changes nothing else. The slots that a call
//! schedules to be written have one owner. The longest hit is found independently, by trying every
//! length. Twin: kvcore/check/properties/outcomes.py.

use crate::check::names::same::same_state;
use crate::check::properties::floors::Tenants;
use crate::check::world::calls::Outcome;
use crate::check::world::keyed::{keys_of as keys_of_block, own_tails};
use crate::oracle::calls::{Call, Name, Slots, Value};
use crate::state::state::{RequestState, State};
use crate::transitions::window::remove_skipped_blocks;
use crate::types::commands::Command;
use crate::types::events::Event;
use crate::types::groups::{Kind, skipped_tokens};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::{Key, make_key};
use crate::types::values::{Hit, Reason, Refused};
use crate::types::violation::Violation;

type Checked = Result<(), Violation>;

/// The properties that this file checks.
pub const OUTCOME_PROPERTIES: [&str; 6] =
    ["ATOMIC-FAIL", "ADMIT-EXACT", "RESET", "WRITE-EXCL", "HIT-LONGEST", "EVT-COPY"];

/// Fails for what a call must not give: ATOMIC-FAIL, ADMIT-EXACT, RESET, WRITE-EXCL.
pub fn check_outcome(before: &State, call: &Call, outcome: &Outcome, after: &State) -> Checked {
    check_admission(before, call, outcome, after)?;
    match (&outcome.value, call) {
        (Value::Misuse(error), _) if !same_state(before, after) => {
            let detail = format!("{call:?} gave {error:?} and changed the state");
            Err(Violation::new("ATOMIC-FAIL", detail))
        }
        (Value::Misuse(_), _) => Ok(()),
        (Value::Refused(_), _) => check_refused(before, call, outcome, after),
        (_, Call::AllocateSlots(slots)) => {
            let Some(row) = slots.name.row(before) else { return Ok(()) };
            let (first, last) = scheduled(before, row, slots);
            check_exclusive(after, row, first, last)
        }
        (Value::Appended(appended), Call::Append { name, .. }) if appended.done > 0 => {
            let Some(row) = name.row(before) else { return Ok(()) };
            let first = before[row].num_computed;
            check_exclusive(after, row, first, first + 1)
        }
        (Value::Flag(done), Call::ResetPrefixCache) => {
            let mut tiers = std::iter::once(&before.device).chain(&before.host);
            let unused = tiers.all(|pool| pool.num_free() == pool.num_usable());
            let left = unused && !after.device.index.is_empty();
            if *done == unused && !left {
                return Ok(());
            }
            Err(Violation::new("RESET", format!("gives {done}, unused: {unused}")))
        }
        _ => Ok(()),
    }
}

/// Fails with EVT-COPY unless the keys of a state whose events were taken, and the events of a
/// later one, give its index.
pub fn check_events(start: &State, after: &State) -> Checked {
    let wrong = |detail: String| Err(Violation::new("EVT-COPY", detail));
    let mut keys: Vec<Key> = keys_of(start);
    for event in after.effects.events.iter() {
        match event {
            Event::BlockStored { block_hashes, group_id, .. } => {
                for key in block_hashes.iter().map(|hash| make_key(hash, group_id)) {
                    if !keys.contains(&key) {
                        keys.push(key);
                    }
                }
            }
            Event::BlockRemoved { block_hash, group_id } => {
                let key = make_key(&block_hash, group_id);
                match keys.iter().position(|each| *each == key) {
                    Some(place) => keys.swap_remove(place),
                    None => return wrong(format!("{key:?} is removed and not held")),
                };
            }
            Event::AllBlocksCleared => keys.clear(),
        }
    }
    let mut held = keys_of(after);
    keys.sort_unstable();
    held.sort_unstable();
    if keys == held { Ok(()) } else { wrong(format!("the events give {} keys", keys.len())) }
}

/// Fails with HIT-LONGEST unless a hit is the longest, in every group.
pub fn check_hit(state: &State, row: Row, hit: &Hit) -> Checked {
    let request = &state[row];
    let wrong = |detail: String| Err(Violation::new("HIT-LONGEST", detail));
    let longest = longest_hit(state, request, true);
    let common = if state.has_states { longest_hit(state, request, false) } else { 0 };
    if hit.num_common != common {
        let found = hit.num_common;
        return wrong(format!("{found} tokens are found without states, not {common}"));
    }
    if hit.num_tokens != longest {
        let found = hit.num_tokens;
        return wrong(format!("{found} tokens are hit, but {longest} are findable in every group"));
    }
    for ((index, group), blocks) in (0..).zip(&state.config.groups).zip(&hit.blocks.blocks) {
        let num_blocks = if group.is_cross() { 0 } else { longest.div_ceil(group.block_size) };
        for (position, &block) in (0..).zip(blocks) {
            let seen = (position + 1) * group.block_size > skipped_tokens(group, longest);
            let null = state.is_null(block);
            let end = ((position + 1) * group.block_size).min(longest);
            let expected = request.key_at(state.hash_block_size, index, end);
            if null == seen
                || (seen && !keys_of_block(&state.device, block).any(|key| key == &expected))
            {
                return wrong(format!("{block:?} at {position} of group {index}"));
            }
        }
        if blocks.len() != num_blocks as usize {
            return wrong(format!("{} blocks of group {index}", blocks.len()));
        }
    }
    Ok(())
}

/// Return the longest length to resume at, found by trying all. states: whether they count.
#[must_use]
pub fn longest_hit(state: &State, request: &RequestState, states: bool) -> u32 {
    if !state.config.enable_caching || request.skip_reading {
        return 0;
    }
    let step = state.hit_alignment;
    let num_hashed = request.block_hashes.len() as u32 * state.hash_block_size;
    let most = request.num_tokens().saturating_sub(1).min(num_hashed);
    let mut lengths = (1..=most / step).rev().map(|count| count * step);
    let counts = |group: &u32| states || !state.config.groups[*group as usize].is_state();
    let groups = (0..state.config.groups.len() as u32).filter(counts);
    let all = |&length: &u32| groups.clone().all(|group| resumes(state, request, group, length));
    lengths.find(all).unwrap_or(0)
}

/// Tell whether a group finds what the query at a length sees, and any block that it drops.
fn resumes(state: &State, request: &RequestState, index: u32, length: u32) -> bool {
    let group = &state.config.groups[index as usize];
    if group.is_state() {
        let key = request.key_at(state.hash_block_size, index, length);
        return state.device.index.first(&key).is_some();
    }
    let size = group.block_size;
    let is_inside = !length.is_multiple_of(size);
    let step = if state.config.has_tails() { state.hit_alignment } else { size };
    let found = |end: u32| finds(state, request, index, end);
    let drops = state.config.drops_last_hit(index);
    if drops && (length + step >= request.num_tokens() || !found(length + step)) {
        return false;
    }
    let seen = |end: &u32| *end > skipped_tokens(group, length);
    let mut ends = (1..=length / size).map(|count| count * size).filter(seen);
    let none = ends.clone().next().is_none();
    if (is_inside || group.kind == Kind::SlidingWindow && none) && !found(length) {
        return false;
    }
    ends.all(found)
}

/// Tell whether a group finds the block that ends with these tokens, or has them as a tail.
fn finds(state: &State, request: &RequestState, index: u32, end: u32) -> bool {
    if end / state.hash_block_size > request.block_hashes.len() as u32 {
        return false;
    }
    let key = request.key_at(state.hash_block_size, index, end);
    if end.is_multiple_of(state.config.groups[index as usize].block_size) {
        state.device.index.first(&key).is_some()
    } else {
        state.device.first_tail(&key).is_some()
    }
}

/// Return the slots [first, last) that an allocation schedules, lookahead included.
fn scheduled(before: &State, row: Row, slots: &Slots) -> (u32, u32) {
    let limit = before.config.length_limit();
    let num_hit = slots.hit.as_ref().map_or(0, |hit| hit.num_tokens);
    let first = before[row].num_computed + num_hit;
    let last = (first + slots.num_external_computed_tokens).min(limit) + slots.num_new_tokens;
    (first, (last + slots.num_lookahead_tokens).min(limit))
}

/// Check that a call leaves its tier's reserve free, or was refused for lack of blocks.
fn check_admission(before: &State, call: &Call, outcome: &Outcome, after: &State) -> Checked {
    let watermark = before.config.watermark_blocks;
    let admission = |name: Name| {
        let runs = name.row(before).is_some_and(|row| before[row].holds_blocks());
        if runs { 0 } else { watermark }
    };
    let (pool, reserve) = match call {
        Call::AllocateSlots(slots) => {
            (&after.device, slots.reserved_blocks + admission(slots.name))
        }
        Call::Load { name, .. } => (&after.device, admission(*name)),
        Call::SwapIn { .. } => (&after.device, watermark),
        Call::SwapOut { .. } => match &after.host {
            Some(host) => (host, 0),
            None => return Ok(()),
        },
        _ => return Ok(()),
    };
    let free = pool.num_free();
    let wrong = match &outcome.value {
        Value::Misuse(_) => false,
        Value::Refused(refused) => {
            let hopeless =
                refused.needed > u64::from(pool.num_usable()) && !keeps_windows(before, call);
            refused.needed <= refused.available
                || !is_exact(before, call, refused)
                || refused.reason == Reason::Later && hopeless
        }
        _ => free < reserve && outcome.commands(after).any(|each| takes(before, each)),
    };
    if !wrong {
        return Ok(());
    }
    let value = &outcome.value;
    let detail = format!("{call:?} gives {value:?}; {free} are free, {reserve} must stay free");
    Err(Violation::new("ADMIT-EXACT", detail))
}

/// Tell whether the open batch keeps blocks that the windows of a call's request will trim.
fn keeps_windows(before: &State, call: &Call) -> bool {
    let name = match call {
        Call::AllocateSlots(slots) => slots.name,
        Call::Load { name, .. } => *name,
        _ => return false,
    };
    let is_scheduled = |row| before.batch.scheduled.get(row).is_some();
    before.has_windows && name.row(before).is_some_and(is_scheduled)
}

/// Tell whether a refusal counts the blocks that floors keep, if its call brings no trim and no
/// reserve.
fn is_exact(before: &State, call: &Call, refused: &Refused) -> bool {
    let (name, hit) = match call {
        Call::AllocateSlots(slots) if slots.reserved_blocks == 0 => (slots.name, &slots.hit),
        Call::Load { name, hit, .. } => (*name, hit),
        _ => return true,
    };
    let Some(row) = name.row(before).filter(|_| !before.has_windows) else { return true };
    if before.device.floors.is_none() {
        return true;
    }
    let mut tenants = Tenants::new(before);
    for block in hit.iter().flat_map(|hit| hit.blocks.blocks.iter().flatten()) {
        tenants.follow(Command::Touch { block: *block });
    }
    let mut kept = tenants.num_kept(before.tenant(row));
    if !before[row].holds_blocks() {
        kept += before.config.watermark_blocks;
    }
    refused.available == u64::from(before.device.num_free().saturating_sub(kept))
}

/// Tell whether a command takes a block out of the device's free queue.
fn takes(before: &State, command: Command) -> bool {
    match command {
        Command::Allocate { .. } => true,
        Command::Touch { block } => before.device.is_queued(block),
        _ => false,
    }
}

fn check_refused(before: &State, call: &Call, outcome: &Outcome, after: &State) -> Checked {
    if same_state(before, after) {
        return Ok(());
    }
    let trims = |each: Command| matches!(each, Command::Free { .. } | Command::SetTable { .. });
    let name = match call {
        Call::AllocateSlots(slots) => Some(slots.name),
        Call::Load { name, .. } => Some(*name),
        _ => None,
    };
    if let (Some(name), true) = (name, outcome.commands(after).all(trims)) {
        let mut trimmed = before.clone();
        let accepted = name.row(before).map_or(0, |row| before[row].num_accepted());
        let done = remove_skipped_blocks(&mut trimmed, name.id(), i64::from(accepted));
        if done.is_ok() && same_state(&trimmed, after) {
            return Ok(());
        }
    }
    Err(Violation::new("ATOMIC-FAIL", format!("{call:?} was refused and changed the state")))
}

/// Fails with WRITE-EXCL unless the blocks of these slots have one owner and no key but their own.
fn check_exclusive(state: &State, row: Row, first: u32, end: u32) -> Checked {
    let request = &state[row];
    for ((index, group), table) in (0..).zip(&state.config.groups).zip(&request.tables) {
        if group.is_cross() || first == end {
            continue;
        }
        let scale = state.scales[index as usize];
        let num_blocks = table.len() as u32;
        let mut places = first / group.block_size..end.div_ceil(group.block_size).min(num_blocks);
        if group.is_state() {
            let num_written = u32::from(request.num_computed > first).min(num_blocks);
            places = num_blocks - num_written..num_blocks;
        }
        for position in places {
            let block: BlockId = table[position as usize];
            if state.is_null(block) {
                continue;
            }
            let own = |key: &Key| {
                position < request.num_hashed(scale) && *key == request.key(scale, index, position)
            };
            let tails = state.device.tail_keys(block);
            let mine = || own_tails(state, row, index, position, request.num_tokens());
            let keyed_by_others = state.device.key(block).is_some_and(|key| !own(key))
                || !tails.is_empty() && !tails.iter().all(|key| mine().contains(key));
            if state.device.ref_count(block) != 1 || keyed_by_others {
                let name = request.name();
                let detail = format!("{name} writes block {} of group {index}", block.0);
                return Err(Violation::new("WRITE-EXCL", detail));
            }
        }
    }
    Ok(())
}

/// Return the keys of a state's device index, each once.
fn keys_of(state: &State) -> Vec<Key> {
    let named =
        state.device.index.firsts().filter(|(block, _)| !state.device.silent.contains(block));
    named.map(|(first, _)| *state.device.index.key(first)).collect()
}
