// SPDX-License-Identifier: Apache-2.0
//! kvcore's Rust twin: the transitions of `kvcore/*.py`, mutable and fast.
//!
//! Rules: file `x.rs` is the twin of `kvcore/x.py`, with the same names in the same order, and
//! gives the same commands, events, values, errors and canonical bytes. A transition takes `&mut
//! State` and checks everything before it changes anything, so an `Err` or a refusal leaves the
//! state as it was. Python is known to `bindings/` alone.

#![deny(unsafe_code)]

pub mod access;
pub mod allocate;
pub mod asked;
pub mod batch;
pub mod block_pool;
pub mod caching;
pub mod cancel;
pub mod check;
pub mod commands;
pub mod config;
pub mod contents;
pub mod decode;
mod decode_batch;
mod decode_events;
mod decode_request;
pub mod drain;
pub mod effects;
pub mod encode;
pub mod errors;
pub mod events;
pub mod extra_keys;
pub mod fork;
pub mod free_queue;
#[cfg(test)]
mod fuzz;
pub mod groups;
pub mod hash_index;
pub mod hashing;
pub mod hits;
pub mod ids;
mod message;
pub mod mutants;
pub mod open_batch;
pub mod operations;
pub mod pins;
pub mod plan;
pub mod pool_layer;
mod prefetch;
pub mod quarantine;
pub mod queries;
pub mod queue_layer;
mod quiet;
pub mod ranked;
pub mod release;
pub mod requests;
mod reuse;
pub mod rewind;
pub mod row_map;
mod sections;
pub mod state;
pub mod swap;
pub mod tables;
pub mod tiers;
#[cfg(test)]
mod trace;
#[cfg(test)]
mod trace_calls;
#[cfg(test)]
mod trace_text;
#[cfg(test)]
mod trace_words;
pub mod truncate;
pub mod unconfirmed;
pub mod unfinished;
pub mod values;
pub mod window;

#[cfg(feature = "python")]
mod bindings;
