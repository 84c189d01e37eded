# SPDX-License-Identifier: Apache-2.0
"""Bad input on pins of prefixes."""

from __future__ import annotations

from kvcore import Group, KVCacheManager
from kvcore.types.errors import (
    EmptyPinName,
    InvalidCount,
    NothingToPin,
    RepeatedPin,
    StaleRequest,
    SwappedOut,
    TooManyPinned,
    UnknownPin,
    UnknownRequest,
)
from tests.conftest import Backend
from tests.helpers.misuse import Row, bad
from tests.helpers.stories import add, make, serve, step


def pinned(backend: Backend) -> KVCacheManager:
    """Allow two pinned blocks; "p" holds the first of "runs", which has 5 tokens in 3 blocks.
    "waits" holds nothing, "out" is swapped out.
    """
    manager = make(backend, num_host_blocks=4, max_model_len=8, max_pinned_blocks=2)
    serve(manager, "runs", range(5))
    serve(manager, "out", range(20, 23))
    add(manager, "waits", range(10, 15))
    step(manager)
    manager.swap_out(["out"])
    manager.pin_prefix("p", "runs", 2)
    step(manager)
    return manager


def advanced(backend: Backend) -> KVCacheManager:
    """Change the weights after "runs" was computed."""
    manager = pinned(backend)
    manager.advance_epoch()
    return manager


def uncached(backend: Backend) -> KVCacheManager:
    """Make a manager without caching; "runs" has 2 computed tokens."""
    manager = make(backend, enable_caching=False)
    serve(manager, "runs", range(2))
    step(manager)
    return manager


def nothing(request: str, requested: int, reason: str) -> NothingToPin:
    return NothingToPin(request=request, requested=requested, reason=reason)


FEW = "{} are computed, and no whole block of them is found"
ROWS: list[Row] = [
    *(
        bad(pinned, EmptyPinName(value=name), "pin_prefix", name, "runs", 2)
        for name in ("", 7, None)
    ),
    bad(pinned, EmptyPinName(value=""), "pin_prefix", "", "x", 2),
    bad(pinned, EmptyPinName(value="\ud800"), "pin_prefix", "\ud800", "runs", 2),
    bad(pinned, RepeatedPin(pin="p"), "pin_prefix", "p", "runs", 2),
    bad(pinned, RepeatedPin(pin="p"), "pin_prefix", "p", "x", 0),
    *(bad(pinned, UnknownRequest(request=name), "pin_prefix", "q", name, 2) for name in ("x", 7)),
    bad(pinned, SwappedOut(request="out"), "pin_prefix", "q", "out", 2),
    *(
        bad(
            pinned,
            InvalidCount(name="num_tokens", value=count, least=1),
            *("pin_prefix", "q", "runs", count),
        )
        for count in (0, -1, -(2**70), "2", 2.0, None)
    ),
    bad(pinned, nothing("runs", 1, FEW.format(5)), "pin_prefix", "q", "runs", 1),
    bad(pinned, nothing("waits", 2**70, FEW.format(0)), "pin_prefix", "q", "waits", 2**70),
    bad(uncached, nothing("runs", 2, "prefix caching is off"), "pin_prefix", "q", "runs", 2),
    bad(advanced, StaleRequest(request="runs", epoch=0, current=1), "pin_prefix", "q", "runs", 2),
    *(
        bad(pinned, UnknownPin(pin=name), "unpin_prefix", name)
        for name in ("q", "", 7, None, "\ud800")
    ),
]


def full(backend: Backend) -> KVCacheManager:
    """Let "other" have 4 tokens in two blocks; one more block may be pinned."""
    manager = pinned(backend)
    serve(manager, "other", range(30, 34))
    step(manager)
    return manager


def chunked(backend: Backend) -> KVCacheManager:
    """Make a manager of chunks of four tokens; "runs" has computed two of them."""
    group = Group(2, kind="chunked_local", window=4)
    manager = make(backend, groups=(group,), max_model_len=12)
    serve(manager, "runs", range(8))
    step(manager)
    return manager


NO_BLOCK = "a hit of 4 needs no block"
ROWS.append(bad(chunked, nothing("runs", 5, NO_BLOCK), "pin_prefix", "q", "runs", 5))
ROWS.append(bad(full, TooManyPinned(pin="q", num_blocks=3, most=2), "pin_prefix", "q", "other", 4))
