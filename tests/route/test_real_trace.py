# SPDX-License-Identifier: Apache-2.0
"""The Mooncake conversation trace on 64 replicas, against the figures of another simulation.

The trace is no part of this repository. The other simulation: an LRU model, the trace 5 times as
fast, 400 blocks of 512, 4,000 prompt tokens a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcore.replay.request_trace import TraceReader
from kvcore.route.fleet import Fleet
from kvcore.route.jobs import Workload, read_jobs
from kvcore.route.results import Options, Result, RuleName

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
pytestmark = pytest.mark.skipif(
    not TRACE.is_file(), reason="the trace mooncake_conversation.jsonl is not beside the project"
)
NEAR = 0.02


@pytest.fixture(scope="module")
def workload() -> Workload:
    """The whole trace."""
    return read_jobs(TraceReader(TRACE), None, 5.0)


def run(workload: Workload, **options: Any) -> Result:
    """One run on 64 replicas."""
    plan = Options(num_replicas=64, num_blocks=400, **options)
    return Fleet(workload, plan, "python").run()


def test_the_ideal_is_what_the_authors_say(workload: Workload) -> None:
    assert round(1 - workload.num_distinct / workload.num_blocks, 3) == 0.366


@pytest.mark.parametrize(
    ("rule", "hit_rate", "p95"),
    [("round-robin", 0.051, 36.1), ("least-loaded", 0.049, 9.8), ("hash", 0.306, 35.2)],
)
def test_rules_without_an_index(
    workload: Workload, rule: RuleName, hit_rate: float, p95: float
) -> None:
    result = run(workload, rule=rule)
    assert result.hit_rate == pytest.approx(hit_rate, abs=NEAR)
    assert result.first_token is not None
    assert result.first_token.p95 == pytest.approx(p95, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "hit_rate", "p95"),
    [
        ({"scale": 1.0}, 0.171, 9.4),
        ({"scale": 2.0}, 0.214, 8.7),
        ({"scale": 8.0}, 0.260, 8.2),
        ({"delay": 2.0}, 0.177, None),
        ({"delay": 30.0}, 0.120, None),
        ({"loss": 0.05, "replay": False}, 0.156, None),
    ],
)
def test_the_cost_rule(
    workload: Workload, options: dict[str, Any], hit_rate: float, p95: float | None
) -> None:
    result = run(workload, rule="cost", **options)
    assert result.hit_rate == pytest.approx(hit_rate, abs=NEAR)
    assert result.first_token is not None
    assert p95 is None or result.first_token.p95 == pytest.approx(p95, rel=0.1)


@pytest.mark.slow
def test_prefix_alone_sends_all_to_one(workload: Workload) -> None:
    assert run(workload, rule="prefix").busiest == 64
