# SPDX-License-Identifier: Apache-2.0
"""Several processes that try the edges of one level together.

Nodes are sent in chunks, in order, to any idle process, and the results are merged in that order:
the counts are those of one process. The meanings of the hashes in a node are sent along, since the
receiving process may never have met the request that had them. A process that dies is an error, not
a result.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import attrs

from kvcore.check.search.expand import Expander, Expansion, taken_notes
from kvcore.check.search.frontier import Squeezer
from kvcore.check.search.process_memory import memory_bytes
from kvcore.check.world.model import Violation
from kvcore.oracle.prefixes import Learnt

CHUNK = 16
"""Nodes that a process tries at a time."""


@attrs.frozen
class Result:
    """The result of a chunk: each node's edges, new hashes, notes.

    grown_bytes: growth of the process. kept_bytes: memory of its names.
    """

    expansions: list[Expansion]
    learnt: list[Learnt]
    notes: Any
    grown_bytes: int
    kept_bytes: int


@contextmanager
def leaving_interrupts() -> Iterator[None]:
    """Let the processes that are started inside leave interrupts to this process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets interrupts, or may change their handler
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Workers:
    """Processes that wait for nodes. make: makes an expander in each of them. squeezer:
    decompresses the nodes.
    """

    def __init__(self, make: Callable[[], Expander], squeezer: Squeezer, num_workers: int) -> None:
        context = get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(num_workers):
            own, other = context.Pipe()
            process = context.Process(target=_serve, args=(other, make, squeezer), daemon=True)
            with leaving_interrupts():
                process.start()
            other.close()
            self._ends.append(own)
            self._processes.append(process)
        self._grown = [0] * num_workers
        self._kept = [0] * num_workers
        self._learnt: list[Learnt] = []
        self._num_sent = [0] * num_workers

    def learn(self, expander: Expander) -> None:
        """Send all processes what another expander has learnt so far."""
        prefixes = getattr(expander.model, "prefixes", None)
        self._learnt += [] if prefixes is None else prefixes.news()

    def expand(self, level: Sequence[bytes]) -> Iterator[Result]:
        """Expand the nodes of a level, chunk by chunk in their order."""
        chunks = [level[at : at + CHUNK] for at in range(0, len(level), CHUNK)]
        idle, busy = list(range(len(self._ends))), dict[int, int]()
        done: dict[int, Result] = {}
        sent = given = 0
        while given < len(chunks):
            while idle and sent < len(chunks):
                worker = idle.pop(0)
                news = self._learnt[self._num_sent[worker] :]
                self._num_sent[worker] = len(self._learnt)
                self._ends[worker].send((news, list(chunks[sent])))
                busy[worker] = sent
                sent += 1
            for end in wait([self._ends[worker] for worker in busy]):
                worker = self._ends.index(end)  # type: ignore[arg-type] # one of ours
                result: Result = self._ends[worker].recv()
                done[busy.pop(worker)] = result
                idle.append(worker)
                self._learnt += result.learnt
                self._grown[worker] = result.grown_bytes
                self._kept[worker] = result.kept_bytes
            while given in done:
                yield done.pop(given)
                given += 1

    @property
    def grown_bytes(self) -> int:
        """Return how many bytes all processes have grown by."""
        return sum(self._grown)

    @property
    def kept_bytes(self) -> int:
        """Return the memory of the names that all processes keep, in bytes."""
        return sum(self._kept)

    def close(self) -> None:
        """End all processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(end: Connection, make: Callable[[], Expander], squeezer: Squeezer) -> None:
    """Try the edges of the nodes that arrive, until the other end is closed."""
    begun = memory_bytes()
    expander = make()
    expander.squeezer = squeezer
    prefixes = getattr(expander.model, "prefixes", None)
    try:
        while True:
            news, nodes = end.recv()
            if prefixes is not None:
                prefixes.take_in(news)
            expansions = [expander.expand(node) for node in nodes]
            for each in expansions:
                if each.broken is not None:
                    # The process that receives a violation makes its steps again.
                    each.broken = Violation(each.broken.name, each.broken.detail, ())
            learnt = [] if prefixes is None else prefixes.news()
            notes, grown = taken_notes(expander.model), max(0, memory_bytes() - begun)
            end.send(Result(expansions, learnt, notes, grown, expander.seen.num_bytes))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        os._exit(0)
