// SPDX-License-Identifier: Apache-2.0
//! What an engine does at once: moves of a few calls that belong together.
//!
//! Rules: a prompt is admitted or forgotten again, with all its tokens and its longest hit; a
//! waiting request is resumed with all of them, too. A finished request is freed and forgotten.
//! What a world names besides (cuts, swaps, drafts, loads, stores, pins) is tried call by call.
//! Twin: kvcore/check/search/moves.py.

use crate::check::search::actions::{
    Children, Move, actions, block_calls, cuts, draft_calls, fresh_name, loads, next_tokens,
    prompts, swaps,
};
use crate::check::world::calls::Outcome;
use crate::check::world::world::{Moves, World};
use crate::oracle::calls::{Call, Name, Slots, Value};
use crate::state::state::{RequestState, State};
use crate::transitions::prefix_lookup::longest_hit;
use crate::types::values::Status;

/// Every move of a world in a state, in a fixed order.
pub fn moves(world: &World, state: &State, children: &Children, out: &mut Vec<Move>) {
    match world.moves {
        Moves::Calls => actions(world, state, children, out),
        Moves::Engine => engine_moves(world, state, children, out),
    }
}

impl Move {
    /// The next call, behind so many that were made; state: the one after the last, which had this
    /// outcome.
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

/// What an engine can do in a state, in a fixed order.
pub fn engine_moves(world: &World, state: &State, children: &Children, out: &mut Vec<Move>) {
    let fresh = fresh_name(state);
    let room = (state.rows.len() as u32) < world.num_requests;
    if room && world.tries("add_request") {
        for tokens in prompts(world, children) {
            for kind in 0..world.kinds_of_requests.len() {
                out.push(Move::Admit { name: fresh, tokens: tokens.to_vec(), kind });
            }
        }
    }
    for request in state.requests() {
        moves_of(world, state, request, children, out);
        if room && world.tries("fork") && request.status() == Status::Running {
            out.push(Move::Call(Call::Fork { parent: Name::of(request), child: fresh }));
        }
    }
    swaps(world, state, out);
    block_calls(world, state, out);
    if world.tries("reset_prefix_cache") {
        out.push(Move::Call(Call::ResetPrefixCache));
    }
}

/// The call that schedules all tokens and drafts that are left, behind the longest hit, with all
/// lookahead slots of the world.
#[must_use]
pub fn schedule_rest(world: &World, state: &State, request: &RequestState) -> Call {
    let mut first = request.num_computed;
    let mut hit = None;
    if !request.holds_blocks() {
        let found = longest_hit(state, request);
        first = found.num_tokens;
        hit = (first > 0).then_some(found);
    }
    let num_new = request.num_tokens() + request.num_drafts() - first;
    let num_encoder = if request.num_computed > 0 { 0 } else { world.num_encoder };
    let slots = Slots { hit, num_encoder, ..Slots::new(Name::of(request), num_new) };
    Call::AllocateSlots(Slots { num_lookahead: world.num_lookahead, ..slots })
}

fn moves_of(
    world: &World,
    state: &State,
    request: &RequestState,
    children: &Children,
    out: &mut Vec<Move>,
) {
    let (name, status) = (Name::of(request), request.status());
    let (running, swapped) = (status == Status::Running, status == Status::Swapped);
    let (num_tokens, computed) = (request.num_tokens(), request.num_computed);
    let left = computed <= num_tokens && computed < num_tokens + request.num_drafts();
    if world.tries("allocate_slots") && !swapped && left && request.num_loading == 0 {
        out.push(Move::Call(schedule_rest(world, state, request)));
        if !running {
            let hit = longest_hit(state, request);
            let hit = (hit.num_tokens > 0).then_some(hit);
            loads(world, state, request, &[hit], out);
        }
    }
    let all = computed == num_tokens && num_tokens < world.num_tokens;
    if world.tries("append") && running && all {
        for token in next_tokens(world, children, &request.tokens) {
            out.push(Move::Call(Call::Append { name, token }));
        }
    }
    if running {
        draft_calls(world, request, children, out);
        cuts(world, state, request, out);
    }
    if world.tries("free") && (running || swapped) {
        out.push(Move::Call(Call::Free { name }));
        if world.tries("remove_request") {
            out.push(Move::Finish { name });
        }
    }
    if world.tries("remove_request") && !running && !swapped {
        out.push(Move::Call(Call::RemoveRequest { name }));
    }
}
