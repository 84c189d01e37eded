// SPDX-License-Identifier: Apache-2.0
//! The state of the core, and its parts.

pub mod access;
pub mod batch_records;
pub mod new_blocks;
pub mod open_batch;
pub mod plan_records;
pub mod row_map;
pub mod state;
pub mod table_edit;
pub(crate) mod waiting;
