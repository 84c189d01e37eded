// SPDX-License-Identifier: Apache-2.0
//! The search itself: models, their moves, and what was found.

pub mod actions;
pub(crate) mod ahead_model;
pub mod core_model;
pub(crate) mod flight_model;
pub(crate) mod frontier;
pub mod moves;
pub(crate) mod other_output;
pub mod report;
pub mod search;
