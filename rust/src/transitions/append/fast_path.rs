// SPDX-License-Identifier: Apache-2.0
//! How far a request can grow while only its count changes, and the appends up to there.
//!
//! Invariants: most decode tokens go to an existing slot, fill no block and move no window. After
//! an allocation this holds up to a known computed count, for the slots, and up to a known number
//! of tokens, for the blocks that these fill: while positions are to come, each may rise alone. It
//! holds until another request gets a share in the blocks: `fork`, every cut and every rejection
//! reset the count for the request, `pin` for all requests (a pin of a prefix holds only blocks
//! with keys, which have no such slots). A request with such a count ahead has
//! no drafts and no unfinished loads, is on the device and, if all its tokens are known, awaits the
//! output of one batch only; a transition that changes this resets the count too. If blocks may
//! have tail keys, no token is quiet. The count up to which the slots themselves are there is kept
//! beside, under the same rules, for a token that only fills blocks (`block_ends.rs`). Debug builds
//! plan each quiet token and assert that the plan is empty.

use crate::mutants::{Mutant, seeded};
use crate::pool::block_pool::BlockPool;
use crate::state::plan_records::{Plan, StateStep};
use crate::state::state::{RequestState, State, request_mut};
use crate::transitions::in_flight::note_next_entry;
use crate::transitions::output::note_output;
use crate::transitions::plan::plan_allocation;
use crate::transitions::states::next_step;
use crate::types::groups::{Group, Kind, skipped_blocks};
use crate::types::ids::{BlockId, Row};
use crate::types::slot_request::SlotRequest;

/// Add and schedule the first tokens, as far as they change only counts; returns how many.
pub(crate) fn append_quietly(
    state: &mut State,
    rows: &[u32],
    tokens: Option<&[u32]>,
    batch: Option<i64>,
) -> usize {
    let tracks = state.config.tracks_batches();
    for (place, &row) in rows.iter().enumerate() {
        let State { requests, num_pins, batch: open, .. } = &mut *state;
        let request = request_mut(requests, Row(row));
        if !is_known_quiet(request, *num_pins) {
            return place;
        }
        let token = tokens.map(|tokens| tokens[place]);
        if let Some(token) = token {
            request.tokens.push(token);
        }
        if cfg!(debug_assertions) || tracks {
            debug_assert!(is_nothing(state, Row(row)));
            count_quietly(state, Row(row), token, batch);
        } else {
            count_next(request, open.number, token.and(batch));
        }
    }
    rows.len()
}

/// Schedule a token that changes only counts.
#[inline(always)] // of each request in each step
fn count_quietly(state: &mut State, row: Row, token: Option<u32>, batch: Option<i64>) {
    note_next_entry(state, row);
    let State { requests, batch: open, .. } = state;
    count_next(request_mut(requests, row), open.number, token.and(batch));
}

/// Count it, of a request whose entry in the open batch, if any, is noted.
#[inline(always)] // of each request in each step
pub(super) fn count_next(request: &mut RequestState, open: u64, batch: Option<i64>) {
    note_output(request, batch, open);
    request.num_computed += u32::from(!seeded(Mutant::QuietStepNotCounted));
}

/// Whether the last token of a request that `append` has checked changes only its count.
#[inline(always)] // of each request in each step
fn is_known_quiet(request: &RequestState, num_pins: u64) -> bool {
    is_quiet(request) && request.quiet_since == num_pins
}

/// Whether the next slot is known to be held alone, and no window to move with it.
#[inline(always)] // twice in each block of a request
pub(super) fn has_slot(request: &RequestState, num_pins: u64) -> bool {
    let is_known = request.quiet_until > 0 && request.quiet_since == num_pins;
    is_known && request.num_computed < request.slots_until
}

/// Whether the same holds as far as counts tell; `quiet_since` tells the rest.
#[inline(always)] // of each request in each step
pub(super) fn is_quiet(request: &RequestState) -> bool {
    let num_tokens = request.tokens.len();
    request.num_computed < request.quiet_until && num_tokens < request.quiet_tokens as usize
}

