# SPDX-License-Identifier: Apache-2.0
"""Runs of a few requests: blocks of 4 tokens, of which a replica computes one per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.replay.workload import TraceRequest
from kvcore.route.fleet import Fleet
from kvcore.route.jobs import read_jobs
from kvcore.route.results import Options, Result


def fleet_of(requests: Sequence[TraceRequest], **options: Any) -> Fleet:
    """Return a fleet that has not run, by default with two replicas of 100 blocks."""
    given: dict[str, Any] = {
        "num_replicas": 2,
        "num_blocks": 100,
        "rule": "round-robin",
        "prefill_rate": 4.0,
        "seconds_per_decode": 1.0,
    }
    return Fleet(read_jobs(requests, None, 1.0), Options(**given | options), "python")


def run(requests: Sequence[TraceRequest], **options: Any) -> Result:
    """Return the result of a fleet's run."""
    return fleet_of(requests, **options).run()
