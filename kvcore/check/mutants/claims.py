# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of content that is kept at any cost: pinned prefixes and floors."""

from __future__ import annotations

from typing import Any

from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.check.mutants.worlds import world
from kvcore.check.profiles.profile import SLOT
from kvcore.pool.block_pool import PoolTransaction
from kvcore.pool.floors import Floors, Spare
from kvcore.transitions import TRANSITIONS, pins

TWO_PINS = world(
    2, 2, 1, "pin_prefix", groups=(SLOT,), num_pins=2, max_model_len=1, max_pinned_blocks=1
)
ONLY_HITS = "what was pinned is computed again"
LESS_KEPT = "what a floor keeps is computed again"
LATER = "what fits waits until more is free"


@mutant("prefix-pins", "NAMED-PINS")
def m_pin_of_a_prefix_owns_nothing(patcher: Patcher) -> None:
    """A pin of a prefix is noted, and its blocks can be taken by anyone."""
    patcher.during(TRANSITIONS, "pin_prefix", PoolTransaction, "pin", lambda *_: None)


@mutant("prefix-pins", "PINS", costs="what looks for leaks lets all pins go before")
def m_unpinned_prefix_stays_held(patcher: Patcher) -> None:
    """A pin of a prefix that has ended holds its blocks forever."""
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


@mutant("prefix-pins-delays", "PIN-HIT", costs=ONLY_HITS)
def m_pin_of_a_prefix_is_not_written(patcher: Patcher) -> None:
    """A pin of a prefix holds a block that the open batch writes for another request."""
    patcher.replace(pins, "unfinished_keys", lambda *_: set())


@mutant("floors", "FLOOR", costs=LESS_KEPT)
def m_floor_keeps_nothing(patcher: Patcher) -> None:
    """Anyone takes what a floor keeps, though an admission counts it."""
    patcher.replace(Spare, "may_take", lambda *_: True)


@mutant("floors", "NOCRASH")
def m_admission_ignores_floors(patcher: Patcher) -> None:
    """What floors keep counts as room for new blocks."""
    patcher.replace(PoolTransaction, "num_kept", lambda *_: 0)


@mutant("floors", "ADMIT-EXACT", costs=LATER)
def m_floor_counts_cached_blocks_alone(patcher: Patcher) -> None:
    """A tenant keeps its whole floor in cached blocks, whatever its requests hold."""

    @patcher.around(Spare, "__init__")
    def begin(old: Any, self: Spare, floors: Floors, *args: Any) -> None:
        old(self, floors, *args)
        _, keys, _, free = args
        for tenant, left in self.left.items():
            cached = sum(floors.takers[each] == tenant and keys[each] is not None for each in free)
            self.left[tenant] = min(left, max(0, cached - floors.least[tenant - 1]))
            self.num_kept += left - self.left[tenant]


@mutant("floors", "FLOOR", costs=LESS_KEPT)
def m_taker_is_not_noted(patcher: Patcher) -> None:
    """A block stays with the tenant that took it first."""

    @patcher.around(Floors, "taken")
    def taken(old: Any, self: Floors, blocks: Any, tenants: Any) -> Any:
        pairs = zip(blocks, tenants, strict=True)
        return old(self, blocks, [self.takers[block] or tenant for block, tenant in pairs])


@mutant("floors-epoch", "FLOOR", costs=LESS_KEPT)
def m_floor_keeps_older_epochs(patcher: Patcher) -> None:
    """Blocks of older epochs are passed over as long as there are others."""

    @patcher.around(Spare, "first")
    def first(old: Any, self: Spare, queue: Any) -> int:
        blocks = list(queue)
        mine = [block for block in blocks if self.left.get(self.takers[block]) is None]
        return int(old(self, iter([*mine, *blocks])))
