// SPDX-License-Identifier: Apache-2.0
//! Replay the list's operations on kvcore's twin, called from Rust.

use std::hint::black_box;

use kvcore::state::state::{State, make_state};
use kvcore::transitions::allocate::allocate_slots;
use kvcore::transitions::append::{Requests, append};
use kvcore::transitions::batches::take_batch;
use kvcore::transitions::free::free;
use kvcore::transitions::queries::get_computed_blocks;
use kvcore::transitions::requests::{add_request, remove_request};
use kvcore::types::config::{Config, Eviction};
use kvcore::types::keys::Hashing;
use kvcore::types::slot_request::SlotRequest;
use kvcore::types::values::Request;

use crate::Peer;
use crate::operations::List;

/// The state, and an engine's own records of its requests.
pub struct Twin {
    state: State,
    ids: Vec<String>,
    rows: Vec<u32>,
    computed: Vec<usize>,
    hits: Vec<usize>,
    /// The requests of the last decode, and their rows.
    last: (Vec<u32>, Vec<u32>),
}

impl Twin {
    pub fn new(list: &List, hashing: Hashing, eviction: Eviction) -> Self {
        let mut config = Config::new(list.num_blocks, list.block_size, b"vllm-none-hash");
        (config.hashing, config.eviction) = (hashing, eviction);
        let count = list.num_requests();
        Twin {
            state: make_state(config).expect("the sizes are right"),
            ids: (0..count).map(|number| format!("request-{number}")).collect(),
            rows: vec![0; count],
            computed: vec![0; count],
            hits: Vec::new(),
            last: (Vec::new(), Vec::new()),
        }
    }
}

impl Peer for Twin {
    fn add(&mut self, request: usize, prompt: &[u32]) {
        let added = add_request(&mut self.state, Request::new(&self.ids[request], prompt));
        self.rows[request] = added.expect("the id is new").0;
    }

    fn prefill(&mut self, request: usize, end: usize) {
        let (id, computed) = (&self.ids[request], self.computed[request]);
        if computed >= end {
            return;
        }
        let got = if computed > 0 {
            self.computed[request] = end;
            allocate_slots(&mut self.state, id, &SlotRequest::new((end - computed) as i64))
        } else {
            let hit = get_computed_blocks(&self.state, id).expect("it is known");
            let num_hit = hit.num_tokens as usize;
            self.hits.push(num_hit);
            self.computed[request] = end.max(num_hit + 1);
            let mut slot_request = SlotRequest::new((self.computed[request] - num_hit) as i64);
            slot_request.hit = Some((&hit).into());
            allocate_slots(&mut self.state, id, &slot_request)
        };
        black_box(got.expect("the arguments are right").expect("the pool has room"));
    }

    fn decode(&mut self, requests: &[u32], tokens: &[u32]) {
        if self.last.0 != requests {
            let rows = requests.iter().map(|&request| self.rows[request as usize]).collect();
            self.last = (requests.to_vec(), rows);
        }
        let appended = append(&mut self.state, Requests::Rows(&self.last.1), tokens);
        assert!(appended.expect("the rows are known").refused.is_none(), "the pool has room");
    }

    fn preempt(&mut self, request: usize) {
        free(&mut self.state, &self.ids[request]).expect("nobody counts on it");
        self.computed[request] = 0;
    }

    fn finish(&mut self, request: usize) {
        free(&mut self.state, &self.ids[request]).expect("nobody counts on it");
        remove_request(&mut self.state, &self.ids[request]).expect("it holds nothing");
    }

    fn end_step(&mut self) {
        black_box(take_batch(&mut self.state).expect("no batch is in flight"));
    }

    fn hits(&self) -> &[usize] {
        &self.hits
    }
}
