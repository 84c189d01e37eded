// SPDX-License-Identifier: Apache-2.0
//! The arguments of an allocation, checked.
//!
//! Invariants: every misuse is found here, before anything is planned. A hit is accepted only if
//! each of its blocks still has the request's key.
//! Source: S000-01, 04, 21, 22, 25. Twin: kvcore/transitions/slot_request.py.

use crate::state::batch_records::UnconfirmedLoad;
use crate::state::state::{NULL_BLOCK, RequestState, State};
use crate::transitions::requests::{check_drafts_settled, check_no_drafts};
use crate::types::errors::Error;
use crate::types::groups::{Group, skipped_blocks};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;
use crate::types::slot_request::{RequestedHit, SlotRequest};

impl SlotRequest {
    /// Make the request of one more token, which may be one to come.
    #[must_use]
    #[inline]
    pub(crate) fn next(request: &RequestState) -> Self {
        let num_output_placeholders = i64::from(request.num_computed >= request.num_tokens());
        SlotRequest { num_output_placeholders, ..SlotRequest::new(1) }
    }
}

/// Fails with InvalidCount for a count below zero.
pub fn read_slot_request(slot_request: &SlotRequest) -> Result<(), Error> {
    slot_request.check_counts()
}

/// Return the hit blocks per group, none without a hit. Fails if there is nothing to do, the hit is
/// wrong, or tokens are missing.
pub fn check_slot_request(
    state: &State,
    row: Row,
    slot_request: &SlotRequest,
) -> Result<Vec<Vec<BlockId>>, Error> {
    let request = &state[row];
    let brings =
        slot_request.num_external_computed_tokens != 0 || slot_request.num_hit_tokens() != 0;
    if slot_request.num_new_tokens == 0 && !brings {
        return Err(Error::InvalidCount { name: "num_new_tokens", value: 0, least: 1 });
    }
    check_drafts_settled(request)?;
    if slot_request.num_output_placeholders > 0 {
        check_no_drafts(request)?;
    }
    if slot_request.num_encoder_tokens > 0 && !state.config.groups.iter().any(Group::is_cross) {
        let num_encoder_tokens = slot_request.num_encoder_tokens;
        return Err(Error::NoEncoderGroup { request: request.name(), num_encoder_tokens });
    }
    let hits = match &slot_request.hit {
        Some(hit) if hit.blocks.iter().any(|ids| !ids.is_empty()) => {
            check_hit(state, request, hit)?
        }
        Some(hit) if hit.num_tokens != 0 => {
            let num_tokens = hit.num_tokens;
            return Err(Error::WrongHit { request: request.name(), num_blocks: 0, num_tokens });
        }
        _ => Vec::new(),
    };
    check_length(state, request, slot_request)?;
    if state.has_states {
        check_one_unknown(state, row, slot_request)?;
        if slot_request.num_external_computed_tokens > 0 {
            check_not_begun(state, row)?;
        }
    }
    if slot_request.checkpoint {
        check_checkpoint(state, request, slot_request)?;
    }
    Ok(hits)
}

