# SPDX-License-Identifier: Apache-2.0
"""Requests whose time has come: read from a trace no earlier than needed.

Who has arrived waits in order; behind WAITING_MAX of them nothing is read, so that a trace
of any length, replayed on an engine that is too slow for it, is never held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import attrs

from kvcore.replay.workload import TraceRequest

WAITING_MAX = 65_536


@attrs.frozen
class Arrived:
    """A request of the trace, and its number there, from 0, among those that were read."""

    number: int
    request: TraceRequest


class Arrivals:
    """The requests of a trace, by their time.

    most: read no more than this many, None for all. accept: says whether a request that is read is
    to wait; else it is forgotten. num_read: requests read so far.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        most: int | None,
        accept: Callable[[Arrived], bool],
    ) -> None:
        self._source = iter(requests)
        self._most = most
        self._accept = accept
        self._next: Arrived | None = None
        self.waiting: deque[Arrived] = deque()
        self.num_read = 0

    def pull(self, now: float) -> None:
        """Let those wait whose time is not after now."""
        while len(self.waiting) < WAITING_MAX:
            arrived = self._peek()
            if arrived is None or arrived.request.arrival > now:
                return
            self.waiting.append(arrived)
            self._next = None

    def next_time(self) -> float | None:
        """When the next one arrives that does not wait yet; None if there is none."""
        arrived = self._peek()
        return None if arrived is None else arrived.request.arrival

    def _peek(self) -> Arrived | None:
        while self._next is None and (self._most is None or self.num_read < self._most):
            request = next(self._source, None)
            if request is None:
                self._most = self.num_read
                return None
            arrived = Arrived(self.num_read, request)
            self.num_read += 1
            if self._accept(arrived):
                self._next = arrived
        return self._next
