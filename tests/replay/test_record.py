# SPDX-License-Identifier: Apache-2.0
"""A run's notes for its bounds: everything that fills the cache; only first look-ups count."""

from __future__ import annotations

import pytest

from kvcore import Config
from kvcore.replay.costs import Meter
from kvcore.replay.record import Record
from kvcore.replay.results import Options, Result
from kvcore.replay.workload import TraceRequest

OPTIONS = Options(num_blocks=2, block_size=4)
X = TraceRequest(1, 0.0, 5, 1, [1, 2], 4)
Y = TraceRequest(2, 0.0, 5, 1, [3, 4], 4)


def result(record: Record) -> Result:
    return record.result(("t", 0), 2, "python", 0.0, Meter())


@pytest.mark.parametrize("way", ["again", "swap", None])
def test_a_prompt_that_comes_back_fills_the_cache_for_the_bound(way: str | None) -> None:
    """There is one block. Y comes twice in a row; X is found after that only if it came between."""
    record = Record(OPTIONS, Config(2, 4))
    for request in (X, Y, Y):
        record.admitted(request, 0.0, 0)
    if way == "again":
        record.admitted_again(X, 6, 4)
    if way == "swap":
        record.swapped_in(X)
    record.admitted(X, 0.0, 0)
    assert result(record).optimum_hit_tokens == (4 if way is None else 8)
    assert result(record).ideal_hit_tokens == 8
    assert (record.looked_up_tokens, record.hit_tokens) == (20, 0)
    again = (6, 4) if way == "again" else (0, 0)
    assert (record.again_looked_up_tokens, record.again_hit_tokens) == again


def test_waits_are_of_first_schedules() -> None:
    record = Record(OPTIONS, Config(2, 4))
    for waited in (0.0, 0.0, 3.0):
        record.admitted(X, waited, 0)
    record.admitted_again(X, 6, 4)
    queueing = result(record).queueing
    assert (queueing.median, queueing.worst) == (0.0, 3.0)
    assert queueing.p99 == pytest.approx(3.0, rel=1 / 64)
