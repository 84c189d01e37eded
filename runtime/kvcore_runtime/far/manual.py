# SPDX-License-Identifier: Apache-2.0
"""A far tier for tests, which answers when and how the test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.far.errors import UnknownTicket
from kvcore.far.page import check_page
from kvcore.far.pending import PendingTier, PendingTransfer
from kvcore.far.tier import FarStatus

Fault = Callable[[bytearray], "FarStatus | None"]
"""A fault that befalls a page: it may change the page, or end its name with a status."""


class ManualTier(PendingTier):
    """See `PendingTier`. takes: whether it accepts tickets."""

    def __init__(self) -> None:
        super().__init__()
        self.takes = True

    @property
    def accepts(self) -> bool:
        """See `PendingTier`."""
        return self.takes

    def cancel(self, ticket: int) -> None:
        """See `FarTier`."""
        for each in self.pending:
            if each.ticket == ticket:
                each.is_cancelled = True
                return
        raise UnknownTicket(ticket=ticket)

    def close(self, timeout_s: float) -> None:
        """See `FarTier`."""
        del timeout_s
        self.takes = False

    def answer(self, pending: PendingTransfer, faults: Sequence[Fault | None] = ()) -> None:
        """End a ticket. faults: for its first names, in order; None for no fault."""
        by_name = [*faults, *[None] * (len(pending.names) - len(faults))]
        statuses = [
            self._answer(pending, index, fault)
            for index, fault in zip(range(len(pending.names)), by_name, strict=True)
        ]
        self._end(pending, statuses)

    def answer_all(self) -> None:
        """End all tickets without faults."""
        for each in list(self.pending):
            self.answer(each)

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
