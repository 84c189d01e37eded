# SPDX-License-Identifier: Apache-2.0
"""The requests that have arrived, read from a trace only when needed.

Arrived requests wait in order. Beyond WAITING_MAX of them nothing is read, so that a long trace on
a slow engine is never held in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import attrs

from kvcore.replay.workload import TraceRequest

WAITING_MAX = 65_536


@attrs.frozen
class Arrived:
    """A request of the trace, and its number among those read, from 0."""

    number: int
    request: TraceRequest


class Arrivals:
    """The requests of a trace, by their time.

    most: maximum number to read, None for all. accept: returns whether a request that was read is
    queued; else it is dropped. num_read: requests read so far.
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
        """Queue the requests that have arrived by `now`."""
        while len(self.waiting) < WAITING_MAX:
            arrived = self._peek()
            if arrived is None or arrived.request.arrival > now:
                return
            self.waiting.append(arrived)
            self._next = None

    def next_time(self) -> float | None:
        """Return the time of the next arrival; None if there is none."""
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
