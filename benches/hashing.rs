// SPDX-License-Identifier: Apache-2.0
//! Measure the hashing of a prompt of 100,000 tokens against a bare chain of SHA-256.
//!
//! Run: `cargo bench --bench hashing`. The bare chain is SHA-256(parent, 16 tokens of 4 bytes),
//! without encoding or checks: the least that any chain of SHA-256 costs. Rounds of all cases take
//! turns, so that other load affects them alike; a case's time is its least, and its ratio to the
//! bare chain the median over rounds. `-- --test` runs each case once.

use std::hint::black_box;
use std::time::Instant;

use kvcore::hashing::block_hash::{extend_chain, root_hash};
use kvcore::types::extra_inputs::{ExtraKeys, LoRA, MediaItem};
use kvcore::types::keys::{BlockHash, Hashing};
use sha2::{Digest, Sha256};

const NUM_TOKENS: usize = 100_000;
const BLOCK_SIZE: u32 = 16;
const NUM_ROUNDS: usize = 200;
/// Return token ids of a current vocabulary; most take five bytes in CBOR.
const VOCABULARY: u32 = 151_936;

/// The name of a case and its work.
struct Case<'a> {
    name: &'static str,
    run: Box<dyn Fn() -> BlockHash + 'a>,
}

fn main() {
    let num_rounds =
        if std::env::args().any(|argument| argument == "--test") { 1 } else { NUM_ROUNDS };
    let tokens = tokens();
    let (none, some) = (ExtraKeys::default(), extra_keys());
    let cases = [
        Case { name: "bare chain", run: Box::new(|| bare_chain(&tokens)) },
        case("sha256_cbor", &tokens, &none, Hashing::Sha256Cbor),
        Case { name: "sha256_cbor, a call per block", run: Box::new(|| block_by_block(&tokens)) },
        case("sha256", &tokens, &none, Hashing::Sha256),
        case("siphash", &tokens, &none, Hashing::Siphash),
        case("xxh3", &tokens, &none, Hashing::Xxh3),
        case("sha256_cbor, LoRA and media", &tokens, &some, Hashing::Sha256Cbor),
    ];
    let mut times = vec![Vec::with_capacity(num_rounds); cases.len()];
    for _ in 0..num_rounds {
        for (case, times) in cases.iter().zip(&mut times) {
            let start = Instant::now();
            black_box((case.run)());
            times.push(start.elapsed().as_nanos() as f64);
        }
    }
    report(&cases, &times);
}

fn case<'a>(
    name: &'static str,
    tokens: &'a [u32],
    extra_keys: &'a ExtraKeys,
    hashing: Hashing,
) -> Case<'a> {
    let root = root_hash(b"bench", hashing);
    let run = move || {
        let mut hashes = Vec::new();
        let tokens = black_box(tokens);
        extend_chain(&mut hashes, root, tokens, (BLOCK_SIZE, 0), extra_keys, hashing);
        hashes.pop().expect("the prompt has full blocks")
    };
    Case { name, run: Box::new(run) }
}

/// Hash the chain of a decoding request: each block when its last token arrives.
fn block_by_block(tokens: &[u32]) -> BlockHash {
    let (none, hashing) = (ExtraKeys::default(), Hashing::Sha256Cbor);
    let mut hashes = vec![root_hash(b"bench", hashing)];
    for (place, block) in (0..).zip(black_box(tokens).chunks_exact(BLOCK_SIZE as usize)) {
        let (parent, start) = (hashes[place], place as u32 * BLOCK_SIZE);
        extend_chain(&mut hashes, parent, block, (BLOCK_SIZE, start), &none, hashing);
    }
    hashes.pop().expect("the root is there")
}

fn bare_chain(tokens: &[u32]) -> BlockHash {
    let mut parent = [0; 32];
    for block in black_box(tokens).chunks_exact(BLOCK_SIZE as usize) {
        let mut bytes = [0; 32 + 4 * BLOCK_SIZE as usize];
        bytes[..32].copy_from_slice(&parent);
        for (place, token) in bytes[32..].chunks_exact_mut(4).zip(block) {
            place.copy_from_slice(&token.to_le_bytes());
        }
        parent = Sha256::digest(bytes).into();
    }
    parent
}

fn tokens() -> Vec<u32> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u32 % VOCABULARY
    };
    (0..NUM_TOKENS).map(|_| next()).collect()
}

/// Return extra inputs: an adapter, and an image of 576 tokens per 2048.
fn extra_keys() -> ExtraKeys {
    let lora = LoRA { name: "adapter".to_owned(), path: "adapters/adapter".to_owned() };
    let image = |offset| MediaItem { identifier: "f".repeat(64), offset, length: 576 };
    let media = (100..NUM_TOKENS as u32 - 576).step_by(2048).map(image).collect();
    ExtraKeys { lora: Some(lora), media, ..ExtraKeys::default() }
}

fn report(cases: &[Case<'_>], times: &[Vec<f64>]) {
    let num_blocks = (NUM_TOKENS / BLOCK_SIZE as usize) as f64;
    println!("{NUM_TOKENS} tokens, blocks of {BLOCK_SIZE}, {} rounds", times[0].len());
    println!("{:<30} {:>9} {:>11}", "", "ns/block", "x bare chain");
    for (case, own) in cases.iter().zip(times) {
        let least = own.iter().copied().fold(f64::INFINITY, f64::min);
        let mut ratios: Vec<f64> =
            own.iter().zip(&times[0]).map(|(own, bare)| own / bare).collect();
        ratios.sort_by(f64::total_cmp);
        let ratio = ratios[ratios.len() / 2];
        println!("{:<30} {:>9.1} {:>11.2}", case.name, least / num_blocks, ratio);
    }
}
