// SPDX-License-Identifier: Apache-2.0
//! The keys of blocks: the full key, the tail keys, under which their first tokens are found, and
//! hashes as an engine makes them that brings its own. Twin: kvcore/check/world/keyed.py.

use smallvec::SmallVec;

use crate::pool::block_pool::BlockPool;
use crate::state::state::State;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::{BlockHash, HASH_SIZE, Key};

/// The letters of hashes of an engine's own: a trace can write a hash of one letter.
const OWN: &[u8; 62] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

/// Return all keys of a block, its tail keys included.
pub(crate) fn keys_of(pool: &BlockPool, block: BlockId) -> impl Iterator<Item = &Key> {
    pool.key(block).into_iter().chain(pool.tail_keys(block))
}

/// Return the tail keys of a request's block at a position that end up to a token.
pub(crate) fn own_tails(
    state: &State,
    row: Row,
    group_id: u32,
    position: u32,
    most: u32,
) -> SmallVec<[Key; 4]> {
    let (request, step) = (&state[row], state.hash_block_size);
    let size = state.config.groups[group_id as usize].block_size;
    let hashed = request.block_hashes.len() as u32 * step;
    let counts = (1..size / step).map(|count| position * size + count * step);
    let known = counts.filter(|&count| count <= most.min(hashed));
    known.map(|count| request.key_at(step, group_id, count)).collect()
}

/// Return an engine's own hash of a block, by its prefix: one letter per prefix.
pub(crate) fn own_hash(tokens: &[u32], num_letters: u32) -> BlockHash {
    let number = tokens.iter().fold(0, |number, &token| number * num_letters + token + 1);
    [OWN[number as usize - 1]; HASH_SIZE]
}
