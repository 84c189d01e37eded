// SPDX-License-Identifier: Apache-2.0
//! What holds in every state.

pub mod in_flight;
pub mod pool_and_state;
pub mod requests;
