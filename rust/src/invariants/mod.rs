// SPDX-License-Identifier: Apache-2.0
//! What holds in every state.

pub(crate) mod claims;
pub mod pool_and_state;
pub mod requests;
pub(crate) mod retention;
pub(crate) mod states;
