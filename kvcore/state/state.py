# SPDX-License-Identifier: Apache-2.0
"""The state: one immutable value that owns pools, requests and the open batch.

Rules: a transition makes a `Draft` of a state, changes the draft and freezes it; the state it came
from is never touched, so a call that raises half way has changed nothing. Per-block data are
columns in persistent vectors; what can be derived is not stored. A request waits (no tables), runs
(device tables) or is swapped out (host tables); that is read from its tables, not stored. Twin:
rust/src/state/state.rs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from immutables import Map
from msgspec import Struct
from pyrsistent import PVector, pvector

from kvcore.hashing.block_hash import make_key, root_hash
from kvcore.hashing.extra_keys import NO_EXTRA_KEYS, ExtraKeys
from kvcore.pool.block_pool import BlockPool, PoolDraft, make_pool
from kvcore.state.batch_records import Given, Mark, Unfinished
from kvcore.state.unconfirmed_loads import UnconfirmedLoad, keyed_only
from kvcore.types.arguments import check_kind
from kvcore.types.commands import Command
from kvcore.types.config import Config
from kvcore.types.effects import Effects
from kvcore.types.errors import (
    LoadUnfinished,
    NoHostTier,
    RepeatedRequest,
    SwappedOut,
    UnknownRequest,
)
from kvcore.types.events import Event
from kvcore.types.groups import skipped_blocks
from kvcore.types.values import Outcome, PrefixCacheStats, Status

T = TypeVar("T")
Table = PVector[int]

NULL_BLOCK = 0
NO_HOST_BLOCK = -1
MAX_OPERATION = 2**31 - 1


class RequestState(Struct, frozen=True, gc=False):
    """A request as the manager knows it.

    row: stable row of its block tables. tokens: accepted ones. drafts: guessed ones behind them.
    block_hashes: of its full blocks, at the config's hash_block_size; grown with the tokens, or
    handed in (own_hashes). tables: device block ids, one table a group; no longer needed ones are
    the null block. num_cached: leading blocks of each table that need no publication any more.
    host_tables: the same as tables in the host tier while swapped out, else empty; NO_HOST_BLOCK
    where the null block was. num_loading: its unfinished loads. load_end: tokens up to the first
    failed one.
    """

    request_id: str
    row: int
    num_cached: tuple[int, ...]
    tables: tuple[Table, ...]
    tokens: PVector[int] = pvector()
    drafts: PVector[int] = pvector()
    block_hashes: PVector[bytes] = pvector()
    own_hashes: bool = False
    skip_reading: bool = False
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    num_computed: int = 0
    host_tables: tuple[Table, ...] = ()
    preempted: bool = False
    num_loading: int = 0
    load_end: int = 0

    @property
    def status(self) -> Status:
        """Where the request's blocks are."""
        if self.host_tables:
            return Status.SWAPPED
        return Status.RUNNING if any(self.tables) else Status.WAITING

    @property
    def num_accepted(self) -> int:
        """Computed tokens that are no drafts."""
        return min(self.num_computed, len(self.tokens))

    def num_hashed(self, config: Config, group: int) -> int:
        """Leading blocks of a group's table that have a hash."""
        return len(self.block_hashes) // config.scale(group)

    def key(self, config: Config, group: int, position: int) -> bytes:
        """The key of a full block: the hash of its last hashed part covers what is before."""
        last = (position + 1) * config.scale(group) - 1
        return make_key(self.block_hashes[last], group)


class Published(Struct, frozen=True, gc=False):
    """A key that the open batch published for content that the batch itself writes."""

    group: int
    position: int
    block: int
    key: bytes


class BatchRecord(Struct, frozen=True, gc=False):
    """What the open batch did for a request that it schedules.

    num_computed_before: the count before the request's first slots in the batch, and before its
    hits.
    """

    num_computed_before: int
    published: PVector[Published] = pvector()


class Merge(Struct, frozen=True, gc=False):
    """A full block whose key another block held when it was filled (`duplicates="merge"`)."""

    request_id: str
    group: int
    position: int
    block: int
    key: bytes


class Operation(Struct, frozen=True, gc=False):
    """An unfinished store or load; it holds its block as a pin does.

    batch: the number of the batch with its command. request_id: who waits for it, None for a store,
    and where the request was freed since. first_token: position of the block's first token, for a
    load.
    """

    block: int
    key: bytes
    batch: int
    request_id: str | None = None
    first_token: int = 0


class OpenBatch(Struct, frozen=True, gc=False):
    """The batch that is being filled.

    marks: what it does to requests, and given: what it publishes, where batches are remembered.
    """

    number: int
    commands: PVector[Command] = pvector()
    records: Map[str, BatchRecord] = Map()
    merges: PVector[Merge] = pvector()
    marks: Map[str, Mark] = Map()
    given: PVector[Given] = pvector()


