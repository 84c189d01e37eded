// SPDX-License-Identifier: Apache-2.0
//! Hits inside blocks: keys of parts of blocks, and copies that leave these parts as they are.

pub(crate) mod keys;
pub mod rewrites;
