// SPDX-License-Identifier: Apache-2.0
//! Tracks which requests wait and what they will look up, for policies that use it.
//!
//! Invariants: a request waits if it was added and holds no block of any tier. Its due number is
//! that of its arrival, even if it waits again. It will look up the keys that its longest hit
//! needs, each group's last one first. Other policies keep nothing here.
//! Twin: kvcore/state/waiting.py.

use crate::state::state::{RequestState, State};
use crate::types::config::Config;
use crate::types::groups::skipped_blocks;
use crate::types::ids::Row;
use crate::types::keys::Key;
use crate::types::policies::WaitingRequest;

impl State {
    /// Note whether a request waits now, and for which keys, after a change of its blocks or
    /// hashes.
    #[inline]
    pub(crate) fn settle_waiting(&mut self, row: Row) {
        if self.waiting.is_some() {
            self.settle(row);
        }
    }

    #[cold]
    fn settle(&mut self, row: Row) {
        let keys = keys_ahead(self, &self[row]);
        let Some(waiting) = &mut self.waiting else { return };
        let next_due = &mut waiting.next_due;
        let known = waiting.requests.entry(row).or_insert_with(|| {
            *next_due += 1;
            WaitingRequest { due: *next_due - 1, keys: Vec::new() }
        });
        if known.keys != keys {
            self.device.stop_waiting(&known.keys, known.due);
            self.device.wait(&keys, known.due);
            known.keys = keys;
        }
    }

    /// Forget a request that was removed.
    pub(crate) fn forget_waiting(&mut self, row: Row) {
        let Some(waiting) = &mut self.waiting else { return };
        if let Some(known) = waiting.requests.remove(&row) {
            self.device.stop_waiting(&known.keys, known.due);
        }
    }
}

/// Return the keys that a request will look up; none if it does not wait.
fn keys_ahead(state: &State, request: &RequestState) -> Vec<Key> {
    let config: &Config = &state.config;
    if request.holds_blocks() || !request.host_tables.is_empty() || request.skip_reading {
        return Vec::new();
    }
    let hashed = request.block_hashes.len() as u32 * state.hash_block_size;
    let most = request.num_tokens().saturating_sub(1).min(hashed);
    let length = most / state.hit_alignment * state.hit_alignment;
    let mut keys = Vec::new();
    if length == 0 {
        return keys;
    }
    for (group_id, group) in (0..).zip(&config.groups) {
        if group.is_state() {
            let counts = (1..=length / state.hit_alignment).rev();
            let counts = counts.map(|count| count * state.hit_alignment);
            let key = |count| request.key_at(state.hash_block_size, group_id, count);
            keys.extend(counts.map(key));
            continue;
        }
        let size = group.block_size;
        let dropped = u32::from(config.drops_last_hit(group_id));
        let end = (length / size + dropped).min(most / size);
        let first = skipped_blocks(group, length).min(length / size - 1);
        let scale = state.scales[group_id as usize];
        keys.extend((first..end).rev().map(|place| request.key(scale, group_id, place)));
    }
    keys
}
