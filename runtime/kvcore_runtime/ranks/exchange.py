# SPDX-License-Identifier: Apache-2.0
"""Rank 0's exchange with a far tier in which each rank keeps its own slice of every page.

The client of kvcore/far decides here, as for one rank. Beneath it, a find asks for the names of all
ranks, and a page is there if all of them are. Loads and stores go to the other ranks as orders, and
slot i of every rank has the same use: a ticket ends when it has ended on all ranks, so no slot is
used again while the tier of any rank may access it. What every rank has verified, in a row, counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Sequence

import attrs

from kvcore.far.engine import Clock
from kvcore.far.errors import UnknownTicket
from kvcore.far.options import FarOptions
from kvcore.far.page import PageOwner
from kvcore.far.slots import Use
from kvcore.far.tier import Done, FarStatus, FarTier, View
from kvcore.types.commands import Batch, Store
from kvcore.types.keys import KEY_SIZE
from kvcore_runtime.cache.apply import batch_columns
from kvcore_runtime.cache.transfers import read_transfers
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.model.identity import identify
from kvcore_runtime.ranks.errors import RankLost, StepFailed
from kvcore_runtime.ranks.links import Links
from kvcore_runtime.ranks.step_wire import OrderKind, RankOrder, RankStep, encode_step

ASK_S = 0.002
"""Without a step for this long, the others are asked for the tickets that have ended there."""


class RankTier:
    """See `FarTier`: rank 0's tier and, through orders, those of the other ranks."""

    def __init__(self, tier: FarTier, links: Links) -> None:
        self._tier, self._links = tier, links
        self._owners: Sequence[PageOwner] = ()
        self._slots: dict[int, int] = {}
        self._finds: dict[int, int] = {}
        """By ticket: number of names per rank."""
        self._own: dict[int, tuple[FarStatus, ...] | None] = {}
        """By ticket of a load or store: how it has ended on rank 0."""
        self._stores: set[int] = set()
        self._asked = 0.0
        self.failed: StepFailed | None = None
        """Orders that another rank could not carry out; the engine's next step raises it."""

    def attach(self, memory: View, slot_bytes: int) -> None:
        """See `FarTier`."""
        self._tier.attach(memory, slot_bytes)

    def join(self, num_slots: int, weights: str) -> str:
        """Return a digest of all ranks' weights. Raises RankLost, and StepFailed unless each rank
        has a tier and as many slots.
        """
        self._send([RankOrder(OrderKind.JOIN, 0, num_slots, bytes(KEY_SIZE))])
        return gather_weights(self._links, weights)

    def own(self, owners: Sequence[PageOwner], views: Sequence[View]) -> None:
        """Set the owner of each rank's pages. views: of the slots. Raises StepFailed, RankLost."""
        self._owners = owners
        self._slots = {id(view): slot for slot, view in enumerate(views)}
        pad = bytes(KEY_SIZE - len(owners[0].identity))
        self._send(
            RankOrder(OrderKind.OWN, each.rank, 0, each.identity + pad) for each in owners[1:]
        )

    def submit_find(self, names: Sequence[str], lease_s: float) -> int | None:
        """See `FarTier`: find the names of all ranks."""
        keys = [_key(name) for name in names]
        others = [owner.name(key) for owner in self._owners[1:] for key in keys]
        ticket = self._tier.submit_find([*names, *others], lease_s)
        if ticket is not None:
            self._finds[ticket] = len(names)
        return ticket

    def submit_load(self, names: Sequence[str], views: Sequence[View]) -> int | None:
        """See `FarTier`."""
        ticket = self._tier.submit_load(names, views)
        return self._share(OrderKind.LOAD, ticket, names, views)

    def submit_store(self, names: Sequence[str], views: Sequence[View]) -> int | None:
        """See `FarTier`."""
        ticket = self._tier.submit_store(names, views)
        if ticket is not None:
            self._stores.add(ticket)
        return self._share(OrderKind.STORE, ticket, names, views)

    def cancel(self, ticket: int) -> None:
        """See `FarTier`: the other ranks complete theirs."""
        if ticket not in self._finds and ticket not in self._own:
            raise UnknownTicket(ticket=ticket)
        if self._own.get(ticket) is None:
            self._tier.cancel(ticket)

    def poll(self) -> list[Done]:
        """See `FarTier`."""
        done = []
        for each in self._tier.poll():
            count = self._finds.pop(each.ticket, None)
            if count is None:
                self._own[each.ticket] = each.statuses
            else:
                ranks = [each.statuses[at::count] for at in range(count)]
                done.append(Done(each.ticket, tuple(max(statuses) for statuses in ranks)))
        if self._own and time.monotonic() - self._asked > ASK_S:
            self._send(())
        ended, num_others = self._links.ended, self._links.world - 1
        for ticket, statuses in list(self._own.items()):
            if statuses is not None and len(ended.get(ticket, ())) == num_others:
                del self._own[ticket]
                worst = FarStatus.FAILED if ticket in self._stores else FarStatus.MISSING
                self._stores.discard(ticket)
                num_right = min(ended.pop(ticket, [len(statuses)]))
                done.append(Done(ticket, _cut(statuses, num_right, worst)))
        return done

    def why(self, operation: str) -> str:
        """See `FarTier`: what rank 0's tier says."""
        return str(self._tier.why(operation))  # type: ignore[attr-defined] # it may have it

    def close(self, timeout_s: float) -> None:
        """See `FarTier`; the other ranks close theirs when they end."""
        self._tier.close(timeout_s)

    def _share(
        self, kind: OrderKind, ticket: int | None, names: Sequence[str], views: Sequence[View]
    ) -> int | None:
        """Order the other ranks to do the same."""
        if ticket is not None:
            self._own[ticket] = None
            pairs = zip(names, views, strict=True)
            # The engine's step raises it. Here it would free slots that this rank's tier has.
            with contextlib.suppress(RankLost, StepFailed):
                self._send(
                    RankOrder(kind, ticket, self._slots[id(view)], _key(name))
                    for name, view in pairs
                )
        return ticket

    def _send(self, orders: Iterable[RankOrder]) -> None:
        """Send orders, and hear what has ended. Raises RankLost, StepFailed."""
        links = self._links
        batch = Batch(links.number, bytearray(), b"")
        links.broadcast(encode_step(RankStep(batch=batch, orders=tuple(orders), is_applied=True)))
        least = links.collect()
        self._asked = time.monotonic()
        if least < 0:
            self.failed = StepFailed(number=batch.number, reason=f"rank {-least} says why")
            raise self.failed


