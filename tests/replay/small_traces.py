# SPDX-License-Identifier: Apache-2.0
"""Small traces for properties: few ids, so that prefixes are shared, left and met again."""

from __future__ import annotations

from hypothesis import strategies as st

from kvcore.replay.workload import TraceRequest


@st.composite
def traces(draw: st.DrawFn, *, most: int = 12, longest: int = 40) -> list[TraceRequest]:
    """Requests of one unit by their arrival."""
    unit = draw(st.sampled_from([1, 4, 6, 8]))
    requests, arrival = [], 0.0
    for line in range(1, draw(st.integers(1, most)) + 1):
        prompt_len = draw(st.integers(1, longest))
        num_ids = -(-prompt_len // unit)
        ids = draw(st.lists(st.integers(0, 1), min_size=num_ids, max_size=num_ids))
        arrival += draw(st.sampled_from([0.0, 0.01, 5.0]))
        output_len = draw(st.integers(0, 20))
        requests.append(TraceRequest(line, arrival, prompt_len, output_len, ids, unit))
    return requests
