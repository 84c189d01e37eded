// SPDX-License-Identifier: Apache-2.0
//! What every slot of anyone's KV cache holds, and whether a step reads what it must.

pub mod chunks;
pub mod contents;
pub mod digests;
pub mod lines;
pub mod requests;
pub mod slot_checker;
