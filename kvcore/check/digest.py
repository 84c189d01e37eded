# SPDX-License-Identifier: Apache-2.0
"""An exact name of a state, cheaply: equal digests mean equal states, names and all.

Rules: everything counts but events, statistics, `preempted`, which only chooses a column of them,
and of the open batch all but what it published; batches are told by their age. What was found out
about a state is kept under its digest, so that it is found out once; only what was met lately is
kept. Twin: none, the twin is fast enough without.
"""

from __future__ import annotations

import hashlib
import marshal
from typing import Any, Generic, TypeVar

from kvcore.block_pool import BlockPool
from kvcore.extra_keys import NO_EXTRA_KEYS
from kvcore.state import RequestState, State
from kvcore.unfinished import Unfinished

T = TypeVar("T")

DIGEST_BYTES = 16
WITHOUT_REFERENCES = 2
"""The version of marshal's format in which equal values have equal bytes."""


def digest(state: State) -> bytes:
    """128 bits of all that counts of a state."""
    device, number = state.device, state.batch.number
    parts: list[Any] = [_pool(device, number)]
    parts.append(None if state.host is None else _pool(state.host, number))
    parts += [_request(request) for _, request in sorted(state.requests.items())]
    parts += [tuple(state.rows), tuple(state.free_rows)]
    if len(state.operations):
        parts += [
            (at, each.block, each.key, number - each.batch, each.request_id, each.first_token)
            for at, each in sorted(state.operations.items())
        ]
    if state.unfinished:
        parts.append(tuple(_unfinished(each, number) for each in state.unfinished))
    if len(state.batch.given):
        parts.append(tuple(state.batch.given))
    data = marshal.dumps(parts, WITHOUT_REFERENCES)
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _pool(pool: BlockPool, number: int) -> tuple[Any, ...]:
    queue, index, quarantine = pool.queue, pool.index, pool.quarantine
    return (
        tuple(pool.ref_counts),
        tuple(pool.keys),
        tuple(queue.following),
        tuple(queue.preceding),
        queue.length,
        sorted(index.firsts.items()),
        sorted(index.following.items()) if len(index.following) else None,
        sorted(index.preceding.items()) if len(index.preceding) else None,
        sorted(pool.pins.items()) if len(pool.pins) else None,
        None
        if quarantine is None
        else (
            tuple(quarantine.queue.following),
            tuple(quarantine.queue.preceding),
            quarantine.queue.length,
            sorted(
                (block, sorted(number - user for user in users))
                for block, users in quarantine.busy.items()
            ),
        ),
    )


def _request(request: RequestState) -> tuple[Any, ...]:
    extra = request.extra_keys
    return (
        request.request_id,
        request.row,
        tuple(request.tokens),
        tuple(request.drafts),
        tuple(request.block_hashes),
        request.own_hashes,
        request.skip_reading,
        None if extra is NO_EXTRA_KEYS or extra == NO_EXTRA_KEYS else repr(extra),
        request.num_computed,
        request.num_cached,
        tuple([tuple(table) for table in request.tables]),
        tuple([tuple(table) for table in request.host_tables]),
        request.num_loading,
        request.load_end,
    )


def _unfinished(batch: Unfinished, number: int) -> tuple[Any, ...]:
    marks = []
    for name, each in sorted(batch.marks.items()):
        counts = (name, each.order, each.before, each.restore, each.publishes)
        marks.append((*counts, each.held, sorted(each.replaced)))
    return (number - batch.number, marks, tuple(batch.given), batch.rows)


class Lately(Generic[T]):
    """What was found out under names that were met lately: at most twice so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._new: dict[bytes, T] = {}
        self._old: dict[bytes, T] = {}

    def get(self, name: bytes) -> T | None:
        """What is known under a name."""
        found = self._new.get(name)
        if found is None:
            found = self._old.get(name)
            if found is not None:
                self._new[name] = found
        return found

    def put(self, name: bytes, value: T) -> None:
        """Keep what was found out; what was not asked for in a while goes."""
        if len(self._new) >= self._most:
            self._old, self._new = self._new, {}
        self._new[name] = value
