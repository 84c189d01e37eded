# SPDX-License-Identifier: Apache-2.0
"""The options and results of a replay, as frozen values.

Counts are totals of the run so far, in tokens unless the name says otherwise. Times named `seconds`
or `time` are virtual, except those of a `Cost`, which are processor time. A hit rate is hit tokens
over looked-up prompt tokens of first look-ups; look-ups of preempted requests are counted
separately.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import attrs

from kvcore.types.config import EvictionName
from kvcore.types.groups import Group
from kvcore.types.keys import Hashing

BackendName = Literal["python", "rust"]
Preemption = Literal["recompute", "swap"]
StorePolicy = Literal["publication", "second_use"]

REFUSED_MAX = 100
"""Number of refused requests that a result names; further ones are only counted."""
SAMPLES_MAX = 2048
"""Most samples of a result; a longer run is thinned evenly."""
FULL_SHARE = 0.9
"""The share of used blocks from which on a pool counts as nearly full."""

SPARED = 0.5
BASE_SECONDS = 0.008
SECONDS_PER_PREFILL_TOKEN = 0.00005
SECONDS_PER_DECODE = 0.00004
"""Virtual costs of a step: roughly an 8B model on one large GPU; 20,000 prompt tokens per
second.
"""


@attrs.frozen(kw_only=True)
class Options:
    """The options of a replay.

    num_blocks: of the pool, the null block included. groups: of a model, empty for one full group
    of block_size. hash_block_size: hits end at its multiples, inside blocks too; None: at the ends
    of blocks. policy: `Config.eviction`. max_running: requests that hold blocks on the device at a
    time. token_budget: tokens that a step computes at most. num_known: waiting requests that the
    manager knows before their turn. spared: the share of the pool that an admission leaves to free
    blocks that known requests will look up. preempt: a preempted request loses its blocks
    ("recompute"), or they are swapped to num_host_blocks host blocks (None: as many as num_blocks)
    while these have room. num_requests: number of requests after which reading stops. bounds: count
    the ideal and, in blocks of one size that are hit whole, the optimum; their memory grows with
    the distinct ids of the trace. far_blocks: number of blocks of a far tier, whose loads and
    stores take no time; None for no tier. store_policy: which blocks it keeps (far/far_blocks.py).
    """

    num_blocks: int
    block_size: int = 16
    groups: tuple[Group, ...] = ()
    hash_block_size: int | None = None
    policy: EvictionName = "lru"
    hashing: Hashing = "sha256"
    max_running: int = 256
    token_budget: int = 8192
    preempt: Preemption = "recompute"
    num_host_blocks: int | None = None
    num_requests: int | None = None
    num_known: int = 0
    spared: float = SPARED
    bounds: bool = True
    far_blocks: int | None = None
    store_policy: StorePolicy = "publication"
    base_seconds: float = BASE_SECONDS
    seconds_per_prefill_token: float = SECONDS_PER_PREFILL_TOKEN
    seconds_per_decode: float = SECONDS_PER_DECODE


@attrs.frozen(kw_only=True)
class Sample:
    """The state when a step ended.

    waiting: requests that have arrived and hold nothing; those after the first WAITING_MAX
    (loop.py) are not read yet, and not counted. swapped: requests in the host tier. used_blocks:
    blocks with an owner. cached_blocks: findable blocks without owner, counted once per stride.
    idle_time: seconds so far in which there was no request.
    """

    step: int
    time: float
    running: int
    waiting: int
    swapped: int
    used_blocks: int
    cached_blocks: int
    num_blocks: int
    finished: int
    hit_tokens: int
    looked_up_tokens: int
    evictions: int
    preemptions: int
    idle_time: float = 0.0


@attrs.define
class Spent:
    """For each number of used blocks, cached blocks, running and waiting requests: the virtual
    seconds in which there were that many. Each step counts with the numbers at its end. first_full:
    end of the first step in which the pool was nearly full.
    """

    used: defaultdict[int, float] = attrs.field(factory=lambda: defaultdict(float))
    cached: defaultdict[int, float] = attrs.field(factory=lambda: defaultdict(float))
    running: defaultdict[int, float] = attrs.field(factory=lambda: defaultdict(float))
    waiting: defaultdict[int, float] = attrs.field(factory=lambda: defaultdict(float))
    first_full: float | None = None

    def add(self, seconds: float, sample: Sample) -> None:
        """Count the time that ends with a sample."""
        self.used[sample.used_blocks] += seconds
        self.cached[sample.cached_blocks] += seconds
        self.running[sample.running] += seconds
        self.waiting[sample.waiting] += seconds
        if self.first_full is None and is_full(sample.used_blocks, sample.num_blocks):
            self.first_full = sample.time


def is_full(used_blocks: int, num_blocks: int) -> bool:
    """Return whether a pool of which this many blocks are used is nearly full."""
    return used_blocks >= FULL_SHARE * num_blocks


@attrs.frozen
class Cost:
    """Processor seconds of one kind of call on the manager, or of all calls of one "step".

    The clock's own cost is subtracted. Percentiles are read from buckets that are 1.6 % wide.
    """

    name: str
    count: int
    total: float
    median: float
    p99: float
    p999: float
    worst: float


@attrs.frozen(kw_only=True)
class RefusedRequest:
    """A request whose prompt and outputs the whole pool cannot hold. line: of the trace, from 1."""

    request: str
    line: int
    num_tokens: int
    needed_blocks: int
    usable_blocks: int


@attrs.frozen
class Queueing:
    """Virtual seconds that requests waited from their arrival to their first schedule."""

    median: float
    p99: float
    worst: float


@attrs.frozen(kw_only=True)
class Result:
    """The result of a replay, even if it was interrupted.

    requests: those read, the refused ones too. prompt_tokens: of all of them. looked_up_tokens,
    hit_tokens: of first look-ups. again_*: of the look-ups of requests that were preempted.
    ideal_hit_tokens: hits of an unlimited cache in the same first look-ups (bounds/ideal.py).
    optimum_hit_tokens: a bound that no policy exceeds at this pool size (bounds/optimum.py); both
    None without `Options.bounds`. evictions: blocks that lost their content to another.
    preemptions: by recompute and by swap; swaps: those by swap. virtual_seconds: when the last step
    ended. far_hit_tokens: of first look-ups, after hit_tokens, loaded from the far tier;
    far_written: blocks that it stored. Both None without a tier.
    """

    trace: str
    options: Options
    backend: str
    requests: int
    finished: int
    num_refused: int
    refused: tuple[RefusedRequest, ...]
    skipped_lines: int
    interrupted: bool
    prompt_tokens: int
    output_tokens: int
    looked_up_tokens: int
    hit_tokens: int
    again_looked_up_tokens: int
    again_hit_tokens: int
    ideal_hit_tokens: int | None
    optimum_hit_tokens: int | None
    evictions: int
    preemptions: int
    swaps: int
    steps: int
    virtual_seconds: float
    queueing: Queueing
    samples: tuple[Sample, ...]
    spent: Spent
    costs: tuple[Cost, ...]
    far_hit_tokens: int | None = None
    far_written: int | None = None
