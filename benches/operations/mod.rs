// SPDX-License-Identifier: Apache-2.0
//! A recorded list of an engine's operations. `benches/record.py` has the format and writes it.

use std::ops::Range;
use std::path::Path;

const MAGIC: u32 = 0x6b76_6f70;
const VERSION: u32 = 1;

/// One operation of an engine on a manager.
#[derive(Debug, Clone, Copy)]
pub enum Operation<'a> {
    Step,
    Add(usize),
    /// The number of tokens to allocate up to.
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
    /// The place of each request's tokens, and the length of its prompt.
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

    /// Read the list from a file.
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
}
