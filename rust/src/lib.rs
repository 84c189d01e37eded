// SPDX-License-Identifier: Apache-2.0
//! kvcore's Rust twin: the transitions of `kvcore/`, mutable and fast.
//!
//! Invariants: a file is the twin of the Python file at its path, with the same names in order, and
//! gives the same commands, events, values, errors and canonical bytes. A transition takes `&mut
//! State` and checks everything before it changes anything, so an `Err` or a refusal leaves the
//! state as it was. Only `bindings/` knows Python.

#![deny(unsafe_code)]

pub mod check;
pub mod codec;
#[cfg(feature = "python")]
mod explain;
#[cfg(test)]
mod fuzz;
pub mod hashing;
pub mod invariants;
pub mod legacy;
mod mutants;
pub mod oracle;
pub mod pool;
#[cfg(feature = "python")]
mod record;
#[cfg(feature = "python")]
mod sanitizer;
pub mod state;
#[cfg(test)]
mod trace;
pub mod transitions;
pub mod types;

#[cfg(feature = "python")]
mod bindings;
