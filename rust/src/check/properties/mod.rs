// SPDX-License-Identifier: Apache-2.0
//! The properties that are checked on the edges of a search.

pub mod checker;
pub(crate) mod claims;
pub mod closure;
pub mod epochs;
pub mod fair_scheduler;
pub(crate) mod floors;
pub mod hits;
pub mod liveness;
pub mod outcomes;
pub(crate) mod published;
pub(crate) mod retention;
pub mod transitions;
