// SPDX-License-Identifier: Apache-2.0
//! The twin of what the older managers keep beside the core.

pub mod blocks;
