# SPDX-License-Identifier: Apache-2.0
"""Metrics: the hit rate of recent requests, and the lives of blocks."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Allocate, Evict, EvictAll, Free, PrefixCacheStats, SetTable, Touch
from kvcore.metrics import MAX_REUSE_GAPS, BlockLife, BlockObserver, PrefixCachingMetrics
from kvcore.types.errors import InvalidCount, WrongArgument
from kvcore.types.keys import KEY_SIZE
from tests.conftest import Backend
from tests.helpers.stories import add, drop, make, serve, step

KEY = bytes(KEY_SIZE)


def update(requests: int, queries: int, hits: int, *, reset: bool = False) -> PrefixCacheStats:
    """Make the statistics of this many new requests."""
    return PrefixCacheStats(requests, queries, hits, reset=reset)


def aggregates(metrics: PrefixCachingMetrics) -> tuple[int, int, int]:
    """Return the counted requests, queried tokens and hit tokens."""
    return (
        metrics.aggregated_requests,
        metrics.aggregated_query_total,
        metrics.aggregated_query_hit,
    )


@attrs.define
class EngineStats:
    """Counts as an engine keeps them."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0


@pytest.mark.seed("S001-21", "S001-25")
def test_the_rate_is_hit_tokens_over_queried_tokens() -> None:
    metrics = PrefixCachingMetrics()
    assert (metrics.max_recent_requests, metrics.hit_rate) == (1000, 0.0)
    metrics.observe(update(1, 20, 5))
    metrics.observe(update(2, 30, 20))
    assert metrics.hit_rate == 25 / 50
    assert aggregates(metrics) == (3, 50, 25)
    assert list(metrics.query_queue) == [(1, 20, 5), (2, 30, 20)]


@pytest.mark.seed("S001-22")
def test_past_the_limit_the_oldest_update_leaves() -> None:
    metrics = PrefixCachingMetrics(5)
    metrics.observe(update(2, 20, 4))
    metrics.observe(update(3, 30, 30))
    assert aggregates(metrics) == (5, 50, 34)  # five requests are not too many
    metrics.observe(update(1, 10, 0))
    assert aggregates(metrics) == (4, 40, 30)


@pytest.mark.seed("S001-23", "X-09")
def test_as_many_updates_leave_as_it_takes() -> None:
    metrics = PrefixCachingMetrics(5)
    for _ in range(5):
        metrics.observe(update(1, 10, 10))
    metrics.observe(update(4, 40, 8))
    # Four of the five leave, not one.
    assert list(metrics.query_queue) == [(1, 10, 10), (4, 40, 8)]
    assert metrics.hit_rate == 18 / 50


@pytest.mark.seed("S001-23", "X-09")
def test_an_update_above_the_limit_stays_as_the_newest() -> None:
    metrics = PrefixCachingMetrics(5)
    metrics.observe(update(3, 30, 0))
    metrics.observe(update(7, 70, 7))
    assert (aggregates(metrics), metrics.hit_rate) == ((7, 70, 7), 0.1)
    metrics.observe(update(1, 10, 10))
    assert (aggregates(metrics), metrics.hit_rate) == ((1, 10, 10), 1.0)


@pytest.mark.seed("S001-23", "X-09")
def test_an_update_without_requests_pushes_nothing_out() -> None:
    metrics = PrefixCachingMetrics(1)
    metrics.observe(update(1, 10, 5))
    for _ in range(3):
        metrics.observe(PrefixCacheStats(preempted_requests=1, preempted_queries=9))
    assert list(metrics.query_queue) == [(1, 10, 5)]


@pytest.mark.seed("S001-24")
def test_an_update_with_a_reset_clears_and_then_counts() -> None:
    metrics = PrefixCachingMetrics()
    metrics.observe(update(5, 50, 50))
    metrics.observe(update(1, 10, 2, reset=True))
    assert (aggregates(metrics), list(metrics.query_queue)) == ((1, 10, 2), [(1, 10, 2)])
    metrics.observe(update(0, 0, 0, reset=True))  # nothing was asked since, but it was cleared
    assert (aggregates(metrics), metrics.hit_rate) == ((0, 0, 0), 0.0)


