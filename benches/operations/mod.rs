// SPDX-License-Identifier: Apache-2.0
//! A recorded list of an engine's operations, from a file or made here.
//!
//! Rules: the list is made without assuming any sharing, so that every manager can replay it: a
//! pool that shares needs no more blocks. `record.py` has the format and writes it of a trace; the
//! one that is made here is the same on every machine.

use std::ops::Range;
use std::path::Path;

const MAGIC: u32 = 0x6b76_6f70;
const VERSION: u32 = 1;
const TOKEN_BUDGET: u32 = 8_192;
const MAX_RUNNING: usize = 256;
const VOCABULARY: u64 = 128_256;

/// One thing that an engine asks of a manager.
#[derive(Debug, Clone, Copy)]
pub enum Operation<'a> {
    Step,
    Add(usize),
    /// Up to so many tokens.
    Prefill(usize, u32),
    Decode(&'a [u32]),
    Preempt(usize),
    Finish(usize),
}

/// The list, with the tokens of its requests.
#[derive(Debug, Default)]
pub struct List {
    pub block_size: u32,
    pub num_blocks: u32,
    tokens: Vec<u32>,
    /// Where each request's tokens are, and how many are its prompt.
    requests: Vec<(Range<usize>, usize)>,
    words: Vec<u32>,
}

impl List {
    pub fn num_requests(&self) -> usize {
        self.requests.len()
    }

    pub fn prompt(&self, request: usize) -> &[u32] {
        let (range, prompt) = &self.requests[request];
        &self.tokens[range.start..range.start + prompt]
    }

    pub fn output(&self, request: usize) -> &[u32] {
        let (range, prompt) = &self.requests[request];
        &self.tokens[range.start + prompt..range.end]
    }

    pub fn operations(&self) -> impl Iterator<Item = Operation<'_>> {
        let mut rest = &self.words[..];
        std::iter::from_fn(move || {
            let (operation, size) = match *rest {
                [] => return None,
                [0, ..] => (Operation::Step, 1),
                [1, request, ..] => (Operation::Add(request as usize), 2),
                [2, request, end, ..] => (Operation::Prefill(request as usize, end), 3),
                [3, count, ..] => {
                    let end = 2 + count as usize;
                    (Operation::Decode(&rest[2..end]), end)
                }
                [4, request, ..] => (Operation::Preempt(request as usize), 2),
                [5, request, ..] => (Operation::Finish(request as usize), 2),
                _ => panic!("no operation begins with {}", rest[0]),
            };
            rest = &rest[size..];
            Some(operation)
        })
    }

    /// The list in a file.
    pub fn read(path: &Path) -> List {
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let words: Vec<u32> =
            bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let [MAGIC, VERSION, block_size, num_blocks, num_requests, num_tokens, _, rest @ ..] =
            &words[..]
        else {
            panic!("{path:?} is no list of operations");
        };
        let (lengths, rest) = rest.split_at(2 * *num_requests as usize);
        let (tokens, words) = rest.split_at(*num_tokens as usize);
        let mut list = List { block_size: *block_size, num_blocks: *num_blocks, ..List::default() };
        let mut start = 0;
        for &[prompt, output] in lengths.as_chunks().0 {
            let end = start + (prompt + output) as usize;
            list.requests.push((start..end, prompt as usize));
            start = end;
        }
        (list.tokens, list.words) = (tokens.to_vec(), words.to_vec());
        list
    }

    /// Conversations of five turns, each of which repeats those before.
    pub fn conversations(num_requests: usize, num_blocks: u32, block_size: u32) -> List {
        let mut list = List { block_size, num_blocks, ..List::default() };
        let mut random = Random(1);
        let mut histories: Vec<Vec<u32>> = vec![Vec::new(); num_requests.div_ceil(5)];
        for number in 0..num_requests {
            let count = histories.len();
            let history = &mut histories[number % count];
            let (more, output) = (500 + random.below(4_500), 50 + random.below(400));
            history.extend((0..more).map(|_| random.below(VOCABULARY) as u32));
            let start = list.tokens.len();
            list.tokens.extend_from_slice(history);
            list.tokens.extend((0..output).map(|_| random.below(VOCABULARY) as u32));
            list.requests.push((start..list.tokens.len(), history.len()));
        }
        list.words = Scheduler::new(&list).run();
        list
    }
}

