# SPDX-License-Identifier: Apache-2.0
"""The cost of a call does not grow with the pool: counted, never timed.

One story runs over a pool of 64 blocks and one of 65,536, on the Python core. Each call must make
exactly as many function calls, into Python and into C, and run as many lines. That would not see a
C function that copies the whole pool, so the memory that a call takes at its peak is bounded as
well: for each column that it changes a persistent vector copies one path, in the larger pool two
nodes of 32 pointers longer, while a copy of one column would be 512 KiB. `reset_prefix_cache` is
O(pool) by design, and so are `advance_epoch` and `tick` here; the twin's `advance_epoch` takes the
same instructions in every pool (`make counts`).
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest

import kvcore
from kvcore import (
    Config,
    KVCacheManager,
    KvCacheRetentionConfig,
    Request,
    State,
    TokenRangeRetentionConfig,
    make_state,
)
from kvcore.transitions import TRANSITIONS, queries
from kvcore.transitions.allocate import can_allocate
from kvcore.types.values import Outcome

T = TypeVar("T")
SMALL, LARGE = 64, 65_536
PATH_BYTES_MAX = 16 * 1024
FILES_MAX, MOVES_MAX = 13, 44

# All transitions but levels, and those that walk the pool: prompt, hit, decode, fork,
# copy-on-write, cut, swap, preemption.
STORY: list[tuple[str, tuple[Any, ...]]] = [
    ("add_request", (Request("a", list(range(9))),)),
    ("allocate_slots", ("a", 9)),
    ("take_batch", ()),
    ("append", (["a"], [9])),
    ("take_batch", ()),
    ("fork", ("a", "b")),
    ("append", (["a", "b"], [10, 11])),
    ("take_batch", ()),
    ("add_tokens", ("b", list(range(50, 60)))),
    ("allocate_slots", ("b", 10)),
    ("cache_blocks", ("b", 20)),
    ("unschedule", ("b", 18)),
    ("take_batch", ()),
    ("truncate", ("b", 7)),
    ("pin", ([1, 2],)),
    ("swap_out", (["a", "b"],)),
    ("swap_in", (["a", "b"],)),
    ("unpin", ([1, 2],)),
    ("take_batch", ()),
    ("evict_blocks", ([1, 2, 3],)),
    ("free", ("a",)),
    ("remove_request", ("a",)),
    ("add_drafts", ("b", [7, 8])),
    ("allocate_slots", ("b", 2)),
    ("take_batch", ()),
    ("accept", ("b", 1)),
    ("remove_skipped_blocks", ("b", 6)),
    ("add_request", (Request("own", list(range(5)), block_hashes=[]),)),
    ("add_block_hashes", ("own", [b"1" * 32])),
    ("add_request", (Request("c", list(range(70, 79))),)),
    ("load", ("c", 4)),
    ("take_batch", ()),
    ("complete_operation", (0, True)),
    ("complete_operation", (1, False)),
    ("allocate_slots", ("c", 3)),
    ("take_batch", ()),
    ("store", ([1],)),
    ("rewind", (["c"], 3)),
    ("take_new_block_ids", ()),
    ("allocate_slots", ("b", 99_999)),
    ("take_events", ()),
    ("take_stats", ()),
    ("free", ("b",)),
]

# The same with two batches in flight, published when they are completed.
FLIGHTS: list[tuple[str, tuple[Any, ...]]] = [
    ("add_request", (Request("a", list(range(9))),)),
    ("allocate_slots", ("a", 9)),
    ("take_batch", ()),
    ("fork", ("a", "b")),
    ("append", (["a", "b"], [9, 10])),
    ("take_batch", ()),
    ("truncate", ("a", 5)),
    ("complete", (0,)),
    ("swap_out", (["b"],)),
    ("take_batch", ()),
    ("append", (["a"], [11])),
    ("cancel", (1,)),
    ("free", ("a",)),
    ("take_batch", ()),
    ("complete", (4,)),
]

# Levels of contents that are freed, lose a key, are found again, and leave.
HIGH = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 4, 80, 50)])
LEVELS: list[tuple[str, tuple[Any, ...]]] = [
    ("add_request", (Request("a", list(range(9)), retention=HIGH),)),
    ("allocate_slots", ("a", 9)),
    ("take_batch", ()),
    ("extend_retention", ("a", KvCacheRetentionConfig([], 90))),
    ("pin_prefix", ("system", "a", 8)),
    ("free", ("a",)),
    ("unpin_prefix", ("system",)),
    ("evict_blocks", ([1],)),
    ("add_request", (Request("b", list(range(9)), retention=HIGH),)),
    ("allocate_slots", ("b", 9)),
    ("free", ("b",)),
    ("take_batch", ()),
]
STORIES: list[tuple[list[tuple[str, tuple[Any, ...]]], dict[str, Any]]] = [
    (FLIGHTS, {"max_in_flight": 2, "publish": "completed"}),
    (LEVELS, {"eviction": "retention"}),
    (STORY, {}),
]

QUERIES: dict[str, Callable[[State], object]] = {
    "get_computed_blocks": lambda state: queries.get_computed_blocks(state, "b"),
    "get_blocks": lambda state: queries.get_blocks(state, "b"),
    "get_num_common_prefix_blocks": lambda state: queries.get_num_common_prefix_blocks(state, "b"),
    "usage": queries.usage,
    "can_allocate": lambda state: can_allocate(state, "b", 1),
}


def fresh(num_blocks: int, **options: Any) -> State:
    """Return an empty state whose both tiers have this many blocks."""
    options |= {"num_host_blocks": num_blocks, "enable_events": True, "hash_seed": b"cost"}
    return make_state(Config(num_blocks, 2, **options))


def perform(state: State, name: str, args: tuple[Any, ...]) -> State:
    """Return the state after one call; misuse leaves it unchanged."""
    try:
        outcome: Outcome[State, Any] = TRANSITIONS[name](state, *args)
    except ValueError:
        return state
    return outcome.state


def count_steps(work: Callable[[], object]) -> Counter[str]:
    """Count the calls of each function, of Python and of C, and the lines that Python runs."""
    counts: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            counts[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            counts[arg.__qualname__] += 1

    def trace(frame: FrameType, event: str, _arg: Any) -> Callable[..., Any]:
        if event == "line":
            counts[f"lines of {frame.f_code.co_qualname}"] += 1
        return trace

    tracer, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection in between runs callbacks that are not the call's steps
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(tracer)
        sys.setprofile(None)
        if collects:
            gc.enable()
    return counts


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak memory of the work, above what was used before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def measure(num_blocks: int, meter: Callable[[Callable[[], object]], T]) -> list[tuple[str, T]]:
    """Return the meter's reading for each call of the stories, and for each query at their end."""
    figures, state = [], fresh(num_blocks)
    for story, options in STORIES:
        state = fresh(num_blocks, **options)
        for name, args in story:
            # The call is pure, so it can be made twice: once to look, once for its state.
            figures.append((name, meter(partial(perform, state, name, args))))
            state = perform(state, name, args)
    return figures + [(name, meter(partial(query, state))) for name, query in QUERIES.items()]


