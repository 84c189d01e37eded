# SPDX-License-Identifier: Apache-2.0
"""Draining: events, statistics and new blocks leave the state once.

Invariants: a new block is listed unless a command fills it. If a block is taken again, the last
taking decides. Blocks of external tokens are listed: no command fills them, and a connector may
fill only a part. Source: S000-50. Twin: rust/src/transitions/drain.rs.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.state.state import State
from kvcore.state.transaction import Transaction
from kvcore.types.event_log import Events
from kvcore.types.values import Outcome, PrefixCacheStats


def take_events(state: State) -> Outcome[State, Events]:
    """Return the events since the last call, in order; none if events are disabled."""
    drained = replace(state, events=pvector())
    return Outcome(drained, (), Events.of(state.events))


def take_stats(state: State) -> Outcome[State, PrefixCacheStats]:
    """Return the look-up statistics since the last call."""
    drained = replace(state, stats=PrefixCacheStats())
    return Outcome(drained, (), state.stats)


def take_new_block_ids(state: State) -> Outcome[State, list[int]]:
    """Return the blocks that full-attention groups got since the last call, group by group.

    Blocks that a command fills are left out. Empty if `record_new_blocks` is off.
    """
    drained = replace(state, new_blocks=(pvector(),) * len(state.new_blocks))
    return Outcome(drained, (), [block for blocks in state.new_blocks for block in blocks])


def forget_new(tx: Transaction, blocks: Iterable[int]) -> None:
    """Stop listing these blocks as new: they are taken again, or a command fills them."""
    if tx.config.record_new_blocks and any(tx.new_blocks):
        known = set(blocks)
        tx.new_blocks = tuple(
            pvector(block for block in new if block not in known) for new in tx.new_blocks
        )
