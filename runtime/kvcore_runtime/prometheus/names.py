# SPDX-License-Identifier: Apache-2.0
"""The names of all metrics: kvcore's, and those of vLLM 0.33 and SGLang 0.5.23 for the same values.

Counters are listed without the `_total` that they have on the wire. Source: the metrics of these
releases as they export them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

Kind = Literal["gauge", "counter", "histogram"]
Part: TypeAlias = tuple[str, tuple[str, ...]]
"""The name of a value of the exporter, and the values of the metric's own labels for it."""


@attrs.frozen
class Metric:
    """A metric, and the values of the exporter that it shows.

    labels: its own, in addition to the engine's. table: the exporter's values by these labels,
    instead of parts.
    """

    kind: Kind
    name: str
    help: str
    parts: tuple[Part, ...] = ()
    labels: tuple[str, ...] = ()
    table: str | None = None


def _one(kind: Kind, name: str, value: str, text: str) -> Metric:
    return Metric(kind, name, text, ((value, ()),))


_STATES = ("used", "cached", "free", "quarantined")
USAGE = "Share of the usable blocks that have an owner, 0 to 1."
QUERIES = "Tokens that new requests looked up in the prefix cache."
HITS = "Tokens of new requests that the prefix cache had."
RUNNING, WAITING = "Requests that are being computed.", "Requests that wait to be computed."
PREEMPTIONS = "Requests whose blocks were taken from them while they ran."
EVICTED = "Tokens of free blocks whose content was given up for another."
LIFETIME = "Seconds from a block's allocation to its content's eviction, of a sample."
IDLE = "Seconds from a block's last use to its content's eviction, of a sample."
GAP = "Seconds between two uses of a block, of a sample."

FAR_QUERIES = "Tokens that requests looked for in the far tier."
FAR_HITS = "Tokens that were loaded from the far tier."

METRICS = {
    "kvcore": (
        _one("gauge", "kvcore:usage_ratio", "usage", USAGE),
        Metric(
            "gauge",
            "kvcore:blocks",
            "Blocks of the device pool by state: with an owner; free, with content that can be hit;"
            " free without; without owner, but used by a batch in flight.",
            tuple((state, (state,)) for state in _STATES),
            ("state",),
        ),
        _one("counter", "kvcore:prefix_queries", "queries", QUERIES),
        _one("counter", "kvcore:prefix_hits", "hits", HITS),
        _one("counter", "kvcore:far_queries", "far_queries", FAR_QUERIES),
        _one("counter", "kvcore:far_hits", "far_hits", FAR_HITS),
        _one("gauge", "kvcore:far_up", "far_up", "Whether the far tier is used: 1, or 0."),
        Metric(
            "counter",
            "kvcore:far_pages",
            "Pages of the far tier by operation, and how it ended.",
            labels=("op", "status"),
            table="far_pages",
        ),
        Metric(
            "counter",
            "kvcore:far_seconds",
            "Seconds from a question to the far tier to its answer, by operation.",
            labels=("op",),
            table="far_seconds",
        ),
        Metric(
            "counter",
            "kvcore:far_dropped",
            "Pages that were not asked of the far tier, or not used, by the reason.",
            labels=("why",),
            table="far_dropped",
        ),
        _one("gauge", "kvcore:requests_running", "running", RUNNING),
        _one("gauge", "kvcore:requests_waiting", "waiting", WAITING),
        _one("counter", "kvcore:preemptions", "preemptions", PREEMPTIONS),
        _one("counter", "kvcore:evicted_tokens", "evicted_tokens", EVICTED),
        _one("histogram", "kvcore:block_lifetime_seconds", "lifetime", LIFETIME),
        _one("histogram", "kvcore:block_idle_before_evict_seconds", "idle", IDLE),
        _one("histogram", "kvcore:block_reuse_gap_seconds", "reuse_gap", GAP),
    ),
    "vllm": (
        _one("gauge", "vllm:kv_cache_usage_perc", "usage", USAGE),
        _one("counter", "vllm:prefix_cache_queries", "queries", QUERIES),
        _one("counter", "vllm:prefix_cache_hits", "hits", HITS),
        _one("counter", "vllm:external_prefix_cache_queries", "far_queries", FAR_QUERIES),
        _one("counter", "vllm:external_prefix_cache_hits", "far_hits", FAR_HITS),
        _one("gauge", "vllm:num_requests_running", "running", RUNNING),
        _one("gauge", "vllm:num_requests_waiting", "waiting", WAITING),
        _one("counter", "vllm:num_preemptions", "preemptions", PREEMPTIONS),
        _one("histogram", "vllm:kv_block_lifetime_seconds", "lifetime", LIFETIME),
        _one("histogram", "vllm:kv_block_idle_before_evict_seconds", "idle", IDLE),
        _one("histogram", "vllm:kv_block_reuse_gap_seconds", "reuse_gap", GAP),
    ),
    "sglang": (
        _one("gauge", "sglang:token_usage", "usage", USAGE),
        Metric(
            "counter",
            "sglang:cached_tokens",
            HITS,
            (("hits", ("device",)), ("far_hits", ("storage",))),
            ("cache_source",),
        ),
        _one("counter", "sglang:prefetched_tokens", "far_hits", FAR_HITS),
        _one("counter", "sglang:backuped_tokens", "far_stored", "Tokens that the far tier keeps."),
        _one("gauge", "sglang:num_running_reqs", "running", RUNNING),
        _one("gauge", "sglang:num_queue_reqs", "waiting", WAITING),
        _one("counter", "sglang:num_retracted_requests", "preemptions", PREEMPTIONS),
        _one("counter", "sglang:evicted_tokens", "evicted_tokens", EVICTED),
        _one("gauge", "sglang:kv_used_tokens", "used_tokens", "Tokens of used blocks."),
        _one("gauge", "sglang:kv_evictable_tokens", "cached_tokens", "Tokens of cached blocks."),
        _one("gauge", "sglang:kv_available_tokens", "free_tokens", "Tokens of free blocks."),
    ),
}
