// SPDX-License-Identifier: Apache-2.0
//! Values that every room shares: ids, configuration, groups, commands, events, errors.

pub(crate) mod clone_in_place;
pub mod commands;
pub mod config;
pub mod effects;
pub mod errors;
pub mod events;
pub mod groups;
pub mod ids;
pub mod values;
