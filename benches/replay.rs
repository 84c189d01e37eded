// SPDX-License-Identifier: Apache-2.0
//! Measure a whole list of an engine's operations, by phase.
//!
//! Run: `cargo bench --bench replay -- [--hash sha256_cbor|sha256|siphash|xxh3] [--rounds N]
//! [--blocks N] [--policy lru|uncached_first] [--events] [FILE]...`. A file is one that `python -m
//! benches.record` wrote; `make bench` writes the default one. The figures are CPU time of the
//! thread, minus the clock's own, the least over rounds per phase. `--events`: events are made, and
//! drained once per step. `--test` runs one round.

mod operations;

use std::hint::black_box;
use std::path::Path;
use std::time::Duration;

use cpu_time::ThreadTime;
use kvcore::state::state::{State, make_state};
use kvcore::transitions::allocate::allocate_slots;
use kvcore::transitions::append::{Requests, append};
use kvcore::transitions::batches::take_batch;
use kvcore::transitions::drain::take_events;
use kvcore::transitions::free::free;
use kvcore::transitions::queries::get_computed_blocks;
use kvcore::transitions::requests::{add_request, remove_request};
use kvcore::types::config::{Config, Eviction};
use kvcore::types::keys::Hashing;
use kvcore::types::slot_request::{RequestedHit, SlotRequest};
use kvcore::types::values::Request;
use operations::{List, Operation};

const PHASES: [&str; 6] = ["add", "look up", "allocate", "append", "take_batch", "free"];
const ADD: usize = 0;
const LOOK_UP: usize = 1;
const ALLOCATE: usize = 2;
const APPEND: usize = 3;
const TAKE: usize = 4;
const FREE: usize = 5;
const MADE_BY_MAKE: &str = "build/ops/turns.ops";

fn main() {
    let options = Options::read();
    for list in &options.lists {
        let best = (0..options.rounds).map(|_| replay(list, &options)).reduce(Run::least);
        best.expect("there is a round").print(list);
    }
}

/// The options of the command line.
struct Options {
    hashing: Hashing,
    eviction: Eviction,
    rounds: usize,
    blocks: Option<u32>,
    events: bool,
    lists: Vec<List>,
}

impl Options {
    fn read() -> Options {
        let mut options = Options {
            hashing: Hashing::Sha256Cbor,
            eviction: Eviction::Lru,
            rounds: 7,
            blocks: None,
            events: false,
            lists: Vec::new(),
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().expect("an option has a value");
            match argument.as_str() {
                "--bench" => {}
                "--test" => options.rounds = 1,
                "--events" => options.events = true,
                "--hash" => options.hashing = hashing_of(&value()),
                "--policy" => options.eviction = eviction_of(&value()),
                "--rounds" => options.rounds = value().parse().expect("rounds are a number"),
                "--blocks" => options.blocks = value().parse().ok(),
                file => options.lists.push(List::read(Path::new(file))),
            }
        }
        if options.lists.is_empty() {
            options.lists.push(List::read(Path::new(MADE_BY_MAKE)));
        }
        options
    }
}

fn hashing_of(name: &str) -> Hashing {
    match name {
        "sha256_cbor" => Hashing::Sha256Cbor,
        "sha256" => Hashing::Sha256,
        "siphash" => Hashing::Siphash,
        "xxh3" => Hashing::Xxh3,
        _ => panic!("no hashing is called {name}"),
    }
}

fn eviction_of(name: &str) -> Eviction {
    match name {
        "lru" => Eviction::Lru,
        "uncached_first" => Eviction::UncachedFirst,
        _ => panic!("no policy is called {name}"),
    }
}

/// The cost and the hits of one run.
struct Run {
    times: [Duration; 6],
    /// The manager's time of each step, in ascending order.
    steps: Vec<Duration>,
    blocks: usize,
    appended: usize,
    hit_tokens: u64,
    /// Resident kilobytes of the state: before the run, and with it.
    memory: [usize; 2],
}

impl Run {
    fn least(mut self, other: Run) -> Run {
        for (time, other) in self.times.iter_mut().zip(other.times) {
            *time = other.min(*time);
        }
        for (time, other) in self.steps.iter_mut().zip(&other.steps) {
            *time = (*other).min(*time);
        }
        self
    }

    fn print(&self, list: &List) {
        let Run { times, steps, blocks, appended, hit_tokens, memory } = self;
        let (requests, pool, count) = (list.num_requests(), list.num_blocks, steps.len());
        println!("{requests} requests, {blocks} prompt blocks, {appended} appends, {count} steps");
        println!("a pool of {pool} blocks: {hit_tokens} hit tokens");
        for (name, time) in PHASES.iter().zip(times) {
            let count = if *name == "append" { appended } else { blocks };
            let each = time.as_nanos() as f64 / *count as f64;
            println!("  {name:<12} {:>9.3} ms {each:>8.1} ns", 1e3 * time.as_secs_f64());
        }
        let total: Duration = times.iter().sum();
        println!("  {:<12} {:>9.3} ms", "total", 1e3 * total.as_secs_f64());
        let at =
            |share: f64| 1e3 * steps[(share * (steps.len() - 1) as f64) as usize].as_secs_f64();
        println!(
            "  step ms: median {:.3}, 99.9th percentile {:.3}, worst {:.3}",
            at(0.5),
            at(0.999),
            at(1.0)
        );
        println!("  memory MB: {:.1}, {:.1}", memory[0] as f64 / 1e3, memory[1] as f64 / 1e3);
    }
}

