# SPDX-License-Identifier: Apache-2.0
"""The Mooncake conversation trace on 64 replicas, against the figures of another simulation.

The trace is no part of this repository. The other simulation: an LRU model, the trace 5 times as
fast, 400 blocks of 512, 4,000 prompt tokens per second.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from kvcore.replay.request_trace import TraceReader
from kvcore.route.fleet import Fleet
from kvcore.route.jobs import Workload, read_jobs
from kvcore.route.results import Options, Result

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
pytestmark = pytest.mark.skipif(
    not TRACE.is_file(), reason="the trace mooncake_conversation.jsonl is not beside the project"
)
NEAR = 0.02


CHEAP = (
    (Options(num_replicas=64, num_blocks=400, rule="round-robin"), 0.051, 36.1),
    (Options(num_replicas=64, num_blocks=400, rule="least-loaded"), 0.049, 9.8),
    (Options(num_replicas=64, num_blocks=400, rule="hash"), 0.306, 35.2),
)
"""Options, hit rate, and the 95th percentile of the seconds to the first token."""
COST = (
    (Options(num_replicas=64, num_blocks=400, scale=1.0), 0.171, 9.4),
    (Options(num_replicas=64, num_blocks=400, scale=2.0), 0.214, 8.7),
    (Options(num_replicas=64, num_blocks=400, scale=8.0), 0.260, 8.2),
)
FAULTS = (
    (Options(num_replicas=64, num_blocks=400, delay=2.0), 0.177),
    (Options(num_replicas=64, num_blocks=400, delay=30.0), 0.120),
    (Options(num_replicas=64, num_blocks=400, loss=0.05, replay=False), 0.156),
)


@cache
def workload() -> Workload:
    """Return the whole trace."""
    return read_jobs(TraceReader(TRACE), None, 5.0)


@cache
def run(options: Options) -> Result:
    """Make one run, on the Python core, which the model does not use."""
    return Fleet(workload(), options, "python").run()


def p95(options: Options) -> float:
    """Return the 95th percentile of the seconds to the first token."""
    waits = run(options).first_token
    assert waits is not None
    return waits.p95


def test_the_ideal_is_what_the_authors_say() -> None:
    trace = workload()
    assert round(1 - trace.num_distinct / trace.num_blocks, 3) == 0.366


@pytest.mark.parametrize(("options", "hit_rate", "seconds"), CHEAP)
def test_rules_without_an_index(options: Options, hit_rate: float, seconds: float) -> None:
    assert run(options).hit_rate == pytest.approx(hit_rate, abs=NEAR)
    assert p95(options) == pytest.approx(seconds, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "hit_rate", "seconds"), COST)
def test_the_cost_rule(options: Options, hit_rate: float, seconds: float) -> None:
    assert run(options).hit_rate == pytest.approx(hit_rate, abs=NEAR)
    assert p95(options) == pytest.approx(seconds, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "hit_rate"), FAULTS)
def test_the_cost_rule_with_events_that_are_late_or_lost(options: Options, hit_rate: float) -> None:
    assert run(options).hit_rate == pytest.approx(hit_rate, abs=NEAR)


@pytest.mark.slow
def test_the_rules_have_the_same_order() -> None:
    """Both their order by hit rate and their order by waits are those of the other simulator."""
    both = (*CHEAP, *COST)
    for place, of in ((1, lambda options: run(options).hit_rate), (2, p95)):
        theirs = sorted(range(len(both)), key=lambda each: both[each][place])
        assert sorted(range(len(both)), key=lambda each: of(both[each][0])) == theirs


@pytest.mark.slow
def test_prefix_alone_sends_all_to_one() -> None:
    assert run(Options(num_replicas=64, num_blocks=400, rule="prefix")).busiest == 64
