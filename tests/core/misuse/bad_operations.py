# SPDX-License-Identifier: Apache-2.0
"""Bad input on content that comes from elsewhere: store, load, rewind, and windows."""

from __future__ import annotations

from typing import Any

from kvcore import Group, KVCacheManager
from kvcore.types.errors import (
    BeyondComputed,
    BeyondModelLength,
    CachingDisabled,
    HeldByOthers,
    HitInOpenBatch,
    InOpenBatch,
    InvalidCount,
    LoadUnconfirmed,
    LoadUnfinished,
    NotPinned,
    NotPublished,
    TooManyTokens,
    UnknownBlock,
    UnknownOperation,
    WrongLoad,
)
from tests.conftest import Backend
from tests.helpers.misuse import Row, bad
from tests.helpers.stories import add, make, serve, step


def moving(backend: Backend) -> KVCacheManager:
    """Store block 1 of "runs" in operation 0, and load into "loads" in operations 1 and 2.

    "runs" has 5 tokens in blocks 1 to 3. "loads" has 9 tokens and loads blocks 4 and 5. These
    operations are in a taken batch. Operation 3, which stores block 2, is in the open batch, as is
    "fresh" with 2 tokens in block 6.
    """
    manager = make(backend, num_host_blocks=4, max_model_len=12)
    serve(manager, "runs", range(5))
    step(manager)
    manager.store([1])
    add(manager, "loads", range(20, 29))
    manager.load("loads", 4)
    step(manager)
    manager.store([2])
    serve(manager, "fresh", [30, 31])
    return manager


def believed(backend: Backend) -> KVCacheManager:
    """Load two external tokens of "a" into block 1, in a taken batch; the load may still fail."""
    manager = make(backend)
    add(manager, "a", range(4))
    manager.allocate_slots("a", 1, num_external_computed_tokens=2)
    step(manager)
    return manager


UNFINISHED = LoadUnfinished(request="loads", num_operations=2)

LOADING: list[Row] = [
    bad(moving, UNFINISHED, "allocate_slots", "loads", 1),
    bad(moving, UNFINISHED, "load", "loads", 2),
    bad(moving, UNFINISHED, "append", ["loads"], [1]),
    bad(moving, UNFINISHED, "append", ["runs", "loads"], [1, 1]),
    bad(moving, UNFINISHED, "add_drafts", "loads", [1]),
    bad(moving, UNFINISHED, "cache_blocks", "loads", 2),
    bad(moving, UNFINISHED, "fork", "loads", "child"),
    bad(moving, UNFINISHED, "truncate", "loads", 2),
    bad(moving, UNFINISHED, "unschedule", "loads", 2),
    bad(moving, UNFINISHED, "rewind", ["loads"], 0),
    bad(moving, UNFINISHED, "rewind", ["runs", "loads"], 0),
    bad(moving, UNFINISHED, "remove_skipped_blocks", "loads", 2),
    bad(moving, UNFINISHED, "swap_out", ["loads"]),
    bad(moving, UNFINISHED, "swap_out", ["runs", "loads"]),
    bad(moving, InOpenBatch(kind="operation", value=3), "complete_operation", 3, True),
    bad(moving, InOpenBatch(kind="block", value=6), "store", [6]),
    bad(moving, InOpenBatch(kind="block", value=6), "store", [2, 6]),
    bad(believed, LoadUnconfirmed(block=1), "store", [1]),
    bad(believed, BeyondComputed(request="a", num_computed=3, requested=4), "rewind", ["a"], 4),
    bad(moving, NotPublished(block=3), "store", [3]),
    bad(moving, NotPublished(block=3), "store", [1, 3]),
    bad(moving, UnknownBlock(block=0, first=1, last=9), "store", [0]),
    bad(moving, UnknownBlock(block=10, first=1, last=9), "store", [1, 10]),
    *(
        bad(moving, UnknownOperation(operation=operation), "complete_operation", operation, True)
        for operation in (4, -1, 2**31, 10**30)
    ),
    *(
        bad(moving, UnknownOperation(operation=value), "complete_operation", value, False)
        for value in ("1", None, 1.5)
    ),
    bad(moving, NotPinned(block=1, num_pins=0, requested=1), "unpin", [1]),
    bad(moving, NotPinned(block=4, num_pins=0, requested=1), "unpin", [4]),
]


def waiting(backend: Backend) -> KVCacheManager:
    """Set the limit to 8 tokens. "waits" has 5, "long" has 12, "runs" has computed 3 of its 7."""
    manager = make(backend, max_model_len=8)
    add(manager, "waits", range(5))
    add(manager, "long", range(40, 52))
    add(manager, "runs", range(20, 27))
    manager.allocate_slots("runs", 3)
    step(manager)
    return manager


