// SPDX-License-Identifier: Apache-2.0
//! The arena in which nodes with batches in flight wait, each under its number.
//!
//! All workers share one arena, and a packed node is its number there. A node is dropped after it
//! was explored; the first one begins every story and stays.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::check::names::in_flight::Node;

/// The nodes that wait; a clone is the same arena, for another worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct Arena(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    nodes: HashMap<u64, Arc<Node>, FxBuildHasher>,
    num_kept: u64,
}

impl Arena {
    /// Store a node; return its number.
    pub(crate) fn pack(&self, node: Node) -> Vec<u8> {
        let mut kept = self.kept();
        let number = kept.num_kept;
        kept.num_kept += 1;
        kept.nodes.insert(number, Arc::new(node));
        number.to_le_bytes().to_vec()
    }

    /// Return the node of this number, if it waits.
    pub(crate) fn unpack(&self, packed: &[u8]) -> Option<Arc<Node>> {
        self.kept().nodes.get(&number_of(packed)).cloned()
    }

    /// Forget a node that was explored; return it, unless another worker reads it.
    pub(crate) fn drop_node(&self, packed: &[u8]) -> Option<Node> {
        let number = number_of(packed);
        let dropped = if number > 0 { self.kept().nodes.remove(&number) } else { None };
        dropped.and_then(Arc::into_inner)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn number_of(packed: &[u8]) -> u64 {
    packed.try_into().map_or(0, u64::from_le_bytes)
}
