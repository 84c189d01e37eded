// SPDX-License-Identifier: Apache-2.0
//! Make one call many times in a pool whose blocks were used before, to count its instructions.
//!
//! For `evict`, which is `allocate`, all of them are cached; else they left without a key.
//! `free_alone` is `free` of blocks that no other request holds.
//! Run: `make counts`, which runs `counts CALL BLOCKS` under callgrind for each call and two pools,
//! and counts only what is inside `measured`. Without arguments each call is made once.

use std::hint::black_box;

use kvcore::state::state::{State, make_state};
use kvcore::transitions::allocate::allocate_slots;
use kvcore::transitions::append::{Requests, append, columns_grown, places_grown};
use kvcore::transitions::batches::take_batch_into;
use kvcore::transitions::epochs::advance_epoch;
use kvcore::transitions::fork::fork;
use kvcore::transitions::free::free;
use kvcore::transitions::queries::get_computed_blocks;
use kvcore::transitions::requests::{add_request, add_tokens, remove_request};
use kvcore::types::commands::Batch;
use kvcore::types::config::Config;
use kvcore::types::groups::{Group, Kind};
use kvcore::types::keys::Hashing;
use kvcore::types::slot_request::SlotRequest;
use kvcore::types::values::{Output, Request};

const BLOCK_SIZE: u32 = 16;
/// Blocks of all prompts.
const PROMPTS_BLOCKS: u32 = 2_048;
const CALLS: [&str; 20] = [
    "add",
    "look_up",
    "evict",
    "allocate",
    "take_batch",
    "free_alone",
    "append",
    "append_ahead",
    "append_256",
    "append_1024",
    "append_ahead_256",
    "append_ahead_1024",
    "append_to_come_256",
    "append_to_come_1024",
    "append_grown_256",
    "append_grown_1024",
    "append_states_256",
    "fork",
    "free",
    "advance",
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [call, blocks] if CALLS.contains(&call.as_str()) => {
            Bench::new(blocks.parse().expect("blocks are a number"), call).run(call);
        }
        _ => CALLS.iter().for_each(|call| Bench::new(8_192, call).run(call)),
    }
}

struct Bench {
    state: State,
    batch: Batch,
    ids: Vec<String>,
    children: Vec<String>,
    prompts: Vec<Vec<u32>>,
    rows: Vec<u32>,
    tokens: Vec<u32>,
}

impl Bench {
    /// Make a pool that requests have filled and left, for one call.
    fn new(blocks: u32, call: &str) -> Bench {
        let mut config = Config::new(blocks, BLOCK_SIZE, b"bench");
        config.hashing = Hashing::Xxh3;
        if call.contains("states") {
            config.groups.push(Group { kind: Kind::State, ..Group::new(BLOCK_SIZE) });
        }
        let number = call.rsplit('_').next().and_then(|last| last.parse().ok());
        let running: u32 = number.unwrap_or(32);
        let prompts = |first: u32| (first..first + running).map(|each| prompt(each, running));
        let mut bench = Bench {
            state: make_state(config).expect("the sizes are right"),
            batch: Batch::default(),
            ids: (0..running).map(|number| format!("r{number:03}")).collect(),
            children: (0..running).map(|number| format!("c{number:03}")).collect(),
            prompts: Vec::new(),
            rows: (0..running).collect(),
            tokens: Vec::new(),
        };
        for round in 0..=blocks / PROMPTS_BLOCKS {
            bench.prompts = prompts(round * running).collect();
            ["add", "allocate"].iter().for_each(|call| bench.call(call));
            if call == "evict" {
                bench.call("take_batch"); // else `free` takes the keys back
            }
            bench.call("free");
            bench.remove();
        }
        bench.prompts = prompts(1_000_000).collect();
        bench
    }

