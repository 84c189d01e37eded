# SPDX-License-Identifier: Apache-2.0
"""The section of canonical bytes for levels: the time, and the wishes of blocks and requests.

The place of a free block follows from them.

Twin: rust/src/codec/retention_section.rs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import attrs
from immutables import Map
from msgspec.structs import replace

from kvcore.pool.free_queue import num_older
from kvcore.pool.retention import with_levels
from kvcore.pool.retention_state import NOTHING, RetentionState
from kvcore.state.state import RequestState, State
from kvcore.types.policies import DEFAULT_STEPS, Wish
from kvcore.types.retention import DURATION_MAX, LEVEL_MAX, TIME_MAX
from kvcore.types.wire import Reader, Writer


def has_retention(state: State) -> bool:
    """Return whether any value differs from its default."""
    known = state.device.retention
    return known is not None and bool(known.now or len(known.kept) or any(_with_wishes(state)))


def write_retention(out: Writer, state: State) -> None:
    """Write the time, the blocks with a wish in ascending order, and the steps of requests that
    differ from the defaults, in row order.
    """
    known, requests = state.device.retention, list(_with_wishes(state))
    assert known is not None
    out.u64(known.now)
    out.u32(len(known.kept))
    for block, kept in sorted(known.kept.items()):
        out.u32(block)
        _write_wish(out, kept)
    out.u32(len(requests))
    for request in requests:
        out.u32(request.row)
        out.u32(len(request.wishes))
        for first, wish in request.wishes:
            out.u32(first)
            _write_wish(out, wish)


def read_retention(source: Reader, state: State) -> State:
    """Read levels; return the state with them. Raises DamagedState."""
    pool, now, kept, requests, last = state.device, source.u64(), {}, state.requests, -1
    for _ in range(source.u32()):
        block, each = source.u32(), _read_wish(source, TIME_MAX + DURATION_MAX)
        is_known = pool.first_block <= block < pool.num_blocks and last < block
        if not is_known or each == NOTHING or (pool.keys[block] is None and block in pool.queue):
            raise source.damaged(f"block {block} has an empty wish")
        last, kept[block] = block, each
    last = -1
    for _ in range(source.u32()):
        row = source.u32()
        steps = tuple((source.u32(), _read_wish(source, DURATION_MAX)) for _ in range(source.u32()))
        name = state.rows[row] if last < row < len(state.rows) else None
        falls = all(
            one[0] < two[0] and one[1] != two[1] and all(map(int.__ge__, one[1], two[1]))
            for one, two in pairwise(steps)
        )
        if name is None or not steps or steps[0][0] or not falls or steps == DEFAULT_STEPS:
            raise source.damaged("the wishes of a request are impossible")
        last, requests = row, requests.set(name, replace(requests[name], wishes=steps))
    if now > TIME_MAX or state.config.eviction != "retention":
        raise source.damaged("levels are not in canonical form")
    if not (now or kept or last >= 0):
        raise source.damaged("a section is empty")
    device = attrs.evolve(pool, retention=RetentionState(now, Map(kept)))
    return replace(state, device=device, requests=requests)


def place_levels(source: Reader, state: State) -> State:
    """Return the state with its free blocks in the rings of their levels. Raises DamagedState."""
    old = state.device
    new = with_levels(old)
    first = num_older(old.queue) if state.epoch else num_older(new.queue)
    if list(new.queue) != list(old.queue) or first != num_older(new.queue):
        raise source.damaged("the free queue is not in the order of its levels")
    return replace(state, device=new)


def _write_wish(out: Writer, wish: Wish) -> None:
    out.u8(wish[0])
    out.u8(wish[1])
    out.u64(wish[2])


def _read_wish(source: Reader, most: int) -> Wish:
    wish = source.u8(), source.u8(), source.u64()
    if max(wish[:2]) > LEVEL_MAX or wish[2] > most:
        raise source.damaged(f"{wish} is not a possible wish")
    return wish


def _with_wishes(state: State) -> Iterator[RequestState]:
    """Return the requests whose wishes differ from the defaults, in row order."""
    known = (state.requests[name] for name in state.rows if name is not None)
    return (request for request in known if request.wishes != DEFAULT_STEPS)
