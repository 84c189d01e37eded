# SPDX-License-Identifier: Apache-2.0
"""Digests: a cheap exact name of a state. Equal digests mean equal states, names included.

A digest leaves out events, statistics, `preempted`, which only selects a column of them, and all of
the open batch but what it published; batches are identified by their age. Results about a state are
kept under its digest, so that they are computed once; only recent ones are kept. A digest is made
of the digests of the pools and of each request: a call changes few of these, and an unchanged
object is not digested again.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import attrs
from msgspec.structs import astuple

from kvcore.pool.block_pool import BlockPool
from kvcore.pool.free_queue import FreeQueue
from kvcore.pool.policy_state import PolicyState
from kvcore.pool.retention_state import RetentionState
from kvcore.pool.tails import Tails
from kvcore.state.batch_records import BatchInFlight
from kvcore.state.state import RequestState, State
from kvcore.types.extra_inputs import NO_EXTRA_KEYS

T = TypeVar("T")

DIGEST_BYTES = 16
PARTS_KEPT = 5_000
WITHOUT_REFERENCES = 2
"""The version of marshal's format in which equal values have equal bytes."""


@attrs.frozen
class Digest:
    """128 bits each of everything that counts in a state, in its pools, and in every request."""

    whole: bytes
    pools: bytes
    requests: tuple[bytes, ...]


class Digests:
    """Digests of states; the digest of a part is kept while the part is met."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[object, bytes]] = {}

    def of(self, state: State) -> Digest:
        """Return the digest of a state."""
        parts, number = self._parts, state.batch.number
        if len(parts) > PARTS_KEPT:
            parts.clear()
        pools = b""
        for pool in (state.device, state.host):
            if pool is None:
                continue
            if pool.quarantine is not None and pool.quarantine.busy:
                pools += _short(_bytes(_pool(pool, number)))
                continue
            known = parts.get(id(pool))
            if known is None:
                known = parts[id(pool)] = (pool, _short(_bytes(_pool(pool, number))))
            pools += known[1]
        requests = []
        for request in state.requests.values():
            known = parts.get(id(request))
            if known is None:
                known = parts[id(request)] = (request, _short(_bytes(_request(request))))
            requests.append(known[1])
        requests.sort()
        whole = _told_apart(state) + pools + b"".join(requests)
        return Digest(_short(whole), pools, tuple(requests))


def _told_apart(state: State) -> bytes:
    """Return the parts that distinguish states of the same pools and requests, and their
    numbers.
    """
    number = state.batch.number
    parts: list[Any] = [tuple(state.rows), tuple(state.free_rows)]
    if state.held_rows:
        parts.append([(row, number - batch) for row, batch in state.held_rows])
    if len(state.operations):
        parts += [
            (at, each.block, each.key, number - each.batch, each.request_id, each.first_token)
            for at, each in sorted(state.operations.items())
        ]
    if state.epoch:
        parts.append((state.epoch, state.batch.starts_epoch))
    if len(state.named_pins):
        parts.append(sorted((name, astuple(pin)) for name, pin in state.named_pins.items()))
    if state.in_flight:
        parts.append(tuple(_unfinished(each, number) for each in state.in_flight))
    for load in state.loads:
        reporters = [(each.request_id, each.counted, each.most) for each in load.reporters]
        parts.append((number - load.batch, load.first, load.end, reporters, load.blocks))
    if state.next_due:
        parts.append(sorted((name, due) for name, (due, _) in state.waiting.items()))
    if state.device.policy is not None and state.device.policy.is_remembered:
        parts.append(number)
    if len(state.batch.published_keys):
        parts.append(tuple(state.batch.published_keys))
    return _bytes(parts)


def _bytes(parts: tuple[Any, ...] | list[Any]) -> bytes:
    return marshal.dumps(parts, WITHOUT_REFERENCES)


def _short(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _pool(pool: BlockPool, number: int) -> tuple[Any, ...]:
    queue, index, quarantine = pool.queue, pool.index, pool.quarantine
    return (
        tuple(pool.ref_counts),
        tuple(pool.keys),
        *_queue(queue),
        sorted(index.firsts.items()),
        sorted(index.following.items()) if len(index.following) else None,
        sorted(index.preceding.items()) if len(index.preceding) else None,
        sorted(pool.pins.items()) if len(pool.pins) else None,
        sorted(pool.older) if pool.older else None,
        sorted(pool.silent) if pool.silent else None,
        None if pool.tails is None else _tails(pool.tails),
        None if pool.policy is None else _remembered(pool.policy),
        None if pool.retention is None else _levels(pool.retention),
        None if pool.floors is None else tuple(pool.floors.takers),
        None
        if quarantine is None
        else (
            *_queue(quarantine.queue),
            sorted(
                (block, sorted(number - user for user in users))
                for block, users in quarantine.busy.items()
            ),
        ),
    )


def _tails(tails: Tails) -> tuple[Any, ...]:
    return sorted(tails.by_block.items()), sorted(tails.by_key.items())


def _levels(known: RetentionState) -> tuple[Any, ...]:
    return known.now, sorted(known.kept.items())


def _remembered(policy: PolicyState) -> tuple[Any, ...]:
    uses = [(block, astuple(each)) for block, each in sorted(policy.uses.items())]
    ghosts = [(key, astuple(policy.ghosts[key])) for _, key in sorted(policy.left.items())]
    return (policy.memory, uses, ghosts)


def _queue(queue: FreeQueue) -> tuple[Any, ...]:
    return tuple(queue.following), tuple(queue.preceding), queue.length


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
        request.epoch,
        request.wishes,
    )


def _unfinished(batch: BatchInFlight, number: int) -> tuple[Any, ...]:
    entries = []
    for name, each in sorted(batch.entries.items()):
        counts = (name, each.order, each.before, each.restore, each.publishes)
        entries.append((*counts, each.held, sorted(each.replaced)))
    published_keys = tuple(batch.published_keys)
    return (number - batch.number, entries, published_keys, batch.rows, batch.starts_epoch)


class Lately(Generic[T]):
    """A cache of results by recently used names: at most twice this many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._new: dict[Hashable, T] = {}
        self._old: dict[Hashable, T] = {}

    def get(self, name: Hashable) -> T | None:
        """Return the result that is kept under a name."""
        found = self._new.get(name)
        if found is None:
            found = self._old.get(name)
            if found is not None:
                self._new[name] = found
        return found

    def put(self, name: Hashable, value: T) -> None:
        """Keep a result; results that were not used for a while are dropped."""
        if len(self._new) >= self._most:
            self._old, self._new = self._new, {}
        self._new[name] = value
