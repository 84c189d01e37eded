// SPDX-License-Identifier: Apache-2.0
//! The moves that an exploration tries in a state: single calls, or the moves of an engine.
//!
//! An engine admits a prompt with all its tokens after its longest hit, or removes it again; it
//! resumes a waiting request with all its tokens, too; it frees a finished request and removes it.
//! What a world names besides (cuts, swaps, drafts, loads, stores, pins) is tried call by call.
//! What an engine must not do is left out: until the verdict on a request's scheduled drafts, the
//! only calls on the request are those that bring the verdict or free it. Twin:
//! kvcore/check/search/moves.py.

use crate::check::properties::liveness::rest_of;
use crate::check::search::actions::{
    Children, Move, allocations, block_calls, continuations, cuts, draft_calls, fresh_name,
    hash_calls, loads, next_tokens, prefix_pins, swaps,
};
use crate::check::world::calls::Outcome;
use crate::check::world::world::{Moves, World};
use crate::oracle::calls::{Call, Name, Slots, Value};
use crate::state::state::{RequestState, State};
use crate::transitions::prefix_lookup::longest_hit;
use crate::types::values::Status;

/// The last epoch that a world reaches.
const EPOCHS_MAX: u32 = 2;
/// The last ms that a world reaches.
const TIME_MAX: u64 = 2;

/// Add every move of a world in a state, in a fixed order.
pub fn moves(world: &World, state: &State, children: &Children, out: &mut Vec<Move>) {
    let name = fresh_name(state);
    let room = (state.rows.len() as u32) < world.num_requests;
    if room && world.tries("add_request") {
        for tokens in continuations(world, children, &[], world.num_prompt) {
            for kind in 0..world.kinds_of_requests.len() {
                let tokens = tokens.to_vec();
                out.push(match world.moves {
                    Moves::Calls => Move::Call(Call::AddRequest { name, tokens, kind }),
                    Moves::Engine => Move::Admit { name, tokens, kind },
                });
            }
        }
    }
    for request in state.requests() {
        moves_of(world, state, request, children, out);
        if room && world.tries("fork") && request.status() == Status::Running {
            out.push(Move::Call(Call::Fork { parent: Name::of(request), child: name }));
        }
    }
    swaps(world, state, out);
    block_calls(world, state, out);
    prefix_pins(world, state, out);
    if world.tries("reset_prefix_cache") {
        out.push(Move::Call(Call::ResetPrefixCache));
    }
    if world.tries("advance_epoch") && state.epoch < EPOCHS_MAX {
        out.push(Move::Call(Call::AdvanceEpoch));
    }
    let now = state.device.now();
    if world.tries("tick") && state.device.retention.is_some() && now < TIME_MAX {
        out.push(Move::Call(Call::Tick { now: now + 1 }));
    }
}

impl Move {
    /// Return the next call, after this many were made; state: the one after the last, which had
    /// this outcome.
    #[must_use]
    pub fn next(
        &self,
        world: &World,
        state: &State,
        num_made: usize,
        last: Option<&Outcome>,
    ) -> Option<Call> {
        match (self, num_made) {
            (Move::Call(call), 0) => Some(call.clone()),
            (Move::Admit { name, tokens, kind }, 0) => {
                Some(Call::AddRequest { name: *name, tokens: tokens.clone(), kind: *kind })
            }
            (Move::Admit { name, .. }, 1) => {
                let request = state.requests().find(|each| Name::of(each) == *name)?;
                Some(schedule_rest(world, state, request))
            }
            (Move::Admit { name, .. }, 2) => {
                let refused = last.is_some_and(|last| matches!(last.value, Value::Refused(_)));
                refused.then_some(Call::RemoveRequest { name: *name })
            }
            (Move::Finish { name }, 0) => Some(Call::Free { name: *name }),
            (Move::Finish { name }, 1) => Some(Call::RemoveRequest { name: *name }),
            _ => None,
        }
    }
}

/// Return the call that schedules all tokens and drafts that are left, behind the longest hit, with
/// all lookahead slots of the world.
fn schedule_rest(world: &World, state: &State, request: &RequestState) -> Call {
    let num_encoder_tokens = if request.num_computed > 0 { 0 } else { world.num_encoder };
    let num_lookahead_tokens = world.num_lookahead;
    let rest = rest_of(state, request);
    Call::AllocateSlots(Slots { num_encoder_tokens, num_lookahead_tokens, ..rest })
}

