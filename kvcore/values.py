# SPDX-License-Identifier: Apache-2.0
"""What calls take and give back: requests, hits, blocks, refusals, statistics.

Rules: all are frozen and compare by content. A refusal is one of these values, and false in a
condition. Twin: rust/src/values.rs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import attrs

from kvcore.commands import Command

S = TypeVar("S")
T = TypeVar("T")


class Reason(enum.Enum):
    """Why a call was refused."""

    LATER = "later"
    """Ask again when blocks were given back."""
    NEVER = "never"
    """More than an empty pool can give this call."""


class Verdict(enum.Enum):
    """What `can_allocate` says of a call."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Status(enum.Enum):
    """Where a request's blocks are."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"


@attrs.frozen
class Request:
    """A request as an engine hands it in.

    tokens: a list or tuple of ints below 2**32, or a buffer of integers (array, numpy, torch on the
    CPU, bytes); the buffer's item format decides the width.
    """

    request_id: str
    tokens: Any


@attrs.frozen
class KVCacheBlocks:
    """Block ids, one tuple a group, in table order."""

    blocks: tuple[tuple[int, ...], ...]

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """The blocks of both, group by group."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return KVCacheBlocks(tuple(mine + theirs for mine, theirs in pairs))

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The ids as one list a group."""
        return tuple(list(ids) for ids in self.blocks)


@attrs.frozen
class Hit:
    """A cached prefix of a request: its blocks a group, and the tokens that they hold."""

    blocks: KVCacheBlocks
    num_tokens: int

    def __iter__(self) -> Iterator[Any]:
        return iter((self.blocks, self.num_tokens))


@attrs.frozen
class Refused:
    """A call that did not fit and changed nothing.

    needed: blocks that the call would take out of the free queue. available: blocks that were free.
    pending: released blocks that wait for an unfinished batch.
    """

    reason: Reason
    needed: int
    available: int
    pending: int = 0

    def __bool__(self) -> bool:
        return False


@attrs.frozen
class Appended:
    """How far an `append` came: requests from the refused one on are untouched."""

    done: int
    refused: Refused | None = None


@attrs.frozen
class PrefixCacheStats:
    """Look-ups since the last `take_stats`, counted with the allocation that used them.

    queries and hits are tokens. Requests that were preempted before are counted apart.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit tokens over queried tokens of new requests, 0.0 without queries."""
        return self.hits / self.queries if self.queries else 0.0

    def observe(self, num_queries: int, num_hits: int, *, preempted: bool) -> PrefixCacheStats:
        """These statistics with one more look-up."""
        if preempted:
            return attrs.evolve(
                self,
                preempted_requests=self.preempted_requests + 1,
                preempted_queries=self.preempted_queries + num_queries,
                preempted_hits=self.preempted_hits + num_hits,
            )
        return attrs.evolve(
            self,
            requests=self.requests + 1,
            queries=self.queries + num_queries,
            hits=self.hits + num_hits,
        )


@attrs.frozen
class Outcome(Generic[S, T]):
    """What a transition gives: the state after it, the commands that it emitted, its value."""

    state: S
    commands: tuple[Command, ...]
    value: T