/// A continuous-batching loop that counts blocks and shares none.
struct Scheduler<'a> {
    list: &'a List,
    /// Requests in the order of their arrival, with what they computed and gave out.
    running: Vec<Running>,
    waiting: Vec<usize>,
    /// Tokens that each request gave out.
    given: Vec<u32>,
    free: u32,
    words: Vec<u32>,
}

struct Running {
    request: usize,
    computed: u32,
    held: u32,
}

impl<'a> Scheduler<'a> {
    fn new(list: &'a List) -> Self {
        let waiting = (0..list.num_requests()).rev().collect();
        let given = vec![0; list.num_requests()];
        let free = list.num_blocks - 1;
        Scheduler { list, running: Vec::new(), waiting, given, free, words: Vec::new() }
    }

    fn run(mut self) -> Vec<u32> {
        for request in 0..self.list.num_requests() {
            self.words.extend([1, request as u32]);
        }
        while !(self.running.is_empty() && self.waiting.is_empty()) {
            let mut budget = TOKEN_BUDGET;
            self.decode(&mut budget);
            self.admit();
            self.prefill(&mut budget);
            self.words.push(0);
            self.finish();
        }
        self.words
    }

    fn length(&self, request: usize) -> u32 {
        self.list.prompt(request).len() as u32 + self.given[request]
    }

    /// Blocks that a running request takes to have so many tokens; false: they are not there.
    fn hold(&mut self, place: usize, num_tokens: u32) -> bool {
        let more = num_tokens.div_ceil(self.list.block_size) - self.running[place].held;
        if more > self.free {
            return false;
        }
        self.free -= more;
        self.running[place].held += more;
        true
    }

    fn preempt_last(&mut self) {
        let last = self.running.pop().expect("somebody runs");
        self.free += last.held;
        self.waiting.push(last.request);
        self.words.extend([4, last.request as u32]);
    }

    fn decode(&mut self, budget: &mut u32) {
        let mut rows = Vec::new();
        let mut place = 0;
        while place < self.running.len() {
            let Running { request, computed, .. } = self.running[place];
            if computed == self.length(request) {
                while place < self.running.len() && !self.hold(place, computed + 1) {
                    self.preempt_last();
                }
                if place == self.running.len() {
                    break;
                }
                self.running[place].computed += 1;
                self.given[request] += 1;
                rows.push(request as u32);
                *budget -= 1;
            }
            place += 1;
        }
        if !rows.is_empty() {
            self.words.extend([3, rows.len() as u32]);
            self.words.extend(rows);
        }
    }

    fn admit(&mut self) {
        while self.running.len() < MAX_RUNNING {
            let Some(&request) = self.waiting.last() else { break };
            if self.length(request).div_ceil(self.list.block_size) > self.free {
                break;
            }
            self.waiting.pop();
            self.running.push(Running { request, computed: 0, held: 0 });
            let (place, length) = (self.running.len() - 1, self.length(request));
            assert!(self.hold(place, length), "the request was admitted");
        }
    }

    fn prefill(&mut self, budget: &mut u32) {
        for place in 0..self.running.len() {
            let Running { request, computed, .. } = self.running[place];
            let count = (self.length(request) - computed).min(*budget);
            if count > 0 {
                *budget -= count;
                self.running[place].computed += count;
                self.words.extend([2, request as u32, computed + count]);
            }
        }
    }

    fn finish(&mut self) {
        let (list, given) = (self.list, &self.given);
        let done =
            |one: &mut Running| given[one.request] as usize == list.output(one.request).len();
        for one in self.running.extract_if(.., done) {
            self.free += one.held;
            self.words.extend([5, one.request as u32]);
        }
    }
}

/// A linear congruential generator: the same list on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % end
    }
}
