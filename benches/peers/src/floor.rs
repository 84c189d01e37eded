// SPDX-License-Identifier: Apache-2.0
//! The lower bound of any manager with such keys: it hashes every block and does nothing else.

use std::hint::black_box;

use kvcore::hashing::block_hash::{hash_block, hash_blocks, root_hash};
use kvcore::types::extra_inputs::ExtraKeys;
use kvcore::types::keys::{BlockHash, Hashing};

use crate::Peer;
use crate::operations::List;

/// The chains of hashes of the requests.
pub struct Floor {
    hashing: Hashing,
    root: BlockHash,
    block_size: usize,
    /// The last hash of each request, and the tokens after its block.
    requests: Vec<(BlockHash, Vec<u32>)>,
    none: ExtraKeys,
}

impl Floor {
    pub fn new(list: &List, hashing: Hashing) -> Self {
        let root = root_hash(b"vllm-none-hash", hashing);
        Floor {
            hashing,
            root,
            block_size: list.block_size as usize,
            requests: vec![(root, Vec::new()); list.num_requests()],
            none: ExtraKeys::default(),
        }
    }
}

impl Peer for Floor {
    fn add(&mut self, request: usize, prompt: &[u32]) {
        let Floor { hashing, root, block_size, none, .. } = self;
        let size = *block_size as u32;
        let last = hash_blocks(*root, prompt, size, 0, none, *hashing).last();
        let tail = &prompt[prompt.len() / *block_size * *block_size..];
        self.requests[request] = (last.unwrap_or(*root), tail.to_vec());
    }

    fn prefill(&mut self, _request: usize, _end: usize) {}

    fn decode(&mut self, requests: &[u32], tokens: &[u32]) {
        for (&request, &token) in requests.iter().zip(tokens) {
            let (last, tail) = &mut self.requests[request as usize];
            tail.push(token);
            if tail.len() == self.block_size {
                *last = hash_block(last, tail, &[], self.hashing);
                tail.clear();
            }
        }
    }

    fn preempt(&mut self, _request: usize) {}

    fn finish(&mut self, request: usize) {
        black_box(self.requests[request].0);
    }

    fn end_step(&mut self) {}

    fn hits(&self) -> &[usize] {
        &[]
    }
}
