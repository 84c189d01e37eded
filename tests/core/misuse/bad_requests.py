# SPDX-License-Identifier: Apache-2.0
"""Bad input that names requests: unknown, repeated, in the wrong place, with wrong tokens."""

from __future__ import annotations

from array import array
from typing import Any

from kvcore import KVCacheManager, Request
from kvcore.types.errors import (
    BeforeOpenBatch,
    BeyondComputed,
    BeyondRequest,
    EmptyRequestId,
    EmptyTokens,
    InvalidCount,
    InvalidToken,
    KvcoreError,
    LengthMismatch,
    NoHostTier,
    NotRunning,
    NotSwapped,
    RepeatedRequest,
    StillHoldsBlocks,
    SwappedOut,
    UnknownRequest,
    UnknownRow,
    UnsupportedBuffer,
)
from tests.conftest import Backend
from tests.helpers.misuse import Row, bad
from tests.helpers.stories import add, drop, make, serve, step


def crowd(backend: Backend) -> KVCacheManager:
    """Make one request of each status, with nothing scheduled in the open batch; at most 8
    tokens.

    "runs" (row 0): 5 tokens, all computed, in blocks 1, 2, 3, the first two cached. "swapped" (row
    1): 2 tokens in host block 0. "waits" (row 2): 5 tokens. Row 3 was given back.
    """
    manager = make(backend, num_host_blocks=4, max_model_len=8)
    serve(manager, "runs", [0, 1, 2, 3, 4])
    serve(manager, "swapped", [10, 11])
    add(manager, "waits", [0, 1, 2, 3, 12])
    step(manager)
    manager.swap_out(["swapped"])
    serve(manager, "gone", [20])
    drop(manager, "gone")
    step(manager)
    return manager


def one_tier(backend: Backend) -> KVCacheManager:
    """Make a manager without host blocks; "runs" has 5 computed tokens."""
    manager = make(backend)
    serve(manager, "runs", [0, 1, 2, 3, 4])
    step(manager)
    return manager


def _of_request(error: KvcoreError, request_id: Any) -> list[Row]:
    """Return a row for each transition that takes the id of a request that must be known."""
    return [
        bad(crowd, error, "add_tokens", request_id, [1]),
        bad(crowd, error, "remove_request", request_id),
        bad(crowd, error, "allocate_slots", request_id, 1),
        bad(crowd, error, "add_block_hashes", request_id, []),
        bad(crowd, error, "add_drafts", request_id, [1]),
        bad(crowd, error, "accept", request_id, 0),
        bad(crowd, error, "rewind", [request_id], 0),
        bad(crowd, error, "rewind", ["runs", request_id], 0),
        bad(crowd, error, "remove_skipped_blocks", request_id, 0),
        bad(crowd, error, "load", request_id, 2),
        bad(crowd, error, "append", [request_id], [1]),
        bad(crowd, error, "append", ["runs", request_id], [1, 1]),
        bad(crowd, error, "cache_blocks", request_id, 0),
        bad(crowd, error, "free", request_id),
        bad(crowd, error, "fork", request_id, "child"),
        bad(crowd, error, "truncate", request_id, 1),
        bad(crowd, error, "unschedule", request_id, 0),
        bad(crowd, error, "swap_out", [request_id]),
        bad(crowd, error, "swap_out", ["runs", request_id]),
        bad(crowd, error, "swap_in", [request_id]),
        bad(crowd, error, "swap_in", ["swapped", request_id]),
    ]


UNKNOWN = [
    *_of_request(UnknownRequest(request="nobody"), "nobody"),
    *_of_request(UnknownRequest(request="gone"), "gone"),
    *_of_request(UnknownRequest(request=""), ""),
    *_of_request(UnknownRequest(request=7), 7),
    *_of_request(UnknownRequest(request=None), None),
    bad(crowd, UnknownRow(row=4), "append", array("i", [4]), [1]),
    bad(crowd, UnknownRow(row=3), "append", array("i", [0, 3]), [1, 1]),
    bad(crowd, UnknownRow(row=-1), "append", array("i", [0, -1]), [1, 1]),
]

