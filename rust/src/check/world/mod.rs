// SPDX-License-Identifier: Apache-2.0
//! Small worlds, and the calls that are made in them.

pub mod calls;
pub mod keyed;
pub mod model;
pub(crate) mod remembered;
pub mod world;
