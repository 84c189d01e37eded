# SPDX-License-Identifier: Apache-2.0
"""Runs a user's own eviction policy or scheduler with the production transitions.

A policy decides where a freed block joins the free queue, and which block leaves first; the rest of
the core is unchanged. It sees no block ids and no tokens: if anything depended on names, the
explored states could not be folded. While a policy is installed, the whole process uses it. The
property LRU, which checks the built-in policies, is left out; EVICT-ORDER and PREFIX-CLOSED tell
whether a policy keeps what a hit needs. A scheduler may depend on the names of requests, so these
are not renamed (`schedulers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import attrs

from kvcore.check.properties.registry import select
from kvcore.check.search.report import Report
from kvcore.check.search.scope import out_of_reach
from kvcore.check.search.search import check
from kvcore.check.world.world import Moves, World
from kvcore.oracle.contents import group_of
from kvcore.pool.block_pool import PoolTransaction
from kvcore.types.errors import InvariantViolation

NAME = "POLICY"
WITHOUT = frozenset({"LRU"})
"""Properties that describe the built-in policies."""


@attrs.frozen
class FreeBlock:
    """A block as a policy sees it: whether its content can be hit, and its group."""

    cached: bool
    group_id: int | None = None


class Policy(Protocol):
    """Decides which free block leaves first."""

    def join(self, queue: Sequence[FreeBlock], block: FreeBlock, /) -> int:
        """Return the index at which a freed block joins the queue: 0 for the front, len(queue) for
        the back.
        """

    def leave(self, queue: Sequence[FreeBlock], /) -> int:
        """Return the index of the block to take next."""


class LRU:
    """The built-in default, written as a user's policy."""

    def join(self, queue: Sequence[FreeBlock], _: FreeBlock) -> int:
        """Join at the back."""
        return len(queue)

    def leave(self, _: Sequence[FreeBlock]) -> int:
        """Take the front."""
        return 0


def check_policy(policy: Policy, world: World, **limits: Any) -> Report:
    """Explore a world under a policy. limits: those of `kvcore.check.search.search.check`."""
    if limits.get("backend", "python") != "python":
        raise ValueError("a policy of your own runs only in Python: omit backend")
    if limits.get("workers", 1) != 1:
        raise ValueError("a policy of your own is installed only in this process: omit workers")
    names = set(select(None, world.calls)) - WITHOUT - set(out_of_reach(world))
    limits.setdefault("properties", sorted(names))
    with installed(policy):
        report = check(world, **limits)
    if report.violation is not None:
        report.violation = attrs.evolve(report.violation, policy=policy)
    return report


def check_scheduler(moves: Moves, world: World, **limits: Any) -> Report:
    """Explore a world in which only these moves happen. limits: those of `check`."""
    return check(attrs.evolve(world, moves=moves), **limits)


@contextmanager
def installed(policy: Policy) -> Iterator[None]:
    """Install another eviction policy in the core."""
    take, enqueue = PoolTransaction.take, PoolTransaction._enqueue

    def take_chosen(self: PoolTransaction, count: int, tenant: int = 0) -> list[int]:
        blocks = []
        for _ in range(count):
            queue = _blocks(self)
            place = _place(policy, "leave", len(queue) - 1, _seen(self, queue))
            self.queue.remove(queue[place])
            self.queue.prepend(queue[place])
            blocks += take(self, 1, tenant)
        return blocks

    def join(self: PoolTransaction, block: int) -> None:
        queue = _blocks(self)
        place = _place(policy, "join", len(queue), _seen(self, queue), _view(self, block))
        for each in queue[:place]:
            self.queue.remove(each)
        self.queue.prepend(block)
        for each in reversed(queue[:place]):
            self.queue.prepend(each)

    pools: Any = PoolTransaction
    pools.take, pools._enqueue = take_chosen, join
    try:
        yield
    finally:
        pools.take, pools._enqueue = take, enqueue


def _place(policy: Policy, question: str, last: int, *seen: Any) -> int:
    """Return a policy's answer. Raises InvariantViolation (POLICY) unless it is a valid index."""
    try:
        place = getattr(policy, question)(*seen)
    except Exception as error:
        detail = f"{question} raised {type(error).__name__}: {error}"
        raise InvariantViolation(NAME, f"{detail}, asked with {seen}") from error
    if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place <= last:
        said = f"{question} gives {place!r}, which is not a place up to {last}"
        raise InvariantViolation(NAME, said)
    return place


def _blocks(tx: PoolTransaction) -> list[int]:
    return list(tx.queue)


def _seen(tx: PoolTransaction, blocks: Sequence[int]) -> tuple[FreeBlock, ...]:
    return tuple(_view(tx, block) for block in blocks)


def _view(tx: PoolTransaction, block: int) -> FreeBlock:
    key = tx.keys[block]
    return FreeBlock(key is not None, None if key is None else group_of(key))
