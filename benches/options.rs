// SPDX-License-Identifier: Apache-2.0
//! What events cost a whole trace; what a second group or a batch in flight costs a decode step.
//!
//! Run: `cargo bench --bench options`. The trace is made here: conversations whose turns share
//! their history, prompts in chunks, one token a step for each running request, a pool that evicts;
//! its events are drained once a step. Rounds of all cases take turns, so that a neighbour's load
//! meets them alike; a case's time is its least, and its ratio to the first the median over rounds.
//! `-- --test` runs each case once.

use std::time::{Duration, Instant};

use kvcore::state::state::{State, make_state};
use kvcore::transitions::allocate::{Requests, allocate_slots, append};
use kvcore::transitions::batches::{complete, take_batch};
use kvcore::transitions::drain::take_events;
use kvcore::transitions::free::free;
use kvcore::transitions::queries::get_computed_blocks;
use kvcore::transitions::requests::{add_request, remove_request};
use kvcore::transitions::slot_request::SlotRequest;
use kvcore::types::config::{Config, Publish};
use kvcore::types::groups::{Group, Kind};
use kvcore::types::values::Request;

const BLOCK_SIZE: u32 = 16;
const NUM_ROUNDS: usize = 15;
const VOCABULARY: u64 = 128_256;

fn main() {
    let test = std::env::args().any(|argument| argument == "--test");
    let num_rounds = if test { 1 } else { NUM_ROUNDS };
    let trace = conversations(if test { 8 } else { 60 });
    let num_tokens: usize = trace.iter().map(Vec::len).sum();
    println!("trace: {} requests, {num_tokens} prompt tokens", trace.len());
    compare(&[("events off", false), ("events on", true)], num_rounds, |&events| {
        replay(&trace, events)
    });
    let (running, steps) = if test { (8, 32) } else { (1024, 256) };
    println!("decode: {running} requests, {steps} steps");
    compare(&group_cases(), num_rounds, |groups| {
        decode(&config_of(groups, running, steps), running, steps)
    });
    compare(&time_cases(running, steps), num_rounds, |config| decode(config, running, steps));
}

/// Run all cases in turn, several times; print their least times and their ratios to the first.
fn compare<T>(cases: &[(&str, T)], num_rounds: usize, run: impl Fn(&T) -> Duration) {
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

/// Prompts in order of arrival: each conversation has five turns, and each repeats those before.
fn conversations(count: usize) -> Vec<Vec<u32>> {
    let mut random = Random(1);
    let mut histories: Vec<Vec<u32>> = vec![Vec::new(); count];
    let mut prompts = Vec::new();
    for _ in 0..5 {
        for history in &mut histories {
            let length = 200 + random.below(1_000);
            history.extend((0..length).map(|_| random.below(VOCABULARY) as u32));
            prompts.push(history.clone());
        }
    }
    prompts
}

/// The whole operation list of a trace: at most 20 running, chunks of 2,048 tokens, 64 answers.
fn replay(trace: &[Vec<u32>], events: bool) -> Duration {
    const RUNNING: usize = 20;
    const ANSWERS: u32 = 64;
    let mut config = Config::new(8_192, BLOCK_SIZE, b"bench");
    config.enable_events = events;
    let mut state = make_state(config).expect("the sizes are right");
    let start = Instant::now();
    let mut waiting = trace.iter().enumerate();
    let mut running: Vec<(String, u32, u32)> = Vec::new(); // id, row, answers left
    let mut num_events = 0;
    loop {
        for (id, ..) in running.extract_if(.., |(_, _, left)| *left == 0) {
            finish(&mut state, &id);
        }
        while running.len() < RUNNING {
            let Some((number, tokens)) = waiting.next() else { break };
            let id = format!("r{number}");
            let row = add_request(&mut state, Request::new(&id, tokens)).expect("the id is new");
            prefill(&mut state, &id, tokens.len() as u32);
            running.push((id, row.0, ANSWERS));
        }
        if running.is_empty() {
            break;
        }
        let rows: Vec<u32> = running.iter().map(|(_, row, _)| *row).collect();
        let tokens: Vec<u32> = running.iter().map(|(_, row, left)| 1_000 * row + left).collect();
        let done = append(&mut state, Requests::Rows(&rows), &tokens).expect("the rows are known");
        assert!(done.refused.is_none(), "the pool holds all that run");
        running.iter_mut().for_each(|(_, _, left)| *left -= 1);
        take_batch(&mut state).expect("no batch is in flight");
        num_events += take_events(&mut state).len();
    }
    assert_eq!(events, num_events > 0);
    start.elapsed()
}

fn prefill(state: &mut State, id: &str, num_tokens: u32) {
    let hit = get_computed_blocks(state, id).expect("the request is known");
    let mut left = num_tokens - hit.num_tokens;
    let mut asked = SlotRequest { hit: Some((&hit).into()), ..SlotRequest::default() };
    while left > 0 {
        asked.num_new_tokens = i64::from(left.min(2_048));
        let got = allocate_slots(state, id, &asked).expect("the arguments are right");
        assert!(got.is_ok(), "the pool holds all that run");
        left -= left.min(2_048);
        asked.hit = None;
    }
}

fn finish(state: &mut State, id: &str) {
    free(state, id).expect("nobody counts on what it publishes");
    remove_request(state, id).expect("it holds nothing");
}

fn group_cases() -> Vec<(&'static str, Vec<Group>)> {
    let full = Group::new(BLOCK_SIZE);
    let window = Group { kind: Kind::SlidingWindow, window: Some(128), ..full };
    vec![
        ("one group", vec![full]),
        ("two groups, full attention", vec![full, full]),
        ("two groups, one with a window", vec![full, window]),
    ]
}

fn config_of(groups: &[Group], running: u32, steps: u32) -> Config {
    let num_blocks = 1 + running * groups.len() as u32 * (steps + 40) / BLOCK_SIZE;
    Config { groups: groups.to_vec(), ..Config::new(num_blocks, BLOCK_SIZE, b"bench") }
}

fn time_cases(running: u32, steps: u32) -> Vec<(&'static str, Config)> {
    let none = config_of(&[Group::new(BLOCK_SIZE)], running, steps);
    let one = Config { max_in_flight: 1, ..none.clone() };
    let late = Config { publish: Publish::Completed, ..one.clone() };
    vec![("no batch in flight", none), ("one in flight", one), ("one, published when done", late)]
}

/// So many decode steps of so many requests; each batch is completed before the next is taken.
fn decode(config: &Config, running: u32, steps: u32) -> Duration {
    let mut state = make_state(config.clone()).expect("the sizes are right");
    for number in 0..running {
        let id = format!("d{number}");
        // Requests of different lengths, so that each step fills some blocks.
        let tokens = vec![number; 1 + (number % BLOCK_SIZE) as usize];
        add_request(&mut state, Request::new(&id, &tokens)).expect("the id is new");
        let asked = SlotRequest::new(tokens.len() as i64);
        assert!(allocate_slots(&mut state, &id, &asked).expect("the arguments are right").is_ok());
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

/// A linear congruential generator: the same trace on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % end
    }
}
