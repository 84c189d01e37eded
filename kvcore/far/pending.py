# SPDX-License-Identifier: Apache-2.0
"""The tickets of a far tier whose answers come from outside: a test, or a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from kvcore.far.tier import Done, FarStatus, View


@attrs.define(eq=False)
class PendingTransfer:
    """A ticket without an answer yet. operation: "find", "load" or "store"."""

    ticket: int
    operation: str
    names: tuple[str, ...]
    views: tuple[View, ...]
    is_cancelled: bool = False


class PendingTier:
    """See `FarTier`. entries: the pages that it holds. pending: its tickets without an answer."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.pending: list[PendingTransfer] = []
        self._done: list[Done] = []
        self._next = 0

    @property
    def accepts(self) -> bool:
        """Whether it takes one more ticket."""
        return True

    def attach(self, memory: View, slot_bytes: int) -> None:
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

    def poll(self) -> list[Done]:
        """See `FarTier`."""
        done, self._done = self._done, []
        return done

    def _submit(self, operation: str, names: Sequence[str], views: Sequence[View]) -> int | None:
        if not self.accepts:
            return None
        pending = PendingTransfer(self._next, operation, tuple(names), tuple(views))
        self.pending.append(pending)
        self._next += 1
        return pending.ticket

    def _end(self, pending: PendingTransfer, statuses: Iterable[FarStatus]) -> None:
        """End a ticket with a status for each name."""
        self._done.append(Done(pending.ticket, tuple(statuses)))
        self.pending.remove(pending)
