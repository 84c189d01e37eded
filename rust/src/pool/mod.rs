// SPDX-License-Identifier: Apache-2.0
//! Blocks, their owners, their keys and the order of eviction.

pub mod block_pool;
pub(crate) mod floors;
pub mod free_queue;
pub mod hash_index;
pub(crate) mod policy_pool;
pub(crate) mod policy_state;
pub(crate) mod prefetch;
pub mod priority_eviction;
pub mod quarantine;
pub(crate) mod retention;
pub mod retention_state;
pub mod tails;
pub mod transitions;
