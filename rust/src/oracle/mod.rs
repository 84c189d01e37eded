// SPDX-License-Identifier: Apache-2.0
//! What every slot holds, worked out from the commands and the forward passes alone.

pub mod calls;
pub mod contents;
pub mod hazards;
pub mod prefixes;
pub mod schedule;
