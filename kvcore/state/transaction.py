# SPDX-License-Identifier: Apache-2.0
"""A transaction on a state: a transition changes it in place, and it is frozen at the end.

Invariants: the original state is never changed, so a call that raises halfway has changed nothing.
The twin changes its state in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar, cast

from msgspec.structs import replace
from pyrsistent import PVector

from kvcore.hashing.block_hash import root_hash
from kvcore.pool.block_pool import BlockPool, PoolTransaction
from kvcore.pool.policy_pool import PolicyTransaction
from kvcore.state.batch_records import UnconfirmedLoad
from kvcore.state.open_batch import OpenBatch
from kvcore.state.state import RequestMap, RequestMapTransaction, RequestState, State, Table
from kvcore.types.commands import Evict, EvictAll
from kvcore.types.effects import Effects
from kvcore.types.errors import (
    LoadUnfinished,
    NoHostTier,
    RepeatedRequest,
    SwappedOut,
    UnknownRequest,
)
from kvcore.types.groups import skipped_blocks
from kvcore.types.values import Outcome

T = TypeVar("T")


class Transaction:
    """A state inside a transition: changed in place, frozen at the end."""

    __slots__ = (
        *("batch", "config", "device", "effects", "free_rows", "published_keys", "host", "loads"),
        *("entries", "new_blocks", "next_operation", "operations", "requests", "rows", "scheduled"),
        *("state", "stats", "in_flight", "held_rows", "epoch", "waiting", "next_due"),
        "named_pins",
    )

    def __init__(self, state: State) -> None:
        self.state = state
        self.config = state.config
        self.effects = Effects(events_enabled=state.config.enable_events)
        self.device = _open_pool(state.device, self.effects, state.batch.number)
        self.host = None if state.host is None else PoolTransaction(state.host, Effects())
        self.requests = RequestMapTransaction(state.requests.places, state.requests.slots.evolver())
        self.rows = state.rows
        self.free_rows = state.free_rows
        self.held_rows = state.held_rows
        self.batch = state.batch
        self.scheduled = state.batch.scheduled
        self.entries = state.batch.entries
        self.published_keys = state.batch.published_keys
        self.in_flight = list(state.in_flight)
        self.loads = state.loads
        self.stats = state.stats
        self.new_blocks = state.new_blocks
        self.operations = state.operations
        self.next_operation = state.next_operation
        self.epoch = state.epoch
        self.waiting = state.waiting
        self.next_due = state.next_due
        self.named_pins = state.named_pins

    def freeze(self) -> State:
        """Return the state after the transition."""
        batch = OpenBatch(
            self.batch.number,
            _longer(self.batch.commands, self.effects.commands),
            self.scheduled,
            self.batch.merges,
            self.entries,
            self.published_keys,
            self.batch.starts_epoch,
            self.batch.ends,
            self.batch.marked,
            self.batch.delayed,
        )
        return State(
            self.config,
            self.device.freeze(),
            None if self.host is None else self.host.freeze(),
            RequestMap(self.requests.places, self.requests.slots.persistent()),
            self.rows,
            self.free_rows,
            batch,
            _longer(self.state.events, self.effects.events),
            self.stats,
            self.new_blocks,
            self.operations,
            self.next_operation,
            tuple(self.in_flight),
            _keyed_only(self) if self.loads else (),
            self.held_rows,
            self.epoch,
            self.waiting,
            self.next_due,
            self.named_pins,
        )

    def request(self, request_id: str) -> RequestState:
        """Return the request with this id. Raises UnknownRequest."""
        requests = self.requests
        place = requests.places.get(request_id) if isinstance(request_id, str) else None
        if place is None:
            raise UnknownRequest(request=request_id)
        return cast(RequestState, requests.slots[place])

    def on_device(self, request_id: str) -> RequestState:
        """Return the request with this id, which must not be swapped out. Raises UnknownRequest,
        SwappedOut.
        """
        request = self.request(request_id)
        if request.host_tables:
            raise SwappedOut(request=request_id)
        return request

    def idle(self, request_id: str) -> RequestState:
        """Return the request with this id, which must be on the device without unfinished loads.

        Raises UnknownRequest, SwappedOut, LoadUnfinished.
        """
        request = self.on_device(request_id)
        if request.num_loading:
            raise LoadUnfinished(request=request_id, num_operations=request.num_loading)
        return request

    def distinct(self, request_ids: list[str]) -> list[RequestState]:
        """Return the requests with these ids. Raises UnknownRequest, RepeatedRequest."""
        requests = []
        seen: set[str] = set()
        for request_id in request_ids:
            requests.append(self.request(request_id))
            if request_id in seen:
                raise RepeatedRequest(request=request_id, reason="is named twice in one call")
            seen.add(request_id)
        return requests

    def note_lookup(self, num_queries: int, num_hits: int, *, preempted: bool) -> None:
        """Count a look-up."""
        old = self.stats
        if preempted:
            self.stats = replace(
                old,
                preempted_requests=old.preempted_requests + 1,
                preempted_queries=old.preempted_queries + num_queries,
                preempted_hits=old.preempted_hits + num_hits,
            )
            return
        queries, hits = old.queries + num_queries, old.hits + num_hits
        self.stats = replace(old, requests=old.requests + 1, queries=queries, hits=hits)

    def put(self, request: RequestState) -> None:
        """Replace a request by its new value. If its count is 0, it has no epoch."""
        if request.epoch and not request.num_computed:
            request = replace(request, epoch=0)
        requests, request_id = self.requests, request.request_id
        place = requests.places.get(request_id)
        if place is None:
            requests.add(request_id, request)
        else:
            requests.slots[place] = request

    def is_stale(self, request: RequestState) -> bool:
        """Return whether a request counts tokens computed with older weights."""
        return request.num_computed > 0 and request.epoch < self.epoch

    def rests(self, block: int) -> bool:
        """Return whether a block can rest on a load: it has a key, or a batch owes it one."""
        owed = (owed.block for batch in self.in_flight for owed in batch.owed)
        return self.device.has_key(block) or block in owed

    def tenant(self, request: RequestState) -> int:
        """Return the tenant for which a request takes blocks; 0 if it has no floor."""
        return self.config.tenant_of(request.extra_keys.cache_salt) if self.config.floors else 0

    def host_tier(self) -> PoolTransaction:
        """Return the host pool. Raises NoHostTier."""
        if self.host is None:
            raise NoHostTier
        return self.host

    def parent_hash(self, request: RequestState, num_hashed: int) -> bytes:
        """Return the hash that the next block continues, after `num_hashed` hashed ones."""
        if num_hashed:
            return request.block_hashes[num_hashed - 1]
        return root_hash(self.config.hash_seed, self.config.hashing)

    def is_null(self, block: int) -> bool:
        """Return whether a table's entry is the null block."""
        return block < self.device.first_block

    def num_pending(self) -> int:
        """Count the blocks that become free when operations or batches end, since nothing else uses
        them.
        """
        held = Counter(operation.block for operation in self.operations.values())
        held.update(owed.block for batch in self.in_flight for owed in batch.owed)
        alone = sum(self.device.ref_counts[block] == count for block, count in held.items())
        return alone + self.device.num_quarantined

    def num_settled(self, request: RequestState) -> int:
        """Count the accepted tokens that the request had computed before the open batch.

        0 if the window that they need has been given back since.
        """
        record = self.scheduled[request.row]
        num_tokens = request.num_accepted
        if record is not None:
            before = record.num_computed_before
            num_tokens = min(request.tokens.length, before)
            if self.config.has_states and self._keeps_state(request, before):
                request = replace(request, num_computed=before)
        return self.resumable(request, num_tokens)

    def resumable(self, request: RequestState, num_tokens: int) -> int:
        """Return the number of tokens, or 0 if a group gave back blocks that the next query would
        see, or keeps states and has another one.
        """
        if self.config.has_states and num_tokens != request.state_count:
            return 0
        for group, table in zip(self.config.groups, request.tables, strict=True):
            first = skipped_blocks(group, num_tokens)
            needed = group.is_windowed and first * group.block_size < num_tokens
            if needed and first < len(table) and self.is_null(table[first]):
                return 0
        return num_tokens

    def _keeps_state(self, request: RequestState, num_tokens: int) -> bool:
        """Whether the state before the open batch has a block that the batch does not write."""
        for group, table in zip(self.config.groups, request.tables, strict=True):
            if group.is_state:
                position = (num_tokens - 1) // group.block_size
                if not 0 <= position < len(table) - 1 or self.is_null(table[position]):
                    return False
        return True

    def num_kept(self, group_id: int, table: Table, num_tokens: int) -> int:
        """Count the blocks of a table that `num_tokens` tokens need. An encoder's table needs all
        its blocks.
        """
        group = self.config.groups[group_id]
        if group.is_cross:
            return len(table) if num_tokens else 0
        return min(len(table), -(-num_tokens // group.block_size))


def transition(state: State, change: Callable[[Transaction], T]) -> Outcome[State, T]:
    """Run a change in a transaction on a state."""
    tx = Transaction(state)
    value = change(tx)
    return Outcome(tx.freeze(), tuple(tx.effects.commands), value)


def _open_pool(pool: BlockPool, effects: Effects, now: int) -> PoolTransaction:
    """Open a transaction on the pool of a state whose open batch has the number `now`."""
    if pool.retention is not None:
        from kvcore.pool.retention import RetentionTransaction  # few pools have levels

        return RetentionTransaction(pool, effects)
    if pool.policy is None:
        return PoolTransaction(pool, effects)
    return PolicyTransaction(pool, effects, now)


def _longer(items: PVector[T], more: list[T]) -> PVector[T]:
    return items.extend(more) if more else items


def _keyed_only(tx: Transaction) -> tuple[UnconfirmedLoad, ...]:
    """Return the loads without the blocks that lost their keys, and that no batch owes one."""
    evicts = any(isinstance(command, Evict | EvictAll) for command in tx.effects.commands)
    if not evicts and not tx.config.has_states:
        return tx.loads
    return tuple(
        replace(load, blocks=tuple(pair for pair in load.blocks if tx.rests(pair[0])))
        for load in tx.loads
    )
