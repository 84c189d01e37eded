# SPDX-License-Identifier: Apache-2.0
"""The slice of a far tier's pages on a rank without a manager: it does what rank 0 orders.

Its slots have the uses of rank 0's. So nothing is free or taken here: rank 0 gives a slot another
use only after this rank has reported the end of its ticket.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Sequence

from kvcore.far.page import PageOwner
from kvcore.far.slots import Use
from kvcore.far.tier import FarStatus, FarTier
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.far.staging import Staging
from kvcore_runtime.ranks.errors import BadStep
from kvcore_runtime.ranks.links import NO_TICKET
from kvcore_runtime.ranks.step_wire import OrderKind, RankOrder

_USES: dict[OrderKind, Use] = {OrderKind.READ: "load", OrderKind.WRITE: "store"}


class MirroredStaging(Staging):
    """Slots whose uses and marks are set from outside."""

    def set_marks(self, orders: Sequence[RankOrder], identity: bytes) -> None:
        """Mark the slots of a batch's stores and loads, and no others."""
        for slot in list(self._uses):
            self.unmark(slot)
        self._uses = {each.slot: _USES[each.kind] for each in orders}
        for each in orders:
            self.mark(each.slot, each.key, identity)


class RankPages:
    """This rank's slots and tier. Raises InvalidTier."""

    def __init__(self, rank: int, world: int, tier: FarTier, num_slots: int, runtime: Runtime):
        self._rank, self._world, self._tier = rank, world, tier
        self._staging = MirroredStaging(num_slots, runtime.cache.layout.page_size_bytes)
        tier.attach(self._staging.memory, self._staging.slot_bytes)
        runtime.external = self._staging
        self._owner: PageOwner | None = None
        self._tickets: dict[int, tuple[int, list[int]]] = {}
        """By ticket here: the ticket on rank 0, and its slots if it is a load."""
        self._ended: deque[tuple[int, int]] = deque()

    def follow(self, orders: Sequence[RankOrder]) -> None:
        """Carry out orders. Raises BadStep."""
        num_slots = len(self._staging.views)
        for each in orders:
            if each.kind is OrderKind.JOIN:
                if each.slot != num_slots:
                    reason = f"rank 0 has {each.slot} slots of a far tier, this rank {num_slots}"
                    raise BadStep(reason=reason)
            elif each.kind is OrderKind.OWN:
                if each.ticket == self._rank:
                    self._owner = PageOwner(each.key[:32], self._rank, self._world)
            elif each.slot >= num_slots or self._owner is None:
                raise BadStep(reason=f"an order about slot {each.slot} of {num_slots}")
        marks = [each for each in orders if each.kind in _USES]
        if marks and self._owner is not None:
            self._staging.set_marks(marks, self._owner.identity)
        moves = [each for each in orders if each.kind in (OrderKind.LOAD, OrderKind.STORE)]
        for ticket, part in itertools.groupby(moves, lambda each: each.ticket):
            self._submit(ticket, list(part))

    def take_ended(self) -> tuple[int, int]:
        """Return a ticket of rank 0 that has ended here, and how many of its pages are right before
        the first that is not; or NO_TICKET.
        """
        with contextlib.suppress(Exception):  # of a client library
            for done in self._tier.poll():
                ticket, slots = self._tickets.pop(done.ticket)
                rights = [each is FarStatus.OK for each in done.statuses]
                if slots and self._owner is not None:
                    owns = [self._owner.owns(self._staging.views[slot]) for slot in slots]
                    rights = [right and own for right, own in zip(rights, owns, strict=True)]
                self._ended.append((ticket, [*rights, False].index(False)))
        return self._ended.popleft() if self._ended else (NO_TICKET, 0)

    def close(self, timeout_s: float) -> None:
        """Close the tier."""
        with contextlib.suppress(Exception):  # of a client library
            self._tier.close(timeout_s)

    def _submit(self, ticket: int, orders: Sequence[RankOrder]) -> None:
        owner, slots = self._owner, [each.slot for each in orders]
        assert owner is not None
        names = [owner.name(each.key) for each in orders]
        views = [self._staging.views[slot] for slot in slots]
        is_load = orders[0].kind is OrderKind.LOAD
        submit = self._tier.submit_load if is_load else self._tier.submit_store
        number = None
        with contextlib.suppress(Exception):  # of a client library
            number = submit(names, views)
        if number is None:
            self._ended.append((ticket, 0))
        else:
            self._tickets[number] = ticket, slots if is_load else []