REPEATED = [
    bad(
        crowd,
        RepeatedRequest(request="runs", reason="is there already"),
        "add_request",
        Request("runs", [1]),
    ),
    bad(
        crowd,
        RepeatedRequest(request="swapped", reason="is there already"),
        "add_request",
        Request("swapped", [1]),
    ),
    bad(
        crowd, RepeatedRequest(request="waits", reason="is there already"), "fork", "runs", "waits"
    ),
    bad(crowd, RepeatedRequest(request="runs", reason="is there already"), "fork", "runs", "runs"),
    bad(
        crowd,
        RepeatedRequest(request="runs", reason="is named twice in one call"),
        "rewind",
        ["runs", "runs"],
        0,
    ),
    bad(
        crowd,
        RepeatedRequest(request="runs", reason="is named twice in one call"),
        "swap_out",
        ["runs", "runs"],
    ),
    bad(
        crowd,
        RepeatedRequest(request="swapped", reason="is named twice in one call"),
        "swap_in",
        ["swapped", "swapped"],
    ),
]

NO_NAMES: list[Any] = ["", None, 7, b"name", ("name",), "half a pair: \ud800"]
NAMELESS = [
    row
    for value in NO_NAMES
    for row in (
        bad(crowd, EmptyRequestId(value=value), "add_request", Request(value, [1])),
        bad(crowd, EmptyRequestId(value=value), "fork", "runs", value),
    )
]


def _tokens(error: KvcoreError, tokens: Any) -> list[Row]:
    """Return a row for each transition that takes tokens; they are named "runs"."""
    return [
        bad(crowd, error, "add_request", Request("runs two", tokens)),
        bad(crowd, error, "add_tokens", "runs", tokens),
        bad(crowd, error, "add_drafts", "runs", tokens),
        bad(crowd, error, "append", ["runs"], tokens),
    ]


NOTHING: list[Any] = [[], (), b"", array("i")]
EMPTY = [
    row
    for nothing in NOTHING
    for row in (
        bad(crowd, EmptyTokens(request="more"), "add_request", Request("more", nothing)),
        bad(crowd, EmptyTokens(request="runs"), "add_tokens", "runs", nothing),
    )
]

TOKENS = [
    *_tokens(InvalidToken(value=-1, position=1, least=0), [1, -1]),
    *_tokens(InvalidToken(value=4294967296, position=0, least=0), [2**32]),
    *_tokens(InvalidToken(value=1.0, position=2, least=0), (1, 2, 1.0)),
    *_tokens(InvalidToken(value=True, position=0, least=0), [True]),
    *_tokens(InvalidToken(value="1", position=0, least=0), ["1"]),
    *_tokens(InvalidToken(value=None, position=1, least=0), [5, None]),
    *_tokens(InvalidToken(value=-7, position=1, least=0), array("b", [1, -7])),
    *_tokens(InvalidToken(value=-7, position=0, least=0), array("q", [-7])),
    *_tokens(InvalidToken(value=4294967296, position=0, least=0), array("Q", [2**32])),
    *_tokens(UnsupportedBuffer(name="tokens", format="d", dimensions=1), array("d", [1.0])),
    *_tokens(
        UnsupportedBuffer(name="tokens", format="B", dimensions=2),
        memoryview(b"abcd").cast("B", (2, 2)),
    ),
    *_tokens(
        UnsupportedBuffer(name="tokens", format="c", dimensions=1), memoryview(b"ab").cast("c")
    ),
]

TWICE = RepeatedRequest(request="runs", reason="is named twice in one call")

APPENDS = [
    bad(
        crowd,
        UnsupportedBuffer(name="requests", format="d", dimensions=1),
        "append",
        array("d", [1.0]),
        [1],
    ),
    bad(crowd, LengthMismatch(num_requests=1, num_tokens=2), "append", ["runs"], [1, 2]),
    bad(crowd, LengthMismatch(num_requests=1, num_tokens=0), "append", ["runs"], []),
    bad(crowd, LengthMismatch(num_requests=0, num_tokens=1), "append", [], [1]),
    bad(crowd, LengthMismatch(num_requests=2, num_tokens=1), "append", array("i", [0, 2]), b"1"),
    bad(crowd, TWICE, "append", ["runs", "runs"], [1, 1]),
    bad(crowd, NotRunning(request="waits"), "append", ["runs", "waits"], [1, 1]),
    bad(crowd, NotRunning(request="waits"), "append", ["waits"]),
]