/// Fails unless the hit is a prefix of the request that the pool still holds under its keys.
pub fn check_hit(
    state: &State,
    request: &RequestState,
    hit: &RequestedHit,
) -> Result<Vec<Vec<BlockId>>, Error> {
    let num_blocks = hit.blocks.iter().map(Vec::len).max().unwrap_or(0) as i64;
    if !state.config.enable_caching {
        return Err(Error::CachingDisabled { request: request.name(), num_blocks });
    }
    if request.holds_blocks() {
        return Err(Error::HitsOnRunningRequest { request: request.name(), num_blocks });
    }
    let (groups, num_tokens) = (&state.config.groups, hit.num_tokens);
    let num_hashed = request.block_hashes.len() as i64 * i64::from(state.hash_block_size);
    let whole = |(ids, group): (&Vec<i64>, &Group)| {
        let size = i64::from(group.block_size);
        (num_tokens + size - 1) / size == ids.len() as i64
    };
    let fits = hit.blocks.len() == groups.len()
        && (1..i64::from(request.num_tokens())).contains(&num_tokens)
        && num_tokens % i64::from(state.hit_alignment) == 0
        && hit.blocks.iter().zip(groups).all(whole)
        && num_tokens <= num_hashed;
    if !fits {
        return Err(Error::WrongHit { request: request.name(), num_blocks, num_tokens });
    }
    let check = |group_id: u32, position: u32, number: i64| {
        let rule = &groups[group_id as usize];
        if number == 0 && position < skipped_blocks(rule, num_tokens as u32) {
            return Ok(NULL_BLOCK);
        }
        let block = state.device.check_block(number)?;
        let key = hit_key(state, request, num_tokens as u32, (group_id, position));
        let size = rule.block_size;
        let is_part = !rule.is_state() && (position + 1) * size > num_tokens as u32;
        let has_it = match is_part {
            true => state.device.tail_keys(block).contains(&key),
            false => state.device.key(block) == Some(&key),
        };
        if !has_it {
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

/// Return the key that the block of a hit of this many tokens has at a place (group, position).
#[must_use]
pub fn hit_key(
    state: &State,
    request: &RequestState,
    num_tokens: u32,
    (group_id, position): (u32, u32),
) -> Key {
    let group = &state.config.groups[group_id as usize];
    if (position + 1) * group.block_size > num_tokens {
        return request.key_at(state.hash_block_size, group_id, num_tokens);
    }
    request.key(state.scales[group_id as usize], group_id, position)
}

/// Fails unless the request has the tokens, including drafts and those that may come later, and the
/// model's length allows them.
pub fn check_length(
    state: &State,
    request: &RequestState,
    slot_request: &SlotRequest,
) -> Result<(), Error> {
    let limit = i64::from(state.config.length_limit());
    let (num_local, num_total, end) = step_ends(state, request, slot_request);
    let num_scheduled = num_local.max(end);
    if num_scheduled > limit {
        let (request, requested) = (request.name(), num_scheduled);
        return Err(Error::BeyondModelLength { request, requested, max_model_len: limit });
    }
    let num_tokens = i64::from(request.num_tokens());
    let known = num_total.max(num_tokens + request.drafts.len() as i64);
    let beyond = num_total > num_tokens.max(i64::from(request.num_computed));
    if beyond || num_scheduled > known + slot_request.num_output_placeholders {
        let request = request.name();
        return Err(Error::TooManyTokens { request, num_tokens, requested: num_scheduled });
    }
    Ok(())
}

/// Return the tokens that are computed or hit, those with the external ones behind them, and those
/// after the step.
#[inline]
fn step_ends(state: &State, request: &RequestState, slot_request: &SlotRequest) -> (i64, i64, i64) {
    let limit = i64::from(state.config.length_limit());
    let num_local = i64::from(request.num_computed) + slot_request.num_hit_tokens();
    let num_total = (num_local + slot_request.num_external_computed_tokens).min(limit);
    (num_local, num_total, num_total + slot_request.num_new_tokens)
}

/// Fails with TooManyDrafts if a step of state groups would compute more drafts than it may keep
/// states of, or more than one token to come: a state cannot be cut back to the accepted ones. All
/// calls of a batch are one step.
pub fn check_one_unknown(state: &State, row: Row, slot_request: &SlotRequest) -> Result<(), Error> {
    let request = &state[row];
    let (num_local, _, end) = step_ends(state, request, slot_request);
    let record = state.batch.scheduled.get(row);
    let start = record.map_or(num_local, |each| num_local.min(each.num_computed_before.into()));
    let num_drafts = end - start.max(request.num_tokens().into());
    let groups = state.config.groups.iter().filter(|group| group.is_state());
    let most = match request.drafts.is_empty() {
        true => 1,
        false => groups.map(|group| group.draft_states.into()).min().unwrap_or(0),
    };
    if num_drafts > most {
        return Err(Error::TooManyDrafts { request: request.name(), num_drafts, most });
    }
    Ok(())
}

/// Fails with InOpenBatch if the open batch computes tokens of a request that gets external ones:
/// they would overwrite its state before the forward pass has read it. Its hits may be in the
/// batch.
fn check_not_begun(state: &State, row: Row) -> Result<(), Error> {
    let (request, count) = (&state[row], state[row].num_computed);
    let Some(record) = state.batch.scheduled.get(row) else { return Ok(()) };
    if count == record.num_computed_before {
        return Ok(());
    }
    let own_first = count == 1 || state.config.groups.iter().any(Group::is_cross); // is kept, too
    if (count > record.num_kept || own_first) && !only_brought(state, row) {
        return Err(Error::InOpenBatch { kind: "request", value: request.name().into() });
    }
    Ok(())
}

/// Whether the last of a request's tokens in the open batch are external ones or its hit. The state
/// after a hit has a key; the batch itself gives none until it is taken.
fn only_brought(state: &State, row: Row) -> bool {
    let (request, number) = (&state[row], state.batch.number);
    let brings = |load: &UnconfirmedLoad| {
        load.reporters[0].row == row && load.batch == number && load.end == request.num_computed
    };
    let mut groups = state.config.groups.iter().zip(&request.tables);
    state.loads.iter().any(brings)
        || groups.any(|(group, table)| {
            group.is_state() && table.last().is_some_and(|&block| state.device.key(block).is_some())
        })
}

/// Fails unless there are states, and a hit can end where the call does, with known tokens.
pub fn check_checkpoint(
    state: &State,
    request: &RequestState,
    slot_request: &SlotRequest,
) -> Result<(), Error> {
    if !state.has_states {
        return Err(Error::NoStateGroup { request: request.name() });
    }
    let multiple = i64::from(state.hit_alignment);
    let (_, _, requested) = step_ends(state, request, slot_request);
    let num_tokens = i64::from(request.num_tokens());
    if requested % multiple != 0 || requested > num_tokens {
        let request = request.name();
        return Err(Error::UnalignedCheckpoint { request, num_tokens, requested, multiple });
    }
    Ok(())
}