/// A manager that replays a list.
struct Replay<'a> {
    list: &'a List,
    state: State,
    ids: Vec<String>,
    rows: Vec<u32>,
    appended: Vec<usize>,
    computed: Vec<u32>,
    /// The hit of each request that was looked up and not yet allocated.
    hits: Vec<Option<RequestedHit>>,
    times: [Duration; 6],
    hit_tokens: u64,
    clock: Duration,
}

fn replay(list: &List, options: &Options) -> Run {
    let memory = resident();
    let num_blocks = options.blocks.unwrap_or(list.num_blocks);
    let mut config = Config::new(num_blocks, list.block_size, b"vllm-none-hash");
    (config.hashing, config.eviction) = (options.hashing, options.eviction);
    config.enable_events = options.events;
    let state = make_state(config).expect("the sizes are right");
    let made = resident();
    let count = list.num_requests();
    let mut replay = Replay {
        list,
        state,
        ids: (0..count).map(|number| format!("request-{number}")).collect(),
        rows: vec![0; count],
        appended: vec![0; count],
        computed: vec![0; count],
        hits: vec![None; count],
        times: [Duration::ZERO; 6],
        hit_tokens: 0,
        clock: clock_cost(),
    };
    let mut steps = Vec::new();
    let mut before = Duration::ZERO;
    for operation in list.operations() {
        replay.apply(operation);
        if let Operation::Step = operation {
            let total = replay.times.iter().sum();
            steps.push(total - before);
            before = total;
        }
    }
    steps.sort_unstable();
    Run {
        times: replay.times,
        steps,
        blocks: (0..count).map(|one| list.prompt(one).len() / list.block_size as usize).sum(),
        appended: (0..count).map(|one| list.output(one).len()).sum(),
        hit_tokens: replay.hit_tokens,
        memory: [made - memory, resident() - memory],
    }
}

impl Replay<'_> {
    fn time<T>(&mut self, phase: usize, call: impl FnOnce(&mut Self) -> T) -> T {
        let start = ThreadTime::now();
        let result = call(self);
        self.times[phase] += start.elapsed().saturating_sub(self.clock);
        result
    }

    fn apply(&mut self, operation: Operation<'_>) {
        match operation {
            Operation::Step => {
                let batch = self
                    .time(TAKE, |this| (take_batch(&mut this.state), take_events(&mut this.state)));
                black_box(batch.0.expect("no batch is in flight"));
            }
            Operation::Add(request) => {
                let list = self.list;
                self.rows[request] = self.time(ADD, |this| {
                    let request = Request::new(&this.ids[request], list.prompt(request));
                    add_request(&mut this.state, request).expect("the id is new").0
                });
            }
            Operation::Prefill(request, end) => self.prefill(request, end),
            Operation::Decode(requests) => self.decode(requests),
            Operation::Preempt(request) => {
                (self.computed[request], self.hits[request]) = (0, None);
                self.time(FREE, |this| free(&mut this.state, &this.ids[request]))
                    .expect("nobody counts on it");
            }
            Operation::Finish(request) => self.time(FREE, |this| {
                free(&mut this.state, &this.ids[request]).expect("nobody counts on it");
                remove_request(&mut this.state, &this.ids[request]).expect("it holds nothing");
            }),
        }
    }

    fn prefill(&mut self, request: usize, end: u32) {
        if self.computed[request] == 0 {
            let hit = self.time(LOOK_UP, |this| {
                get_computed_blocks(&this.state, &this.ids[request]).expect("it is known")
            });
            self.hit_tokens += u64::from(hit.num_tokens);
            self.computed[request] = hit.num_tokens;
            self.hits[request] = Some((&hit).into());
        }
        if end > self.computed[request] {
            let num_new_tokens = i64::from(end - self.computed[request]);
            let slot_request = SlotRequest {
                num_new_tokens,
                hit: self.hits[request].take(),
                ..SlotRequest::default()
            };
            let got = self.time(ALLOCATE, |this| {
                allocate_slots(&mut this.state, &this.ids[request], &slot_request)
            });
            black_box(got.expect("the arguments are right").expect("the pool has room"));
            self.computed[request] = end;
        }
    }

    fn decode(&mut self, requests: &[u32]) {
        let rows: Vec<u32> = requests.iter().map(|&one| self.rows[one as usize]).collect();
        let next = |&one: &u32| {
            let place = &mut self.appended[one as usize];
            *place += 1;
            self.list.output(one as usize)[*place - 1]
        };
        let tokens: Vec<u32> = requests.iter().map(next).collect();
        let done =
            self.time(APPEND, |this| append(&mut this.state, Requests::Rows(&rows), &tokens));
        assert!(done.expect("the rows are known").refused.is_none(), "the pool has room");
    }
}

/// Measure what one reading of the clock adds to a time.
fn clock_cost() -> Duration {
    (0..1_000).map(|_| ThreadTime::now().elapsed()).min().unwrap_or_default()
}

/// Return the resident kilobytes of this process.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}
