# SPDX-License-Identifier: Apache-2.0
"""What a far tier does: it finds, fills and drains staging slots, and answers later.

A tier never sees a block of the cache. Nothing that it says is believed: a page counts when it was
verified in its slot (page.py).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import attrs

View = memoryview
"""One staging slot: writable bytes."""


class FarStatus(enum.IntEnum):
    """How a name of a ticket ended. FOREIGN: the entry is of another model or format."""

    OK = 0
    MISSING = 1
    DAMAGED = 2
    FOREIGN = 3
    FULL = 4
    FAILED = 5


@attrs.frozen
class Done:
    """A ticket that has ended. statuses: one for each of its names, in order."""

    ticket: int
    statuses: tuple[FarStatus, ...]


class FarTier(Protocol):
    """An asynchronous store of pages by name.

    A `submit_*` returns a ticket, never the same twice, or None if the tier takes no more now. No
    call but `close` blocks longer than 1 ms. From a submit to its `Done` the views belong to the
    ticket, also after `cancel`.
    """

    def attach(self, memory: View) -> None:
        """Note the memory in which all views of later calls lie; called once, first."""

    def submit_find(self, names: Sequence[str], lease_s: float) -> int | None:
        """Ask which names are there; statuses: OK or MISSING. lease_s: wanted for so long."""

    def submit_load(self, names: Sequence[str], views: Sequence[View]) -> int | None:
        """Fill slots; OK means that `check_page` has verified the whole slot."""

    def submit_store(self, names: Sequence[str], views: Sequence[View]) -> int | None:
        """Keep the sealed pages of slots; an entry that is there stays as it is."""

    def cancel(self, ticket: int) -> None:
        """Ask that a ticket ends early; it still ends with one `Done`. Raises UnknownTicket."""

    def poll(self) -> list[Done]:
        """The tickets that ended since the last call."""

    def close(self, timeout_s: float) -> None:
        """Give up what is on its way after this time."""


class BlockingStore(Protocol):
    """The functions of a store that `ThreadedTier` makes a tier of; each may block and raise.

    It is called from several threads.
    """

    def attach(self, memory: View) -> None:
        """See `FarTier`."""

    def find(self, names: Sequence[str], lease_s: float) -> list[bool]:
        """Which names are there."""

    def get(self, names: Sequence[str], views: Sequence[View]) -> list[int | FarStatus]:
        """Fill slots; for each name the bytes that were stored, or why there are none."""

    def put(self, names: Sequence[str], views: Sequence[View]) -> list[FarStatus]:
        """Keep pages: OK, FULL or FAILED for each; what is there is not overwritten."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove entries, so that they can be stored anew."""

    def close(self) -> None:
        """Release connections and files."""