class State(Struct, frozen=True, gc=False):
    """Everything that a manager knows.

    rows: the id of the request in each row, None where the row is free. free_rows: those, in the
    order in which they were given back. events, new_blocks (a group): not yet drained. unfinished:
    taken batches that are neither completed nor cancelled, oldest first. loads: external ones that
    may still fail, in the order of their calls.
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
    new_blocks: tuple[PVector[int], ...]
    operations: Map[int, Operation] = Map()
    next_operation: int = 0
    unfinished: tuple[Unfinished, ...] = ()
    loads: tuple[UnconfirmedLoad, ...] = ()


def make_state(config: Config) -> State:
    """The empty state of a configuration. Raises WrongArgument."""
    check_kind("config", config, Config)
    hosts, waits = config.num_host_blocks, config.max_in_flight > 0
    device = make_pool(
        config.num_blocks,
        null_block=config.null_block,
        eviction=config.eviction,
        quarantine=waits,
    )
    return State(
        config=config,
        device=device,
        host=make_pool(hosts, eviction=config.eviction, quarantine=waits) if hosts else None,
        requests=Map(),
        rows=pvector(),
        free_rows=pvector(),
        batch=OpenBatch(0),
        events=pvector(),
        stats=PrefixCacheStats(),
        new_blocks=(pvector(),) * len(config.groups),
    )


class Draft:
    """A state inside a transition: changed in place, frozen at the end."""

    __slots__ = (
        *("batch", "config", "device", "effects", "free_rows", "given", "host", "loads"),
        *("marks", "new_blocks", "next_operation", "operations", "records", "requests", "rows"),
        *("state", "stats", "unfinished"),
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
        self.marks = state.batch.marks
        self.given = state.batch.given
        self.unfinished = list(state.unfinished)
        self.loads = state.loads
        self.stats = state.stats
        self.new_blocks = state.new_blocks
        self.operations = state.operations
        self.next_operation = state.next_operation

    def freeze(self) -> State:
        """The state after the transition."""
        batch = OpenBatch(
            self.batch.number,
            _longer(self.batch.commands, self.effects.commands),
            self.records,
            self.batch.merges,
            self.marks,
            self.given,
        )
        return State(
            self.config,
            self.device.freeze(),
            None if self.host is None else self.host.freeze(),
            self.requests.finish(),
            self.rows,
            self.free_rows,
            batch,
            _longer(self.state.events, self.effects.events),
            self.stats,
            self.new_blocks,
            self.operations,
            self.next_operation,
            tuple(self.unfinished),
            keyed_only(self) if self.loads else (),
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

    def idle(self, request_id: str) -> RequestState:
        """The request of this id, on the device and without unfinished loads.

        Raises UnknownRequest, SwappedOut, LoadUnfinished.
        """
        request = self.on_device(request_id)
        if request.num_loading:
            raise LoadUnfinished(request=repr(request_id), num_operations=request.num_loading)
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

    def parent_hash(self, request: RequestState, num_hashed: int) -> bytes:
        """The hash that the next block continues behind so many hashed ones."""
        if num_hashed:
            return request.block_hashes[num_hashed - 1]
        return root_hash(self.config.hash_seed, self.config.hashing)

    def is_null(self, block: int) -> bool:
        """Whether a table's entry is the null block."""
        return block < self.device.first_block

    def num_pending(self) -> int:
        """Blocks that come back when operations or batches end: none but those use them."""
        held = Counter(operation.block for operation in self.operations.values())
        alone = sum(self.device.ref_counts[block] == count for block, count in held.items())
        return alone + self.device.num_quarantined

    def num_settled(self, request: RequestState) -> int:
        """Tokens that the request had computed before the open batch, drafts aside; 0 where the
        window that they need was given back since.
        """
        record = self.records.get(request.request_id)
        num_tokens = request.num_accepted if record is None else record.num_computed_before
        return self.resumable(request, num_tokens)

    def resumable(self, request: RequestState, num_tokens: int) -> int:
        """So many tokens, or 0 where a group gave back blocks that the next query would see."""
        for group, table in zip(self.config.groups, request.tables, strict=True):
            first = skipped_blocks(group, num_tokens)
            needed = group.is_windowed and first * group.block_size < num_tokens
            if needed and first < len(table) and self.is_null(table[first]):
                return 0
        return num_tokens

    def num_kept(self, group: int, table: Table, num_tokens: int) -> int:
        """Blocks of a table that so many tokens need: all of the encoder's, unless none are."""
        kind = self.config.groups[group]
        if kind.is_cross:
            return len(table) if num_tokens else 0
        return min(len(table), -(-num_tokens // kind.block_size))


def transition(state: State, change: Callable[[Draft], T]) -> Outcome[State, T]:
    """Run a change on a draft of a state."""
    draft = Draft(state)
    value = change(draft)
    return Outcome(draft.freeze(), tuple(draft.effects.commands), value)


def _longer(items: PVector[T], more: list[T]) -> PVector[T]:
    return items.extend(more) if more else items
