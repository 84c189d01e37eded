# SPDX-License-Identifier: Apache-2.0
"""The options and results of a run of replicas, as frozen values.

Times are virtual, except `router_seconds`, which is processor time. A block is one id of the trace.
"""

from __future__ import annotations

from typing import Literal

import attrs

RuleName = Literal["round-robin", "least-loaded", "hash", "prefix", "cost"]
ModelName = Literal["lru", "manager"]

WITH_INDEX: tuple[RuleName, ...] = ("prefix", "cost")
"""Rules that use the index. A delay or loss of events makes no difference to the others."""

PREFILL_RATE = 4_000.0
SECONDS_PER_DECODE = 0.013


@attrs.frozen(kw_only=True)
class Options:
    """How to run.

    num_blocks: of each replica. scale: weight of prefill in the cost rule. delay: of a message of
    events, in seconds. loss: share of the messages that do not arrive. replay: missing messages are
    requested again; else the index goes on without them. num_dead: replicas that die when half of
    the requests have arrived. prefill_rate: prompt tokens per second of a replica, one request at a
    time. seconds_per_decode: of one output token, however many requests decode. seed: of losses,
    deaths and the hash rule.
    """

    num_replicas: int
    num_blocks: int
    rule: RuleName = "cost"
    model: ModelName = "lru"
    scale: float = 1.0
    delay: float = 0.0
    loss: float = 0.0
    replay: bool = True
    num_dead: int = 0
    prefill_rate: float = PREFILL_RATE
    seconds_per_decode: float = SECONDS_PER_DECODE
    seed: int = 0


@attrs.frozen
class Waits:
    """Seconds from arrival to first token."""

    p50: float
    p95: float
    p99: float


@attrs.frozen(kw_only=True)
class Result:
    """The result of one run.

    requests: those that got a first token. refused: those larger than a replica. again: those
    routed a second time because their replica died. blocks, hit_blocks: of the prompts.
    first_token: None without requests. busiest: computed tokens of the busiest replica over the
    mean. deviation: standard deviation of the computed tokens over their mean. copies: cached
    blocks of the living replicas over the distinct ones, at the end. died_blocks: distinct blocks
    that only dead replicas had. events, payload_bytes, messages: published by all replicas; lost:
    messages that did not arrive. seconds: time of the last first token.
    """

    options: Options
    requests: int
    refused: int
    again: int
    blocks: int
    hit_blocks: int
    first_token: Waits | None
    busiest: float
    deviation: float
    copies: float
    died_blocks: int
    events: int
    messages: int
    lost: int
    payload_bytes: int
    seconds: float
    router_seconds: float

    @property
    def hit_rate(self) -> float:
        """Hit blocks over all blocks of the prompts."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0


@attrs.frozen(kw_only=True)
class Report:
    """The runs of one trace.

    speed: factor by which its times are shortened. block_size: tokens per block. ideal_hit_blocks:
    those of one unlimited cache. interrupted: whether runs are missing.
    """

    trace: str
    requests: int
    blocks: int
    block_size: int
    ideal_hit_blocks: int
    speed: float
    runs: tuple[Result, ...]
    interrupted: bool
