# SPDX-License-Identifier: Apache-2.0
"""The figures of a result that every report shows: rates, and use over time.

Text, JSON and page take their numbers from here, so that they cannot differ. Medians, means and
shares weight by time.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvcore.replay.explain.explained import Explained
from kvcore.replay.results import Result, Sample, Spent, is_full

SATURATED_SHARE = 0.75
"""In the middle of its growth, a growing queue has at most this share of its final length."""


@attrs.frozen
class Report:
    """A run, and the same trace on pools of other sizes.

    sweep: finished runs by pool size, including the first; empty if none was requested. left_out:
    pool sizes that an interrupt prevented from finishing. explained: what the run computed again,
    if requested.
    """

    result: Result
    sweep: tuple[Result, ...] = ()
    left_out: tuple[int, ...] = ()
    explained: Explained | None = None

    @property
    def interrupted(self) -> bool:
        """Whether less was run than was requested."""
        return self.result.interrupted or bool(self.left_out)


@attrs.frozen
class Rates:
    """Hit tokens over looked-up tokens, 0.0 to 1.0; None if nothing was looked up or counted."""

    run: float | None
    ideal: float | None
    optimum: float | None
    again: float | None
    far: float | None = None


@attrs.frozen
class Spread:
    """A quantity over time: median, mean and maximum."""

    median: float
    mean: float
    most: float


@attrs.frozen
class Course:
    """The course of a run over its virtual time.

    use: share of the blocks with an owner. cached: share of the findable blocks without owner.
    nearly_full: share of the time at FULL_SHARE or more. first_full: the first such time, None for
    never.
    """

    use: Spread
    cached: Spread
    running: Spread
    waiting: Spread
    nearly_full: float
    first_full: float | None


@attrs.frozen
class Saturation:
    """A queue that grew for most of the run: start, end, and final length."""

    since: float
    until: float
    most: int


def rates_of(result: Result) -> Rates:
    """Return the hit rates of a run and of its bounds."""
    looked_up = result.looked_up_tokens
    return Rates(
        run=share(result.hit_tokens, looked_up),
        ideal=share(result.ideal_hit_tokens, looked_up),
        optimum=share(result.optimum_hit_tokens, looked_up),
        again=share(result.again_hit_tokens, result.again_looked_up_tokens),
        far=share(result.far_hit_tokens, looked_up),
    )


def share(part: float | None, whole: float | None) -> float | None:
    """Return a part of a whole, None if either is missing."""
    return None if part is None or not whole else part / whole


def course_of(result: Result) -> Course | None:
    """Return the course of a run, None if it made no step."""
    samples = result.samples
    if not samples:
        return None
    spent, num_blocks = result.spent, samples[0].num_blocks
    if not sum(spent.used.values()):  # no time passed: all samples weigh the same
        spent = Spent()
        for each in samples:
            spent.add(1.0, each)
    full = (spent.used[number] for number in spent.used if is_full(number, num_blocks))
    return Course(
        use=_spread(spent.used, num_blocks),
        cached=_spread(spent.cached, num_blocks),
        running=_spread(spent.running),
        waiting=_spread(spent.waiting),
        nearly_full=sum(full) / sum(spent.used.values()),
        first_full=spent.first_full,
    )


def saturation_of(result: Result) -> Saturation | None:
    """Return the growth of the queue if it grew without bound while requests arrived; else None.

    That is the case if the queue was never empty in the last half of the time before its maximum,
    had at most three quarters of its maximum in the middle of that stretch, and more requests
    waited than ever ran.
    """
    samples = result.samples
    if not samples:
        return None
    longest = max(samples, key=lambda each: each.waiting)
    if longest.waiting <= max(each.running for each in samples):
        return None
    before = [each for each in samples if each.time <= longest.time]
    since = max((each.time for each in before if not each.waiting), default=0.0)
    if since > longest.time / 2:
        return None
    middle = (since + longest.time) / 2
    halfway = next(each for each in before if each.time >= middle)
    if halfway.waiting > SATURATED_SHARE * longest.waiting:
        return None
    return Saturation(since, longest.time, max(result.spent.waiting, default=longest.waiting))


def use_of(sample: Sample) -> float:
    """Return the share of the blocks with an owner."""
    return sample.used_blocks / sample.num_blocks if sample.num_blocks else 0.0


def cached_of(sample: Sample) -> float:
    """Return the share of the findable blocks without owner."""
    return sample.cached_blocks / sample.num_blocks if sample.num_blocks else 0.0


def _spread(times: Mapping[int, float], whole: int = 1) -> Spread:
    """Return the spread of numbers, as parts of a whole. times: seconds by number."""
    total, seen = sum(times.values()), 0.0
    median = most = max(times)
    for number in sorted(times):
        seen += times[number]
        if seen >= total / 2:
            median = number
            break
    mean = sum(number * seconds for number, seconds in times.items()) / total
    return Spread(median / whole, mean / whole, most / whole)
