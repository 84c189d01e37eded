# SPDX-License-Identifier: Apache-2.0
"""Property of what one call takes from tenants, with what each holds followed by its commands.

No transition calls anything here. Twin: rust/src/check/properties/floors.rs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call
from kvcore.types.commands import Allocate, Command, Evict, EvictAll, Free, Touch
from kvcore.types.values import Outcome


def floor(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """FLOOR: a call takes from another tenant only blocks above that tenant's floor, passes over no
    block that it may take, and notes for which tenant each block was taken.
    """
    floors = outcome.state.device.floors
    if floors is None or not any(isinstance(each, Allocate) for each in outcome.commands):
        return
    tenants, queue = Tenants(before), list(before.device.queue)
    orders = before.device.policy is None and call.name != "cancel"
    evicted: int | None = None
    for command in outcome.commands:
        if isinstance(command, Evict) and command.block in queue:
            evicted = command.block
        block = command.block if isinstance(command, Evict | Allocate) else None
        holders = set[int]() if block is None else tenants_of(outcome.state, call, block)
        taker = holders.copy().pop() if len(holders) == 1 else 0
        if block is not None and holders and (block == evicted) == isinstance(command, Evict):
            passed = queue[: queue.index(block)] if orders and block in queue else []
            if not tenants.may_take(block, taker):
                yield f"{call.name} takes block {block}, which a floor keeps"
            if any(tenants.may_take(each, taker) for each in passed):
                yield f"{call.name} takes block {block} before blocks {passed}"
        tenants.follow(command)
        if isinstance(command, Allocate):
            # What comes back for several tenants counts for none of them before all is taken.
            tenants.takers[command.block] = taker
        if isinstance(command, Allocate | Touch) and command.block in queue:
            queue.remove(command.block)
    for command in outcome.commands:
        if isinstance(command, Allocate):
            takers = {
                tenant_of(outcome.state, request)
                for request in outcome.state.requests.values()
                if any(command.block in table for table in request.tables)
            }
            if takers and floors.takers[command.block] not in takers:
                yield f"block {command.block} was taken for {takers}"


def tenant_of(state: State, request: RequestState) -> int:
    """Return the place of a request's salt among those with floors, from 1; 0 without a floor."""
    salts = ["", *sorted(state.config.floors)]
    salt = request.extra_keys.cache_salt or ""
    return salts.index(salt) if salt in salts else 0


def tenants_of(state: State, call: Call, block: int) -> set[int]:
    """Return the tenants for which a call takes a block: those of all requests that come back by
    it.
    """
    requests = state.requests.values()
    if call.name == "swap_in":
        return {tenant_of(state, state.requests[name]) for name in call.args[0]}
    return {
        tenant_of(state, request)
        for request in requests
        if any(block in table for table in request.tables)
    }


class Tenants:
    """What each tenant holds, followed by the commands of a call."""

    def __init__(self, state: State) -> None:
        pool = state.device
        assert pool.floors is not None
        self.least = pool.floors.least
        self.takers = dict(enumerate(pool.floors.takers))
        self.owned = {block for block, count in enumerate(pool.ref_counts) if count}
        self.keyed = {block for block, key in enumerate(pool.keys) if key is not None}
        self.free = set(pool.queue)

    def follow(self, command: Command) -> None:
        """Note what a command changes."""
        match command:
            case Allocate(block) | Touch(block):
                self.owned.add(block)
                self.free.discard(block)
            case Free(block, cached):
                self.owned.discard(block)
                (self.keyed.add if cached else self.keyed.discard)(block)
            case Evict(block):
                self.keyed.discard(block)
            case EvictAll():
                self.keyed.clear()

    def num_held(self, tenant: int) -> int:
        """Count the blocks of a tenant that have an owner or are cached."""
        return sum(self.takers[block] == tenant for block in self.owned | self.keyed)

    def may_take(self, block: int, taker: int) -> bool:
        """Whether a tenant may take a free block."""
        tenant = self.takers[block]
        if not tenant or tenant == taker or block not in self.keyed:
            return True
        return self.num_held(tenant) > self.least[tenant - 1]

    def num_kept(self, taker: int) -> int:
        """Count the free blocks that others keep from a tenant."""
        kept = 0
        for tenant, least in enumerate(self.least, 1):
            cached = sum(self.takers[block] == tenant for block in self.free & self.keyed)
            rest = self.num_held(tenant) - cached
            kept += 0 if tenant == taker else min(cached, max(0, least - rest))
        return kept