    /// Measure one call, after the calls that prepare it.
    fn run(&mut self, call: &str) {
        let before = CALLS.iter().take_while(|&&before| before != call);
        let is_made = |before: &&&str| {
            !before.starts_with("append_") && !["evict", "free_alone"].contains(before)
        };
        before.filter(is_made).for_each(|before| self.call(before));
        if call == "append" {
            // The first calls move each prompt to a column with room for more.
            self.call(call);
        }
        if call == "fork" {
            // The first calls reuse freed memory, in pieces of many sizes. Their own pieces are
            // freed last first, so that the allocator's part does not depend on the pool.
            self.call(call);
            self.call("take_batch");
            for child in self.children.iter().rev() {
                free(&mut self.state, child).expect("nobody counts on it");
                remove_request(&mut self.state, child).expect("it holds nothing");
            }
            self.call("take_batch");
        }
        if call.starts_with("append_ahead") {
            for id in &self.ids {
                let slot_request =
                    SlotRequest { num_output_placeholders: 1, ..SlotRequest::new(1) };
                let got =
                    allocate_slots(&mut self.state, id, &slot_request).expect("it is computed");
                assert!(got.is_ok(), "the pool has room");
            }
            self.call("take_batch");
        }
        if call == "advance" {
            self.call("take_batch");
        }
        if call.starts_with("append_to_come") {
            (0..2 * BLOCK_SIZE).for_each(|step| {
                measured(self, call);
                self.fill(step);
            });
        } else {
            measured(self, call);
        }
    }

    /// Hand in the tokens that the batch before the last sampled, one for each request.
    fn fill(&mut self, step: u32) {
        for (id, row) in self.ids.iter().zip(&self.rows) {
            let (token, batch) = ([1_000 * row + step], Some(self.batch.number as i64 - 1));
            let output = Output { batch, ..Output::from(&token[..]) };
            add_tokens(&mut self.state, id, output).expect("the batch sampled it");
        }
    }

    fn call(&mut self, call: &str) {
        let Bench { state, batch, ids, children, prompts, rows, tokens } = self;
        match call {
            "add" => {
                for (id, tokens) in ids.iter().zip(&*prompts) {
                    add_request(state, Request::new(id, tokens)).expect("the id is new");
                }
            }
            "look_up" => ids.iter().for_each(|id| {
                black_box(get_computed_blocks(state, id).expect("it is known"));
            }),
            "allocate" | "evict" => ids.iter().zip(&*prompts).for_each(|(id, prompt)| {
                let slot_request = SlotRequest::new(prompt.len() as i64);
                let got =
                    allocate_slots(state, id, &slot_request).expect("the arguments are right");
                assert!(got.is_ok(), "the pool has room");
            }),
            call if call.starts_with("append_to_come") => {
                append(state, Requests::Rows(rows), Output::default()).expect("the rows are known");
                take_batch_into(state, batch).expect("no batch is in flight");
            }
            call if call.starts_with("append") => {
                for step in 0..2 * BLOCK_SIZE {
                    tokens.clear();
                    tokens.extend(rows.iter().map(|row| 1_000 * row + step));
                    // Ahead, the batch before the last sampled each token, which fills a
                    // placeholder.
                    let ahead = call.starts_with("append_ahead");
                    let number = ahead.then_some(batch.number as i64 - 1);
                    let output = Output { batch: number, ..Output::from(&tokens[..]) };
                    append(state, Requests::Rows(rows), output).expect("the rows are known");
                    if call.starts_with("append_grown") {
                        black_box(columns_grown(&places_grown(state, rows, 0)));
                    }
                    take_batch_into(state, batch).expect("no batch is in flight");
                }
            }
            "take_batch" => take_batch_into(state, batch).expect("no batch is in flight"),
            "fork" => ids.iter().zip(&*children).for_each(|(id, child)| {
                fork(state, id, child).expect("the id is new");
            }),
            "advance" => ids.iter().for_each(|_| {
                advance_epoch(state, None).expect("the open batch computes nothing");
            }),
            _ => ids.iter().for_each(|id| free(state, id).expect("nobody counts on it")),
        }
    }

    fn remove(&mut self) {
        self.call("take_batch");
        let Bench { state, ids, .. } = self;
        ids.iter().for_each(|id| remove_request(state, id).expect("it holds nothing"));
        self.call("take_batch"); // which gives the rows back
    }
}

/// Run the work; only its instructions are counted.
#[inline(never)]
fn measured(bench: &mut Bench, call: &str) {
    bench.call(black_box(call));
}

/// Make the prompt with a number. running: how many prompts share the blocks.
fn prompt(number: u32, running: u32) -> Vec<u32> {
    let first = number.wrapping_mul(0x9e37_79b9);
    (0..PROMPTS_BLOCKS / running * BLOCK_SIZE)
        .map(|position| first.wrapping_add(position))
        .collect()
}
