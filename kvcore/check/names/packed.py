# SPDX-License-Identifier: Apache-2.0
"""States between two edges as bytes, the form in which they wait in memory and travel between
processes.

The configuration belongs to the world and is left out, and so is everything that a closed state
lacks: an open batch, events, statistics, batches in flight and their output to come. A state whose
eviction policy orders blocks is packed as its canonical bytes. The twin packs states in its own
way, in rust/src/check/names/packed.rs.
"""

from __future__ import annotations

import pickle
from operator import attrgetter
from typing import Any

import attrs
from immutables import Map
from msgspec.structs import astuple
from pyrsistent import pvector

from kvcore.codec.decode import decode
from kvcore.codec.encode import MAGIC, encode
from kvcore.pool.block_pool import BlockPool
from kvcore.pool.floors import Floors
from kvcore.pool.free_queue import FreeQueue
from kvcore.pool.hash_index import HashIndex
from kvcore.pool.retention_state import RetentionState
from kvcore.pool.tails import Tails
from kvcore.state.open_batch import make_open_batch
from kvcore.state.state import NamedPin, RequestMap, RequestState, State
from kvcore.types.config import Config, Eviction
from kvcore.types.tokens import PackedTokens
from kvcore.types.values import PrefixCacheStats

VALUES_OF = {
    kind: attrgetter(*(each.name for each in attrs.fields(kind)))
    for kind in (FreeQueue, RetentionState, Floors, Tails)
}
"""Parts of a pool, and what makes a tuple of their fields."""
NUM_OF_OUTPUT = 2
"""Last fields of a request, which concern its output to come: defaults in a closed state."""


def pack(state: State) -> bytes:
    """Return a closed state as bytes."""
    assert not state.in_flight
    assert not state.held_rows
    if state.device.policy is not None:
        return encode(state)
    pools = [None if pool is None else _pool(pool) for pool in (state.device, state.host)]
    requests = [_request(request) for request in state.requests.values()]
    pins = [(name, astuple(pin)) for name, pin in sorted(state.named_pins.items())]
    counts = (state.batch.number, state.next_operation, state.epoch)
    rest = (state.rows, state.free_rows, state.operations, *counts, pins)
    return pickle.dumps((pools, requests, rest), pickle.HIGHEST_PROTOCOL)


def unpack(config: Config, data: bytes) -> State:
    """Return the closed state of these bytes."""
    if data.startswith(MAGIC):
        return decode(data)
    pools, requests, rest = pickle.loads(data)
    device, host = (
        None if pool is None else _pool_of(eviction, *pool)
        for eviction, pool in zip((config.eviction, config.host_eviction), pools, strict=True)
    )
    rows, free_rows, operations, number, next_operation, epoch, named_pins = rest
    assert device is not None
    return State(
        config=config,
        device=device,
        host=host,
        requests=RequestMap.of({values[1]: _request_of(*values) for values in requests}),
        rows=rows,
        free_rows=free_rows,
        batch=make_open_batch(number, len(rows)),
        events=pvector(),
        stats=PrefixCacheStats(),
        new_blocks=(pvector(),) * len(config.groups),
        operations=operations,
        next_operation=next_operation,
        epoch=epoch,
        named_pins=Map({name: NamedPin(*pin) for name, pin in named_pins}),
    )


def _request(request: RequestState) -> tuple[Any, ...]:
    request_id, row, num_cached, tables, tokens, *rest = astuple(request)[:-NUM_OF_OUTPUT]
    return (tuple(tokens), request_id, row, num_cached, tables, *rest)


def _request_of(
    tokens: tuple[int, ...], request_id: str, row: int, num_cached: Any, tables: Any, *rest: Any
) -> RequestState:
    return RequestState(request_id, row, num_cached, tables, PackedTokens().extend(tokens), *rest)


def _pool(pool: BlockPool) -> tuple[Any, ...]:
    assert pool.quarantine is None
    index = pool.index
    links = (index.firsts, index.following, index.preceding)
    queue, levels, floors, tails = (
        None if part is None else VALUES_OF[type(part)](part)
        for part in (pool.queue, pool.retention, pool.floors, pool.tails)
    )
    columns = (pool.ref_counts, pool.keys)
    rest = (pool.silent, tails) if pool.silent or tails else ()  # empty in nearly all states
    older = pool.older
    return (pool.first_block, *columns, queue, links, pool.pins, older, levels, floors, *rest)


def _pool_of(
    eviction: Eviction,
    first_block: int,
    ref_counts: Any,
    keys: Any,
    queue: Any,
    links: Any,
    pins: Any,
    older: frozenset[int],
    levels: Any,
    floors: Any,
    silent: frozenset[int] = frozenset(),
    tails: Any = None,
) -> BlockPool:
    queue, index = FreeQueue(*queue), HashIndex(*links)
    retention = None if levels is None else RetentionState(*levels)
    columns = (ref_counts, keys, queue, index, pins)
    return BlockPool(
        *(first_block, eviction, *columns),
        older=older,
        silent=silent,
        tails=None if tails is None else Tails(*tails),
        retention=retention,
        floors=None if floors is None else Floors(*floors),
    )
