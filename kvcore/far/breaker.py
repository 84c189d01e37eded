# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker of a far tier: after several failures in a row, nothing waits for it."""

from __future__ import annotations

NUM_FAILURES_MAX = 3
FIRST_WAIT_S, WAIT_S_MAX = 1.0, 60.0


class Breaker:
    """Counts failures. is_down: only probes may be submitted, when they are due."""

    def __init__(self) -> None:
        self.is_down = False
        self._num_failures = 0
        self._wait_s = FIRST_WAIT_S
        self._next_probe = 0.0

    def failed(self, now: float, *, probe: bool = False) -> None:
        """Note that a ticket failed or was given up; a failed probe doubles the wait."""
        self._num_failures += 1
        if self.is_down:
            if probe:
                self._wait_s = min(2 * self._wait_s, WAIT_S_MAX)
                self._next_probe = now + self._wait_s
        elif self._num_failures >= NUM_FAILURES_MAX:
            self.trip(now)

    def trip(self, now: float) -> None:
        """Mark the tier as down."""
        self.is_down, self._wait_s = True, FIRST_WAIT_S
        self._next_probe = now + self._wait_s

    def worked(self) -> None:
        """Note that a ticket was answered in time, which marks the tier as up."""
        self.is_down, self._num_failures = False, 0

    def is_due(self, now: float) -> bool:
        """Return whether a probe is to be sent now."""
        return self.is_down and now >= self._next_probe