def clear(num_blocks: int) -> Callable[[], object]:
    """Make the transition that may walk the pool, on a pool of this many blocks."""
    return partial(TRANSITIONS["reset_prefix_cache"], fresh(num_blocks))


def test_the_stories_have_every_transition_but_those_that_walk_the_pool() -> None:
    walking = {"reset_prefix_cache", "advance_epoch", "tick"}
    assert {name for story, _ in STORIES for name, _ in story} == set(TRANSITIONS) - walking


@pytest.mark.seed("S001-10", "S004-01")
def test_a_call_takes_the_same_steps_whatever_the_pool() -> None:
    measure(SMALL, count_steps)  # what Python caches on a first use is cached now
    small, large = measure(SMALL, count_steps), measure(LARGE, count_steps)
    for (name, steps), (_, more) in zip(small, large, strict=True):
        assert steps, name
        assert steps == more, f"{name} takes other steps in the larger pool"


def test_a_call_copies_paths_and_never_a_column() -> None:
    small, large = measure(SMALL, peak_bytes), measure(LARGE, peak_bytes)
    for (name, num_bytes), (_, more) in zip(small, large, strict=True):
        assert more < num_bytes + PATH_BYTES_MAX, f"{name} takes {num_bytes} and {more} bytes"


def test_both_meters_see_what_does_grow_with_the_pool() -> None:
    assert count_steps(clear(LARGE)).total() > count_steps(clear(SMALL)).total() + LARGE / 2
    column = fresh(LARGE).device.keys
    assert peak_bytes(partial(list, column)) >= 8 * LARGE > 16 * PATH_BYTES_MAX


def test_a_refusal_takes_no_memory_for_the_blocks_it_asks_for() -> None:
    state = fresh(LARGE)
    state = perform(state, "add_request", (Request("a", range(2 * LARGE)),))
    assert peak_bytes(partial(perform, state, "allocate_slots", ("a", 2 * LARGE))) < PATH_BYTES_MAX


def test_an_allocation_passes_few_files() -> None:
    """A reader follows one call: through how many files, and how often from one to another."""
    manager = KVCacheManager(Config(num_blocks=64), backend="python")
    manager.add_request(Request("a", list(range(40))))
    hit = manager.get_computed_blocks("a")
    room, files = str(Path(kvcore.__file__).parent), list[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(room):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        manager.allocate_slots("a", 40, hit)
    finally:
        sys.setprofile(None)
    assert len(set(files)) <= FILES_MAX
    assert sum(one != other for one, other in pairwise(files)) <= MOVES_MAX
