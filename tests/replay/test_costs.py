# SPDX-License-Identifier: Apache-2.0
"""Histograms and the meter, with a fake clock."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.replay.costs import Histogram, Meter, clock_cost

SHARES = (0.5, 0.99, 0.999, 1.0)


@given(st.lists(st.integers(0, 10**12), min_size=1))
def test_percentiles_are_within_a_bucket_of_the_sorted_values(values: list[int]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    ordered = sorted(values)
    for share in SHARES:
        rank = next(n for n in range(1, len(values) + 1) if n >= share * len(values))
        exact = ordered[rank - 1]
        assert histogram.percentile(share) == pytest.approx(exact, rel=1 / 64)
    assert (histogram.count, histogram.total) == (len(values), sum(values))
    assert histogram.worst == ordered[-1]


def test_small_values_are_exact() -> None:
    histogram = Histogram()
    for value in range(100):
        histogram.add(value)
    assert [histogram.percentile(share) for share in (0.01, 0.5, 0.99)] == [0, 49, 98]


def test_without_values_all_is_zero() -> None:
    assert Histogram().percentile(0.5) == 0.0


def test_memory_is_bounded_by_the_range_and_not_by_the_count() -> None:
    histogram = Histogram()
    for value in range(200_000):
        histogram.add(value)
    assert len(histogram._buckets) <= 64 * (200_000).bit_length()


def work() -> str:
    return "done"


def test_the_meter_takes_off_what_the_clock_costs() -> None:
    """Reading this clock takes 7 and a call takes nothing, so nothing is measured."""
    readings = count(0, 7)
    meter = Meter(lambda: next(readings))
    assert meter.call(work) == "done"
    meter.end_step()
    cost, step = meter.costs()
    assert (cost.name, cost.count, cost.total, cost.worst) == ("work", 1, 0.0, 0.0)
    assert (step.name, step.count, step.total) == ("step", 1, 0.0)


def test_a_step_is_the_sum_of_its_calls() -> None:
    now = [0]
    meter = Meter(lambda: now[0])

    def wait(span: int) -> None:
        now[0] += span

    def other(span: int) -> None:
        now[0] += span

    meter.call(wait, 10)
    now[0] += 1000
    meter.call(other, 30)
    meter.end_step()
    meter.call(wait, 20)
    meter.end_step()
    costs = {each.name: each for each in meter.costs()}
    assert [each.name for each in meter.costs()] == ["other", "wait", "step"]
    assert (costs["wait"].count, costs["wait"].worst) == (2, 20 / 1e9)
    assert costs["wait"].median == 10 / 1e9
    assert (costs["step"].count, costs["step"].worst) == (2, 40 / 1e9)
    assert costs["step"].total == 60 / 1e9


def test_the_cost_of_a_clock_is_what_lies_between_two_readings() -> None:
    readings = count(0, 3)
    assert clock_cost(lambda: next(readings)) == 3
