# SPDX-License-Identifier: Apache-2.0
"""Floors: how much of each tenant's content the others must leave cached.

Invariants: a block belongs to the tenant whose request took it last. A tenant holds the blocks of
its own that have an owner or can be found. If it holds more than its floor, others may take the
rest of what it has cached in the free queue; its own requests may take all of that. What the taker
may not take is passed over, so the order of the queue stays, under any policy.
Why: a floor keeps content and reserves no empty block, so a tenant that has cached nothing costs
the others nothing.
Twin: rust/src/pool/floors.rs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import attrs
from pyrsistent import PVector, pvector

NO_TENANT = 0
"""The tenant of requests without a floor."""


@attrs.frozen
class Floors:
    """The floors of a pool as a value.

    least: the floor of each tenant; they are numbered from 1. takers: for each block, the tenant
    that took it last.
    """

    least: tuple[int, ...]
    takers: PVector[int]

    def taken(self, blocks: Sequence[int], tenants: Sequence[int]) -> Floors:
        """Note which tenant took each block."""
        takers = self.takers.evolver()
        for block, tenant in zip(blocks, tenants, strict=True):
            takers[block] = tenant
        return Floors(self.least, takers.persistent())


class Spare:
    """The cached blocks that one taker may take, while it takes them.

    keys: of each block. owned: the blocks with an owner. free: those in the free queue.
    """

    def __init__(
        self,
        floors: Floors,
        taker: int,
        keys: Sequence[bytes | None],
        owned: Collection[int],
        free: Collection[int],
    ) -> None:
        self.keys, self.takers, self.taker = keys, floors.takers, taker
        held, cached = ([0] * (len(floors.least) + 1) for _ in range(2))
        for block, tenant in enumerate(floors.takers):
            is_found = keys[block] is not None
            held[tenant] += is_found or block in owned
            cached[tenant] += is_found and block in free
        others = [tenant for tenant in range(1, len(held)) if tenant != taker]
        self.left = {
            tenant: max(0, min(cached[tenant], held[tenant] - floors.least[tenant - 1]))
            for tenant in others
        }
        self.num_kept = sum(cached[tenant] - self.left[tenant] for tenant in others)

    def may_take(self, block: int) -> bool:
        """Return whether the taker may take a block of the free queue."""
        return self.keys[block] is None or self.left.get(self.takers[block], 1) > 0

    def note(self, block: int) -> None:
        """Note that the taker takes a block."""
        tenant = self.takers[block]
        if self.keys[block] is not None and tenant in self.left:
            self.left[tenant] -= 1

    def first(self, queue: Iterator[int]) -> int:
        """Return the first of these free blocks that the taker may take."""
        return next(block for block in queue if self.may_take(block))


def make_floors(sizes: Sequence[int], num_blocks: int) -> Floors:
    """Return the floors of a pool from which no block has been taken."""
    return Floors(tuple(sizes), pvector([NO_TENANT] * num_blocks))
