# SPDX-License-Identifier: Apache-2.0
"""Makes a far tier from a store with blocking functions, by threads with bounded queues.

A page that was read is verified here, in its slot. A damaged page is removed by name before its
ticket ends: stores never overwrite, so the damage would stay forever.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

import attrs

from kvcore.far.errors import UnknownTicket
from kvcore.far.page import check_pages
from kvcore.far.tier import BlockingStore, Done, FarStatus, View

KINDS = ("find", "get", "put")
"""Kinds of operations; each has a thread."""
OPERATIONS = dict(zip(("find", "load", "store"), KINDS, strict=True))
"""The kinds, by what a tier calls them."""
HELD_UP_S = 0.25
"""If one get takes longer than this many seconds, a second thread begins the next ones. It ends
when none waits: two threads that always run would wait for each other, for Python's lock and for
cores.
"""
NUM_WAITING_MAX = 64
"""The most tickets of each kind of operation that wait for a thread."""


@attrs.define(eq=False)
class _Job:
    ticket: int
    names: tuple[str, ...]
    views: tuple[View, ...] = ()
    lease_s: float = 0.0
    is_cancelled: bool = False


class ThreadedTier:
    """See `FarTier`. Its threads start with the first ticket, and end with the process."""

    def __init__(self, store: BlockingStore) -> None:
        self._store = store
        self._numbers = itertools.count()
        self._jobs: dict[int, _Job] = {}
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._waited: list[Done] = []
        """What `wait` has taken, for the next `poll`."""
        self._queues: dict[str, SimpleQueue[_Job | None]] = {kind: SimpleQueue() for kind in KINDS}
        self._threads: dict[str, threading.Thread] = {}
        self._errors: dict[str, str] = {}
        """The name of the error of the latest operation of each kind that raised."""
        self._is_closed = False
        self._got_at = 0.0
        """When a thread began its latest get."""

    def attach(self, memory: View, slot_bytes: int) -> None:
        """See `FarTier`."""
        self._store.attach(memory, slot_bytes)

    def submit_find(self, names: Sequence[str], lease_s: float) -> int | None:
        """See `FarTier`."""
        return self._submit("find", _Job(next(self._numbers), tuple(names), lease_s=lease_s))

    def submit_load(self, names: Sequence[str], views: Sequence[View]) -> int | None:
        """See `FarTier`."""
        return self._submit("get", _Job(next(self._numbers), tuple(names), tuple(views)))

    def submit_store(self, names: Sequence[str], views: Sequence[View]) -> int | None:
        """See `FarTier`."""
        return self._submit("put", _Job(next(self._numbers), tuple(names), tuple(views)))

    def cancel(self, ticket: int) -> None:
        """See `FarTier`: an operation that a thread has begun is completed."""
        if ticket not in self._jobs:
            raise UnknownTicket(ticket=ticket)
        self._jobs[ticket].is_cancelled = True

    def poll(self) -> list[Done]:
        """See `FarTier`."""
        if self._queues["get"].qsize() and time.monotonic() - self._got_at > HELD_UP_S:
            with contextlib.suppress(RuntimeError):  # the system has no thread for it now
                self._start("get", name="second", waits=False)
        done, self._waited = self._waited, []
        with contextlib.suppress(Empty):
            while True:
                done.append(self._done.get_nowait())
        for each in done:
            del self._jobs[each.ticket]
        return done

    def wait(self, timeout_s: float) -> None:
        """See `FarTier`: sleep, so that the threads that transfer pages have the core."""
        if not self._waited:
            with contextlib.suppress(Empty):
                self._waited.append(self._done.get(timeout=timeout_s))

    def why(self, operation: str) -> str:
        """See `FarTier`. Without the text of an error, which may tell names or a password."""
        return self._errors.get(OPERATIONS[operation], "")

    def close(self, timeout_s: float) -> None:
        """See `FarTier`. Threads that still wait for the store are not joined, and begin no more:
        a store that is closed would connect again.
        """
        self._is_closed = True
        end = time.monotonic() + timeout_s
        for queue in (*self._queues.values(), self._queues["get"]):
            queue.put(None)
        for thread in self._threads.values():
            thread.join(max(0.0, end - time.monotonic()))
        for job in list(self._jobs.values()):
            job.is_cancelled = True
        with contextlib.suppress(Exception):  # of the client library
            self._store.close()

    def _submit(self, kind: str, job: _Job) -> int | None:
        if self._is_closed:
            return None
        for each in KINDS:
            self._start(each, name=each, waits=True)
        if self._queues[kind].qsize() >= NUM_WAITING_MAX:
            return None
        self._jobs[job.ticket] = job
        self._queues[kind].put(job)
        return job.ticket

    def _start(self, kind: str, *, name: str, waits: bool) -> None:
        """Start the thread of a name, unless it runs. waits: for work, else it ends without any."""
        if name not in self._threads or not self._threads[name].is_alive():
            thread = threading.Thread(
                target=self._serve, args=(kind, waits), name=f"kvcore-far-{name}", daemon=True
            )
            thread.start()
            self._threads[name] = thread

    def _serve(self, kind: str, waits: bool) -> None:
        run = {"find": self._find, "get": self._get, "put": self._put}[kind]
        with contextlib.suppress(Empty):
            while (job := self._queues[kind].get(waits)) is not None:
                statuses = (FarStatus.FAILED,) * len(job.names)
                if not job.is_cancelled:
                    self._errors.pop(kind, None)
                    try:
                        statuses = tuple(run(job))
                    except Exception as error:  # of the client library: FAILED
                        self._errors[kind] = type(error).__name__
                self._done.put(Done(job.ticket, statuses))

    def _find(self, job: _Job) -> list[FarStatus]:
        found = self._store.find(job.names, job.lease_s)
        return [FarStatus.OK if each else FarStatus.MISSING for each in found]

    def _put(self, job: _Job) -> list[FarStatus]:
        return self._store.put(job.names, job.views)

    def _get(self, job: _Job) -> list[FarStatus]:
        self._got_at = time.monotonic()
        got = self._store.get(job.names, job.views)
        return check_pages(job.names, job.views, got, self._store.remove)
