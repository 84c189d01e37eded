// SPDX-License-Identifier: Apache-2.0
//! Commands that are added for many blocks at a time. Part of kvcore/types/commands.py.

use super::{ALLOCATE, Commands, EVICT, FREE, SET_TABLE};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;

impl Commands {
    /// Add, for each of these blocks, the `Evict` of its key and its `Allocate`.
    pub(crate) fn push_taken<'a>(
        &mut self,
        blocks: &[BlockId],
        key_of: impl Fn(BlockId) -> &'a Key,
    ) {
        let (first, num_keys) = (self.rows.len(), self.keys.len() as i32);
        self.rows.resize(first + 2 * blocks.len(), [0; 5]);
        let pairs = self.rows[first..].as_chunks_mut().0;
        for (place, ([evict, allocate], &BlockId(block))) in
            pairs.iter_mut().zip(blocks).enumerate()
        {
            evict[..3].copy_from_slice(&[EVICT, block as i32, num_keys + place as i32]);
            allocate[..2].copy_from_slice(&[ALLOCATE, block as i32]);
        }
        self.keys.extend(blocks.iter().map(|&block| key_of(block).0));
    }

    /// Add the `Free` of each of these blocks, whose content can still be hit.
    pub(crate) fn push_freed(&mut self, blocks: &[BlockId]) {
        self.rows.extend(blocks.iter().map(|block| [FREE, block.0 as i32, 1, 0, 0]));
    }

    /// Add a `SetTable` for each of these blocks, from a position on.
    pub(crate) fn set_places(
        &mut self,
        (Row(row), group_id): (Row, u32),
        first: usize,
        blocks: &[BlockId],
    ) {
        let places = (first as i32..).zip(blocks);
        let set = |(position, block): (i32, &BlockId)| {
            [SET_TABLE, row as i32, group_id as i32, position, block.0 as i32]
        };
        self.rows.extend(places.map(set));
    }
}
