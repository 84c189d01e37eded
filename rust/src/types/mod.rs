// SPDX-License-Identifier: Apache-2.0
//! Values that every room shares: ids, configuration, groups, commands, events, errors.

pub(crate) mod clone_in_place;
pub mod commands;
pub mod config;
pub mod effects;
pub mod error_fields;
pub mod errors;
pub mod event_log;
pub mod events;
pub mod extra_inputs;
pub mod groups;
pub mod ids;
pub mod keys;
pub mod memory;
pub(crate) mod policies;
pub mod retention;
pub mod slot_request;
pub mod values;
pub mod violation;
pub mod wire;
