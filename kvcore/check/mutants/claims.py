# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of pinned prefixes."""

from __future__ import annotations

from typing import Any

from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.check.mutants.worlds import world
from kvcore.check.profiles.profile import SLOT
from kvcore.pool.block_pool import PoolTransaction
from kvcore.transitions import TRANSITIONS, pins

TWO_PINS = world(
    2, 2, 1, "pin_prefix", groups=(SLOT,), num_pins=2, max_model_len=1, max_pinned_blocks=1
)
ONLY_HITS = "what was pinned is computed again"


@mutant("prefix-pins", "NAMED-PINS")
def m_pin_of_a_prefix_owns_nothing(patcher: Patcher) -> None:
    """A pin of a prefix is noted, and its blocks can be taken by anyone."""
    patcher.during(TRANSITIONS, "pin_prefix", PoolTransaction, "pin", lambda *_: None)


@mutant("prefix-pins", "PINS", costs="what looks for leaks lets all pins go before")
def m_unpinned_prefix_stays_held(patcher: Patcher) -> None:
    """A pin of a prefix that has ended holds its blocks for ever."""
    patcher.during(TRANSITIONS, "unpin_prefix", PoolTransaction, "unpin", lambda *_: None)


@mutant("prefix-pins", "NAMED-PINS")
def m_pin_by_name_is_taken_by_id(patcher: Patcher) -> None:
    """`unpin` takes what a pin of a prefix holds."""
    patcher.during(TRANSITIONS, "unpin", pins, "_named", lambda _: ())


@mutant("prefix-pins", "NAMED-PINS", shows=TWO_PINS)
def m_each_pin_may_hold_the_most(patcher: Patcher) -> None:
    """`max_pinned_blocks` bounds each pin of a prefix, not all together."""
    patcher.during(TRANSITIONS, "pin_prefix", pins, "_named", lambda _: ())


@mutant("prefix-pins-window", "PIN-HIT", costs=ONLY_HITS)
def m_pin_of_a_prefix_misses_its_windows(patcher: Patcher) -> None:
    """A pin of a prefix holds the blocks of full groups alone."""

    @patcher.around(pins, "needed")
    def needed(old: Any, config: Any, group_id: int, length: int) -> Any:
        return () if config.groups[group_id].is_windowed else old(config, group_id, length)
