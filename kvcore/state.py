# SPDX-License-Identifier: Apache-2.0
"""The state: one immutable value that owns pools, requests and the open batch.

Rules: a transition makes a `Draft` of a state, changes the draft and freezes it; the state it came
from is never touched, so a call that raises half way has changed nothing. Per-block data are
columns in persistent vectors; what can be derived is not stored. A request waits (no tables), runs
(device tables) or is swapped out (host tables); that is read from its tables, not stored. Twin:
rust/src/state.rs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import attrs
from immutables import Map
from pyrsistent import PVector, pvector

from kvcore.block_pool import BlockPool, PoolDraft, make_pool
from kvcore.commands import Command
from kvcore.config import Config
from kvcore.effects import Effects
from kvcore.errors import NoHostTier, RepeatedRequest, SwappedOut, UnknownRequest
from kvcore.events import Event
from kvcore.hashing import make_key, root_hash
from kvcore.values import Outcome, PrefixCacheStats, Status

T = TypeVar("T")
Table = PVector[int]


@attrs.frozen
class RequestState:
    """A request as the manager knows it.

    row: stable row of its block tables. block_hashes: of its full blocks, grown with the tokens.
    tables: device block ids, one table a group. num_cached: leading blocks of each table that need
    no publication any more. host_tables: the same in the host tier while swapped out, else empty.
    """

    request_id: str
    row: int
    tokens: PVector[int]
    block_hashes: PVector[bytes]
    num_computed: int
    tables: tuple[Table, ...]
    num_cached: tuple[int, ...]
    host_tables: tuple[Table, ...] = ()
    preempted: bool = False

    @property
    def status(self) -> Status:
        """Where the request's blocks are."""
        if self.host_tables:
            return Status.SWAPPED
        return Status.RUNNING if any(self.tables) else Status.WAITING

    def key(self, position: int, group: int) -> bytes:
        """The key of the full block at a position."""
        return make_key(self.block_hashes[position], group)


@attrs.frozen
class Published:
    """A key that the open batch published for content that the batch itself writes."""

    group: int
    position: int
    block: int
    key: bytes


@attrs.frozen
class BatchRecord:
    """What the open batch did for a request that it schedules.

    num_computed_before: the count before the request's first slots in the batch, and before its
    hits.
    """

    num_computed_before: int
    published: tuple[Published, ...] = ()


@attrs.frozen
class Merge:
    """A full block whose key another block held when it was filled (`duplicates="merge"`)."""

    request_id: str
    group: int
    position: int
    block: int
    key: bytes


@attrs.frozen
class OpenBatch:
    """The batch that is being filled."""

    number: int
    commands: PVector[Command] = attrs.field(factory=pvector)
    records: Map[str, BatchRecord] = attrs.field(factory=Map)
    merges: tuple[Merge, ...] = ()


@attrs.frozen
class State:
    """Everything that a manager knows.

    rows: the id of the request in each row, None where the row is free. free_rows: those, in the
    order in which they were given back. events: not yet drained.
    """

    config: Config
    device: BlockPool
    host: BlockPool | None
    requests: Map[str, RequestState]
    rows: PVector[str | None]
    free_rows: PVector[int]
    batch: OpenBatch
    events: PVector[Event]
    stats: PrefixCacheStats


def make_state(config: Config) -> State:
    """The empty state of a configuration."""
    hosts = config.num_host_blocks
    return State(
        config=config,
        device=make_pool(config.num_blocks, null_block=config.null_block, eviction=config.eviction),
        host=make_pool(hosts, eviction=config.eviction) if hosts else None,
        requests=Map(),
        rows=pvector(),
        free_rows=pvector(),
        batch=OpenBatch(0),
        events=pvector(),
        stats=PrefixCacheStats(),
    )


class Draft:
    """A state inside a transition: changed in place, frozen at the end."""

    __slots__ = (
        *("batch", "config", "device", "effects", "free_rows", "host", "records"),
        *("requests", "rows", "state", "stats"),
    )

    def __init__(self, state: State) -> None:
        self.state = state
        self.config = state.config
        self.effects = Effects(events_enabled=state.config.enable_events)
        self.device = PoolDraft(state.device, self.effects)
        self.host = None if state.host is None else PoolDraft(state.host, Effects())
        self.requests = state.requests.mutate()
        self.rows = state.rows
        self.free_rows = state.free_rows
        self.batch = state.batch
        self.records = state.batch.records
        self.stats = state.stats

    def freeze(self) -> State:
        """The state after the transition."""
        batch = OpenBatch(
            self.batch.number,
            self.batch.commands.extend(self.effects.commands),
            self.records,
            self.batch.merges,
        )
        return State(
            self.config,
            self.device.freeze(),
            None if self.host is None else self.host.freeze(),
            self.requests.finish(),
            self.rows,
            self.free_rows,
            batch,
            self.state.events.extend(self.effects.events),
            self.stats,
        )

    def request(self, request_id: str) -> RequestState:
        """The request of this id. Raises UnknownRequest."""
        request = self.requests.get(request_id) if isinstance(request_id, str) else None
        if request is None:
            raise UnknownRequest(request=repr(request_id))
        return request

    def on_device(self, request_id: str) -> RequestState:
        """The request of this id, which is not swapped out. Raises UnknownRequest, SwappedOut."""
        request = self.request(request_id)
        if request.host_tables:
            raise SwappedOut(request=repr(request_id))
        return request

    def distinct(self, request_ids: list[str]) -> list[RequestState]:
        """The requests of these ids. Raises UnknownRequest, RepeatedRequest."""
        requests = []
        seen: set[str] = set()
        for request_id in request_ids:
            requests.append(self.request(request_id))
            if request_id in seen:
                raise RepeatedRequest(request=repr(request_id))
            seen.add(request_id)
        return requests

    def store(self, request: RequestState) -> None:
        """Put a request's new form in the place of its old one."""
        self.requests[request.request_id] = request

    def host_tier(self) -> PoolDraft:
        """The host pool. Raises NoHostTier."""
        if self.host is None:
            raise NoHostTier
        return self.host

    def parent_hash(self, request: RequestState, position: int) -> bytes:
        """The hash that the block at a position continues."""
        return request.block_hashes[position - 1] if position else root_hash(self.config.hash_seed)


def transition(state: State, change: Callable[[Draft], T]) -> Outcome[State, T]:
    """Run a change on a draft of a state."""
    draft = Draft(state)
    value = change(draft)
    return Outcome(draft.freeze(), tuple(draft.effects.commands), value)
