// SPDX-License-Identifier: Apache-2.0
//! Tiers of blocks under the older managers, looked up by key and by table.

pub mod by_table;
pub mod tiers;
