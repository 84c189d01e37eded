# SPDX-License-Identifier: Apache-2.0
"""The interface of a far tier: it finds pages, fills and drains staging slots, and answers later.

A tier never sees a block of the cache, and its answers are not trusted: a page counts only once it
was verified in its slot (page.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

import attrs

View = memoryview | bytearray
"""One staging slot: writable bytes."""


class FarStatus(enum.IntEnum):
    """The outcome for a name of a ticket. FOREIGN: the entry is of another model or format."""

    OK = 0
    MISSING = 1
    DAMAGED = 2
    FOREIGN = 3
    FULL = 4
    FAILED = 5


@attrs.frozen
class Done:
    """A ticket that has ended. statuses: one per name, in order."""

    ticket: int
    statuses: tuple[FarStatus, ...]


class FarTier(Protocol):
    """An asynchronous store of pages by name.

    A `submit_*` returns a ticket, never the same twice, or None if the tier accepts no more now. No
    call except `close` blocks longer than 1 ms. From a submit to its `Done` the views belong to the
    ticket, even after `cancel`. A tier may also have `wait(timeout_s)`, which returns as soon as
    `poll` has an answer, or after timeout_s: with it an idle exchange wakes at once, not by turns.
    And it may have `why(operation)`, which names the error of the latest "find", "load" or "store",
    for the log.
    """

    def attach(self, memory: View, slot_bytes: int) -> None:
        """Note the memory that contains the views of all later calls; called once, first.

        slot_bytes: of each view. Raises InvalidTier if the tier can keep no page of this size.
        """

    def submit_find(self, names: Sequence[str], lease_s: float) -> int | None:
        """Ask which names exist. Statuses: OK or MISSING. lease_s: how long to keep them."""

    def submit_load(self, names: Sequence[str], views: Sequence[View]) -> int | None:
        """Fill slots; OK means that `check_page` has verified the whole slot."""

    def submit_store(self, names: Sequence[str], views: Sequence[View]) -> int | None:
        """Keep the sealed pages of slots; an existing entry is not overwritten."""

    def cancel(self, ticket: int) -> None:
        """Ask for a ticket to end early; it still ends with one `Done`. Raises UnknownTicket."""

    def poll(self) -> list[Done]:
        """Return the tickets that ended since the last call."""

    def close(self, timeout_s: float) -> None:
        """Wait for open tickets up to timeout_s, then give them up."""


class BlockingStore(Protocol):
    """A store that `ThreadedTier` makes into a tier; its functions may block and raise.

    They are called from several threads.
    """

    def attach(self, memory: View, slot_bytes: int) -> None:
        """See `FarTier`."""

    def find(self, names: Sequence[str], lease_s: float) -> list[bool]:
        """Return for each name whether it exists."""

    def get(self, names: Sequence[str], views: Sequence[View]) -> Iterable[int | FarStatus]:
        """Fill slots, which are writable and not empty.

        Gives for each name the size of its entry, or why there is none. If it is an iterator, each
        page is verified while later ones are on their way. Once it has ended, or raised, nothing
        may write into a slot, which then holds another page.
        """

    def put(self, names: Sequence[str], views: Sequence[View]) -> list[FarStatus]:
        """Keep pages; an existing entry is not overwritten. Returns OK, FULL or FAILED for each.

        The views are writable, since a store may take their addresses, and not empty.
        """

    def remove(self, names: Sequence[str]) -> None:
        """Remove entries, so that they can be stored again."""

    def close(self) -> None:
        """Release connections and files."""
