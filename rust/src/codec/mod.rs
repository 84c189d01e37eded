// SPDX-License-Identifier: Apache-2.0
//! Canonical bytes of states, batches and events.

pub(crate) mod claims_section;
pub mod decode;
pub(crate) mod decode_batch;
pub mod encode;
pub(crate) mod policy_sections;
pub(crate) mod retention_section;
pub(crate) mod samplers_section;
pub(crate) mod sections;
pub(crate) mod states_section;
pub(crate) mod tails_section;
