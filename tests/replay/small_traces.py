# SPDX-License-Identifier: Apache-2.0
"""Small traces for properties: few ids, so that prefixes are shared, left and met again."""

from __future__ import annotations

from hypothesis import strategies as st

from kvcore.replay.results import Options
from kvcore.replay.workload import TraceRequest


@st.composite
def traces(draw: st.DrawFn, *, most: int = 12, longest: int = 40) -> list[TraceRequest]:
    """Draw requests of one unit by their arrival."""
    return draw(requests_of(draw(st.integers(1, most)), longest, 20))


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[TraceRequest], Options]:
    """Draw requests for a pool in which a few of them fit, and most outgrow it together."""
    block_size = draw(st.sampled_from([1, 2, 3, 4]))
    usable = draw(st.integers(4, 16))
    room = usable * block_size
    requests = draw(requests_of(draw(st.integers(3, 12)), room // 2, room // 2 + 2))
    options = Options(
        num_blocks=usable + 1,
        block_size=block_size,
        policy=draw(st.sampled_from(["lru", "uncached_first"])),
        max_running=draw(st.integers(2, 6)),
        token_budget=draw(st.sampled_from([1, 3, 8, 64])),
        preempt=draw(st.sampled_from(["recompute", "swap"])),
        num_host_blocks=draw(st.sampled_from([None, 0, 5])),
    )
    return requests, options


@st.composite
def requests_of(
    draw: st.DrawFn, num_requests: int, longest: int, most_outputs: int
) -> list[TraceRequest]:
    """Make this many requests of one unit by their arrival, most of them together."""
    unit = draw(st.sampled_from([1, 4, 6, 8]))
    requests, arrival = [], 0.0
    for line in range(1, num_requests + 1):
        prompt_len = draw(st.integers(1, longest))
        num_ids = -(-prompt_len // unit)
        ids = draw(st.lists(st.integers(0, 1), min_size=num_ids, max_size=num_ids))
        arrival += draw(st.sampled_from([0.0, 0.0, 0.02, 5.0]))
        output_len = draw(st.integers(0, most_outputs))
        requests.append(TraceRequest(line, arrival, prompt_len, output_len, ids, unit))
    return requests


def ask(line: int, prompt_len: int, output_len: int, *ids: int, at: float = 0.0) -> TraceRequest:
    """Return a request of 4 tokens an id. at: its arrival."""
    return TraceRequest(line, at, prompt_len, output_len, ids, 4)
