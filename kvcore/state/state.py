# SPDX-License-Identifier: Apache-2.0
"""The state: one immutable value that owns pools, requests and the open batch.

Invariants: a transition changes a `Transaction` (transaction.py), never the state. Per-block data
are columns in persistent vectors; derivable data are not stored. A request waits (no tables), runs
(device tables) or is swapped out (host tables); its tables tell which.
Twin: rust/src/state/state.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import attrs
from immutables import Map
from msgspec import Struct
from msgspec.structs import replace
from pyrsistent import PVector, pvector

from kvcore.pool.block_pool import BlockPool, make_pool
from kvcore.pool.tails import Tails
from kvcore.state.batch_records import BatchInFlight, Sampler, UnconfirmedLoad
from kvcore.state.open_batch import OpenBatch
from kvcore.types.arguments import check_kind
from kvcore.types.config import Config
from kvcore.types.events import Event
from kvcore.types.extra_inputs import NO_EXTRA_KEYS, ExtraKeys
from kvcore.types.keys import GROUP_BYTES
from kvcore.types.memory import check_memory
from kvcore.types.policies import DEFAULT_STEPS, Step
from kvcore.types.tokens import PackedTokens
from kvcore.types.values import PrefixCacheStats, Status

Table = PVector[int]
Ahead = tuple[int, tuple[bytes, ...]]
"""The due number of a request, and the keys that it will look up if it waits."""

NULL_BLOCK = 0
NO_HOST_BLOCK = 2**32 - 1
MAX_OPERATION = 2**31 - 1


class RequestState(Struct, frozen=True, gc=False):
    """A request as the manager knows it.

    row: stable row of its block tables. tokens: accepted tokens. drafts: speculative tokens after
    them. block_hashes: of its full blocks, at the config's hash_block_size; derived from the
    tokens, or passed by the engine (own_hashes). tables: device block ids, one table per group;
    blocks no longer needed are replaced by the null block. num_cached: leading blocks of each table
    that need no further publication; in a state group, the null blocks at its start. host_tables:
    the same in the host tier while swapped out, else empty; NO_HOST_BLOCK in place of the null
    block. num_loading: its unfinished loads. load_end: tokens before the first failed one. epoch:
    in which its count began; 0 while the count is 0. wishes: how long its content should stay
    cached; the defaults unless the policy uses levels. output_from: the first batch whose output
    still belongs to it. samplers: the batches whose output is to come, oldest first; none if batch
    output_from alone is one, which computed up to the last token.
    """

    request_id: str
    row: int
    num_cached: tuple[int, ...]
    tables: tuple[Table, ...]
    tokens: PackedTokens = PackedTokens()
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
    epoch: int = 0
    wishes: tuple[Step, ...] = DEFAULT_STEPS
    output_from: int = 0
    samplers: tuple[Sampler, ...] = ()

    @property
    def status(self) -> Status:
        """The tier of the request's blocks."""
        if self.host_tables:
            return Status.SWAPPED
        return Status.RUNNING if any(self.tables) else Status.WAITING

    @property
    def num_accepted(self) -> int:
        """Computed tokens that are known and not drafts."""
        return min(self.num_computed, self.tokens.length)

    @property
    def num_output_placeholders(self) -> int:
        """Scheduled positions whose tokens are not yet known."""
        return 0 if self.drafts else max(0, self.num_computed - self.tokens.length)

    @property
    def num_scheduled_drafts(self) -> int:
        """Computed drafts that were neither accepted nor dropped."""
        return max(0, self.num_computed - self.tokens.length) if self.drafts else 0

    @property
    def state_count(self) -> int:
        """Tokens of which the request has the state: the computed ones, without drafts."""
        return self.num_computed - self.num_scheduled_drafts

    @property
    def awaited(self) -> tuple[Sampler, ...]:
        """The batches whose output is to come, oldest first: those that compute the positions from
        which the tokens after the known ones are sampled.
        """
        if self.samplers or self.num_computed < self.tokens.length:
            return self.samplers
        return ((self.output_from, self.num_computed),)

    def awaiting(self, samplers: Iterable[Sampler]) -> RequestState:
        """Return the request with these batches, as far as they sample what it does not know."""
        num_tokens, count = self.tokens.length, self.num_computed
        made: list[Sampler] = []
        for batch, end in samplers:
            most = end if count < num_tokens else min(end, count)
            if most < num_tokens or (made and most <= made[-1][1]):
                continue
            if made and made[-1][0] == batch:
                made.pop()
            made.append((batch, most))
        if made == [(self.output_from, count)] and not self.num_output_placeholders:
            made = []
        return self if not made and not self.samplers else replace(self, samplers=tuple(made))

    def awaiting_before(self, number: int, known: RequestState) -> RequestState:
        """Return the request with the batches before this one that `known` awaits."""
        return self.awaiting(each for each in known.awaited if each[0] < number)

    def scheduled(self, number: int, count: int) -> RequestState:
        """Return the request with the positions up to a count, which the open batch schedules, and
        with its output to come.

        number: the open batch's. The output of older batches is out of date if the first of these
        positions has a known token.
        """
        late = self.num_computed < self.tokens.length
        older, first = ((), number) if late else (self.awaited, self.output_from)
        counted = replace(self, num_computed=count, output_from=first)
        return counted.awaiting((*older, (number, count)))

    def awaiting_none(self, number: int) -> RequestState:
        """Return the request with all output before the open batch out of date, and no batch for
        the next token.

        number: the open batch's. Batch 0 stands for none: it is older than the open one.
        """
        count = self.num_computed
        none = ((0, count),) if count >= self.tokens.length else ()
        return replace(self, output_from=number, samplers=none)

    def num_hashed(self, config: Config, group_id: int) -> int:
        """Count the leading blocks of a group's table that have a hash."""
        return len(self.block_hashes) // config.scales[group_id]

    def key_at(self, config: Config, group_id: int, num_tokens: int) -> bytes:
        """Return the key of the state after a number of tokens, a multiple of hash_block_size."""
        return self.block_hashes[num_tokens // config.hash_block_size - 1] + GROUP_BYTES[group_id]

    def key(self, config: Config, group_id: int, position: int) -> bytes:
        """Return the key of a full block, whose last hash also covers all tokens before."""
        last = (position + 1) * config.scales[group_id] - 1
        return self.block_hashes[last] + GROUP_BYTES[group_id]


@attrs.frozen(eq=False)
class RequestMap(Mapping[str, RequestState]):
    """The requests of a state by id: a request stands at its row in one vector. Maps of the same
    requests are equal.

    places: where each request stands. slots: the request at each place, None for none. In a damaged
    state, a request whose row another one has stands behind all others.
    Why no general persistent map: the garbage collector tracks each of its nodes, and there is one
    for each entry or two. A step of 1,024 requests made enough of them to start it, and it walks
    all columns of the pool that changed since. The nodes of a vector are not tracked.
    """

    places: Map[str, int] = Map()
    slots: PVector[RequestState | None] = attrs.field(factory=pvector)

    @classmethod
    def of(cls, requests: Mapping[str, RequestState]) -> RequestMap:
        """Build a map of these requests."""
        tx = RequestMapTransaction(Map(), pvector().evolver())
        for request_id, request in requests.items():
            tx.add(request_id, request)
        return RequestMap(tx.places, tx.slots.persistent())

    def set(self, request_id: str, request: RequestState) -> RequestMap:
        """Return a map in which a known id has this request."""
        return RequestMap(self.places, self.slots.set(self.places[request_id], request))

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.places

    def __getitem__(self, request_id: str) -> RequestState:
        return cast(RequestState, self.slots[self.places[request_id]])

    # Mapping's own three look up one id after another, and raise and catch an error if it is new.
    def get(self, request_id: str) -> RequestState | None:  # type: ignore[override]  # no default
        """Return a request, None if it is unknown."""
        place = self.places.get(request_id)
        return None if place is None else self.slots[place]

    def items(self) -> Any:
        """Return the ids with their requests, in the order of `values`."""
        slots = self.slots
        return [(request_id, slots[place]) for request_id, place in self.places.items()]

    def values(self) -> Any:
        """Return the requests, in the order of the map's ids."""
        slots = self.slots
        return [slots[place] for place in self.places.values()]

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))


