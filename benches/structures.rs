// SPDX-License-Identifier: Apache-2.0
//! What the free queue and the hash index cost per block, in a small and in a large pool.
//!
//! Run: `cargo bench --bench structures`; `-- --test` runs each once. Blocks come in an order that
//! no cache foresees, as after a long run.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvcore::pool::free_queue::make_free_queue;
use kvcore::pool::hash_index::HashIndex;
use kvcore::types::ids::BlockId;
use kvcore::types::keys::{Key, make_key};

const POOLS: [u32; 2] = [16_384, 1_048_576];
const ROUND: usize = 1_024;

/// All blocks of a pool in an order without any; the pool's size is a power of two.
fn shuffled(num_blocks: u32) -> Vec<BlockId> {
    let step = |place: u32| place.wrapping_mul(0x9e37_79b1) ^ (place >> 7);
    let mut blocks: Vec<u32> = (0..num_blocks).collect();
    blocks.sort_by_key(|&place| step(place));
    blocks.into_iter().map(BlockId).collect()
}

fn key(number: u64) -> Key {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    make_key(&hash, 0)
}

/// Time a call for each block of one round after the other, a pool's blocks in turn.
fn bench(
    criterion: &mut Criterion,
    name: &str,
    mut prepare: impl FnMut(u32) -> Box<dyn FnMut(BlockId)>,
) {
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Elements(ROUND as u64));
    for pool in POOLS {
        let blocks = shuffled(pool);
        let mut call = prepare(pool);
        let mut rounds = blocks.chunks_exact(ROUND).cycle();
        group.bench_with_input(BenchmarkId::from_parameter(pool), &pool, |bencher, _| {
            bencher.iter(|| rounds.next().into_iter().flatten().for_each(|&block| call(block)));
        });
    }
    group.finish();
}

fn free_queue(criterion: &mut Criterion) {
    bench(criterion, "free queue: front leaves and joins the back", |pool| {
        let mut queue = make_free_queue(pool, shuffled(pool));
        Box::new(move |_| {
            let block = queue.front().expect("no block is lost");
            queue.remove(block);
            queue.append(block);
        })
    });
    bench(criterion, "free queue: any block leaves and joins the back", |pool| {
        let mut queue = make_free_queue(pool, shuffled(pool));
        Box::new(move |block| {
            queue.remove(block);
            queue.append(block);
        })
    });
}

fn filled(pool: u32) -> HashIndex {
    let mut index = HashIndex::new(pool);
    (0..pool).for_each(|block| index.insert(key(u64::from(block)), BlockId(block)));
    index
}

fn hash_index(criterion: &mut Criterion) {
    bench(criterion, "hash index: a key that is there", |pool| {
        let index = filled(pool);
        Box::new(move |block| assert_eq!(index.first(&key(u64::from(block.0))), Some(block)))
    });
    bench(criterion, "hash index: a key that is not there", |pool| {
        let index = filled(pool);
        Box::new(move |block| {
            black_box(index.first(&key(1 << 40 | u64::from(block.0))));
        })
    });
    bench(criterion, "hash index: a block gets another key", |pool| {
        let mut index = filled(pool);
        let mut next = u64::from(pool);
        Box::new(move |block| {
            index.remove(block);
            index.insert(key(next), block);
            next += 1;
        })
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = free_queue, hash_index
}
criterion_main!(benches);
