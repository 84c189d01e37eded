# SPDX-License-Identifier: Apache-2.0
"""A sanitizer in a serving engine, controlled by environment variables.

KVCORE_SANITIZER=off|log|raise, by default log: `log` logs each finding once and lets the engine go
on, `raise` raises it after the step. KVCORE_SANITIZER_EVERY=n checks one request in n. If the
adapter fails, it logs one line and switches the sanitizer off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from kvcore.sanitizer.errors import UnsupportedEngine
from kvcore.sanitizer.findings import Finding
from kvcore.sanitizer.sanitizer import Sanitizer

LOG = logging.getLogger("kvcore.sanitizer")
MODES = ("log", "off", "raise")


class WrongKv(RuntimeError):
    """The engine read wrong KV; raised in the engine's own thread. finding: the first one of the
    step.
    """

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(str(finding))


def mode() -> str:
    """Read the mode from KVCORE_SANITIZER. Raises ValueError."""
    value = os.environ.get("KVCORE_SANITIZER", MODES[0])
    if value not in MODES:
        raise ValueError(f"KVCORE_SANITIZER is {value!r}: it is one of {', '.join(MODES)}")
    return value


def every() -> int:
    """Read the interval from KVCORE_SANITIZER_EVERY. Raises ValueError."""
    value = os.environ.get("KVCORE_SANITIZER_EVERY", "1")
    if not value.isdecimal() or int(value) == 0:
        raise ValueError(f"KVCORE_SANITIZER_EVERY is {value!r}: it is a number from 1 on")
    return int(value)


def check_version(engine: str, found: str, tested: tuple[str, ...]) -> None:
    """Raise UnsupportedEngine unless an adapter was tested with this version."""
    if found not in tested:
        raise UnsupportedEngine(engine=engine, found=found, tested=", ".join(tested))


class Guard:
    """Runs the adapter of an engine, reports findings, and switches off at the first error."""

    def __init__(self, attach: Callable[[], Sanitizer]) -> None:
        self.sanitizer: Sanitizer | None = None if mode() == "off" else attach()
        self._raises = mode() == "raise"
        self._num_suspicions = 0

    def observe(self, call: Callable[[Sanitizer], list[Finding] | None]) -> list[Finding]:
        """Run an observation of the adapter; return the findings, none once it is off."""
        if self.sanitizer is None:
            return []
        try:
            return call(self.sanitizer) or []
        except Exception as error:  # any error: the engine must go on
            LOG.error("the sanitizer is off from here on: %s: %s", type(error).__name__, error)
            self.sanitizer = None
            return []

    def report(self, found: list[Finding]) -> None:
        """Log findings and new suspicions. Raises WrongKv if the environment says so."""
        for finding in found:
            LOG.error("%s", finding, extra={"finding": finding})
        if self.sanitizer is not None:
            for suspicion in self.sanitizer.suspicions[self._num_suspicions :]:
                LOG.warning("%s", suspicion, extra={"finding": suspicion})
            self._num_suspicions = len(self.sanitizer.suspicions)
        if found and self._raises:
            raise WrongKv(found[0])
