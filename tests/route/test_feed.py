# SPDX-License-Identifier: Apache-2.0
"""Events on their way to the index: what a loss leaves, with and without a replay."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from kvcore.route.caches import LruCache
from kvcore.route.feed import Feed
from kvcore.route.jobs import read_jobs
from kvcore.route.results import Options
from tests.replay.small_traces import ask

NUM_BATCHES = 120


class Clock:
    """Calls functions at their time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, then: float, function: Callable[..., None], *args: Any) -> None:
        """Schedule a call for when `run` reaches this time."""
        heapq.heappush(self._heap, (then, next(self._order), function, args))

    def run(self, until: float) -> None:
        """Make all calls whose time has come."""
        while self._heap and self._heap[0][0] <= until:
            _, _, function, args = heapq.heappop(self._heap)
            function(*args)


def send(feed: Feed, clock: Clock) -> LruCache:
    """Publish the events of a cache of 6 blocks in which prompts of 3 follow each other, one batch
    per second, until one of them is sure to have arrived.
    """
    cache = LruCache(6, 4)
    requests = (ask(n, 12, 0, n % 5, n % 3, n) for n in range(10_000))
    for number, job in enumerate(read_jobs(requests, 2 * NUM_BATCHES, 1.0).jobs):
        lost = feed.lost
        cache.start(job)
        cache.computed(job)
        feed.publish(0, cache.take_events(), float(number))
        clock.run(float(number))
        if number >= NUM_BATCHES and feed.lost == lost:
            break
    clock.run(1e9)
    return cache


def indexed(feed: Feed) -> set[Any]:
    """Return the index's blocks of the replica."""
    assert feed.index is not None
    return {name for _, name in feed.index.keys("0", 0)}


@pytest.mark.parametrize("delay", [0.0, 0.4, 100.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_replay_makes_the_index_whole(delay: float, seed: int) -> None:
    """The index is complete even if lost events are no longer kept, as with 100 s."""
    clock = Clock()
    options = Options(num_replicas=1, num_blocks=6, loss=0.3, delay=delay, seed=seed)
    feed = Feed(options, clock.at)
    cache = send(feed, clock)
    assert feed.lost > 10
    assert indexed(feed) == cache.names()


def test_without_replay_what_is_lost_stays_wrong() -> None:
    clock = Clock()
    feed = Feed(Options(num_replicas=1, num_blocks=6, loss=0.3, replay=False), clock.at)
    cache = send(feed, clock)
    assert indexed(feed) - cache.names()  # removals that did not come
    assert not feed.index or not feed.index.is_partial("0", 0)  # which is not noticed


def test_a_dead_replica_is_not_in_the_index_again() -> None:
    clock = Clock()
    feed = Feed(Options(num_replicas=1, num_blocks=6, delay=5.0), clock.at)
    cache = LruCache(6, 4)
    for number, job in enumerate(read_jobs([ask(n, 8, 0, n, 2) for n in (1, 2)], 2, 1.0).jobs):
        cache.computed(job)
        feed.publish(0, cache.take_events(), 6.0 * number)
        clock.run(6.0)
    assert len(indexed(feed)) == 2  # the others are on their way
    feed.drop(0)
    assert indexed(feed) == set()
    clock.run(1e9)
    assert indexed(feed) == set()
