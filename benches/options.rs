// SPDX-License-Identifier: Apache-2.0
//! Measure what a second group or a batch in flight costs a decode step.
//!
//! Run: `cargo bench --bench options`. Rounds of all cases take turns, so that other load affects
//! them alike; a case's time is its least, and its ratio to the first the median over rounds.
//! `-- --test` runs each case once. `benches/replay.rs --events` has the price of events.

use std::time::{Duration, Instant};

use kvcore::state::state::{State, make_state};
use kvcore::transitions::allocate::allocate_slots;
use kvcore::transitions::append::{Requests, append};
use kvcore::transitions::batches::{complete, take_batch};
use kvcore::transitions::requests::add_request;
use kvcore::types::config::{Config, Publish};
use kvcore::types::groups::{Group, Kind};
use kvcore::types::slot_request::SlotRequest;
use kvcore::types::values::Request;

const BLOCK_SIZE: u32 = 16;
const NUM_ROUNDS: usize = 15;

fn main() {
    let test = std::env::args().any(|argument| argument == "--test");
    let num_rounds = if test { 1 } else { NUM_ROUNDS };
    let (running, steps) = if test { (8, 32) } else { (1024, 256) };
    println!("decode: {running} requests, {steps} steps");
    compare(&cases(running, steps), num_rounds, |config| decode(config, running, steps));
}

/// Run all cases in turn, several times; print their least times and their ratios to the first.
fn compare(cases: &[(&str, Config)], num_rounds: usize, run: impl Fn(&Config) -> Duration) {
    let mut times = vec![Vec::with_capacity(num_rounds); cases.len()];
    for _ in 0..num_rounds {
        for ((_, case), own) in cases.iter().zip(&mut times) {
            own.push(run(case).as_secs_f64());
        }
    }
    for ((name, _), own) in cases.iter().zip(&times) {
        let least = own.iter().copied().fold(f64::INFINITY, f64::min);
        let mut ratios: Vec<f64> = own.iter().zip(&times[0]).map(|(a, b)| a / b).collect();
        ratios.sort_by(f64::total_cmp);
        println!("  {name:<32} {:>9.2} ms {:>6.2}", 1e3 * least, ratios[ratios.len() / 2]);
    }
}

fn cases(running: u32, steps: u32) -> Vec<(&'static str, Config)> {
    let full = Group::new(BLOCK_SIZE);
    let window = Group { kind: Kind::SlidingWindow, window: Some(128), ..full };
    let of = |groups: &[Group]| {
        let num_blocks = 1 + running * groups.len() as u32 * (steps + 40) / BLOCK_SIZE;
        Config { groups: groups.to_vec(), ..Config::new(num_blocks, BLOCK_SIZE, b"bench") }
    };
    let one = Config { max_in_flight: 1, ..of(&[full]) };
    let late = Config { publish: Publish::Completed, ..one.clone() };
    vec![
        ("one group, no batch in flight", of(&[full])),
        ("two groups, full attention", of(&[full, full])),
        ("two groups, one with a window", of(&[full, window])),
        ("one batch in flight", one),
        ("one, published when it is done", late),
    ]
}

/// Run decode steps of some requests; each batch is completed before the next is taken.
fn decode(config: &Config, running: u32, steps: u32) -> Duration {
    let mut state = make_state(config.clone()).expect("the sizes are right");
    for number in 0..running {
        let id = format!("d{number}");
        // Requests of different lengths, so that each step fills some blocks.
        let tokens = vec![number; 1 + (number % BLOCK_SIZE) as usize];
        add_request(&mut state, Request::new(&id, &tokens)).expect("the id is new");
        let slot_request = SlotRequest::new(tokens.len() as i64);
        assert!(
            allocate_slots(&mut state, &id, &slot_request)
                .expect("the arguments are right")
                .is_ok()
        );
    }
    take_batch(&mut state).expect("no batch is in flight");
    let rows: Vec<u32> = (0..running).collect();
    let start = Instant::now();
    for step in 0..steps {
        let tokens: Vec<u32> = rows.iter().map(|row| row + step).collect();
        let done = append(&mut state, Requests::Rows(&rows), &tokens).expect("the rows are known");
        assert!(done.refused.is_none(), "the pool has room for every step");
        finish_oldest(&mut state);
        take_batch(&mut state).expect("no batch is in flight");
    }
    start.elapsed()
}

fn finish_oldest(state: &mut State) {
    let oldest = state.in_flight().next();
    if let Some(batch) = oldest {
        complete(state, batch as i64).expect("it is the oldest");
    }
}
