// SPDX-License-Identifier: Apache-2.0
//! Measure each eviction policy: allocating and freeing in a full pool.
//!
//! Run: `cargo bench --bench policies [-- NAME ...]`; without names, all. It prints nanoseconds of
//! processor time per block. The extra cost over `lru` is that of the policy's decision; requests
//! wait for a tenth of the pool.

use std::hint::black_box;
use std::time::Duration;

use cpu_time::ThreadTime;
use kvcore::state::state::{State, make_state};
use kvcore::transitions::allocate::allocate_slots;
use kvcore::transitions::batches::take_batch;
use kvcore::transitions::free::free;
use kvcore::transitions::requests::{add_request, remove_request};
use kvcore::types::config::{Config, EVICTIONS, Eviction};
use kvcore::types::keys::Hashing;
use kvcore::types::slot_request::SlotRequest;
use kvcore::types::values::Request;

const NUM_BLOCKS: u32 = 32_768;
const PROMPT: u32 = 64;
const NUM_ROUNDS: u32 = 4_096;

fn main() {
    println!("{:16}{:>10}{:>10}", "ns per block", "allocate", "free");
    let names: Vec<String> = std::env::args().skip(1).filter(|each| each != "--bench").collect();
    let is_asked = |name: &str| names.is_empty() || names.iter().any(|each| each == name);
    for (eviction, name) in EVICTIONS.into_iter().filter(|each| is_asked(each.1)) {
        let least = (0..5).map(|_| measure(eviction)).min().unwrap_or_default();
        let each = |spent: Duration| spent.as_nanos() as f64 / f64::from(NUM_ROUNDS * PROMPT);
        println!("{name:16}{:>10.1}{:>10.1}", each(least.0), each(least.1));
    }
}

/// The time of all allocations, and of all calls that free them.
fn measure(eviction: Eviction) -> (Duration, Duration) {
    let mut config = Config::new(NUM_BLOCKS, 1, b"seed");
    (config.eviction, config.hashing) = (eviction, Hashing::Xxh3);
    let mut state = make_state(config).expect("the config is valid");
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

fn serve(state: &mut State, number: u32, spent: &mut (Duration, Duration)) {
    let (name, tokens) = (format!("r{number}"), prompt(number));
    add_request(state, Request::new(&name, &tokens)).expect("it is new");
    let request = SlotRequest::new(i64::from(PROMPT));
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
