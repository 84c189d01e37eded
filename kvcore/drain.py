# SPDX-License-Identifier: Apache-2.0
"""Draining: events and statistics leave the state once.

Twin: rust/src/drain.rs.
"""

from __future__ import annotations

import attrs
from pyrsistent import pvector

from kvcore.events import Event
from kvcore.state import State
from kvcore.values import Outcome, PrefixCacheStats


def take_events(state: State) -> Outcome[State, tuple[Event, ...]]:
    """Hand out the events since the last call, in order; none where events are disabled."""
    drained = attrs.evolve(state, events=pvector())
    return Outcome(drained, (), tuple(state.events))


def take_stats(state: State) -> Outcome[State, PrefixCacheStats]:
    """Hand out the look-up statistics since the last call."""
    drained = attrs.evolve(state, stats=PrefixCacheStats())
    return Outcome(drained, (), state.stats)
