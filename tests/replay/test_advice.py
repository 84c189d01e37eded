# SPDX-License-Identifier: Apache-2.0
"""A report says when the queue grew without end, and what would bring most."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs
import pytest

from kvcore.replay import record
from kvcore.replay.loop import replay
from kvcore.replay.report_json import to_json
from kvcore.replay.report_text import advice, to_text
from kvcore.replay.results import Options, Result, Sample
from kvcore.replay.summary import Report, saturation_of
from kvcore.replay.workload import TraceRequest
from tests.replay.results import EMPTY, RESULT, made, of_size


def waiting(*counts: int) -> Result:
    """Return a run with these numbers of waiting requests, second by second, and two that run."""
    samples: Sequence[Sample] = [
        attrs.evolve(EMPTY, step=place, time=place + 1.0, waiting=count, running=2)
        for place, count in enumerate(counts)
    ]
    return made(samples=tuple(samples))


@pytest.mark.parametrize(
    ("counts", "since"),
    [
        ((0, 5, 10, 15, 20, 25, 20, 10, 0), 1.0),
        ((5, 10, 15, 20), 0.0),
        ((0, 0, 0, 0, 0, 0, 10, 20), None),  # a burst at the end
        ((0, 20, 19, 20, 19, 20, 21, 20), None),  # a queue that stands
        ((0, 1, 2, 0, 1, 2), None),  # fewer wait than run
        ((0,), None),
    ],
)
def test_a_queue_that_grows_for_most_of_the_run_is_saturated(
    counts: tuple[int, ...], since: float | None
) -> None:
    found = saturation_of(waiting(*counts))
    assert (None if found is None else found.since) == since


def test_a_run_without_steps_is_not_saturated() -> None:
    assert saturation_of(made(samples=())) is None


def test_an_engine_that_is_too_slow_says_so_in_every_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "SAMPLES_MAX", 64)  # few samples meet the longest queue
    slow = [TraceRequest(n, n / 50, 64, 40, (n,), 64) for n in range(200)]
    options = Options(num_blocks=30, block_size=16, max_running=4)
    report = Report(replay(slow, options, backend="python"))
    assert re.search(
        r"^saturated +yes  the queue grew to 1\d\d requests", to_text(report), re.MULTILINE
    )
    data = to_json(report)["saturation"]
    assert data is not None
    assert data["since_seconds"] < data["until_seconds"]
    assert data["waiting"] > 100
    course = to_json(report)["course"]
    assert course is not None
    assert data["waiting"] == course["waiting"]["most"]
    calm = Report(replay(slow, attrs.evolve(options, max_running=64, num_blocks=1000)))
    assert "saturated" not in to_text(calm)
    assert to_json(calm)["saturation"] is None


def test_the_advice_is_the_size_that_brings_most_per_block() -> None:
    sweep = (of_size(51, 100), RESULT, of_size(201, 350), of_size(1001, 500))
    said = advice(Report(RESULT, sweep))
    assert said == "100 more blocks would bring 10.0 points of hit rate"


def test_more_blocks_are_judged_under_the_same_policy() -> None:
    other = attrs.evolve(of_size(201, 450), options=Options(num_blocks=201, policy="lru2"))
    said = advice(Report(RESULT, (RESULT, of_size(201, 350), other)))
    assert said == "100 more blocks would bring 10.0 points of hit rate"


def test_without_a_larger_pool_that_helps_the_bounds_advise() -> None:
    said = "another policy can bring at most 15.0 points of hit rate in this pool, more blocks "
    said += "10.0 on top"
    assert advice(Report(RESULT)) == said
    assert advice(Report(RESULT, (RESULT, of_size(201, 255)))) == said
    assert advice(Report(made(ideal_hit_tokens=None, optimum_hit_tokens=None))) is None
    assert advice(Report(made(looked_up_tokens=0))) is None
