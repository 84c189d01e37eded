# SPDX-License-Identifier: Apache-2.0
"""The requests of a trace as a router sees them: one name per block, equal for equal prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from kvcore.replay.bounds.prefix_tree import PrefixTree
from kvcore.replay.errors import TraceFileError
from kvcore.replay.workload import TraceRequest


class UnitsDiffer(TraceFileError):
    """The ids of a trace stand for different numbers of tokens."""

    message = "line {line} has {unit} tokens per id, those before it {before}"


@attrs.frozen
class Job:
    """A request. arrival: seconds. names: of its blocks, one per id; the last may be partial."""

    number: int
    arrival: float
    request: TraceRequest
    names: tuple[int, ...]


@attrs.frozen
class Workload:
    """All requests of a trace, by arrival. num_distinct: number of distinct blocks."""

    jobs: tuple[Job, ...]
    unit: int
    num_blocks: int
    num_distinct: int


def read_jobs(requests: Iterable[TraceRequest], most: int | None, speed: float) -> Workload:
    """Read a trace, or its first `most` requests. speed: their times are divided by it.

    Raises UnitsDiffer, and what reading raises.
    """
    tree = PrefixTree()
    jobs = tuple(_jobs(requests, most, speed, tree))
    unit = jobs[0].request.unit if jobs else 1
    return Workload(jobs, unit, sum(len(each.names) for each in jobs), len(tree))


def _jobs(
    requests: Iterable[TraceRequest], most: int | None, speed: float, tree: PrefixTree
) -> Iterator[Job]:
    unit = None
    for number, each in enumerate(requests):
        if number == most:
            return
        unit = unit or each.unit
        if each.unit != unit:
            raise UnitsDiffer(line=each.line, unit=each.unit, before=unit)
        yield Job(number, each.arrival / speed, each, tuple(tree.numbers(each.hash_ids, unit)))
