// SPDX-License-Identifier: Apache-2.0
//! What the twin's transitions cost, a block or a request, in a small and in a large pool.
//!
//! Run: `cargo bench --bench transitions`; `-- --test` runs each once. Every case works on one
//! state that lives through the whole run, so caches and tables are warm as in an engine; only the
//! named call is timed.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvcore::state::state::{State, make_state};
use kvcore::transitions::allocate::{Requests, allocate_slots, append};
use kvcore::transitions::batches::take_batch;
use kvcore::transitions::fork::fork;
use kvcore::transitions::free::free;
use kvcore::transitions::queries::get_computed_blocks;
use kvcore::transitions::requests::{add_request, remove_request};
use kvcore::transitions::slot_request::SlotRequest;
use kvcore::types::config::Config;
use kvcore::types::values::Request;

const BLOCK_SIZE: u32 = 16;
const POOLS: [u32; 2] = [16_384, 1_048_576];
const PROMPT_BLOCKS: u32 = 64;
const RUNNING: u32 = 1024;

fn state_of(num_blocks: u32) -> State {
    make_state(Config::new(num_blocks, BLOCK_SIZE, b"bench")).expect("the configuration works")
}

/// Tokens that no other request of the run has.
fn prompt(number: u64) -> Vec<u32> {
    let first = number as u32;
    (0..PROMPT_BLOCKS * BLOCK_SIZE).map(|position| first.wrapping_add(position)).collect()
}

fn allocate(state: &mut State, request_id: &str) {
    let hit = get_computed_blocks(state, request_id).expect("the request is known");
    let num_new = PROMPT_BLOCKS * BLOCK_SIZE - hit.num_tokens;
    let mut slot_request = SlotRequest::new(i64::from(num_new));
    slot_request.hit = Some((&hit).into());
    let got = allocate_slots(state, request_id, &slot_request).expect("the arguments are right");
    black_box(got.expect("the pool holds one request"));
}

/// Time one phase of requests that come, are scheduled, and go.
fn one_request(state: &mut State, number: u64, phase: &str) -> Duration {
    let tokens = prompt(number * 7919);
    let timed = |name: &str, start: Instant| {
        if name == phase { start.elapsed() } else { Duration::ZERO }
    };
    let start = Instant::now();
    add_request(state, Request::new("r", &tokens)).expect("the id is new");
    let mut total = timed("add_request", start);
    let start = Instant::now();
    allocate(state, "r");
    total += timed("look up and allocate", start);
    let start = Instant::now();
    black_box(take_batch(state).expect("no batch is in flight"));
    total += timed("take_batch", start);
    let start = Instant::now();
    fork(state, "r", "child").expect("the id is new");
    total += timed("fork", start);
    free(state, "child").expect("the request is known");
    remove_request(state, "child").expect("the request holds nothing");
    let start = Instant::now();
    free(state, "r").expect("the request is known");
    total += timed("free", start);
    take_batch(state).expect("no batch is in flight");
    remove_request(state, "r").expect("the request holds nothing");
    total
}

fn requests(criterion: &mut Criterion) {
    for phase in ["add_request", "look up and allocate", "take_batch", "fork", "free"] {
        let mut group = criterion.benchmark_group(format!("{phase}, a request of 64 blocks"));
        group.throughput(Throughput::Elements(u64::from(PROMPT_BLOCKS)));
        for pool in POOLS {
            let mut state = state_of(pool);
            let mut number = 0;
            group.bench_with_input(BenchmarkId::from_parameter(pool), &pool, |bencher, _| {
                bencher.iter_custom(|iterations| {
                    (0..iterations)
                        .map(|_| {
                            number += 1;
                            one_request(&mut state, number, phase)
                        })
                        .sum()
                });
            });
        }
        group.finish();
    }
}

fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("append, a step of 1024 requests");
    group.throughput(Throughput::Elements(u64::from(RUNNING)));
    for pool in POOLS {
        let mut state = state_of(pool);
        group.bench_with_input(BenchmarkId::from_parameter(pool), &pool, |bencher, _| {
            bencher.iter_custom(|iterations| decode_steps(&mut state, iterations));
        });
    }
    group.finish();
}

/// So many decode steps; the requests start anew before any of them fills its share of the pool.
fn decode_steps(state: &mut State, iterations: u64) -> Duration {
    let rows: Vec<u32> = (0..RUNNING).collect();
    let tokens = vec![7; RUNNING as usize];
    let mut total = Duration::ZERO;
    for step in 0..iterations {
        if step % 128 == 0 {
            restart(state, step > 0);
        }
        let start = Instant::now();
        let appended = append(state, Requests::Rows(&rows), &tokens);
        total += start.elapsed();
        assert!(appended.expect("the rows are known").refused.is_none());
        take_batch(state).expect("no batch is in flight");
    }
    restart(state, true);
    for number in 0..RUNNING {
        free_one(state, number);
    }
    total
}

fn restart(state: &mut State, running: bool) {
    for number in 0..RUNNING {
        if running {
            free_one(state, number);
        }
    }
    for number in 0..RUNNING {
        let id = format!("d{number}");
        add_request(state, Request::new(&id, &[number, 1, 2])).expect("the id is new");
        let got =
            allocate_slots(state, &id, &SlotRequest::new(3)).expect("the arguments are right");
        assert!(got.is_ok());
    }
    take_batch(state).expect("no batch is in flight");
}

fn free_one(state: &mut State, number: u32) {
    let id = format!("d{number}");
    free(state, &id).expect("the request is known");
    remove_request(state, &id).expect("the request holds nothing");
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(2));
    targets = requests, decode
}
criterion_main!(benches);
