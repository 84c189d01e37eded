// SPDX-License-Identifier: Apache-2.0
//! Replay the list's operations on NVIDIA's kvbm-logical.
//!
//! It runs its own sequences and manager as its README does, with the guards of the blocks in plain
//! vectors: its `LogicalBlockAssignments` would more than double the cost. A look-up leaves a token
//! to compute, as with the other peers.

use kvbm_logical::{BlockManager, BlockRegistry, BlockSequence, ImmutableBlock, MutableBlock};

use crate::Peer;
use crate::operations::List;

/// The tier of the blocks.
#[derive(Clone, Debug)]
struct Device;

struct Known {
    sequence: BlockSequence,
    full: Vec<ImmutableBlock<Device>>,
    /// The blocks that are not full.
    open: Vec<MutableBlock<Device>>,
    computed: usize,
}

/// The manager, and its sequences.
pub struct Kvbm {
    manager: BlockManager<Device>,
    requests: Vec<Option<Known>>,
    block_size: usize,
    hits: Vec<usize>,
}

impl Kvbm {
    /// Make a peer that evicts in the default order, by lineage, or least recently used first.
    pub fn new(list: &List, lru: bool) -> Self {
        let block_size = list.block_size as usize;
        let builder = BlockManager::builder()
            .block_count(list.num_blocks as usize - 1) // the others keep one back as padding
            .block_size(block_size)
            .registry(BlockRegistry::new());
        let builder = if lru { builder.with_lru_backend() } else { builder.with_lineage_backend() };
        Kvbm {
            manager: builder.build().expect("the sizes are right"),
            requests: (0..list.num_requests()).map(|_| None).collect(),
            block_size,
            hits: Vec::new(),
        }
    }
}

impl Known {
    /// Hold blocks for some tokens and publish the full ones.
    fn grow(&mut self, end: usize, block_size: usize, manager: &BlockManager<Device>) {
        let held = self.full.len() + self.open.len();
        let needed = end.div_ceil(block_size).saturating_sub(held);
        if needed > 0 {
            self.open.extend(manager.allocate_blocks(needed).expect("the pool has room"));
        }
        let full = self.full.len()..end / block_size;
        if !full.is_empty() {
            let tokens = &self.sequence.blocks()[full];
            let complete = |(block, tokens): (MutableBlock<_>, _)| {
                block.complete(tokens).expect("the sizes agree")
            };
            let blocks = self.open.drain(..tokens.len()).zip(tokens).map(complete).collect();
            self.full.extend(manager.register_blocks(blocks));
        }
        self.computed = end;
    }
}

impl Peer for Kvbm {
    fn add(&mut self, request: usize, prompt: &[u32]) {
        self.requests[request] = Some(Known {
            sequence: BlockSequence::new(prompt.to_vec(), self.block_size as u32, None),
            full: Vec::new(),
            open: Vec::new(),
            computed: 0,
        });
    }

    fn prefill(&mut self, request: usize, end: usize) {
        let known = self.requests[request].as_mut().expect("it was added");
        if known.computed >= end {
            return;
        }
        let mut end = end;
        if known.computed == 0 {
            let mut hashes = known.sequence.all_sequence_hashes();
            hashes.truncate((known.sequence.total_tokens() - 1) / self.block_size);
            let matched = self.manager.match_blocks(&hashes);
            let num_hit = matched.len() * self.block_size;
            self.hits.push(num_hit);
            known.full = matched;
            end = end.max(num_hit + 1);
        }
        known.grow(end, self.block_size, &self.manager);
    }

    fn decode(&mut self, requests: &[u32], tokens: &[u32]) {
        for (&request, &token) in requests.iter().zip(tokens) {
            let known = self.requests[request as usize].as_mut().expect("it was added");
            let filled = known.sequence.append_token(token).expect("there is room").is_some();
            let end = known.computed + 1;
            if filled || known.computed.is_multiple_of(self.block_size) {
                known.grow(end, self.block_size, &self.manager);
            }
            known.computed = end;
        }
    }

    fn preempt(&mut self, request: usize) {
        let known = self.requests[request].as_mut().expect("it was added");
        known.open.clear();
        known.full.clear();
        known.computed = 0;
    }

    fn finish(&mut self, request: usize) {
        self.requests[request] = None;
    }

    fn end_step(&mut self) {}

    fn hits(&self) -> &[usize] {
        &self.hits
    }
}
