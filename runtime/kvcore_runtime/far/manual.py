# SPDX-License-Identifier: Apache-2.0
"""A far tier for tests, which answers when and how the test says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import attrs

from kvcore.far.errors import UnknownTicket
from kvcore.far.page import check_page
from kvcore.far.tier import Done, FarStatus, View

Fault = Callable[[bytearray], "FarStatus | None"]
"""A fault that befalls a page: it may change the page, or end its name with a status."""


@attrs.define(eq=False)
class PendingTransfer:
    """A ticket without an answer yet. operation: "find", "load" or "store"."""

    ticket: int
    operation: str
    names: tuple[str, ...]
    views: tuple[View, ...]
    is_cancelled: bool = False


class ManualTier:
    """See `FarTier`. entries: the pages that it holds. takes: whether it accepts tickets."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.pending: list[PendingTransfer] = []
        self.takes = True
        self._numbers = itertools.count()
        self._done: list[Done] = []

    def attach(self, memory: View) -> None:
        """See `FarTier`."""

    def submit_find(self, names: Sequence[str], lease_s: float) -> int | None:
        """See `FarTier`."""
        del lease_s
        return self._submit("find", names, ())

    def submit_load(self, names: Sequence[str], views: Sequence[View]) -> int | None:
        """See `FarTier`."""
        return self._submit("load", names, views)

    def submit_store(self, names: Sequence[str], views: Sequence[View]) -> int | None:
        """See `FarTier`."""
        return self._submit("store", names, views)

    def cancel(self, ticket: int) -> None:
        """See `FarTier`."""
        for each in self.pending:
            if each.ticket == ticket:
                each.is_cancelled = True
                return
        raise UnknownTicket(ticket=ticket)

    def poll(self) -> list[Done]:
        """See `FarTier`."""
        done, self._done = self._done, []
        return done

    def close(self, timeout_s: float) -> None:
        """See `FarTier`."""
        del timeout_s
        self.takes = False

    def answer(self, pending: PendingTransfer, faults: Sequence[Fault | None] = ()) -> None:
        """End a ticket. faults: for its first names, in order; None for no fault."""
        self.pending.remove(pending)
        by_name = [*faults, *[None] * (len(pending.names) - len(faults))]
        statuses = [
            self._answer(pending, index, fault)
            for index, fault in zip(range(len(pending.names)), by_name, strict=True)
        ]
        self._done.append(Done(pending.ticket, tuple(statuses)))

    def answer_all(self) -> None:
        """End all tickets without faults."""
        for each in list(self.pending):
            self.answer(each)

    def _submit(self, operation: str, names: Sequence[str], views: Sequence[View]) -> int | None:
        if not self.takes:
            return None
        pending = PendingTransfer(next(self._numbers), operation, tuple(names), tuple(views))
        self.pending.append(pending)
        return pending.ticket

    def _answer(self, pending: PendingTransfer, index: int, fault: Fault | None) -> FarStatus:
        name = pending.names[index]
        if pending.operation == "find":
            page = bytearray(1)
            status = None if fault is None else fault(page)
            has = FarStatus.OK if name in self.entries else FarStatus.MISSING
            return has if status is None else status
        view = pending.views[index]
        if pending.operation == "store":
            page = bytearray(view)
            status = None if fault is None else fault(page)
            if status is None:
                self.entries.setdefault(name, bytes(page))
            return FarStatus.OK if status is None else status
        if name not in self.entries:
            return FarStatus.MISSING
        page = bytearray(self.entries[name])
        status = None if fault is None else fault(page)
        view[: min(len(view), len(page))] = page[: len(view)]
        if status is None:
            status = check_page(view, name, len(page))
        if status is FarStatus.DAMAGED:
            del self.entries[name]
        return status