class RankExchange(FarExchange):
    """See `FarExchange`; the other ranks have a `RankPages`, with as many slots. For a `Leader`.

    options: rank and world are those of the links. If it has no weights, each rank's are digested.
    Raises InvalidTier, RankLost, and StepFailed if another rank has no tier or other slots.
    """

    def __init__(
        self,
        engine: Engine,
        tier: FarTier,
        links: Links,
        options: FarOptions | None = None,
        *,
        clock: Clock = time,
    ) -> None:
        options = options or FarOptions()
        self._tier = RankTier(tier, links)
        self._world = links.world
        weights = options.weights or identify(engine.model, engine.manager.config.groups)
        weights = self._tier.join(options.staging_pages, weights)
        options = attrs.evolve(options, weights=weights, rank=0, world=links.world)
        super().__init__(engine, self._tier, options, clock=clock)

    @property
    def failed(self) -> StepFailed | None:
        """Orders that another rank could not carry out: no step may follow."""
        return self._tier.failed

    def set_weights(self, weights: str | None) -> None:
        """See `FarExchange`; weights: a digest of those of all ranks."""
        super().set_weights(weights)
        if weights is not None:
            owners = [self._owner(weights, rank) for rank in range(self._world)]
            self._tier.own(owners, self.staging.views)

    def marks(self, batch: Batch) -> tuple[RankOrder, ...]:
        """Return the orders that mark the slots of a batch's loads and stores on other ranks."""
        orders = []
        for each in read_transfers(batch, batch_columns(batch)):
            is_store = each.kind == Store.kind
            use: Use = "store" if is_store else "load"
            slot = self.staging.marked(use, each.key)
            if slot is not None:
                kind = OrderKind.WRITE if is_store else OrderKind.READ
                orders.append(RankOrder(kind, 0, slot, each.key))
        return tuple(orders)


def gather_weights(links: Links, weights: str) -> str:
    """Return a digest of all ranks' weights from that of this rank's; all call it at once."""
    own = hashlib.sha256(weights.encode()).digest()
    return hashlib.sha256(b"".join(links.gather(own))).hexdigest()


def _key(name: str) -> bytes:
    return bytes.fromhex(name.rpartition("/")[2])


def _cut(
    statuses: tuple[FarStatus, ...], num_right: int, worst: FarStatus
) -> tuple[FarStatus, ...]:
    """Return statuses of which only the first num_right can be OK."""
    return tuple(
        worst if at >= num_right and each is FarStatus.OK else each
        for at, each in enumerate(statuses)
    )
