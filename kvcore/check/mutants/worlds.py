# SPDX-License-Identifier: Apache-2.0
"""The small worlds in which users see a seeded bug whose named world is too large for that.

Each is as small as its bugs allow, since what users observe is explored without renaming. Blocks
hold two tokens unless groups say otherwise, and are counted without the null block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcore.check.profiles import profile
from kvcore.check.profiles.features import KINDS
from kvcore.check.profiles.profile import (
    FLYING_SLOTS,
    FULL,
    SHARING,
    SLOT,
    STATE,
    STAYING,
    SWAPS,
    WINDOW,
)
from kvcore.check.world.world import World, by_row
from kvcore.state.state import State
from kvcore.trace.calls import Call
from kvcore.types.extra_inputs import LoRA, MediaItem
from kvcore.types.values import Request, Status


def world(num_blocks: int, num_requests: int, num_tokens: int, *more: str, **options: Any) -> World:
    """Make a world of num_blocks usable blocks, explored by calls, like `named_world.world`."""
    options.setdefault("moves", "calls")
    return profile.world(num_blocks, num_requests, num_tokens, num_tokens, *more, **options)


BASIC = world(2, 2, 3, enable_events=True)
ONE = world(2, 1, 4, enable_events=True)
CUT = world(2, 2, 3, "truncate", enable_events=True)
SIBLINGS = world(
    *(2, 2, 4),
    num_letters=1,
    moves_per_batch=2,
    without=("append", "remove_request", "reset_prefix_cache"),
)

DRAFTS_CUT = world(2, 1, 3, "rewind", num_drafts=2)
ALONE = world(3, 1, 4, groups=(WINDOW,))
SWAP_PAIRS = world(2, 2, 2, *SWAPS, num_host_blocks=2, moves_per_batch=2, without=SHARING)
LOADS_LEFT = world(2, 1, 2, "load", moves="engine", without=SHARING, **FLYING_SLOTS)
LOADED_PAIRS = world(2, 2, 2, "load", groups=(SLOT,), moves="engine", without=STAYING)
ADAPTERS = world(
    3, 2, 2, "load", groups=(SLOT,), kinds_of_requests=({}, {"lora": LoRA("one")}), num_letters=1
)

FLYING = world(2, 2, 3, max_in_flight=1)
COMPLETED = world(3, 1, 3, groups=(SLOT,), max_in_flight=2, publish="completed", without=SHARING)
KEYS_EVICTED = world(2, 1, 4, "evict_blocks", without=("fork", "reset_prefix_cache"))
SIZES_TWICE = world(7, 1, 3, groups=(FULL, SLOT), moves="engine", without=SHARING)
SALTED_HITS = world(2, 2, 3, kinds_of_requests=KINDS, num_letters=1, moves="engine")
LEAVING = world(2, 1, 3, "truncate", num_letters=1, moves_per_batch=4, without=STAYING)
DRAFTS_IN_ENGINE = world(2, 1, 4, num_drafts=1, moves="engine")
FLYING_LOADS = world(2, 1, 2, "load", groups=(SLOT,), max_in_flight=2, loads_fail=True)
COPIES_EVICTED = world(2, 2, 3, "evict_blocks", moves="engine", without=SHARING)
SWAP_CHAIN = world(
    *(1, 2, 2, *SWAPS),
    num_host_blocks=2,
    moves_per_batch=2,
    without=("append", "fork", "free", "remove_request", "reset_prefix_cache"),
)
FLYING_FAMILY = world(
    *(2, 2, 1),
    groups=(SLOT,),
    num_letters=1,
    max_in_flight=3,
    without=("append", "reset_prefix_cache"),
)
FLYING_WINDOW = world(
    3, 1, 3, groups=(WINDOW,), num_letters=1, max_in_flight=2, without=("fork", "append")
)
AHEAD_FAMILY = world(
    *(3, 2, 2, "add_tokens"),
    groups=(SLOT,),
    num_output_placeholders=1,
    max_in_flight=1,
    moves="engine",
    without=("free", "reset_prefix_cache", "remove_request"),
)
AHEAD_SWAPPED = world(
    *(2, 1, 2, *SWAPS),
    groups=(SLOT,),
    num_output_placeholders=1,
    num_host_blocks=2,
    max_in_flight=1,
    moves="engine",
    without=("fork", "free", "reset_prefix_cache", "remove_request"),
)


def forked(world: World, state: State) -> Iterator[Call]:
    """Yield the calls of an engine with one request, which it forks before its tokens have come."""
    if not state.requests:
        yield Call("add_request", (Request("0", [0]),))
    for request in by_row(state):
        name, num_tokens, computed = request.request_id, len(request.tokens), request.num_computed
        if not any(request.tables):
            yield Call("allocate_slots", (name, num_tokens))
            yield Call("remove_request", (name,))
        elif computed < num_tokens:
            yield Call("allocate_slots", (name, num_tokens - computed))
        else:
            yield Call("free", (name,))
            if len(state.requests) < world.num_requests:
                yield Call("fork", (name, "1"))


DRAFTED: dict[str, Any] = {"num_output_placeholders": 2, "max_in_flight": 1, "moves": forked}
AHEAD_COPIED = world(4, 2, 3, num_letters=1, publish="completed", **DRAFTED)
AHEAD_REJECTED = world(3, 1, 4, **DRAFTED)


def pinned(_: World, state: State) -> Iterator[Call]:
    """Yield the calls of an engine with one request, in chunks, whose second block is pinned."""
    if not state.requests:
        yield Call("add_request", (Request("0", [0] * 5),))
    for request in by_row(state):
        if request.num_computed < 3:
            yield Call("allocate_slots", ("0", 3))
        elif request.num_computed == 3:
            yield Call("allocate_slots", ("0", 2))
            if not state.device.pins:
                yield Call("pin", ([request.tables[0][1]],))
        else:
            yield Call("free", ("0",))


STATES_PINNED = world(
    9, 1, 5, "pin", groups=(FULL, STATE), num_letters=1, max_in_flight=1, moves=pinned
)


def swapped(_: World, state: State) -> Iterator[Call]:
    """Yield the calls of an engine with one request, which it swaps and forks."""
    if not state.requests:
        yield Call("add_request", (Request("0", [0]),))
    for request in by_row(state):
        name = request.request_id
        if request.status is Status.SWAPPED:
            yield Call("swap_in", ([name],))
        elif request.status is Status.WAITING:
            yield Call("allocate_slots", (name, 1))
        elif len(state.requests) == 1:
            yield Call("swap_out", ([name],))
            yield Call("fork", (name, "1"))


FLYING_SWAPPED = world(
    *(2, 2, 1),
    groups=(SLOT,),
    enable_caching=False,
    num_host_blocks=2,
    max_in_flight=2,
    moves_per_batch=2,
    moves=swapped,
)


def hasty(_: World, state: State) -> Iterator[Call]:
    """Yield the calls of an engine that appends tokens without looking at the batch."""
    if not state.requests:
        yield Call("add_request", (Request("0", [0, 1]),))
    for request in by_row(state):
        if not any(request.tables):
            yield Call("allocate_slots", (request.request_id, len(request.tokens)))
        elif len(request.tokens) < 4:
            yield Call("append", ([request.request_id], [0]))


HASTY = world(2, 1, 4, moves=hasty, moves_per_batch=2)
PICTURED = world(
    *(2, 2, 3, "truncate"),
    kinds_of_requests=(
        {"media": (MediaItem("cat", 0, 2),)},
        {"media": (MediaItem("cat cut at 1", 0, 1),)},
    ),
    num_letters=1,
    moves="engine",
)