@pytest.mark.seed("S001-26")
def test_a_reset_clears_everything() -> None:
    metrics = PrefixCachingMetrics(3)
    metrics.observe(update(2, 20, 20))
    metrics.reset()
    assert (aggregates(metrics), metrics.hit_rate, len(metrics.query_queue)) == ((0, 0, 0), 0.0, 0)
    metrics.observe(update(3, 30, 0))
    assert aggregates(metrics) == (3, 30, 0)


updates = st.builds(
    update,
    st.integers(0, 6),
    st.integers(0, 50),
    st.integers(0, 50),
    reset=st.sampled_from([False] * 9 + [True]),
)


@pytest.mark.seed("S001-21", "S001-22", "S001-23", "S001-24", "S001-25")
@given(limit=st.integers(1, 12), story=st.lists(updates, max_size=40))
def test_the_window_is_the_newest_updates_that_fit_and_at_least_one(
    limit: int, story: list[PrefixCacheStats]
) -> None:
    metrics = PrefixCachingMetrics(limit)
    for count, each in enumerate(story, 1):
        metrics.observe(each)
        assert aggregates(metrics) == recalculated(story[:count], limit)
        _, queries, hits = aggregates(metrics)
        assert metrics.hit_rate == (hits / queries if queries else 0.0)


def recalculated(story: list[PrefixCacheStats], limit: int) -> tuple[int, int, int]:
    """Return the sums over the most newest updates within the limit, at least the newest."""
    resets = [place for place, each in enumerate(story) if each.reset]
    since = story[resets[-1] if resets else 0 :]
    counting = [each for each in since if each.requests]
    lengths = range(1, len(counting) + 1)
    fitting = [n for n in lengths if sum(each.requests for each in counting[-n:]) <= limit]
    newest = counting[-max(fitting, default=1) :]
    return (
        sum(each.requests for each in newest),
        sum(each.queries for each in newest),
        sum(each.hits for each in newest),
    )


@pytest.mark.parametrize("value", [0, -1, 1.5, None, "ten"])
def test_a_window_holds_at_least_one_request(value: Any) -> None:
    with pytest.raises(InvalidCount, match="max_recent_requests"):
        PrefixCachingMetrics(value)


def test_only_statistics_are_observed() -> None:
    metrics = PrefixCachingMetrics()
    metrics.observe(update(1, 10, 5))
    with pytest.raises(WrongArgument, match="stats must be an object with requests, queries, hits"):
        metrics.observe((1, 10, 5))  # type: ignore[arg-type] # the mistake under test
    with pytest.raises(InvalidCount, match="hits"):
        metrics.observe(EngineStats(reset=True, requests=1, queries=2, hits=-1))
    assert aggregates(metrics) == (1, 10, 5)


def test_an_engines_own_statistics_are_updates() -> None:
    """vLLM's class has these names; it is not this package's `PrefixCacheStats`."""
    metrics = PrefixCachingMetrics()
    metrics.observe(EngineStats(requests=2, queries=20, hits=5))
    assert aggregates(metrics) == (2, 20, 5)
    metrics.observe(EngineStats(reset=True))
    assert aggregates(metrics) == (0, 0, 0)


@pytest.mark.seed("S000-55")
def test_the_statistics_of_a_manager_are_updates(backend: Backend) -> None:
    manager, metrics = make(backend), PrefixCachingMetrics()
    serve(manager, "a", [0, 1, 2, 3, 4])
    metrics.observe(manager.take_stats())
    serve(manager, "b", [0, 1, 2, 3, 5])
    metrics.observe(manager.take_stats())
    assert list(metrics.query_queue) == [(1, 5, 0), (1, 5, 4)]
    assert metrics.hit_rate == pytest.approx(0.4)


@pytest.mark.seed("S000-61")
def test_a_life_goes_from_allocation_to_eviction(backend: Backend) -> None:
    manager, observer = make(backend, 4), BlockObserver(1.0)
    serve(manager, "a", [0, 1, 2])  # blocks 1 and 2; 1 is cached
    observer.observe(step(manager), 10.0)
    serve(manager, "b", [0, 1, 3])  # a hit on block 1 while it is in use; 3 is new
    observer.observe(step(manager), 13.0)
    drop(manager, "a")
    drop(manager, "b")
    observer.observe(step(manager), 14.0)
    serve(manager, "c", [0, 1])  # a full hit is computed again, in block 2: block 1 lies idle on
    drop(manager, "c")
    observer.observe(step(manager), 15.0)
    assert observer.take_lives() == []
    serve(manager, "d", [0, 1, 4])  # a hit on block 1 out of the free queue
    observer.observe(step(manager), 18.0)
    drop(manager, "d")
    observer.observe(step(manager), 20.0)
    serve(manager, "e", range(50, 56))  # takes all three
    observer.observe(step(manager), 27.0)
    # Born at 10, used at 13 and 18, idle from 20 on.
    assert observer.take_lives() == [BlockLife(1, 17.0, 7.0, (3.0, 5.0))]
    assert observer.take_lives() == []


