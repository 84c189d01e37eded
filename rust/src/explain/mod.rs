// SPDX-License-Identifier: Apache-2.0
//! What a manager lost, for explanations of what was computed again.

pub mod lost_keys;
