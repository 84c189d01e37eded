# SPDX-License-Identifier: Apache-2.0
"""The cost of a manager's calls: CPU time of the thread, less that of an empty call."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from benches.engines.manager_calls import CALLS, clocked


def test_a_call_costs_its_time_on_the_thread_less_what_an_empty_one_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = iter(
        [0.0, 3.0, 10.0, 20.0, 23.0, 26.0]
    )  # 3 s to read the clock; a call of 4 s, of 0
    monkeypatch.setattr(time, "thread_time", lambda: next(readings))
    manager = SimpleNamespace(**dict.fromkeys(CALLS, lambda number: number + 1))
    spent = clocked(manager)
    assert (manager.free(1), manager.free(number=2)) == (2, 3)
    assert (spent.seconds["free"], spent.counts["free"], spent.total) == (4.0, 2, 4.0)
