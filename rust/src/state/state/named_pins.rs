// SPDX-License-Identifier: Apache-2.0
//! Pins of prefixes, by name; part of kvcore/state/state.py.

use std::collections::BTreeMap;

use crate::types::ids::BlockId;

/// A pin of a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedPin {
    /// The epoch of its content.
    pub(crate) epoch: u32,
    /// The blocks, group by group.
    pub(crate) blocks: Vec<BlockId>,
}

/// All pins of prefixes.
pub type NamedPins = BTreeMap<String, NamedPin>;

/// The blocks that pins of prefixes hold, once for each.
pub(crate) fn named_blocks(pins: &NamedPins) -> impl Iterator<Item = BlockId> {
    pins.values().flat_map(|pin| &pin.blocks).copied()
}
