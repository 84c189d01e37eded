# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker of a far tier: after several failures in a row, nothing waits for it.

Each operation has a count of its own, since a tier may find pages and not give them. After such
failures a probe that is answered lets all operations try again, but one more failure of the same
one is enough, and each wait is twice the one before, until that operation works.
"""

from __future__ import annotations

from collections import Counter

NUM_FAILURES_MAX = 3
FIRST_WAIT_S, WAIT_S_MAX = 1.0, 60.0


class Breaker:
    """Counts failures in a row, by operation. is_down: only probes may be submitted, when due."""

    def __init__(self) -> None:
        self.is_down = False
        self._num_failures: Counter[str] = Counter()
        self._cause = ""
        """The operation whose failures took the tier down last."""
        self._wait_s = FIRST_WAIT_S
        self._next_probe = 0.0

    def failed(self, operation: str, now: float) -> None:
        """Note that a ticket failed or was given up."""
        self._num_failures[operation] += 1
        if not self.is_down and self._num_failures[operation] >= NUM_FAILURES_MAX:
            if operation != self._cause:
                self._cause, self._wait_s = operation, FIRST_WAIT_S
            self.is_down = True
            self._wait(now)

    def worked(self, operation: str) -> None:
        """Note that a ticket was answered in time, which shows nothing of other operations. But
        nothing waits for a store, so its failures count only while nothing else works.
        """
        for each in {operation, "store"}:
            del self._num_failures[each]
            if each == self._cause:
                self._wait_s, self.is_down = FIRST_WAIT_S, False

    def probe_failed(self, now: float) -> None:
        """Note that a probe was not answered."""
        self._wait(now)

    def probe_worked(self) -> None:
        """Note that a probe was answered: the tier is up, on trial for what failed."""
        self.is_down = False
        for operation in self._num_failures:
            self._num_failures[operation] = min(self._num_failures[operation], NUM_FAILURES_MAX - 1)

    def is_due(self, now: float) -> bool:
        """Return whether a probe is to be sent now."""
        return self.is_down and now >= self._next_probe

    def _wait(self, now: float) -> None:
        self._next_probe = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, WAIT_S_MAX)