fn moves_of(
    world: &World,
    state: &State,
    request: &RequestState,
    children: &Children,
    out: &mut Vec<Move>,
) {
    let (name, status) = (Name::of(request), request.status());
    let (running, waiting) = (status == Status::Running, status == Status::Waiting);
    let (num_tokens, computed) = (request.num_tokens(), request.num_computed);
    let engine = world.moves == Moves::Engine;
    if world.tries("allocate_slots") && (running || waiting) && computed <= num_tokens {
        let schedule = if engine { resume } else { allocations };
        schedule(world, state, request, out);
    }
    let all = computed == num_tokens && num_tokens < world.num_tokens;
    if world.tries("append") && running && all && !is_scheduled(state, request) {
        let tokens = next_tokens(world, children, &request.tokens);
        out.extend(tokens.map(|token| Move::Call(Call::append(name, Some(token)))));
    }
    let some = request.num_drafts() == 0 && num_tokens < world.num_tokens;
    if world.tries("add_tokens") && running && some {
        let tokens = next_tokens(world, children, &request.tokens);
        let add = |token| Call::AddTokens { name, tokens: vec![token], output: None };
        out.extend(tokens.map(|token| Move::Call(add(token))));
    }
    if world.tries("add_block_hashes") {
        hash_calls(world, request, out);
    }
    if running {
        draft_calls(world, request, children, out);
        cuts(world, state, request, out);
    }
    if world.tries("free") && !waiting {
        out.push(Move::Call(Call::Free { name }));
        if engine && world.tries("remove_request") {
            out.push(Move::Finish { name });
        }
    }
    if world.tries("remove_request") && waiting {
        out.push(Move::Call(Call::RemoveRequest { name }));
    }
}

/// Add the calls that schedule positions whose tokens are to come: after output that a request
/// awaits, or drafts after its last token.
pub(crate) fn ahead_calls(
    world: &World,
    state: &State,
    awaited: impl Fn(&RequestState) -> bool,
    out: &mut Vec<Move>,
) {
    for request in state.requests() {
        let (name, computed) = (Name::of(request), request.num_computed);
        let num_tokens = request.num_tokens();
        let stays = request.num_loading > 0 || request.num_drafts() > 0;
        if stays || request.status() == Status::Swapped {
            continue;
        }
        let slots = |num_output_placeholders| {
            let slots =
                Slots { num_output_placeholders, ..Slots::new(name, num_output_placeholders) };
            Move::Call(Call::AllocateSlots(slots))
        };
        if num_tokens > computed {
            let most = (world.num_output_placeholders - 1)
                .min(world.num_tokens.saturating_sub(num_tokens));
            for num_output_placeholders in 1..=most {
                let Call::AllocateSlots(known) = schedule_rest(world, state, request) else {
                    continue;
                };
                let num_new_tokens = known.num_new_tokens + num_output_placeholders;
                out.push(Move::Call(Call::AllocateSlots(Slots {
                    num_new_tokens,
                    num_output_placeholders,
                    ..known
                })));
            }
        } else if awaited(request) && grows(world, state, request) {
            let most = world.num_output_placeholders.min(world.num_tokens - computed);
            out.push(Move::Call(Call::append(name, None)));
            out.extend((2..=most).map(slots));
        }
    }
}

/// Tell whether another position can be scheduled for a request whose tokens are all computed.
pub(crate) fn grows(world: &World, state: &State, request: &RequestState) -> bool {
    let computed = request.num_computed;
    let waits = request.num_loading > 0 || request.num_drafts() > 0;
    let idle = request.holds_blocks() && !waits && !is_scheduled(state, request);
    idle && request.num_tokens() <= computed && computed < world.num_tokens
}

/// Tell whether the open batch computes tokens of a request, so that none can have been sampled.
fn is_scheduled(state: &State, request: &RequestState) -> bool {
    let row = state.request(&request.request_id);
    row.is_ok_and(|row| state.batch.scheduled.get(row).is_some())
}

/// Schedule or load the tokens that a request has left, if there are any.
fn resume(world: &World, state: &State, request: &RequestState, out: &mut Vec<Move>) {
    let left = request.num_tokens() + request.num_drafts() - request.num_computed;
    if left == 0 || request.num_loading > 0 {
        return;
    }
    out.push(Move::Call(schedule_rest(world, state, request)));
    if request.status() == Status::Waiting && world.tries("load") {
        let hit = longest_hit(state, request);
        loads(world, state, request, &[(hit.num_tokens > 0).then_some(hit)], out);
    }
}
