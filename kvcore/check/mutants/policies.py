# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of eviction policies: a wrong position, or a use or a waiting request that is not
recorded.

All but one cost only hits, so that the trace of their policy finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.pool.block_pool import PoolTransaction
from kvcore.pool.policy_pool import PolicyTransaction
from kvcore.types.policies import LRU2, S3FIFO, Learned, QueueAware
from kvcore.types.policy import Front, Memory, Seen

ONLY_HITS = "what is evicted too early is computed again"


@mutant("policy-due", costs=ONLY_HITS, trace="queue_aware")
def m_waiting_requests_are_not_noted(patcher: Patcher) -> None:
    """No request that waits keeps anything."""
    patcher.replace(PolicyTransaction, "wait", lambda *_: None)
    patcher.replace(PolicyTransaction, "stop_waiting", lambda *_: None)


@mutant("policy-due", costs=ONLY_HITS, trace="queue_aware")
def m_block_stays_due(patcher: Patcher) -> None:
    """A free block keeps its place when the request that waited for it is gone."""
    patcher.during(
        PolicyTransaction, "stop_waiting", PolicyTransaction, "_due_changed", lambda *_: None
    )


@mutant("policy-due", costs=ONLY_HITS, trace="queue_aware")
def m_due_first_leaves_first(patcher: Patcher) -> None:
    """Of what is due the content of the first request leaves first."""

    @patcher.around(QueueAware, "on_release")
    def on_release(old: Any, self: QueueAware, memory: Memory, block: Seen) -> Any:
        memory, (section, order) = old(self, memory, block)
        return memory, (section, order if block.due is None else block.due)


@mutant("policy-lru2", costs=ONLY_HITS, trace="lru2")
def m_lru2_goes_by_the_last_use(patcher: Patcher) -> None:
    """The content whose last use is longest ago leaves first."""

    @patcher.around(LRU2, "on_release")
    def on_release(old: Any, self: LRU2, memory: Memory, block: Seen) -> Any:
        return old(self, memory, replace(block, before=block.last))


@mutant("policy-lru2", costs=ONLY_HITS, trace="lru2")
def m_uses_of_what_left_are_forgotten(patcher: Patcher) -> None:
    """A content that comes back is a new one."""

    @patcher.around(PolicyTransaction, "publish")
    def publish(old: Any, self: PolicyTransaction, block: int, key: bytes, depth: int = 0) -> None:
        known = self.ghosts.get(key)
        if known is not None:
            self._forget_ghost(key, known)
        old(self, block, key, depth)


@mutant("policy-s3fifo", costs=ONLY_HITS, trace="s3fifo")
def m_s3fifo_has_no_small_queue(patcher: Patcher) -> None:
    """A new content joins those that were used again."""

    @patcher.around(S3FIFO, "on_release")
    def on_release(old: Any, self: S3FIFO, memory: Memory, block: Seen) -> Any:
        return old(self, memory, replace(block, uses=block.uses + 1))


@mutant("policy-due", costs=ONLY_HITS, trace="learned")
def m_learned_never_ages(patcher: Patcher) -> None:
    """What was used often once stays, however long ago that is."""

    @patcher.around(Learned, "take")
    def take(old: Any, self: Learned, memory: Memory, fronts: Sequence[Front]) -> Any:
        _, section, place = old(self, memory, fronts)
        return memory, section, place


@mutant("policy-epoch", "EPOCH-FIRST", costs=ONLY_HITS)
def m_older_block_gets_a_place(patcher: Patcher) -> None:
    """A block with a key of an older epoch joins among those of this one when it is freed."""

    @patcher.around(PolicyTransaction, "_enqueue")
    def enqueue(_: Any, self: PolicyTransaction, block: int) -> None:
        self.older -= {block}
        self._put(block, self.place_of(block))


@mutant("policy-epoch", "DEADLOCK-FREE", "L-ADMIT")
def m_epoch_leaves_the_policys_order(patcher: Patcher) -> None:
    """The places of free blocks outlive the epoch, so the next one that leaves has no tail."""
    patcher.replace(PolicyTransaction, "start_epoch", vars(PoolTransaction)["start_epoch"])
