# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of owners, of the free queue, and of what fits.

Rules: as in seeding.py. `rows` are those of the catalogue (catalogue.py). Twin: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvcore import allocate, plan
from kvcore.block_pool import PoolDraft
from kvcore.check.mutants.seeding import Patcher, mutant, without
from kvcore.check.mutants.worlds import BASIC, FORKS, ONE
from kvcore.commands import Free, Touch
from kvcore.free_queue import FreeQueueDraft
from kvcore.state import Draft
from kvcore.values import Refused


@mutant(BASIC, "PARTITION", rows=(21,))
def m_touch_not_dequeued(patcher: Patcher) -> None:
    """A hit on an ownerless block counts an owner and leaves the block in the free queue."""

    def touch(self: PoolDraft, block: int) -> None:
        if self.ref_counts[block] == 0:
            self.effects.emit(Touch(block))
        self.ref_counts[block] += 1

    patcher.setattr(PoolDraft, "touch", touch)


@mutant(ONE, "FQ-UNIQ", rows=(27,))
def m_queue_counter_drifts(patcher: Patcher) -> None:
    """The length of the free queue is kept beside it, and taking a block out does not change it."""
    remove = FreeQueueDraft.remove

    def remove_uncounted(self: FreeQueueDraft, block: int) -> None:
        remove(self, block)
        self.length += 1

    patcher.setattr(FreeQueueDraft, "remove", remove_uncounted)


@mutant(ONE, "REF", rows=(23,))
def m_alloc_ref0(patcher: Patcher) -> None:
    """A block that is handed out counts no owner."""
    take = PoolDraft.take

    def take_unowned(self: PoolDraft, count: int) -> list[int]:
        blocks = take(self, count)
        for block in blocks:
            self.ref_counts[block] = 0
        return blocks

    patcher.setattr(PoolDraft, "take", take_unowned)


@mutant(BASIC, "NO-ALIAS", "KV-READ", rows=(18,))
def m_touch_after_alloc(patcher: Patcher) -> None:
    """New blocks are taken before the hits get their owner, so a hit can be taken away."""
    commit, touch, take = allocate.commit, PoolDraft.touch, PoolDraft.take

    def commit_late(*args: Any) -> Any:
        late: list[int] = []

        def take_first(self: PoolDraft, count: int) -> list[int]:
            blocks = take(self, count)
            for block in late:
                touch(self, block)
            return blocks

        with Patcher() as inner:
            inner.setattr(PoolDraft, "touch", lambda _, block: late.append(block))
            inner.setattr(PoolDraft, "take", take_first)
            return commit(*args)

    patcher.setattr(allocate, "commit", commit_late)


@mutant(BASIC, "NOCRASH", rows=(16,))
def m_hits_cost_no_capacity(patcher: Patcher) -> None:
    """Hits in the free queue are counted as room for new blocks, too."""
    find, refuse = plan.needed_hits, plan.refuse
    queued: list[int] = []

    def note_queued(draft: Draft, *rest: Any) -> Any:
        hits = find(draft, *rest)
        queued[:] = [sum(draft.device.ref_counts[block] == 0 for block in hits)]
        return hits

    def refuse_fewer(draft: Draft, needed: int, *rest: Any) -> Refused | None:
        return refuse(draft, needed - sum(queued), *rest)

    patcher.setattr(plan, "needed_hits", note_queued)
    patcher.setattr(plan, "refuse", refuse_fewer)


@mutant(ONE, "LEAK")
def m_free_forgets_a_block(patcher: Patcher) -> None:
    """The first block of a release is not given back."""
    give_back = PoolDraft.release

    def give_back_some(self: PoolDraft, blocks: Sequence[int]) -> None:
        give_back(self, blocks[1:])

    patcher.setattr(PoolDraft, "release", give_back_some)


@mutant(ONE, "OWNER-MIRROR")
def m_free_not_told(patcher: Patcher) -> None:
    """The worker is not told that a block has no owner any more."""
    without(patcher, Free)


@mutant(BASIC, "ADMIT-EXACT")
def m_needs_one_block_less(patcher: Patcher) -> None:
    """A call that fits exactly is refused."""
    refuse = plan.refuse

    def refuse_more(draft: Draft, needed: int, available: int, *rest: Any) -> Refused | None:
        refused = refuse(draft, needed + 1, available, *rest)
        return None if refused is None else attrs.evolve(refused, needed=needed)

    patcher.setattr(plan, "refuse", refuse_more)


@mutant(FORKS, "REF", rows=(24,))
def m_fork_counts_occurrences(patcher: Patcher) -> None:
    """A fork counts another number of holdings than a release gives back."""
    touch = PoolDraft.touch

    def touch_twice(self: PoolDraft, block: int) -> None:
        touch(self, block)
        if self.ref_counts[block] > 1:
            self.ref_counts[block] += 1

    patcher.setattr(PoolDraft, "touch", touch_twice)
