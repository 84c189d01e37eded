# SPDX-License-Identifier: Apache-2.0
"""Results made by hand, as a replay could give them."""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.replay.results import (
    Cost,
    Options,
    Queueing,
    RefusedRequest,
    Result,
    Sample,
    Spent,
)

EMPTY = Sample(
    step=0,
    time=0.0,
    running=0,
    waiting=0,
    swapped=0,
    used_blocks=0,
    cached_blocks=0,
    num_blocks=100,
    finished=0,
    hit_tokens=0,
    looked_up_tokens=0,
    evictions=0,
    preemptions=0,
)

# Of ten seconds, the pool is 20 % used for one, 90 % for six, and 50 % for three.
SAMPLES = (
    attrs.evolve(
        EMPTY, time=1.0, running=1, used_blocks=20, cached_blocks=10, looked_up_tokens=400
    ),
    attrs.evolve(
        EMPTY,
        step=1,
        time=7.0,
        running=4,
        waiting=2,
        used_blocks=90,
        looked_up_tokens=900,
        hit_tokens=200,
        evictions=30,
    ),
    attrs.evolve(
        EMPTY,
        step=2,
        time=10.0,
        running=2,
        used_blocks=50,
        cached_blocks=45,
        finished=5,
        looked_up_tokens=1000,
        hit_tokens=250,
        evictions=42,
        preemptions=1,
    ),
)
SPENT = Spent()
for seconds, sample in zip((1.0, 6.0, 3.0), SAMPLES, strict=True):
    SPENT.add(seconds, sample)
REFUSED = RefusedRequest(request="7", line=8, num_tokens=5000, needed_blocks=313, usable_blocks=100)
RESULT = Result(
    trace="day & night <1>.jsonl",
    options=Options(num_blocks=101),
    backend="python",
    requests=6,
    finished=5,
    num_refused=1,
    refused=(REFUSED,),
    skipped_lines=3,
    interrupted=False,
    prompt_tokens=6000,
    output_tokens=77,
    looked_up_tokens=1000,
    hit_tokens=250,
    again_looked_up_tokens=50,
    again_hit_tokens=40,
    ideal_hit_tokens=500,
    optimum_hit_tokens=400,
    evictions=42,
    preemptions=1,
    swaps=0,
    steps=3,
    virtual_seconds=10.0,
    queueing=Queueing(median=0.25, p99=2.0, worst=12.5),
    samples=SAMPLES,
    spent=SPENT,
    costs=(
        Cost("append", 4, 0.00002, 0.000004, 0.000006, 0.000008, 0.00001),
        Cost("step", 3, 0.00003, 0.000009, 0.000011, 0.000012, 0.000013),
    ),
)


def made(**changes: Any) -> Result:
    """Return the result with some fields changed."""
    return attrs.evolve(RESULT, **changes)


def of_size(num_blocks: int, hit_tokens: int) -> Result:
    """Return the result of the same trace on a pool of another size."""
    return made(options=Options(num_blocks=num_blocks), hit_tokens=hit_tokens)
