// SPDX-License-Identifier: Apache-2.0
//! All calls of an engine on the core: each takes the state and changes it, or refuses.

pub mod allocate;
pub mod append;
pub mod batches;
pub mod cancel;
pub(crate) mod checkpoints;
pub mod drain;
pub mod epochs;
pub mod fork;
pub mod free;
pub(crate) mod in_flight;
pub mod output;
pub mod pins;
pub mod plan;
pub mod prefix_lookup;
pub mod publish;
pub mod queries;
pub mod requests;
pub mod retention;
pub mod rewind;
pub mod slot_request;
pub mod states;
pub mod swap;
pub mod tails;
#[cfg(test)]
pub(crate) mod tests;
pub mod transfers;
pub mod truncate;
pub(crate) mod unconfirmed_loads;
pub mod unschedule;
pub mod window;
