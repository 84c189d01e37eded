// SPDX-License-Identifier: Apache-2.0
//! Draining: events, statistics and new blocks leave the state once.
//!
//! Invariants: a new block is listed unless a command fills it. If a block is taken again, the last
//! taking decides. Blocks of external tokens are listed: no command fills them, and a connector may
//! fill only a part. Source: S000-50. Twin: kvcore/transitions/drain.py.

use crate::state::state::State;
use crate::types::event_log::EventLog;
use crate::types::ids::BlockId;
use crate::types::values::PrefixCacheStats;

/// Return the events since the last call, in order; none if events are disabled.
pub fn take_events(state: &mut State) -> EventLog {
    state.effects.events.take()
}

/// Return the look-up statistics since the last call.
pub fn take_stats(state: &mut State) -> PrefixCacheStats {
    std::mem::take(&mut state.stats)
}

/// Return the blocks that full-attention groups got since the last call, group by group.
///
/// Blocks that a command fills are left out. Empty if `record_new_blocks` is off.
pub fn take_new_block_ids(state: &mut State) -> Vec<BlockId> {
    state.new_blocks.take()
}

/// Stop listing these blocks as new: they are taken again, or a command fills them.
pub(crate) fn forget_new(state: &mut State, blocks: &[BlockId]) {
    if state.config.record_new_blocks {
        state.new_blocks.remove(blocks);
    }
}
