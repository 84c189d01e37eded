// SPDX-License-Identifier: Apache-2.0
//! What the checks of runs find if nothing can go on any more.
//!
//! The stories begin with the runs of checked_states.rs.

use crate::check::properties::liveness::{RUN_PROPERTIES, RunChecker, admit_never};
use crate::check::tests::checked_states::{A, B, Run, config};
use crate::oracle::calls::{Call, Slots};
use crate::state::state::State;
use crate::transitions::append::{Requests, append};
use crate::transitions::batches::take_batch;
use crate::transitions::free::free;
use crate::types::effects::Effects;
use crate::types::ids::Row;

/// Two requests of three tokens, one of them swapped out.
fn run() -> Run {
    let mut run = Run::new(config());
    for name in [A, B] {
        run.add(name, &[1, 2, 3]);
        run.call(&Call::AllocateSlots(Slots::new(name, 3)));
    }
    run.close();
    run.call(&Call::SwapOut { names: vec![B] });
    run.close();
    run
}

/// Return the names of what does not hold in a state that was damaged.
fn found(damage: impl FnOnce(&mut State)) -> Vec<&'static str> {
    let Run { mut state, world, .. } = run();
    damage(&mut state);
    let broken = |(name, holds): &(&'static str, RunChecker)| {
        holds(&world, &state).is_err().then_some(*name)
    };
    RUN_PROPERTIES.iter().filter_map(broken).collect()
}

#[test]
fn everyone_can_go_on_and_leave() {
    assert_eq!(found(|_| ()), Vec::<&str>::new());
}

#[test]
fn a_block_that_nobody_gives_back_is_found() {
    let found = found(|state| {
        state.device.take(1, &mut Effects::silent());
    });
    assert_eq!(found, ["DRAIN"]);
}

#[test]
fn requests_that_nothing_helps_are_found() {
    let found = found(|state| {
        append(state, Requests::Ids(&["0"]), &[4]).unwrap();
        take_batch(state).unwrap();
        let left = state.device.num_free();
        state.device.take(left, &mut Effects::silent());
        for block in state[Row(0)].tables[0].clone() {
            state.device.restore(block, 2);
        }
    });
    assert_eq!(found, ["DRAIN", "DEADLOCK-FREE", "SWAP-RETURN"]);
}

#[test]
fn a_request_that_cannot_be_preempted_is_found() {
    let found = found(|state| {
        state.rows.remove("0");
    });
    assert!(found.contains(&"PREEMPT-GAIN"), "{found:?}");
}

#[test]
fn what_is_told_to_who_waits_is_checked() {
    let names = found(|state| {
        free(state, "0").unwrap();
        take_batch(state).unwrap();
        state[Row(0)].tokens.resize(20, 1);
        assert_eq!(admit_never(&run().world, state), Ok(()));
        state[Row(0)].num_loading = 1;
    });
    assert_eq!(names, ["ADMIT-NEVER"]);
    let names = found(|state| {
        free(state, "0").unwrap();
        free(state, "1").unwrap();
        take_batch(state).unwrap();
        state.rows.remove("0");
    });
    assert!(names.contains(&"L-ADMIT"), "{names:?}");
}
