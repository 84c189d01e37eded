// SPDX-License-Identifier: Apache-2.0
//! The tiers of blocks that the older managers share, with look-up by key and by table.

pub mod by_table;
pub mod tiers;
