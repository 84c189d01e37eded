// SPDX-License-Identifier: Apache-2.0
//! The twin of the block tiers that the older managers share.

pub mod blocks;
