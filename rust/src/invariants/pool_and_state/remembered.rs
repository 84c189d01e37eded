// SPDX-License-Identifier: Apache-2.0
//! The property of what a request remembers of its next tokens (`append/fast_path.rs`).
//!
//! These numbers are the twin's own and not in its bytes, so Python has no counterpart. They are
//! judged by what the state says now, not by how they were found.

use crate::state::state::{RequestState, State};
use crate::types::groups::{Group, skipped_blocks};
use crate::types::ids::{BlockId, Row, Table};
use crate::types::violation::Finding;

/// REFINE: the slots that a request remembers as its own to write are so, no window moves before
/// the last one, and no token that it remembers as quiet fills a block or leaves a checkpoint.
pub(super) fn remembered(state: &State) -> Finding {
    let requests = (0..).map(Row).zip(&state.requests);
    for (row, request) in requests.filter_map(|(row, each)| Some((row, each.as_ref()?))) {
        if request.quiet_until > 0 {
            check_one(state, row, request).map_err(|what| format!("{} {what}", request.name()))?;
        }
    }
    Ok(())
}

fn check_one(state: &State, row: Row, request: &RequestState) -> Finding {
    let (count, since) = (request.num_computed, request.quiet_since);
    if count < request.quiet_until && !is_ready(request) {
        return Err("remembers quiet tokens, and cannot be scheduled".into());
    }
    let until = match since == state.num_pins {
        true => request.slots_until,
        false if since == !state.num_pins => request.quiet_until,
        false => return Ok(()), // a pin may have come, so nothing is concluded
    };
    for (group, table) in state.config.groups.iter().zip(&request.tables) {
        let is_foreign = |&slot: &u32| !group.is_cross() && !is_own(state, group, table, slot);
        if let Some(slot) = (count..until).find(is_foreign) {
            return Err(format!("remembers slot {slot} as one to write, which it is not"));
        }
    }
    match count < request.quiet_until && request.num_tokens() < request.quiet_tokens {
        true => check_quiet(state, row, request).map_err(str::to_owned),
        false => Ok(()),
    }
}

/// Whether one more token can be scheduled.
fn is_ready(request: &RequestState) -> bool {
    let is_idle = request.host_tables.is_empty() && request.num_loading == 0;
    is_idle && request.drafts.is_empty() && request.holds_blocks()
}

/// Whether a slot is in a block that the request alone holds, with no window to move before it.
fn is_own(state: &State, group: &Group, table: &Table, slot: u32) -> bool {
    let block = table.get((slot / group.block_size) as usize);
    let is_alone = |&block: &BlockId| !state.is_null(block) && state.device.ref_count(block) == 1;
    let left = table.len().min(skipped_blocks(group, slot) as usize);
    let moves = || table[..left].iter().any(|&block| !state.is_null(block));
    block.is_some_and(is_alone) && (group.is_state() || !moves())
}

/// Fails if one of the quiet tokens changes more than a count.
fn check_quiet(state: &State, row: Row, request: &RequestState) -> Result<(), &'static str> {
    if request.num_output_placeholders() == 0 && !request.samplers.is_empty() {
        return Err("remembers quiet tokens, and awaits the output of several batches");
    }
    if state.has_late_keys && (state.has_tails || state.batch.marked.contains(&row)) {
        return Err("remembers quiet tokens, which may give keys");
    }
    let (config, tokens) = (&state.config, request.quiet_tokens);
    let changes = |(group, &cached): (&Group, &u32)| match group.is_state() {
        true => request.quiet_until / group.block_size > request.num_computed / group.block_size,
        false => config.enable_caching && tokens / group.block_size > cached,
    };
    let hashes = config.enable_caching && !request.own_hashes;
    if hashes && tokens / state.hash_block_size > request.num_hashed(1)
        || config.groups.iter().zip(&request.num_cached).any(changes)
    {
        return Err("remembers a token as quiet at which a block ends");
    }
    Ok(())
}
