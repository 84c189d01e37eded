# SPDX-License-Identifier: Apache-2.0
"""Costs of calls: processor time of the thread, in histograms of bounded size.

A value goes into one of 64 buckets between a power of two and the next, so a percentile is known to
1.6 %; sums and maxima are exact. The cost of reading the clock is measured first, and subtracted
from each measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvcore.replay.results import Cost

P = ParamSpec("P")
T = TypeVar("T")

NANO = 1_000_000_000
SUB_BITS = 6
NUM_CALIBRATIONS = 201
STEP = "step"
MEASURED = (
    *("add_request", "get_computed_blocks", "allocate_slots", "append", "add_tokens"),
    *("take_batch", "swap_in", "swap_out", "free", "remove_request"),
)
"""Calls of a manager."""


class Histogram:
    """A histogram of integers of at least 0."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.worst = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: int) -> None:
        """Count one value."""
        self.count += 1
        self.total += value
        if value > self.worst:
            self.worst = value
        shift = max(0, value.bit_length() - SUB_BITS - 1)
        bucket = (shift << SUB_BITS) + (value >> shift)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def percentile(self, share: float) -> float:
        """Return the least value that this share of the values does not exceed; 0 without
        values.
        """
        left = share * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                shift = max(0, (bucket >> SUB_BITS) - 1)
                low = (bucket - (shift << SUB_BITS)) << shift
                return min(low + ((1 << shift) - 1) / 2, self.worst)
        return 0.0


class Meter:
    """Measures calls by name, and all calls of a step together."""

    def __init__(self, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._clock = clock
        self._own = clock_cost(clock)
        self._names: dict[str, Histogram] = {}
        self._steps = Histogram()
        self._in_step = 0

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function, and measure it under its own name."""
        start = self._clock()
        value = function(*args, **kwargs)
        spent = max(0, self._clock() - start - self._own)
        name = function.__name__
        costs = self._names.get(name)
        if costs is None:
            costs = self._names[name] = Histogram()
        costs.add(spent)
        self._in_step += spent
        return value

    def end_step(self) -> None:
        """End a step: all calls since the last end count as one cost, if any is measured."""
        if self._names:
            self._steps.add(self._in_step)
        self._in_step = 0

    def costs(self) -> tuple[Cost, ...]:
        """Return one cost per name, the highest total first, then that of steps."""
        names = sorted(self._names.items(), key=lambda item: (-item[1].total, item[0]))
        return tuple(_cost(name, each) for name, each in [*names, (STEP, self._steps)])


def clock_cost(clock: Callable[[], int]) -> int:
    """Measure the time between two consecutive readings of the clock: the median of many."""
    spans = sorted(-clock() + clock() for _ in range(NUM_CALIBRATIONS))
    return spans[NUM_CALIBRATIONS // 2]


def _cost(name: str, values: Histogram) -> Cost:
    median, p99, p999 = (values.percentile(share) / NANO for share in (0.5, 0.99, 0.999))
    worst, total = values.worst / NANO, values.total / NANO
    return Cost(name, values.count, total, median, p99, p999, worst)
