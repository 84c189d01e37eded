// SPDX-License-Identifier: Apache-2.0
//! Tests of the search and of the properties, which Python has under tests/.

mod checked_calls;
mod checked_progress;
pub(crate) mod checked_states;
mod search;
