// SPDX-License-Identifier: Apache-2.0
//! The search itself: models, their moves, and what was found.

pub mod actions;
pub(crate) mod ahead_model;
pub(crate) mod arena;
pub(crate) mod closing;
pub mod core_model;
pub(crate) mod device;
pub(crate) mod flight_ends;
pub(crate) mod flight_model;
pub mod moves;
pub(crate) mod path;
pub mod report;
pub mod search;
