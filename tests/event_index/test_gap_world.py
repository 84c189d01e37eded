# SPDX-License-Identifier: Apache-2.0
"""EVT-GAP and REBUILD in every order of a small world, and the bugs that each of them finds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvcore.codec.event_msgpack import EventMap
from kvcore.event_index import Applied, EventIndex, EventLog, Gap, Message, Stale
from tests.event_index.gap_world import begin, explore

Told = Applied | Gap | Stale


def new_log(first_number: int) -> EventLog:
    return EventLog(first_number, kept_max=1)


SMALL = {"operations": 2, "skips": 1, "restarts": 1, "faults": 1}


def test_no_order_of_losses_doubles_skips_and_restarts_makes_a_wrong_index() -> None:
    states, broken = explore(begin(new_log, **SMALL), new_log)
    assert broken is None
    assert states == 2_508


@pytest.mark.slow
def test_two_faults_make_no_wrong_index() -> None:
    world = begin(new_log, operations=3, skips=1, restarts=1, faults=2)
    states, broken = explore(world, new_log)
    assert broken is None
    assert states == 67_581


class NumbersRestart(EventLog):
    def __init__(self, first_number: int, *, kept_max: int) -> None:  # noqa: ARG002 - the bug
        super().__init__(1, kept_max=kept_max)


class NoClearFirst(EventLog):
    def begin(self, timestamp: float) -> Message:
        return self.append([], timestamp)[0]


class SkipWithoutNumber(EventLog):
    def skip(self, events: Iterable[EventMap]) -> None:
        super().skip(events)
        self._next -= 1
        self._skipped = False


class ReplayOfWhatIsKept(EventLog):
    def append(self, events: Iterable[EventMap], timestamp: float) -> list[Message]:
        self._skipped = False
        return super().append(events, timestamp)

    def replay(self, start: int, timestamp: float) -> list[Message]:  # noqa: ARG002 - the bug
        return [each for each in self._kept if each.number >= start]


@pytest.mark.parametrize(
    ("log", "kept_max", "law"),
    [
        (NumbersRestart, 1, "REBUILD"),
        (NoClearFirst, 4, "REBUILD"),
        (SkipWithoutNumber, 1, "EVT-GAP"),
        (ReplayOfWhatIsKept, 1, "REBUILD"),
    ],
)
def test_the_world_finds_a_wrong_publisher(log: type[EventLog], kept_max: int, law: str) -> None:
    def wrong(first_number: int) -> EventLog:
        return log(first_number, kept_max=kept_max)

    _, broken = explore(begin(wrong, **SMALL), wrong, [law])
    assert broken == law


class GapIgnored(EventIndex):
    def apply(self, worker: str, rank: int, number: int, payload: bytes) -> Told:
        self._feed((worker, rank)).expected = max(self.expected(worker, rank), number)
        return super().apply(worker, rank, number, payload)


class StaleApplied(EventIndex):
    def apply(self, worker: str, rank: int, number: int, payload: bytes) -> Told:
        reported = super().apply(worker, rank, number, payload)
        if isinstance(reported, Stale):
            feed = self._feed((worker, rank))
            feed.expected = number
            reported = super().apply(worker, rank, number, payload)
            feed.expected = max(feed.expected, 1 + number)
        return reported


class HeldForgotten(EventIndex):
    def apply(self, worker: str, rank: int, number: int, payload: bytes) -> Told:
        reported = super().apply(worker, rank, number, payload)
        if isinstance(reported, Gap):
            self._feed((worker, rank)).held.clear()
        return reported


@pytest.mark.parametrize(
    ("index", "law"),
    [(GapIgnored, "EVT-GAP"), (StaleApplied, "EVT-GAP"), (HeldForgotten, "REBUILD")],
)
def test_the_world_finds_a_wrong_index(index: type[EventIndex], law: str) -> None:
    world = begin(new_log, **SMALL)
    world.index = index()
    _, broken = explore(world, new_log, [law])
    assert broken == law
