# SPDX-License-Identifier: Apache-2.0
"""A process that computes or sleeps takes time of its own; one that gets no processor does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcore.sanitizer.hunter.own_time import OwnTime

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
COMPUTES = "while True: pass"
DEADLOCKS = """
import threading
one, other, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
def take(first, second):
    with first:
        both.wait()
        second.acquire()
threading.Thread(target=take, args=(other, one), daemon=True).start()
take(one, other)
"""
WAITS_IN_TURNS = "import time\nwhile True: time.sleep(0.01)"


@contextmanager
def running(program: str, first: str = "") -> Iterator[int]:
    """Run a program, from the moment on in which it has done what is first."""
    text = f"{first}\nprint(flush=True)\n{program}"
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def read(clock: OwnTime, seconds: float, most: float) -> float:
    """Read a clock for this many seconds, or until it shows the most."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and clock.seconds() < most:
        time.sleep(0.1)
    return clock.seconds()


@pytest.mark.parametrize("program", [COMPUTES, DEADLOCKS, WAITS_IN_TURNS])
def test_a_process_that_computes_or_waits_takes_time(program: str) -> None:
    with running(program) as pid:
        assert read(OwnTime(pid), 60, 1) >= 1


def test_a_process_that_gets_hardly_any_processor_takes_hardly_any_time() -> None:
    if not hasattr(os, "SCHED_IDLE"):
        pytest.skip("this system does not schedule idle processes")
    pinned = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    idle = f"{pinned}; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    with running(COMPUTES, pinned), running(COMPUTES, idle) as pid:
        assert read(OwnTime(pid), 3, 1) < 1


def test_a_process_that_is_stopped_takes_no_time() -> None:
    with running(COMPUTES) as pid:
        os.kill(pid, signal.SIGSTOP)
        assert read(OwnTime(pid), 2, 1) < 0.5


def test_a_reader_that_gets_no_processor_blames_nobody() -> None:
    with running(DEADLOCKS) as pid:
        clock = OwnTime(pid)
        time.sleep(3)
        assert clock.seconds() <= 2