class RequestMapTransaction(Struct, gc=False):
    """A map inside a transition, changed in place. `Transaction` opens, reads and closes it without
    a call, since each transition does.
    """

    places: Map[str, int]
    slots: Any

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.places

    def __getitem__(self, request_id: str) -> RequestState:
        return cast(RequestState, self.slots[self.places[request_id]])

    def get(self, request_id: str) -> RequestState | None:
        """Return a request, None if it is unknown."""
        place = self.places.get(request_id)
        return None if place is None else self.slots[place]

    def add(self, request_id: str, request: RequestState) -> None:
        """Add a request under a new id."""
        place, end = request.row, len(self.slots)
        if place < end and self.slots[place] is not None:
            place = end
        self.slots.extend([None] * (place + 1 - end))
        self.slots[place] = request
        self.places = self.places.set(request_id, place)

    def remove(self, request_id: str) -> None:
        """Remove a request."""
        self.slots[self.places[request_id]] = None
        self.places = self.places.delete(request_id)


class Operation(Struct, frozen=True, gc=False):
    """An unfinished store or load; it holds its block as a pin does.

    batch: number of the batch with its command. request_id: the request that waits for it; None for
    a store, or if the request was freed since. first_token: position of the block's first token,
    for a load.
    """

    block: int
    key: bytes
    batch: int
    request_id: str | None = None
    first_token: int = 0