PLACES = [
    bad(crowd, SwappedOut(request="swapped"), "allocate_slots", "swapped", 1),
    bad(crowd, SwappedOut(request="swapped"), "append", ["swapped"], [1]),
    bad(crowd, SwappedOut(request="swapped"), "append", ["runs", "swapped"], [1, 1]),
    bad(crowd, SwappedOut(request="swapped"), "cache_blocks", "swapped", 2),
    bad(crowd, SwappedOut(request="swapped"), "add_drafts", "swapped", [1]),
    bad(crowd, SwappedOut(request="swapped"), "accept", "swapped", 0),
    bad(crowd, SwappedOut(request="swapped"), "rewind", ["swapped"], 0),
    bad(crowd, SwappedOut(request="swapped"), "remove_skipped_blocks", "swapped", 0),
    bad(crowd, SwappedOut(request="swapped"), "load", "swapped", 2),
    bad(crowd, SwappedOut(request="swapped"), "fork", "swapped", "child"),
    bad(crowd, SwappedOut(request="swapped"), "truncate", "swapped", 1),
    bad(crowd, SwappedOut(request="swapped"), "unschedule", "swapped", 1),
    bad(crowd, NotRunning(request="waits"), "swap_out", ["waits"]),
    bad(crowd, NotRunning(request="waits"), "swap_out", ["runs", "waits"]),
    bad(crowd, NotRunning(request="swapped"), "swap_out", ["swapped"]),
    bad(crowd, NotSwapped(request="runs"), "swap_in", ["runs"]),
    bad(crowd, NotSwapped(request="runs"), "swap_in", ["swapped", "runs"]),
    bad(crowd, NotSwapped(request="waits"), "swap_in", ["waits"]),
    bad(crowd, StillHoldsBlocks(request="runs", num_blocks=3), "remove_request", "runs"),
    bad(crowd, StillHoldsBlocks(request="swapped", num_blocks=1), "remove_request", "swapped"),
    bad(one_tier, NoHostTier(), "swap_out", ["runs"]),
    bad(one_tier, NoHostTier(), "swap_out", ["nobody"]),
    bad(one_tier, NoHostTier(), "swap_in", ["runs"]),
    bad(one_tier, NoHostTier(), "swap_in", []),
]

CUTS = [
    *(
        bad(
            crowd,
            BeyondRequest(request="runs", num_tokens=5, requested=requested),
            "truncate",
            "runs",
            requested,
        )
        for requested in (0, -1, 6, 10**30, -(10**30))
    ),
    *(
        bad(
            crowd,
            BeyondRequest(request="runs", num_tokens=5, requested=requested),
            "truncate",
            "runs",
            requested,
        )
        for requested in ("3", None, 1.5)
    ),
    *(
        bad(
            crowd,
            InvalidCount(name="num_tokens", value=requested, least=0),
            "unschedule",
            "runs",
            requested,
        )
        for requested in ("3", None, 1.5, -1, -(10**30))
    ),
    *(
        bad(
            crowd,
            InvalidCount(name="num_computed_tokens", value=requested, least=0),
            "cache_blocks",
            "runs",
            requested,
        )
        for requested in ("3", None, 1.5)
    ),
    *(
        bad(
            crowd,
            BeyondComputed(request="runs", num_computed=5, requested=requested),
            "cache_blocks",
            "runs",
            requested,
        )
        for requested in (6, 10**30)
    ),
    bad(
        crowd,
        BeyondComputed(request="runs", num_computed=5, requested=6),
        *("unschedule", "runs", 6),
    ),
    bad(
        crowd,
        BeforeOpenBatch(request="runs", num_kept=5, requested=4),
        *("unschedule", "runs", 4),
    ),
    bad(
        crowd,
        BeyondComputed(request="waits", num_computed=0, requested=1),
        "cache_blocks",
        "waits",
        1,
    ),
    bad(
        crowd,
        InvalidCount(name="num_computed_tokens", value=-1, least=0),
        "cache_blocks",
        "runs",
        -1,
    ),
]

ROWS = [*UNKNOWN, *REPEATED, *NAMELESS, *EMPTY, *TOKENS, *APPENDS, *PLACES, *CUTS]