/// Note up to which counts the next tokens of a request are quiet. Returns whether the next one is
/// known to have a slot in place.
pub(crate) fn note_quiet_until(state: &mut State, row: Row) -> bool {
    let State { config, device, requests, batch, num_pins, .. } = state;
    let request = request_mut(requests, row);
    request.quiet_until = 0;
    let num_computed = request.num_computed;
    let awaits_others = request.num_output_placeholders() == 0 && !request.samplers.is_empty();
    let gets_key = state.has_late_keys && (state.has_tails || batch.marked.contains(&row));
    if !request.drafts.is_empty() || awaits_others || gets_key {
        return false;
    }
    let (tables, cached) = (&request.tables[..], &request.num_cached[..]);
    let (mut until, mut slots) = (u32::MAX, u32::MAX);
    let (mut tokens, mut has_older) = (u32::MAX, false);
    for (group_id, group) in config.groups.iter().enumerate() {
        if group.is_cross() {
            continue;
        }
        let (table, held) = (&tables[group_id], cached[group_id]);
        let end = slots_in_group(device, group, table, num_computed);
        if end <= num_computed {
            return false;
        }
        slots = slots.min(end);
        if group.is_state() {
            until = until.min(end - 1); // the token at the end leaves a checkpoint
            has_older |= held as usize + 1 < table.len();
        } else {
            tokens = tokens.min(next_full(group, held));
        }
    }
    let misses = seeded(Mutant::QuietStepKeysNothing) && !config.publishes_at_once();
    if !config.enable_caching || misses {
        tokens = u32::MAX;
    }
    if config.enable_caching && !request.own_hashes {
        let num_hashed = request.num_hashed(1);
        tokens = tokens.min((num_hashed + 1).saturating_mul(state.hash_block_size) - 1);
    }
    (request.quiet_until, request.slots_until) = (until.min(slots), slots);
    request.quiet_tokens = tokens;
    request.quiet_since = if has_older { !*num_pins } else { *num_pins };
    true
}

/// Whether a table has a state before the last one. held: the null blocks at its start.
#[inline(always)]
pub(super) fn has_source(group: &Group, table: &[BlockId], held: u32) -> bool {
    group.is_state() && held as usize + 1 < table.len()
}

/// Return the count up to which a group has slots that can be written in place, and no window
/// moves; 0 if it has none.
#[inline(always)] // twice in each block of a request
fn slots_in_group(device: &BlockPool, group: &Group, table: &[BlockId], local: u32) -> u32 {
    let (size, position) = (group.block_size, local / group.block_size);
    if !table.get(position as usize).is_some_and(|&block| device.is_writable(block)) {
        return 0;
    }
    let until = (position + 1).saturating_mul(size);
    if group.window.is_some() {
        return until.min(next_trim(device, table, group, local));
    }
    until
}

/// The number of tokens at which the next one fills a block of a group without states.
/// published: the blocks for which that was done.
#[inline(always)]
pub(super) fn next_full(group: &Group, published: u32) -> u32 {
    (published + 1).saturating_mul(group.block_size) - 1
}

/// The count at which a group's window moves on by a block; 0 if it has moved already.
fn next_trim(device: &BlockPool, table: &[BlockId], group: &Group, num_computed: u32) -> u32 {
    let skipped = skipped_blocks(group, num_computed);
    let held = skipped.checked_sub(1).and_then(|last| table.get(last as usize));
    if held.is_some_and(|&block| !device.is_null(block)) {
        return 0;
    }
    let window = group.window.unwrap_or(u32::MAX);
    match group.kind {
        Kind::SlidingWindow => {
            ((skipped + 1).saturating_mul(group.block_size)).saturating_add(window - 1)
        }
        _ => (num_computed / window + 1).saturating_mul(window),
    }
}