class NamedPin(Struct, frozen=True, gc=False):
    """A pin of a prefix: the epoch of its content, and its blocks, group by group."""

    epoch: int
    blocks: tuple[int, ...]


class State(Struct, frozen=True, gc=False):
    """Everything that a manager knows.

    rows: id of the request in each row, None if the row is empty. free_rows: rows for reuse, in the
    order in which they were given back. held_rows: rows for reuse once a batch has finished, each
    with the number of that batch, in the same order. events, new_blocks (per group): not yet
    drained. in_flight: taken batches that are neither completed nor cancelled, oldest first. loads:
    external loads that may still fail, in the order of their calls. epoch: number of the weights.
    waiting: what each request will look up, if the eviction policy uses that (waiting.py).
    next_due: due number of the next arrival. named_pins: pins of prefixes, by name.
    """

    config: Config
    device: BlockPool
    host: BlockPool | None
    requests: RequestMap
    rows: PVector[str | None]
    free_rows: PVector[int]
    batch: OpenBatch
    events: PVector[Event]
    stats: PrefixCacheStats
    new_blocks: tuple[PVector[int], ...]
    operations: Map[int, Operation] = Map()
    next_operation: int = 0
    in_flight: tuple[BatchInFlight, ...] = ()
    loads: tuple[UnconfirmedLoad, ...] = ()
    held_rows: tuple[tuple[int, int], ...] = ()
    epoch: int = 0
    waiting: Map[str, Ahead] = Map()
    next_due: int = 0
    named_pins: Map[str, NamedPin] = Map()


def with_floors(device: BlockPool, config: Config) -> BlockPool:
    """Return a pool from which no tenant has taken a block, with the floors of a configuration."""
    from kvcore.pool.floors import make_floors  # few pools have floors

    sizes = [config.floors[salt] for salt in config.tenants]
    return attrs.evolve(device, floors=make_floors(sizes, device.num_blocks))


def make_state(config: Config) -> State:
    """Make the empty state of a configuration. Raises WrongArgument, PoolTooLarge."""
    check_kind("config", config, Config)
    hosts, waits = config.num_host_blocks, config.max_in_flight > 0
    check_memory(config.num_blocks + hosts)
    device = make_pool(
        config.num_blocks,
        null_block=config.null_block,
        eviction=config.eviction,
        quarantine=waits,
    )
    if config.eviction == "retention":
        from kvcore.pool.retention import with_levels  # few pools have levels

        device = with_levels(device)
    if config.floors:
        device = with_floors(device, config)
    if config.has_tails:
        device = attrs.evolve(device, tails=Tails())
    return State(
        config=config,
        device=device,
        host=make_pool(hosts, eviction=config.host_eviction, quarantine=waits) if hosts else None,
        requests=RequestMap(),
        rows=pvector(),
        free_rows=pvector(),
        batch=OpenBatch(0),
        events=pvector(),
        stats=PrefixCacheStats(),
        new_blocks=(pvector(),) * len(config.groups),
        epoch=config.epoch,
    )
