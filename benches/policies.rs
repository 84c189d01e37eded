// SPDX-License-Identifier: Apache-2.0
//! Measure each eviction policy: deciding, allocating and freeing in a full pool.
//!
//! Run: `cargo bench --bench policies [-- NAME ...]`; without names, all. It prints nanoseconds of
//! processor time per block. `decide` is the decision which block leaves the queue, in a pool of
//! which a quarter was hit twice. The others are whole calls, of requests that hit nothing;
//! requests wait for a tenth of the pool. What `allocate` costs over `lru` is the decision, and
//! what the policy remembers of evicted contents.

use std::hint::black_box;
use std::time::Duration;

use cpu_time::ThreadTime;
use kvcore::state::state::{State, make_state};
use kvcore::transitions::allocate::allocate_slots;
use kvcore::transitions::batches::take_batch;
use kvcore::transitions::free::free;
use kvcore::transitions::queries::get_computed_blocks;
use kvcore::transitions::requests::{add_request, remove_request};
use kvcore::types::config::{Config, EVICTIONS, Eviction};
use kvcore::types::keys::Hashing;
use kvcore::types::slot_request::SlotRequest;
use kvcore::types::values::Request;

const NUM_BLOCKS: u32 = 32_768;
const PROMPT: u32 = 64;
const NUM_ROUNDS: u32 = 4_096;

fn main() {
    println!("{:16}{:>10}{:>10}{:>10}", "ns per block", "decide", "allocate", "free");
    let names: Vec<String> = std::env::args().skip(1).filter(|each| each != "--bench").collect();
    let is_asked = |name: &str| names.is_empty() || names.iter().any(|each| each == name);
    for (eviction, name) in EVICTIONS.into_iter().filter(|each| is_asked(each.1)) {
        let decided = (0..5).map(|_| decide(eviction)).min().unwrap_or_default();
        let decided = decided.as_nanos() as f64 / f64::from(NUM_BLOCKS);
        let least = (0..5).map(|_| measure(eviction)).min().unwrap_or_default();
        let each = |spent: Duration| spent.as_nanos() as f64 / f64::from(NUM_ROUNDS * PROMPT);
        println!("{name:16}{decided:>10.1}{:>10.1}{:>10.1}", each(least.0), each(least.1));
    }
}

/// The time in which all blocks of a pool leave its queue, as the policy decides.
fn decide(eviction: Eviction) -> Duration {
    let mut state = make_state(config(eviction)).expect("the config is valid");
    for number in 0..NUM_BLOCKS / PROMPT {
        for _ in 0..if number % 4 == 0 { 3 } else { 1 } {
            serve(&mut state, number, &mut Default::default());
        }
    }
    let mut pool = state.device().clone();
    let start = ThreadTime::now();
    for _ in 0..NUM_BLOCKS / PROMPT {
        black_box(pool.dequeue_next(0, PROMPT));
    }
    start.elapsed()
}

/// The time of all allocations, and of all calls that free them.
fn measure(eviction: Eviction) -> (Duration, Duration) {
    let mut state = make_state(config(eviction)).expect("the config is valid");
    for number in 0..NUM_BLOCKS / PROMPT {
        serve(&mut state, number, &mut Default::default());
    }
    for number in 0..NUM_BLOCKS / PROMPT / 10 {
        let (name, tokens) = (format!("w{number}"), prompt(number));
        add_request(&mut state, Request::new(&name, &tokens)).expect("it is new");
    }
    let mut spent = (Duration::ZERO, Duration::ZERO);
    (0..NUM_ROUNDS).for_each(|round| serve(&mut state, NUM_BLOCKS + round, &mut spent));
    black_box(&state);
    spent
}

fn config(eviction: Eviction) -> Config {
    let mut config = Config::new(NUM_BLOCKS, 1, b"seed");
    (config.eviction, config.hashing) = (eviction, Hashing::Xxh3);
    config
}

fn serve(state: &mut State, number: u32, spent: &mut (Duration, Duration)) {
    let (name, tokens) = (format!("r{number}"), prompt(number));
    add_request(state, Request::new(&name, &tokens)).expect("it is new");
    let hit = get_computed_blocks(state, &name).expect("it is known");
    let mut request = SlotRequest::new(i64::from(PROMPT - hit.num_tokens));
    request.hit = Some((&hit).into());
    let start = ThreadTime::now();
    let got = allocate_slots(state, &name, &request).expect("the call is right");
    spent.0 += start.elapsed();
    assert!(got.is_ok(), "the pool has room");
    take_batch(state).expect("none is in flight");
    let start = ThreadTime::now();
    free(state, &name).expect("it is known");
    remove_request(state, &name).expect("it holds nothing");
    spent.1 += start.elapsed();
}

fn prompt(number: u32) -> Vec<u32> {
    (0..PROMPT).map(|place| number * PROMPT + place).collect()
}
