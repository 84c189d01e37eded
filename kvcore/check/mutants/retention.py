# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of retention levels: lost wishes, levels that end in the wrong order or never."""

from __future__ import annotations

from typing import Any

from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.pool.free_queue import CURRENT
from kvcore.pool.retention import RetentionTransaction
from kvcore.pool.retention_state import NOTHING, Kept
from kvcore.state.table_edit import TableEdit
from kvcore.transitions import states
from kvcore.types import retention
from kvcore.types.policies import DEFAULT_STEPS, Step, Wish
from kvcore.types.retention import Piece

ONLY_HITS = "content that is evicted too early is computed again"


def overriding(patcher: Patcher, part: int) -> None:
    """Let the last wish override one part of the earlier ones."""

    @patcher.around(RetentionTransaction, "note_wish")
    def note_wish(old: Any, self: RetentionTransaction, block: int, wish: Wish) -> None:
        old(self, block, wish)
        kept = list(self.kept.get(block, NOTHING))
        kept[part] = (*wish[:2], self.now + wish[2] if wish[2] else 0)[part]
        self.kept = self.kept.set(block, (kept[0], kept[1], kept[2]))


@mutant("retention-equal", "WISHES", "LEVEL-CHAIN", "EVICT-ORDER", costs=ONLY_HITS)
def m_base_overrides(patcher: Patcher) -> None:
    """The last wish that never ends overrides those before."""
    overriding(patcher, 0)


@mutant("retention", "WISHES", "LEVEL-CHAIN", "EVICT-ORDER", costs=ONLY_HITS)
def m_level_overrides(patcher: Patcher) -> None:
    """The last wish for a time overrides those before."""
    overriding(patcher, 1)


@mutant("retention", "WISHES", "LEVEL-CHAIN", "EVICT-ORDER", costs=ONLY_HITS)
def m_end_of_a_level_overrides(patcher: Patcher) -> None:
    """A shorter duration ends a level earlier than was wished before."""
    overriding(patcher, 2)


@mutant("retention", "LEVEL-CHAIN", "EVICT-ORDER", costs=ONLY_HITS)
def m_wishes_from_behind_are_not_joined(patcher: Patcher) -> None:
    """A token has its own wish, whatever is wished for those behind it."""

    @patcher.around(retention, "steps_of")
    def steps_of(_: Any, pieces: tuple[Piece, ...], num_tokens: int) -> tuple[Step, ...]:
        *ranges, (_, _, decoded) = pieces
        steps = [DEFAULT_STEPS[0]] if not ranges or ranges[0][0] else []
        steps += [(first, wish) for first, _, wish in ranges if first < num_tokens]
        return (*steps, (num_tokens, decoded))


@mutant("retention", "LRU", "EVICT-ORDER", costs=ONLY_HITS)
def m_levels_end_in_reverse(patcher: Patcher) -> None:
    """Of the blocks whose levels end, the one that should leave last leaves first."""

    @patcher.around(RetentionTransaction, "tick")
    def tick(old: Any, self: RetentionTransaction, now: int) -> None:
        before = [*self.queue]
        levels = {block: self.kept.get(block, NOTHING) for block in before}
        old(self, now)
        moved = [block for block in self.queue if ended(levels[block], now)]
        for block in moved[::-1]:
            self.queue.remove(block)
            self.queue.append(block, CURRENT + levels[block][0])


def ended(kept: Kept, now: int) -> bool:
    """Tell whether the level of a block has just ended."""
    base, level, until = kept
    return level > base and until == now


@mutant("retention", "RANK-ORDER", "LRU", costs=ONLY_HITS)
def m_levels_never_end(patcher: Patcher) -> None:
    """Free blocks stay at their level when it ends."""

    @patcher.around(RetentionTransaction, "tick")
    def tick(_: Any, self: RetentionTransaction, now: int) -> None:
        self.now = now


@mutant("retention-equal", "LRU", costs=ONLY_HITS)
def m_a_level_that_ends_at_its_base_moves(patcher: Patcher) -> None:
    """A block joins the back of its level again, which its base had all along."""

    @patcher.around(RetentionTransaction, "tick")
    def tick(old: Any, self: RetentionTransaction, now: int) -> None:
        kept = [(block, self.kept.get(block, NOTHING)) for block in self.queue]
        over = [(k[2], block, k[0]) for block, k in kept if self.now < k[2] <= now and k[1] <= k[0]]
        old(self, now)
        for _, block, base in sorted(over):
            self.queue.remove(block)
            self.queue.append(block, CURRENT + base)


@mutant("retention-evict", "RANK-ORDER", "LRU", costs=ONLY_HITS)
def m_withdrawn_block_stays_at_its_level(patcher: Patcher) -> None:
    """A free block that loses its key stays where it is."""

    @patcher.around(RetentionTransaction, "unpublish")
    def unpublish(_: Any, self: RetentionTransaction, block: int) -> None:
        super(RetentionTransaction, self).unpublish(block)


@mutant("retention", "WISHES", costs=ONLY_HITS)
def m_taken_block_keeps_its_wishes(patcher: Patcher) -> None:
    """The next content of a block has what was wished for the last one."""

    @patcher.around(RetentionTransaction, "take")
    def take(_: Any, self: RetentionTransaction, *args: int) -> list[int]:
        return super(RetentionTransaction, self).take(*args)


@mutant("retention-states", "WISHES", costs=ONLY_HITS)
def m_replaced_state_forgets_its_wish(patcher: Patcher) -> None:
    """A state that its request hits and replaces in one call stays as long as was wished before."""

    @patcher.around(states, "apply_steps")
    def forget(apply: Any, *args: Any, **options: Any) -> None:
        with Patcher() as inner:
            inner.replace(TableEdit, "_note_wishes", lambda *_: None)
            apply(*args, **options)
