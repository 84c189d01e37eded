# SPDX-License-Identifier: Apache-2.0
"""Measure the calls that vLLM's scheduler makes on a manager, in CPU time of the thread.

Reading that clock can take longer than a call. So each call follows an empty call with the same
arguments, and the clock is read before, between and after: the time of the empty call and its
reading is subtracted. Needs no engine.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import attrs

CALLS = (
    "new_step_starts",
    "get_computed_blocks",
    "allocate_slots",
    "get_blocks",
    "get_block_ids",
    "free",
    "cache_blocks",
    "record_prefix_cache_stats",
    "take_new_block_ids",
    "take_kv_cache_block_copies",
    "take_boundary_state_offloads",
    "take_events",
    "make_prefix_cache_stats",
    "estimate_cached_tokens",
)
"""The methods of a manager that the scheduler calls in these loads."""


@attrs.define
class Spent:
    """CPU seconds and number of the calls of a manager, by name."""

    seconds: dict[str, float] = attrs.field(factory=lambda: defaultdict(float))
    counts: dict[str, int] = attrs.field(factory=lambda: defaultdict(int))

    @property
    def total(self) -> float:
        """Return the seconds of all calls."""
        return sum(self.seconds.values())


def clocked(manager: Any, calls: Iterable[str] = CALLS) -> Spent:
    """Start timing a manager's calls, less the time of an empty call, and return the totals."""
    spent = Spent()
    for name in calls:
        setattr(manager, name, timed(name, getattr(manager, name), spent))
    return spent


def timed(name: str, call: Any, spent: Spent) -> Any:
    """Return a call that is timed, less an empty call with the same arguments before it."""
    clock, seconds, counts = time.thread_time, spent.seconds, spent.counts

    def both(*args: Any, **options: Any) -> Any:
        start = clock()
        empty(*args, **options)
        between = clock()
        got = call(*args, **options)
        end = clock()
        seconds[name] += end - between - (between - start)
        counts[name] += 1
        return got

    return both


def empty(*_: Any, **__: Any) -> None:
    """Do nothing."""
