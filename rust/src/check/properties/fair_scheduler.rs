// SPDX-License-Identifier: Apache-2.0
//! A fair scheduler: first come, first served; the latest request is preempted first.
//!
//! NO-THRASH is stated for this scheduler: from any state it must finish every request, and between
//! two new tokens no request starts more than once. It plans one step at a time, and each step is a
//! batch; requests that the pool can never hold are removed. NO-THRASH is checked only if it is
//! named. Twin: kvcore/check/properties/fair_scheduler.py.

use std::sync::Arc;

use crate::check::properties::liveness::{
    can_grow_to, drop_pins, expected, preempt, rows, schedule_all, send_away, settle,
};
use crate::check::world::world::World;
use crate::state::state::{RequestState, State};
use crate::transitions::append::{Requests, append};
use crate::transitions::requests::accept;
use crate::transitions::swap::swap_in;
use crate::transitions::truncate::truncate;
use crate::types::ids::Row;
use crate::types::values::Status;
use crate::types::violation::Finding;

/// NO-THRASH: a fair scheduler never preempts in a cycle without producing a token.
pub fn no_thrash(world: &World, state: &State) -> Finding {
    let mut state = state.clone();
    settle(&mut state)?;
    drop_pins(&mut state)?;
    reject_drafts(&mut state)?;
    let (mut idle, mut known) = (0, num_tokens(&state));
    while known.0 > 0 {
        step(world, &mut state)?;
        let now = num_tokens(&state);
        idle = if now == known { idle + 1 } else { 0 };
        known = now;
        if idle > 1 + now.0 {
            return Err(format!("{idle} steps without a new token, with {} requests", now.0));
        }
    }
    Ok(())
}

/// Make one step: every request goes on in the order of arrival, then the batch is executed.
fn step(world: &World, state: &mut State) -> Finding {
    for row in rows(state).collect::<Vec<Row>>() {
        if is_done(world, state, row) {
            send_away(state, row)?;
            continue;
        }
        loop {
            try_one(state, row)?;
            if is_served(state, row) {
                break;
            }
            let Some(victim) = latest_running(state, row) else { break };
            preempt(state, victim)?;
            if victim == row {
                break;
            }
        }
    }
    settle(state)?;
    reject_drafts(state)
}

/// Bring a request one call further; nothing changes if that is refused.
fn try_one(state: &mut State, row: Row) -> Finding {
    let before = state.clone();
    let name = Arc::clone(&state[row].request_id);
    let request = &state[row];
    let done = if request.status() == Status::Swapped {
        expected(swap_in(state, &[&name]))?.is_ok()
    } else if request.num_computed < request.num_tokens() + request.num_drafts() {
        expected(schedule_all(state, row))?.is_ok()
    } else {
        expected(append(state, Requests::Ids(&[&name]), &[0]))?.done > 0
    };
    if !done {
        *state = before;
    }
    Ok(())
}

/// Tell whether a request goes on in the open batch.
fn is_served(state: &State, row: Row) -> bool {
    let request = &state[row];
    let whole = request.num_tokens() + request.num_drafts();
    state.batch.scheduled.get(row).is_some() && request.num_computed == whole
}

/// Return the request to preempt: the last one after this one, else this one if it runs.
fn latest_running(state: &State, row: Row) -> Option<Row> {
    let behind = rows(state).filter(|&each| each >= row);
    behind.filter(|&each| state[each].status() == Status::Running).last()
}

fn is_done(world: &World, state: &State, row: Row) -> bool {
    let (computed, num_tokens) = (state[row].num_computed, state[row].num_tokens());
    let finished = computed >= num_tokens && num_tokens >= world.num_tokens;
    finished || !can_grow_to(state, world.num_tokens.min(num_tokens + 1), world.num_encoder)
}

/// Reject all scheduled drafts, and drop all positions to come.
fn reject_drafts(state: &mut State) -> Finding {
    for row in rows(state).collect::<Vec<Row>>() {
        let name = Arc::clone(&state[row].request_id);
        let num_tokens = state[row].num_tokens();
        if state[row].num_output_placeholders() > 0 {
            expected(truncate(state, &name, i64::from(num_tokens)))?;
        } else if state[row].num_computed > num_tokens {
            expected(accept(state, &name, 0))?;
        }
    }
    Ok(())
}

/// Count requests, and all their tokens.
fn num_tokens(state: &State) -> (usize, usize) {
    let add =
        |(requests, tokens), request: &RequestState| (requests + 1, tokens + request.tokens.len());
    state.requests().fold((0, 0), add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::tests::checked_states::{A, B, Run, config};
    use crate::oracle::calls::{Call, Slots};
    use crate::types::effects::Effects;

    fn run() -> Run {
        let mut run = Run::new(config());
        for name in [A, B] {
            run.add(name, &[1, 2, 3, 4, 5]);
            run.call(&Call::AllocateSlots(Slots::new(name, 5)));
        }
        run.close();
        run
    }

    #[test]
    fn everyone_is_finished_in_a_pool_that_is_too_small() {
        let run = run();
        assert_eq!(no_thrash(&run.world, &run.state), Ok(()));
    }

    #[test]
    fn who_is_started_again_and_again_is_found() {
        let mut run = run();
        // Nothing is free, and no request gives anything back if it leaves.
        let left = run.state.device.num_free();
        run.state.device.take(left, &mut Effects::silent());
        for row in [Row(0), Row(1)] {
            for block in run.state[row].tables[0].clone() {
                run.state.device.restore(block, 2);
            }
            run.state[row].quiet_until = 0; // the next slot has two owners by now
        }
        assert!(no_thrash(&run.world, &run.state).is_err());
    }
}
