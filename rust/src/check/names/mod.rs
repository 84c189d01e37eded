// SPDX-License-Identifier: Apache-2.0
//! One name for each state of a world, whatever its requests and blocks are called.

pub mod canonical;
pub(crate) mod fingerprints;
pub(crate) mod in_flight;
pub(crate) mod packed;
pub(crate) mod remembered;
pub mod same;
