// SPDX-License-Identifier: Apache-2.0
//! Replay one list of operations through one Rust peer in this process; print the cost as JSON.
//!
//! Run: `kvcore-peers PEER FILE`. It reads CPU time of the thread twice per step; prompts and the
//! tokens of each step, which an engine has anyway, are made before the clock starts. The first
//! prefill of a request looks up; a hit that goes past the chunk leaves one token to compute, so
//! that every peer holds its hits from then on. Twin: benches/peers/replay.py.

mod floor;
#[cfg(feature = "kvbm")]
mod kvbm;
#[path = "../../operations/mod.rs"]
mod operations;
mod twin;

use std::path::Path;

use cpu_time::ThreadTime;
use floor::Floor;
#[cfg(feature = "kvbm")]
use kvbm::Kvbm;
use kvcore::types::config::Eviction::{Lru, UncachedFirst};
use kvcore::types::keys::Hashing;
use operations::{List, Operation};
use twin::Twin;

/// A block manager under the operations of the list.
pub trait Peer {
    fn add(&mut self, request: usize, prompt: &[u32]);
    /// Allocate up to `end`, after a look-up if the request holds nothing.
    fn prefill(&mut self, request: usize, end: usize);
    /// Append a token to each request.
    fn decode(&mut self, requests: &[u32], tokens: &[u32]);
    /// Free the blocks, keep the tokens.
    fn preempt(&mut self, request: usize);
    /// Free the blocks and forget the request.
    fn finish(&mut self, request: usize);
    /// Hand the batch to the device.
    fn end_step(&mut self);
    /// Return the hit tokens of each look-up.
    fn hits(&self) -> &[usize];
}

/// A peer that does nothing, to measure the driver.
struct Null;

impl Peer for Null {
    fn add(&mut self, _request: usize, _prompt: &[u32]) {}
    fn prefill(&mut self, _request: usize, _end: usize) {}
    fn decode(&mut self, _requests: &[u32], _tokens: &[u32]) {}
    fn preempt(&mut self, _request: usize) {}
    fn finish(&mut self, _request: usize) {}
    fn end_step(&mut self) {}
    fn hits(&self) -> &[usize] {
        &[]
    }
}

/// Make a peer by its name.
fn make(name: &str, list: &List) -> Box<dyn Peer> {
    match name {
        "null-rust" => Box::new(Null),
        "kvcore-rust" => Box::new(Twin::new(list, Hashing::Sha256Cbor, UncachedFirst)),
        "kvcore-rust-lru" => Box::new(Twin::new(list, Hashing::Sha256Cbor, Lru)),
        "kvcore-rust-sha" => Box::new(Twin::new(list, Hashing::Sha256, UncachedFirst)),
        "kvcore-rust-siphash" => Box::new(Twin::new(list, Hashing::Siphash, UncachedFirst)),
        "kvcore-rust-xxh3" => Box::new(Twin::new(list, Hashing::Xxh3, UncachedFirst)),
        "hashes-cbor" => Box::new(Floor::new(list, Hashing::Sha256Cbor)),
        "hashes-sha" => Box::new(Floor::new(list, Hashing::Sha256)),
        "hashes-siphash" => Box::new(Floor::new(list, Hashing::Siphash)),
        "hashes-xxh3" => Box::new(Floor::new(list, Hashing::Xxh3)),
        #[cfg(feature = "kvbm")]
        "kvbm" => Box::new(Kvbm::new(list, false)),
        #[cfg(feature = "kvbm")]
        "kvbm-lru" => Box::new(Kvbm::new(list, true)),
        _ => panic!("no peer is called {name}"),
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, file] = &arguments[..] else { panic!("usage: kvcore-peers PEER FILE") };
    let list = List::read(Path::new(file));
    let decodes = decoded_tokens(&list);
    let bare = resident();
    let mut peer = make(name, &list);
    let made = resident();
    let steps = run(&mut *peer, &list, &decodes);
    let steps: Vec<String> = steps.iter().map(|seconds| format!("{seconds:.9}")).collect();
    println!(
        "{{\"steps\": [{}], \"hits\": {:?}, \"memory\": [{}, {}]}}",
        steps.join(", "),
        peer.hits(),
        made - bare,
        resident() - bare,
    );
}

/// Return the tokens that each decode appends.
fn decoded_tokens(list: &List) -> Vec<Vec<u32>> {
    let mut appended = vec![0; list.num_requests()];
    let mut decodes = Vec::new();
    for operation in list.operations() {
        if let Operation::Decode(requests) = operation {
            let next = |&request: &u32| {
                appended[request as usize] += 1;
                list.output(request as usize)[appended[request as usize] - 1]
            };
            decodes.push(requests.iter().map(next).collect());
        }
    }
    decodes
}

/// Replay the whole list; returns the CPU seconds of each step.
fn run(peer: &mut dyn Peer, list: &List, decodes: &[Vec<u32>]) -> Vec<f64> {
    let mut decodes = decodes.iter();
    let mut times = Vec::new();
    let mut start = ThreadTime::now();
    for operation in list.operations() {
        match operation {
            Operation::Decode(requests) => {
                peer.decode(requests, decodes.next().expect("there is one for each"));
            }
            Operation::Prefill(request, end) => peer.prefill(request, end as usize),
            Operation::Add(request) => peer.add(request, list.prompt(request)),
            Operation::Finish(request) => peer.finish(request),
            Operation::Preempt(request) => peer.preempt(request),
            Operation::Step => {
                peer.end_step();
                times.push(start.elapsed().as_secs_f64());
                start = ThreadTime::now();
            }
        }
    }
    times
}

/// Return the resident megabytes of this process; 0 if the system does not report them.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
    kilobytes.unwrap_or(0.0) * 1.024e-3
}
