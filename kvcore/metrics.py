# SPDX-License-Identifier: Apache-2.0
"""Metrics of a manager's caching over time: recent hit rate, and the lifetime of blocks.

No transition reads anything here. Both classes only read what a manager returns anyway:
`take_stats`, and the commands of each batch. Clocks are passed in. Source:
S001-21 to S001-26 with X-09, S000-61.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any, Protocol, cast

import attrs

from kvcore.manager import KVCacheManager
from kvcore.types.arguments import read_count, read_flag
from kvcore.types.commands import Allocate, Command, Evict, EvictAll, Free, SetTable, Touch
from kvcore.types.errors import WrongArgument

MAX_RECENT_REQUESTS = 1000
MAX_REUSE_GAPS = 4


class StatsLike(Protocol):
    """Counts since the last update, like `PrefixCacheStats` of this package and of vLLM."""

    @property
    def requests(self) -> int:
        """Number of requests that were looked up."""

    @property
    def queries(self) -> int:
        """Number of tokens that were looked up."""

    @property
    def hits(self) -> int:
        """Number of tokens that were found."""

    @property
    def reset(self) -> bool:
        """Whether the cache was reset."""


class PrefixCachingMetrics:
    """The hit rate over the most recent requests, from the values of `take_stats`.

    max_recent_requests: an update is dropped when the newer ones have this many requests; the
    newest always stays. Preempted requests do not count: finding their own blocks again is not
    sharing. Raises InvalidCount.
    """

    def __init__(self, max_recent_requests: int = MAX_RECENT_REQUESTS) -> None:
        self.max_recent_requests = read_count("max_recent_requests", max_recent_requests, 1)
        self.query_queue: deque[tuple[int, int, int]] = deque()
        self.reset()

    def __repr__(self) -> str:
        return f"<PrefixCachingMetrics: {self.hit_rate:.3f} over {self.aggregated_requests}>"

    def reset(self) -> None:
        """Forget every update."""
        self.query_queue.clear()
        self.aggregated_requests = 0
        self.aggregated_query_total = 0
        self.aggregated_query_hit = 0

    def observe(self, stats: StatsLike) -> None:
        """Add an update: requests, queried tokens, hit tokens, in a `PrefixCacheStats` or a similar
        class.

        An update with `reset` drops the others first; one without requests adds nothing. Raises
        WrongArgument, InvalidCount.
        """
        names = ("requests", "queries", "hits")
        if not all(hasattr(stats, name) for name in (*names, "reset")):
            expected = f"an object with {', '.join(names)} and reset"
            raise WrongArgument(name="stats", expected=expected, value=stats)
        counts = [read_count(name, getattr(stats, name)) for name in names]
        if read_flag("reset", stats.reset):
            self.reset()
        if counts[0] == 0:
            return
        self._count(*counts)
        self.query_queue.append((counts[0], counts[1], counts[2]))
        while self.aggregated_requests > self.max_recent_requests and len(self.query_queue) > 1:
            requests, queries, hits = self.query_queue.popleft()
            self._count(-requests, -queries, -hits)

    @property
    def hit_rate(self) -> float:
        """Hit tokens over queried tokens, 0.0 without queries."""
        if self.aggregated_query_total == 0:
            return 0.0
        return self.aggregated_query_hit / self.aggregated_query_total

    def _count(self, requests: int, queries: int, hits: int) -> None:
        self.aggregated_requests += requests
        self.aggregated_query_total += queries
        self.aggregated_query_hit += hits


@attrs.frozen
class BlockLife:
    """One content of one block, from the block's allocation to the content's eviction.

    seconds: the whole time. idle_seconds: from the release by the last owner to the eviction.
    reuse_gaps: seconds between uses, the newest MAX_REUSE_GAPS.
    """

    block: int
    seconds: float
    idle_seconds: float
    reuse_gaps: tuple[float, ...]


@attrs.define
class _Watched:
    born: float
    used: float
    freed: float
    gaps: deque[float] = attrs.field(factory=lambda: deque(maxlen=MAX_REUSE_GAPS))


class BlockObserver:
    """Samples the lives of device blocks, from the commands of a manager's batches.

    A life begins with `Allocate`. The block is reused when it leaves the free queue or is put into
    a table, at most once per time of the clock. A life ends, and is returned, with the eviction of
    a block without owner; contents that are forgotten otherwise (a reset, a block in use, a block
    freed without content) are not returned. sample_rate: share of lives to follow, above 0.0, at
    most 1.0. seed: of the sample. Raises WrongArgument.
    """

    def __init__(self, sample_rate: float = 0.01, seed: int = 0) -> None:
        is_number = isinstance(sample_rate, int | float) and not isinstance(sample_rate, bool)
        if not is_number or not 0.0 < sample_rate <= 1.0:
            expected = "a number above 0.0, at most 1.0"
            raise WrongArgument(name="sample_rate", expected=expected, value=sample_rate)
        self.sample_rate = sample_rate
        import random  # here: an import of kvcore needs none of it

        self._random = random.Random(seed)
        self._watched: dict[int, _Watched] = {}
        self._idle: set[int] = set()
        self._ended: list[BlockLife] = []
        self._now = float("-inf")

    def __repr__(self) -> str:
        return f"<BlockObserver: {len(self._watched)} blocks, {len(self._ended)} lives to take>"

    def observe(self, commands: Iterable[Command], now: float) -> None:
        """Process the commands of a batch.

        now: seconds of a clock that does not go back. Raises WrongArgument.
        """
        if not now >= self._now:
            expected = f"a time of at least {self._now}"
            raise WrongArgument(name="now", expected=expected, value=now)
        self._now = now
        for command in commands:
            match command:
                case Allocate(block):
                    self._begin(block)
                case Touch(block) | SetTable(_, _, _, block):
                    self._use(block)
                case Free(block, cached):
                    self._release(block, cached)
                case Evict(block, _):
                    self._evict(block)
                case EvictAll():
                    self._watched.clear()
                    self._idle.clear()

    def take_lives(self) -> list[BlockLife]:
        """Return the lives that ended since the last call, in order of their end."""
        ended, self._ended = self._ended, []
        return ended

    def _begin(self, block: int) -> None:
        self._forget(block)
        if self._random.random() < self.sample_rate:
            self._watched[block] = _Watched(self._now, self._now, self._now)

    def _use(self, block: int) -> None:
        self._idle.discard(block)
        watched = self._watched.get(block)
        if watched is not None and watched.used != self._now:
            watched.gaps.append(self._now - watched.used)
            watched.used = self._now

    def _release(self, block: int, cached: bool) -> None:
        if not cached:
            self._forget(block)
        elif block in self._watched:
            self._watched[block].freed = self._now
            self._idle.add(block)

    def _evict(self, block: int) -> None:
        watched = self._watched.get(block)
        if watched is not None and block in self._idle:
            seconds, idle = self._now - watched.born, self._now - watched.freed
            self._ended.append(BlockLife(block, seconds, idle, tuple(watched.gaps)))
        self._forget(block)

    def _forget(self, block: int) -> None:
        self._watched.pop(block, None)
        self._idle.discard(block)


def measured(
    manager: KVCacheManager, call: Callable[..., Any], names: Container[str] | None = None
) -> KVCacheManager:
    """Return the same manager, with its methods called as `call(method, *args, **options)`.

    names: of the methods; None: all.
    """
    return cast(KVCacheManager, _Measured(manager, call, names))


class _Measured:
    def __init__(
        self, manager: KVCacheManager, call: Callable[..., Any], names: Container[str] | None
    ) -> None:
        self._manager = manager
        self._call = call
        self._names = names

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._manager, name)
        if not callable(value) or (self._names is not None and name not in self._names):
            return value
        method = partial(self._call, value)
        setattr(self, name, method)  # found directly from now on
        return method
