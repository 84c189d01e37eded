// SPDX-License-Identifier: Apache-2.0
//! Draining: events and statistics leave the state once.
//!
//! Twin: kvcore/drain.py.

use crate::events::Event;
use crate::state::State;
use crate::values::PrefixCacheStats;

/// Hand out the events since the last call, in order; none where events are disabled.
pub fn take_events(state: &mut State) -> Vec<Event> {
    std::mem::take(&mut state.effects.events)
}

/// Hand out the look-up statistics since the last call.
pub fn take_stats(state: &mut State) -> PrefixCacheStats {
    std::mem::take(&mut state.stats)
}
