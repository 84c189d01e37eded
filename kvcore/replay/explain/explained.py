# SPDX-License-Identifier: Apache-2.0
"""Collects a replay's explanations: totals, causes over time, and single admissions.

The optimum splits evicted tokens block by block: `policy` if the bound of optimum.py finds the
block in a pool of this size, else `capacity`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import attrs

from kvcore.explain.explanation import Explanation, Totals
from kvcore.explain.observed import observed
from kvcore.explain.observer import AdmissionObserver
from kvcore.manager import KVCacheManager
from kvcore.replay.bounds.optimum import LookUps
from kvcore.replay.explain.by_keys import ObserverByKeys
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import Sample
from kvcore.replay.workload import TraceRequest

POINTS_MAX = 512
"""Most points of the causes over time; a longer run is thinned evenly."""


@attrs.frozen
class Point:
    """Tokens up to a virtual time: looked up, hit, and missed by cause."""

    time: float
    looked_up: int
    hit: int
    causes: Counter[str]


class Explained:
    """Collects the explanations of one run.

    keep: which of them to keep whole; the totals count all. points: thinned evenly.
    """

    def __init__(self, keep: Callable[[Explanation], bool] = lambda _: False) -> None:
        self.totals = Totals()
        self.kept: list[Explanation] = []
        self.points: list[Point] = []
        self._keep, self._steps, self._stride = keep, 0, 1

    def observe(self, manager: KVCacheManager) -> KVCacheManager:
        """Return the manager that the loop must call."""
        return observed(manager, AdmissionObserver(manager, self.add))

    def observe_by_keys(self, manager: KVCacheManager) -> tuple[KVCacheManager, ObserverByKeys]:
        """Return the manager that makes the calls of a record by keys, and its observer."""
        observer = ObserverByKeys(manager, self.add)
        return observed(manager, observer), observer

    def add(self, each: Explanation) -> None:
        """Count an admission."""
        self.totals.add(each)
        if self._keep(each):
            self.kept.append(each)

    def watch(self, sample: Sample) -> None:
        """Note the state after a step."""
        if self._steps % self._stride == 0:
            total = self.totals
            point = Point(sample.time, total.tokens, total.hits, Counter(total.causes))
            self.points.append(point)
            if len(self.points) == POINTS_MAX:
                self._stride *= 2
                self.points = self.points[::2]
        self._steps += 1


class Remembered(TraceReader):
    """A trace that keeps its requests while they are read, for the optimum."""

    read: list[TraceRequest]

    def __iter__(self) -> Iterator[TraceRequest]:
        self.read = []
        for each in super().__iter__():
            self.read.append(each)
            yield each


def split_evicted(
    explained: list[Explanation], read: list[TraceRequest], block_size: int, num_blocks: int
) -> Counter[str]:
    """Split evicted tokens by `policy` and `capacity`.

    explained: all admissions of the run, in order. read: its requests, in the order of the trace.
    num_blocks: usable blocks.
    """
    look_ups, split = LookUps(block_size), Counter[str]()
    for each in explained:
        request = read[int(each.request)]
        look_ups.add(request.hash_ids, request.prompt_len, request.unit, counts=not each.again)
    firsts = (each for each in explained if not each.again)
    for each, found in zip(firsts, look_ups.found_blocks(num_blocks), strict=True):
        for span in each.spans:
            if span.cause == "evicted":
                flags = found[span.start // block_size : span.end // block_size]
                split["policy"] += sum(flags) * block_size
                split["capacity"] += span.end - span.start - sum(flags) * block_size
    return split
