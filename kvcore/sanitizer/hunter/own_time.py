# SPDX-License-Identifier: Apache-2.0
"""The time that a process took itself: while it computed, and while all its threads slept.

A busy loop computes and a deadlock sleeps, so both take time. A process that could go on but gets
no processor takes none, however busy the machine is.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

SLEEPS = ("S", "Z")
"""States of a thread that waits for an event, or has ended; it is neither runnable (R), nor waits
for a disk (D), nor is stopped (T).
"""
READING_SECONDS = 2.0
"""A reading says nothing about more than this time before it: the reader may get no processor."""


class OwnTime:
    """The time of a process from now on. It must be read every second: its state at a reading
    counts for the time since the last one. Without /proc it is the time of the clock.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._seconds = pid, 0.0
        self._read_at, self._computed = time.monotonic(), _computed(pid)

    def seconds(self) -> float:
        """Return the time since the start."""
        now, computed = time.monotonic(), _computed(self._pid)
        if all(state in SLEEPS for state in _states(self._pid)):
            self._seconds += min(now - self._read_at, READING_SECONDS)
        else:
            self._seconds += computed - self._computed
        self._read_at, self._computed = now, computed
        return self._seconds


def _computed(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = _fields(Path(f"/proc/{pid}/stat"))
    ticks = sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _states(pid: int) -> list[str]:
    """Return the states of the threads of a process."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return [fields[0] for fields in map(_fields, threads) if fields]


def _fields(path: Path) -> list[str]:
    """Return what `stat` says of a process or thread, behind its name; nothing if it is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
