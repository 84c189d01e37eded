// SPDX-License-Identifier: Apache-2.0
//! `kvcore._rust.LostKeys`: that of `kvcore.explain.lost_keys`, beside a manager of this module.

use pyo3::prelude::*;

use crate::bindings::manager::Manager;
use crate::explain::lost_keys;
use crate::explain::lost_keys::Loss;

/// The last loss of each key of a manager. `kvcore.explain.observer` is the way to use it.
#[pyclass(module = "kvcore._rust")]
pub(crate) struct LostKeys(pub(in crate::bindings) lost_keys::LostKeys);

#[pymethods]
impl LostKeys {
    /// Nothing is lost, and no block has an owner.
    #[new]
    #[pyo3(signature = (num_blocks, /))]
    fn new(num_blocks: usize) -> Self {
        Self(lost_keys::LostKeys::new(num_blocks))
    }

    /// Forget all keys.
    fn clear(&mut self) {
        self.0.clear();
    }

    /// The mark of a folded key: 2 plus the number of its last loss, or 0.
    #[pyo3(signature = (key, /))]
    fn mark(&self, key: u64) -> u32 {
        self.0.mark(key)
    }

    /// Note what a manager's open batch did from its command `start` on; return the number of its
    /// commands, and the losses.
    #[pyo3(signature = (manager, start, step, first, apart, /))]
    fn note(
        &mut self,
        manager: &Bound<'_, Manager>,
        start: usize,
        step: u32,
        first: u32,
        apart: bool,
    ) -> PyResult<(usize, Vec<Loss>)> {
        let commands = &Manager::shown(manager)?.state.effects.commands;
        Ok((commands.len(), self.0.note(commands, start, step, first, apart)))
    }

    /// Note the loss of keys that no command named.
    #[pyo3(signature = (keys, number, /))]
    fn lose(&mut self, keys: Vec<u64>, number: u32) {
        self.0.lose(&keys, number);
    }

    /// Note that blocks had an owner, for which no command tells: they left its window in the call
    /// that hit them.
    #[pyo3(name = "use", signature = (blocks, step, /))]
    fn use_blocks(&mut self, blocks: Vec<u32>, step: u32) {
        self.0.use_blocks(&blocks, step);
    }

    /// The steps since a block had an owner; None if it has one.
    #[pyo3(signature = (block, step, /))]
    fn idle(&self, block: u32, step: u32) -> Option<u32> {
        self.0.idle(block, step)
    }
}