/// Whether one more token takes no blocks, gives none back, and fills none.
pub(super) fn is_nothing(state: &State, row: Row) -> bool {
    let Some(plan) = plan_next(state, row) else { return false };
    let known = plan.num_scheduled.min(state[row].num_tokens());
    let full = |(group, &cached): (&Group, &u32)| match group.is_state() {
        true => plan.num_scheduled.is_multiple_of(group.block_size),
        false => known / group.block_size > cached,
    };
    let mut groups = state.config.groups.iter().zip(&state[row].num_cached);
    let publishes = state.config.publishes_at_once() && groups.any(full);
    !publishes && plan.trims.is_empty() && num_grown(&plan) == Some(0)
}

/// Return the plan of one more token, if it is admitted.
pub(super) fn plan_next(state: &State, row: Row) -> Option<Plan> {
    plan_allocation(state, row, &SlotRequest::next(&state[row])).ok()?.ok()
}

/// Count the blocks that a plan takes, if it does nothing else to tables.
pub(super) fn num_grown(plan: &Plan) -> Option<u32> {
    let stays = |step: &StateStep| match step.takes {
        true => *step == next_step(step.group_id, step.target),
        false => step.source == Some(step.target),
    };
    let only_grows = plan.hits.is_empty() && plan.rewrites.is_empty();
    let only_grows = only_grows && plan.steps.iter().all(stays);
    let grown = plan.growth.iter().map(|each| each.num_nulls + each.num_external + each.num_new);
    let copied = plan.steps.iter().map(|step| u32::from(step.takes));
    only_grows.then(|| grown.chain(copied).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transitions::fork::fork;
    use crate::transitions::pins::pin;
    use crate::transitions::requests::add_tokens;
    use crate::transitions::tests::*;
    use crate::transitions::transfers::load;
    use crate::types::errors::Error;
    use crate::types::values::Output;

    /// Five tokens in blocks of four, scheduled and taken.
    fn running() -> (State, Row) {
        let mut state = make_state(Config::new(9, 4, b"seed")).unwrap();
        let row = admit(&mut state, "a", &[1, 2, 3, 4, 5], 5);
        take_batch(&mut state).unwrap();
        (state, row)
    }

    #[test]
    fn the_token_that_fills_a_block_is_not_quiet() {
        let (mut state, row) = running();
        let mut quiet = Vec::new();
        for token in 6..11 {
            quiet.push(is_known_quiet(&state[row], state.num_pins));
            append(&mut state, Requests::Rows(&[row.0]), &[token]).unwrap();
            take_batch(&mut state).unwrap();
        }
        assert_eq!(quiet, [true, true, false, false, true]);
        assert_eq!(state[row].num_cached[..], [2]);
    }

    #[test]
    fn the_token_that_fills_a_block_is_not_quiet_when_it_comes_later() {
        let (mut state, row) = running();
        let ahead = SlotRequest { num_output_placeholders: 1, ..SlotRequest::new(1) };
        allocate_slots(&mut state, "a", &ahead).unwrap().unwrap();
        let mut seen = Vec::new();
        for token in 6..10 {
            take_batch(&mut state).unwrap();
            let quiet = is_known_quiet(&state[row], state.num_pins);
            append(&mut state, Requests::Rows(&[row.0]), &[token]).unwrap();
            seen.push((quiet, state[row].num_cached[0]));
        }
        // The fourth token of the second block comes with the slot of the third block's first.
        assert_eq!(seen, [(true, 1), (true, 1), (false, 2), (true, 2)]);
    }

    #[test]
    fn tokens_that_fill_positions_to_come_bring_the_next_full_block_near() {
        let (mut state, row) = running();
        let ahead = SlotRequest { num_output_placeholders: 4, ..SlotRequest::new(4) };
        allocate_slots(&mut state, "a", &ahead).unwrap().unwrap();
        take_batch(&mut state).unwrap();
        assert!(is_known_quiet(&state[row], state.num_pins));
        add_tokens(&mut state, "a", &[6, 7]).unwrap();
        assert!(!is_known_quiet(&state[row], state.num_pins));
        append(&mut state, Requests::Rows(&[row.0]), &[8]).unwrap();
        assert_eq!(state[row].num_cached[..], [2]);
    }

    #[test]
    fn positions_to_come_that_are_filled_in_each_step_are_quiet_inside_a_block() {
        let (mut state, row) = running();
        let mut quiet = Vec::new();
        for token in 6..15 {
            quiet.push(is_known_quiet(&state[row], state.num_pins));
            append(&mut state, Requests::Rows(&[row.0]), Output::default()).unwrap();
            let number = take_batch(&mut state).unwrap().number as i64 - 1;
            let sampled = [token];
            let output = Output { batch: Some(number), ..Output::from(&sampled) };
            add_tokens(&mut state, "a", output).unwrap();
        }
        // Not quiet are the steps at 7 and 11 tokens, of which the next fills a block of four, and
        // those at 8 and 12, whose slot is in a new block.
        assert_eq!(quiet, [true, true, false, false, true, true, false, false, true]);
    }

    #[test]
    fn the_token_at_which_a_window_leaves_a_block_is_not_quiet() {
        let mut config = Config::new(9, 4, b"seed");
        config.groups = vec![Group::windowed(4, Kind::SlidingWindow, 3)];
        let mut state = make_state(config).unwrap();
        let row = admit(&mut state, "a", &[1, 2, 3, 4, 5], 5);
        take_batch(&mut state).unwrap();
        let mut seen = Vec::new();
        for token in 6..12 {
            let quiet = is_known_quiet(&state[row], state.num_pins);
            append(&mut state, Requests::Rows(&[row.0]), &[token]).unwrap();
            take_batch(&mut state).unwrap();
            let held = state[row].tables[0].iter().filter(|&&block| !state.is_null(block));
            seen.push((quiet, held.count()));
        }
        // The queries at 6 and 10 are the first that do not see block 0 and block 1. The token at
        // 7 fills a block, and that at 8 begins one.
        let expected = [(true, 2), (false, 1), (false, 1), (false, 2), (true, 2), (false, 1)];
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_request_that_loads_has_no_count_ahead() {
        let mut state =
            make_state(Config { num_preallocate_tokens: 4, ..Config::new(9, 4, b"seed") }).unwrap();
        let row = add_request(&mut state, Request::new("a", &[1, 2, 3, 4, 5])).unwrap();
        let loaded = SlotRequest { num_external_computed_tokens: 4, ..SlotRequest::new(0) };
        load(&mut state, "a", &loaded).unwrap().unwrap();
        assert_eq!(state[row].tables[0].len(), 2, "the next slot is there");
        assert_eq!(state[row].quiet_until, 0);
        let loading = append(&mut state, Requests::Rows(&[row.0]), &[6]);
        assert!(matches!(loading, Err(Error::LoadUnfinished { .. })), "{loading:?}");
    }

    #[test]
    fn who_awaits_a_batch_that_no_output_names_is_not_quiet() {
        let (mut state, row) = running();
        append(&mut state, Requests::Rows(&[row.0]), Output::default()).unwrap();
        take_batch(&mut state).unwrap();
        // The output of batch 0: of which batch it is, the engine does not say.
        add_tokens(&mut state, "a", &[6]).unwrap();
        assert!(!is_known_quiet(&state[row], state.num_pins));
        append(&mut state, Requests::Rows(&[row.0]), &[7]).unwrap();
        assert!(state[row].samplers.is_empty(), "no batch of before is awaited any more");
    }

    #[test]
    fn who_shares_the_block_ends_the_quiet() {
        let (mut state, row) = running();
        assert!(is_known_quiet(&state[row], state.num_pins));
        fork(&mut state, "a", "b").unwrap();
        assert!(!is_known_quiet(&state[row], state.num_pins));
        let (mut state, row) = running();
        pin(&mut state, &[2]).unwrap();
        assert!(!is_known_quiet(&state[row], state.num_pins));
        append(&mut state, Requests::Rows(&[row.0]), &[6]).unwrap();
        assert_eq!(state[row].tables[..], [[1, 3].map(BlockId)], "the pinned block was copied");
    }
}
