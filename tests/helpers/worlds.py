# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: configurations, tokens and calls that keep a run going."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvcore import Config, Group, Hit
from kvcore.config import Duplicates, Eviction
from kvcore.queries import get_computed_blocks
from kvcore.state import State
from kvcore.values import Status
from tests.helpers.lockstep import Lockstep

EVICTIONS: list[Eviction] = ["lru", "uncached_first"]
DUPLICATES: list[Duplicates] = ["keep", "merge"]
NAMES = ("a", "b", "c", "d", "e")


def rarely() -> st.SearchStrategy[bool]:
    """True once in a while (`integers` would give its ends far too often)."""
    return st.sampled_from([False, False, False, False, True])


@st.composite
def configs(draw: st.DrawFn, *, least: int = 3, most: int = 8) -> Config:
    """Any configuration whose device pool has so many usable blocks."""
    usable = draw(st.integers(least, most))
    block_size = draw(st.sampled_from([1, 2, 2, 3, 3, 4] if most < 64 else [1, 4, 16]))
    num_groups = draw(st.sampled_from([1, 1, 1, 1, 1, 2]))
    null_block = draw(st.booleans())
    zero = draw(st.booleans())
    limit = usable // num_groups * block_size
    return Config(
        usable + null_block,
        groups=(Group(block_size, zero_new_blocks=zero),) * num_groups,
        num_host_blocks=draw(st.sampled_from([0, usable // 2, usable])),
        max_model_len=draw(st.sampled_from([None, None, limit, 1 + limit // 2])),
        enable_caching=draw(st.sampled_from([True, True, True, False])),
        null_block=null_block,
        eviction=draw(st.sampled_from(EVICTIONS)),
        duplicates=draw(st.sampled_from(DUPLICATES)),
        num_preallocate_tokens=draw(st.sampled_from([0, 0, 1, 5])),
        enable_events=draw(st.booleans()),
        hash_seed=b"tests",
    )


def tokens(config: Config, *, most: int) -> st.SearchStrategy[list[int]]:
    """Prompts of two letters, so that prefixes meet; for large blocks, of whole equal runs."""
    if most <= 16:
        return st.lists(st.integers(0, 1), min_size=1, max_size=most)
    size = config.block_size
    runs = st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=most // size)
    return st.tuples(runs, st.integers(0, size)).map(
        lambda pair: [letter for letter in pair[0] for _ in range(size)] + [9] * pair[1]
    )


@st.composite
def allocations(
    draw: st.DrawFn, run: Lockstep, stale: list[Hit], names: list[str] | None = None
) -> tuple[Any, ...]:
    """Arguments and options of `allocate_slots`, legal more often than not.

    names: requests to choose from, all unless given.
    """
    state = run.state
    request_id = draw(st.sampled_from(names or sorted(state.requests)))
    request = state.requests[request_id]
    options: dict[str, Any] = {}
    hit: Hit | None = None
    if not any(request.tables) and not draw(rarely()):
        hit = get_computed_blocks(state, request_id)
        stale.append(hit)
    elif draw(rarely()) and stale:
        hit = draw(st.sampled_from(tuple(stale)))
    start = request.num_computed + (0 if hit is None else hit.num_tokens)
    left = max(0, len(request.tokens) - start)
    external = draw(st.integers(0, left)) if draw(rarely()) else 0
    rest = left - external
    count = draw(st.sampled_from([rest, rest, max(1, rest // 2), 1, 1]))
    if external:
        options["num_external_computed_tokens"] = external
    if draw(rarely()):
        options["num_lookahead_tokens"] = draw(st.integers(0, 2 * state.config.block_size))
    for flag in ("delay_cache_blocks", "full_sequence_must_fit"):
        if draw(rarely()):
            options[flag] = True
    return request_id, count, hit, options


def by_status(state: State, *statuses: Status) -> list[str]:
    """Ids of the requests in one of these statuses, sorted."""
    return sorted(name for name, each in state.requests.items() if each.status in statuses)
