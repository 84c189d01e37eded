// SPDX-License-Identifier: Apache-2.0
//! The hot path allocates nothing once the state is warm: decode steps, their batches, and frees.
//!
//! Every allocation and reallocation of this thread is counted. The columns of a request have room
//! for an answer and double when that is full, so the lengths here lie between two doublings.

use crate::fuzz::memory::count;
use crate::state::state::{State, make_state};
use crate::transitions::allocate::allocate_slots;
use crate::transitions::append::{Requests, append};
use crate::transitions::batches::take_batch_into;
use crate::transitions::free::free;
use crate::transitions::requests::add_request;
use crate::types::commands::Batch;
use crate::types::config::Config;
use crate::types::keys::HASHINGS;
use crate::types::slot_request::SlotRequest;
use crate::types::values::Request;

const RUNNING: u32 = 64;
const PROMPT: u32 = 300;

/// Allocations during a call.
fn allocations(call: impl FnOnce()) -> u64 {
    let before = count();
    call();
    count() - before
}

/// Requests that run, of prompts of different lengths, so that each step fills some blocks.
fn running(config: Config) -> State {
    let mut state = make_state(config).expect("the sizes are right");
    for number in 0..RUNNING {
        let tokens: Vec<u32> = (0..PROMPT + number % 16).map(|at| 1_000 * number + at).collect();
        let id = number.to_string();
        add_request(&mut state, Request::new(&id, &tokens)).expect("the id is new");
        let slot_request = SlotRequest::new(tokens.len() as i64);
        let got = allocate_slots(&mut state, &id, &slot_request).expect("the arguments are right");
        assert!(got.is_ok(), "the pool has room");
    }
    state
}

fn decode(state: &mut State, batch: &mut Batch, steps: u32) {
    let rows: [u32; RUNNING as usize] = std::array::from_fn(|row| row as u32);
    take_batch_into(state, batch).expect("no batch is in flight");
    for step in 0..steps {
        let tokens = rows.map(|row| 70_000 * row + step);
        let done = append(state, Requests::Rows(&rows), &tokens).expect("the rows are known");
        assert!(done.refused.is_none(), "the pool has room");
        take_batch_into(state, batch).expect("no batch is in flight");
    }
}

#[test]
fn an_allocation_is_counted() {
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1_u8; 9]))), 1);
}

#[test]
fn decode_steps_allocate_nothing() {
    for hashing in HASHINGS {
        let mut state = running(Config { hashing, ..Config::new(2_560, 16, b"seed") });
        let mut batch = Batch::default();
        decode(&mut state, &mut batch, 40);
        let free_before = state.device().num_free();
        assert_eq!(allocations(|| decode(&mut state, &mut batch, 128)), 0, "{hashing:?}");
        assert_eq!(free_before - state.device().num_free(), RUNNING * 128 / 16);
    }
}

#[test]
fn freeing_allocates_nothing() {
    let mut state = running(Config::new(2_560, 16, b"seed"));
    let ids: Vec<String> = (0..RUNNING).map(|number| number.to_string()).collect();
    let mut batch = Batch::default();
    take_batch_into(&mut state, &mut batch).expect("no batch is in flight");
    let counted = allocations(|| {
        ids.iter().for_each(|id| free(&mut state, id).expect("nobody counts on it"));
    });
    assert_eq!((counted, state.device().num_free()), (0, 2_559));
}
