// SPDX-License-Identifier: Apache-2.0
//! Canonical names: one for all states that differ only in names of requests, blocks or tokens.

pub mod canonical;
pub(crate) mod fingerprints;
pub(crate) mod in_flight;
pub(crate) mod packed;
pub mod same;