@pytest.mark.seed("S000-61")
def test_only_an_eviction_for_room_is_the_end_of_a_life() -> None:
    observer = BlockObserver(1.0)
    observer.observe([Allocate(1), Allocate(2), Allocate(3)], 0.0)
    observer.observe([Evict(1, KEY), Free(1, False)], 1.0)  # forgotten in use
    observer.observe([Free(2, False)], 2.0)  # nothing to find in it
    observer.observe([Free(3, True), EvictAll()], 3.0)  # a reset
    observer.observe([Evict(1, KEY), Evict(2, KEY), Evict(3, KEY)], 4.0)
    assert observer.take_lives() == []


@pytest.mark.seed("S000-61")
def test_a_block_back_in_use_is_not_idle() -> None:
    for again in (Touch(1), SetTable(0, 0, 0, 1)):
        observer = BlockObserver(1.0)
        observer.observe([Allocate(1), Free(1, True), again, Evict(1, KEY)], 0.0)
        assert observer.take_lives() == []


def test_of_many_gaps_the_newest_are_kept() -> None:
    observer = BlockObserver(1.0)
    observer.observe([Allocate(1)], 0.0)
    for turn in range(1, MAX_REUSE_GAPS + 3):
        observer.observe([Free(1, True), Touch(1), SetTable(0, 0, 0, 1)], float(turn**2))
    observer.observe([Free(1, True), Evict(1, KEY)], 40.0)
    # Uses at 0, 1, 4, 9, 16, 25, 36; a touch and a table at one time are one use.
    assert observer.take_lives() == [BlockLife(1, 40.0, 0.0, (5.0, 7.0, 9.0, 11.0))]


@pytest.mark.seed("S000-61")
def test_a_share_of_lives_is_followed_and_the_seed_says_which() -> None:
    def followed(rate: float, seed: int) -> list[int]:
        observer = BlockObserver(rate, seed)
        for block in range(2000):
            observer.observe([Allocate(block), Free(block, True), Evict(block, KEY)], 0.0)
        return [life.block for life in observer.take_lives()]

    assert len(followed(1.0, 0)) == 2000
    # Of 2000 draws at a quarter, five standard deviations (19.4 each) around 500.
    assert 400 < len(followed(0.25, 0)) < 600
    assert followed(0.25, 7) == followed(0.25, 7)
    assert followed(0.25, 7) != followed(0.25, 8)


@pytest.mark.seed("S000-61")
def test_an_observer_changes_nothing(backend: Backend) -> None:
    watched, alone, observer = make(backend, 4), make(backend, 4), BlockObserver(1.0)
    for turn in range(6):
        for manager in (watched, alone):
            serve(manager, "a", [turn % 3, 1, 2])
        batch = watched.take_batch()
        observer.observe(batch, float(turn))
        assert batch == alone.take_batch()
        for manager in (watched, alone):
            drop(manager, "a")
        assert watched.encode() == alone.encode()
    assert observer.take_lives()


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, float("nan"), None, True, "all"])
def test_a_sample_is_a_share(value: Any) -> None:
    with pytest.raises(WrongArgument, match="sample_rate"):
        BlockObserver(value)


def test_a_clock_does_not_go_back() -> None:
    observer = BlockObserver(1.0)
    observer.observe([Allocate(1)], 5.0)
    for now in (4.0, float("nan")):
        with pytest.raises(WrongArgument, match="at least 5"):
            observer.observe([Free(1, True)], now)
    observer.observe([Evict(1, KEY)], 5.0)
    assert observer.take_lives() == []  # what was refused was not followed


def test_what_was_not_asked_for_by_any_request_is_no_update(backend: Backend) -> None:
    manager, metrics = make(backend), PrefixCachingMetrics()
    add(manager, "a", [0, 1, 2])
    manager.get_computed_blocks("a")
    metrics.observe(manager.take_stats())
    assert len(metrics.query_queue) == 0
