// SPDX-License-Identifier: Apache-2.0
//! Keys of blocks: hashes of their tokens, of the prefix before them and of extra keys.

pub mod block_hash;
pub mod extra_keys;
pub(crate) mod hash_chain;
pub(crate) mod hash_message;
#[cfg(target_arch = "x86_64")]
mod sha_ni;
