// SPDX-License-Identifier: Apache-2.0
//! What the core knows, and the transaction in which a transition changes it.

pub mod access;
pub mod batch_records;
pub mod new_blocks;
pub mod open_batch;
pub mod row_map;
pub mod state;
pub mod table_edit;
pub(crate) mod waiting;