def _load(request_id: str, num_tokens: int, first: int) -> Row:
    reason = f"it begins at token {first}, and both must be multiples of 2"
    error = WrongLoad(request=request_id, num_tokens=num_tokens, reason=reason)
    return bad(waiting, error, "load", request_id, num_tokens)


def uncached(backend: Backend) -> KVCacheManager:
    """Make a manager without caching; "waits" has 5 tokens."""
    manager = make(backend, enable_caching=False)
    add(manager, "waits", range(5))
    return manager


LOADS: list[Row] = [
    _load("waits", 1, 0),
    _load("waits", 3, 0),
    _load("runs", 2, 3),
    *(
        bad(waiting, InvalidCount(name="num_tokens", value=value, least=1), "load", "waits", value)
        for value in (0, -2)
    ),
    bad(waiting, InvalidCount(name="num_tokens", value="2", least=1), "load", "waits", "2"),
    bad(waiting, TooManyTokens(request="waits", num_tokens=5, requested=6), "load", "waits", 6),
    bad(
        waiting,
        BeyondModelLength(request="long", requested=10, max_model_len=8),
        "load",
        "long",
        10,
    ),
    bad(uncached, CachingDisabled(request="waits", num_blocks=0), "load", "waits", 2),
]


def even(backend: Backend) -> KVCacheManager:
    """Let "even" have 4 tokens in blocks of two."""
    manager = make(backend)
    add(manager, "even", range(4))
    return manager


LOADS += [
    bad(
        even,
        WrongLoad(
            request="even",
            num_tokens=4,
            reason="of its 4 tokens one must be left to compute",
        ),
        "load",
        "even",
        4,
    ),
]


def shared(backend: Backend) -> KVCacheManager:
    """Let "first" and "second" count 4 tokens in blocks 1 and 2, and "third" 5.

    "third" computed only the last one.
    """
    manager = make(backend)
    for name in ("first", "second", "third"):
        serve(manager, name, range(5))
    step(manager)
    return manager


def hit_in_batch(backend: Backend) -> KVCacheManager:
    """Let "writer" publish blocks 1 and 2 in the open batch, where "reader" hits them."""
    manager = make(backend)
    serve(manager, "writer", range(5))
    serve(manager, "reader", range(5))
    return manager


def _count(name: str, call: str, *before: Any) -> list[Row]:
    """List rows for a count that is not a number, below zero, or above the 5 tokens of "first"."""
    rows = [
        bad(shared, InvalidCount(name=name, value=value, least=0), call, *before, value)
        for value in ("1", None, 1.5)
    ]
    rows.append(bad(shared, InvalidCount(name=name, value=-1, least=0), call, *before, -1))
    beyond = BeyondComputed(request="first", num_computed=5, requested=6)
    rows.append(bad(shared, beyond, call, *before, 6))
    return rows


REWINDS: list[Row] = [
    *_count("num_computed_tokens", "rewind", ["first"]),
    *_count("total_computed_tokens", "remove_skipped_blocks", "first"),
    bad(
        shared,
        HeldByOthers(blocks=[1, 2], requests=["second", "third"]),
        "rewind",
        ["first"],
        0,
    ),
    bad(
        shared,
        HeldByOthers(blocks=[2], requests=["third"]),
        "rewind",
        ["first", "second"],
        3,
    ),
    bad(
        hit_in_batch,
        HitInOpenBatch(blocks=[1, 2], requests=["reader"]),
        "rewind",
        ["writer"],
        0,
    ),
]


def two_groups(backend: Backend) -> KVCacheManager:
    """Make groups of full attention and a window of 3 tokens, in blocks of two.

    "runs" has computed 6 of 7 tokens: its window group has the null block, then blocks 5 and 6.
    """
    groups = (Group(2), Group(2, kind="sliding_window", window=3))
    manager = make(backend, 12, groups=groups)
    add(manager, "runs", range(7))
    manager.allocate_slots("runs", 6)
    step(manager)
    manager.remove_skipped_blocks("runs", 6)
    step(manager)
    return manager


WINDOWS: list[Row] = [
    bad(
        two_groups,
        BeyondComputed(request="runs", num_computed=6, requested=7),
        "remove_skipped_blocks",
        "runs",
        7,
    ),
    bad(two_groups, UnknownBlock(block=0, first=1, last=11), "pin", [0]),
]

ROWS = [*LOADING, *LOADS, *REWINDS, *WINDOWS]
