// SPDX-License-Identifier: Apache-2.0
//! Draining: events, statistics and new blocks leave the state once.
//!
//! Twin: kvcore/drain.py.

use crate::events::EventLog;
use crate::ids::BlockId;
use crate::state::State;
use crate::values::PrefixCacheStats;

/// Hand out the events since the last call, in order; none where events are disabled.
pub fn take_events(state: &mut State) -> EventLog {
    state.effects.events.take()
}

/// Hand out the look-up statistics since the last call.
pub fn take_stats(state: &mut State) -> PrefixCacheStats {
    std::mem::take(&mut state.stats)
}

/// Hand out the blocks that full-attention groups got since the last call, group by group.
///
/// Empty where `record_new_blocks` is off. Source: S000-50.
pub fn take_new_block_ids(state: &mut State) -> Vec<BlockId> {
    let taken = state.new_blocks.concat();
    state.new_blocks.iter_mut().for_each(Vec::clear);
    taken
}

/// Say that a scheduling step begins; no kind of group needs it yet. Source: S000-51.
pub fn new_step_starts(_state: &mut State) {}
