# SPDX-License-Identifier: Apache-2.0
"""Draining: events, statistics and new blocks leave the state once.

Twin: rust/src/drain.rs.
"""

from __future__ import annotations

from msgspec.structs import replace as evolve
from pyrsistent import pvector

from kvcore.event_log import Events
from kvcore.state import State
from kvcore.values import Outcome, PrefixCacheStats


def take_events(state: State) -> Outcome[State, Events]:
    """Hand out the events since the last call, in order; none where events are disabled."""
    drained = evolve(state, events=pvector())
    return Outcome(drained, (), Events.of(state.events))


def take_stats(state: State) -> Outcome[State, PrefixCacheStats]:
    """Hand out the look-up statistics since the last call."""
    drained = evolve(state, stats=PrefixCacheStats())
    return Outcome(drained, (), state.stats)


def take_new_block_ids(state: State) -> Outcome[State, list[int]]:
    """Hand out the blocks that full-attention groups got since the last call, group by group.

    Empty where `record_new_blocks` is off. Source: S000-50.
    """
    drained = evolve(state, new_blocks=(pvector(),) * len(state.new_blocks))
    return Outcome(drained, (), [block for blocks in state.new_blocks for block in blocks])


def new_step_starts(state: State) -> Outcome[State, None]:
    """Say that a scheduling step begins; no kind of group needs it yet. Source: S000-51."""
    return Outcome(state, (), None)
