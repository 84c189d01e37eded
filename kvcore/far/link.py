# SPDX-License-Identifier: Apache-2.0
"""The exchange's side of a far tier: tickets with deadlines, quarantine, and the breaker.

At its deadline a ticket is given up: nothing waits for it any more, and its slots stay in
quarantine until its `Done`. Any exception of the tier counts as a failure of the ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import attrs

from kvcore.far.breaker import Breaker
from kvcore.far.engine import Clock, Tell, Warn
from kvcore.far.options import FarCounts
from kvcore.far.page import PageOwner
from kvcore.far.slots import Slots
from kvcore.far.tier import Done, FarStatus, FarTier
from kvcore.types.keys import KEY_SIZE

Operation = Literal["find", "load", "store"]


@attrs.define(eq=False)
class Ticket:
    """A submitted operation. slots: of a load or store, one per name."""

    number: int
    operation: Operation
    names: tuple[str, ...]
    slots: tuple[int, ...]
    started: float
    deadline: float
    is_given_up: bool = False
    is_probe: bool = False


@attrs.frozen
class Ended:
    """A ticket that is over for the exchange. statuses: None if it was given up."""

    ticket: Ticket
    statuses: tuple[FarStatus, ...] | None


class TierLink:
    """The tickets of one tier. epoch: returns the number of the current weights."""

    def __init__(
        self,
        tier: FarTier,
        staging: Slots,
        epoch: Callable[[], int],
        clock: Clock,
        probe_timeout_s: float,
        tell: Tell,
        warn: Warn,
    ) -> None:
        self._tier = tier
        self._staging = staging
        self._epoch = epoch
        self._clock = clock
        self._probe_timeout_s = probe_timeout_s
        self._tell_span = tell
        self._warn = warn
        self._breaker = Breaker()
        self._tickets: dict[int, Ticket] = {}
        self._place: PageOwner | None = None
        self._place_epoch = 0
        self.counts = FarCounts()

    @property
    def place(self) -> PageOwner | None:
        """Whose the current pages are; None, and the tier is not used, until an epoch has it."""
        return self._place if self._epoch() == self._place_epoch else None

    def set_place(self, place: PageOwner | None) -> None:
        """Set whose pages this epoch computes."""
        self._place, self._place_epoch = place, self._epoch()

    @property
    def is_up(self) -> bool:
        """Whether tickets are submitted."""
        return not self._breaker.is_down

    @property
    def held(self) -> frozenset[int]:
        """The slots of tickets that have not ended."""
        return frozenset(slot for each in self._tickets.values() for slot in each.slots)

    @property
    def num_stores(self) -> int:
        """Number of stores that have neither ended nor been given up."""
        return sum(
            each.operation == "store" and not each.is_given_up for each in self._tickets.values()
        )

    def find(self, names: Sequence[str], lease_s: float, timeout_s: float) -> Ticket | None:
        """Submit a find. Returns None if the tier does not accept it."""
        return self._submit("find", names, (), timeout_s, lease_s) if self.is_up else None

    def load(self, names: Sequence[str], slots: Sequence[int], timeout_s: float) -> Ticket | None:
        """Submit a load. Returns None if the tier does not accept it."""
        return self._submit("load", names, slots, timeout_s) if self.is_up else None

    def store(self, names: Sequence[str], slots: Sequence[int], timeout_s: float) -> Ticket | None:
        """Submit a store of sealed slots. Returns None if the tier does not accept it."""
        return self._submit("store", names, slots, timeout_s) if self.is_up else None

    def give_up(self, ticket: Ticket) -> None:
        """Stop waiting for a ticket; its slots are given back when it ends."""
        ticket.is_given_up = True
        try:
            self._tier.cancel(ticket.number)
        except Exception:  # the ticket still ends with its `Done`
            self.counts.dropped["cancel failed"] += 1

    def expire(self, ticket: Ticket, now: float) -> None:
        """Give up a ticket that has no answer in time, which is a failure of the tier."""
        if not ticket.is_probe:
            self.counts.pages[ticket.operation, "timeout"] += len(ticket.names)
        self._failed(ticket, now)
        self.give_up(ticket)
        self._report_span(ticket, now, num_ok=0)

    def poll(self) -> list[Ended]:
        """Return the tickets that ended since the last call, and those given up by this one."""
        now = self._clock.monotonic()
        ended: list[Ended] = []
        for done in self._answers(now):
            ticket = self._tickets.pop(done.ticket, None)
            if ticket is not None:
                self._end(ticket, done.statuses, now, ended)
        for ticket in list(self._tickets.values()):
            if now >= ticket.deadline and not ticket.is_given_up:
                self.expire(ticket, now)
                ended.append(Ended(ticket, None))
        if self._breaker.is_due(now) and not self._is_probing():
            self._probe(now)
        return [each for each in ended if not each.ticket.is_probe]

    def close(self, timeout_s: float) -> None:
        """Close the tier."""
        try:
            self._tier.close(timeout_s)
        except Exception:  # its tickets are given up all the same
            self.counts.dropped["close failed"] += 1

    def _submit(
        self,
        operation: Operation,
        names: Sequence[str],
        slots: Sequence[int],
        timeout_s: float,
        lease_s: float = 0.0,
    ) -> Ticket | None:
        views = [self._staging.views[slot] for slot in slots]
        now = self._clock.monotonic()
        try:
            if operation == "find":
                number = self._tier.submit_find(names, lease_s)
            elif operation == "load":
                number = self._tier.submit_load(names, views)
            else:
                number = self._tier.submit_store(names, views)
        except Exception:  # of a client library
            self._count_failure(operation, now)
            return None
        if number is None:
            return None
        ticket = Ticket(number, operation, tuple(names), tuple(slots), now, now + timeout_s)
        self._tickets[number] = ticket
        return ticket

    def _answers(self, now: float) -> list[Done]:
        try:
            return self._tier.poll()
        except Exception:  # of a client library
            self._count_failure("poll", now)
            return []

    def _end(
        self, ticket: Ticket, statuses: tuple[FarStatus, ...], now: float, ended: list[Ended]
    ) -> None:
        if len(statuses) != len(ticket.names):
            statuses = (FarStatus.FAILED,) * len(ticket.names)
        if ticket.is_given_up:
            for slot in ticket.slots:
                self._staging.give_back(slot)
            return
        operation = ticket.operation
        if not ticket.is_probe:
            self.counts.pages.update((operation, each.name.lower()) for each in statuses)
            self.counts.seconds[operation] += now - ticket.started
        if all(each is FarStatus.FAILED for each in statuses):
            self._failed(ticket, now)
        else:
            self._worked(ticket)
        self._report_span(ticket, now, num_ok=statuses.count(FarStatus.OK))
        ended.append(Ended(ticket, statuses))

    def _report_span(self, ticket: Ticket, now: float, *, num_ok: int) -> None:
        """Report the span of a ticket: from its submit until no request waits for it any more."""
        if not ticket.is_probe:
            self._tell_span(
                f"kvcore.far.{ticket.operation}",
                now - ticket.started,
                {
                    "num_pages": len(ticket.names),
                    "num_ok": num_ok,
                    "is_given_up": ticket.is_given_up,
                },
            )

    def _failed(self, ticket: Ticket, now: float) -> None:
        if ticket.is_probe:
            self._breaker.probe_failed(now)
        else:
            self._count_failure(ticket.operation, now)

    def _count_failure(self, operation: str, now: float) -> None:
        was_up = self.is_up
        self._breaker.failed(operation, now)
        if was_up and not self.is_up:
            tier: Any = self._tier
            why = ""
            with suppress(Exception):  # the tier does not say it
                if found := tier.why(operation):
                    why = f", the last one with {found}"
            self._warn(f"the far tier is down: each {operation} failed or was too late{why}")

    def _worked(self, ticket: Ticket) -> None:
        was_up = self.is_up
        self._breaker.worked("poll")
        self._breaker.worked(ticket.operation)
        if ticket.is_probe:
            self._breaker.probe_worked()
        if self.is_up and not was_up:
            self._warn("the far tier is up")

    def _is_probing(self) -> bool:
        return any(each.is_probe and not each.is_given_up for each in self._tickets.values())

    def _probe(self, now: float) -> None:
        """Ask for a name that no page has, to see whether the tier answers."""
        place = self.place or PageOwner(bytes(32))
        ticket = self._submit("find", [place.name(bytes(KEY_SIZE))], (), self._probe_timeout_s)
        if ticket is None:
            self._breaker.probe_failed(now)
        else:
            ticket.is_probe = True
