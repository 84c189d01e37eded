# SPDX-License-Identifier: Apache-2.0
"""A separate process that runs calls one after another: plain data goes in, results come back.

Why a process: a thread shares Python's lock with its caller, so their small operations alternate
(docs/performance.md). Why forked: it starts in milliseconds with the caller's objects, including
models and patched methods, without a copy, an import or a guarded main module. Data that both
change must be in shared memory. A fork cannot use CUDA, and has none of the caller's threads: it
runs its calls on a new thread, since only a new thread creates a new thread pool of torch.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import marshal
import mmap
import os
import pickle
import select
import signal
import stat
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from kvcore_runtime.engine.errors import (
    ExecutorDied,
    ExecutorFailed,
    ExecutorNotStarted,
    NoSuchCore,
)

SPIN_SECONDS = 200e-6
"""How long the process polls for a call before it sleeps. The next step usually comes sooner, and
waking up takes 30 to 100 us."""
NAP_SECONDS = 20e-6
NUM_NAPS_MAX = 100
"""How often the caller polls for a reply, each time with a nap that takes 0.1 ms, before it sleeps
until it is woken. A nap ends on the caller's core and costs the process nothing. Waking the caller
costs the process time, and the system may then run the caller on the core of the process, before
its next call.
"""
SIZE_BYTES = 8
SENT_BYTES_MAX = 32 * 1024
"""Calls that are sent before their replies are read: if both sides sent more than the system keeps
for them, both would wait for the other. It keeps 64 KiB, of which half may be gaps."""


class Reply:
    """The result of a call, like a `concurrent.futures.Future` that the reader's thread fetches."""

    def __init__(self, worker: ForkedWorker) -> None:
        self._worker = worker
        self.answer: tuple[Any, BaseException | None] | None = None

    def exception(self) -> BaseException | None:
        """Wait; return the exception of the call, None if it returned."""
        while self.answer is None:
            self._worker.receive()
        return self.answer[1]

    def result(self) -> Any:
        """Wait; return the value of the call. Raises what the call raised, ExecutorDied."""
        error = self.exception()
        if error is not None:
            raise error
        return self.answer[0] if self.answer else None


class ForkedWorker:
    """Calls one object's methods, in order, in a process forked at the first call or by `begin`.

    The fork ends with this object, and with its process. Ctrl-C does not reach it. core: the only
    core that it uses; None for those of its caller. Raises NoSuchCore.
    """

    def __init__(self, target: object, core: int | None = None) -> None:
        if core is not None:
            allowed = os.sched_getaffinity(0)
            _stay_on(core)
            os.sched_setaffinity(0, allowed)
        self._target = target
        self._core = core
        self._waiting: collections.deque[Reply] = collections.deque()
        self._finalizer: weakref.finalize[Any, ForkedWorker] | None = None
        self._num_bytes_sent = 0  # no reply was expected
        self.process_id = 0

    def submit(self, method: Callable[..., Any], *arguments: Any) -> Reply:
        """Let the fork call a method of its copy of the object.

        arguments: types that marshal supports: numbers, strings, bytes, and lists, tuples, sets and
        dicts of these. Raises ValueError for others, ExecutorNotStarted. The reply reports a dead
        fork.
        """
        reply = Reply(self)
        self._send(method, arguments, reply)
        return reply

    def send(self, method: Callable[..., Any], *arguments: Any) -> None:
        """Call a method like `submit`, but without a reply. The fork ends if the method raises."""
        self._send(method, arguments, None)

    def _send(
        self, method: Callable[..., Any], arguments: tuple[Any, ...], reply: Reply | None
    ) -> None:
        self.begin()
        # The process is the same program, so it can read marshal's format, in a tenth of pickle's
        # time.
        call = marshal.dumps((method.__name__, arguments, reply is not None))
        self._num_bytes_sent += len(call)
        if self._num_bytes_sent > SENT_BYTES_MAX:
            while self._waiting:
                self.receive()
            self._num_bytes_sent = len(call)
        if reply is not None:
            self._waiting.append(reply)
        try:
            self._calls.write(len(call).to_bytes(SIZE_BYTES) + call)
            self._calls.flush()
        except (OSError, ValueError):  # the fork is gone, or buried
            self._bury()
        self._bell[0] += 1

    def receive(self) -> None:
        """Wait for the oldest pending reply."""
        for _ in range(NUM_NAPS_MAX):
            if self._poll.poll(0):
                break
            time.sleep(NAP_SECONDS)
        self._poll.poll()  # a Ctrl-C while waiting loses nothing
        try:
            answer = pickle.loads(self._read(int.from_bytes(self._read(SIZE_BYTES))))
        except (EOFError, OSError):
            self._bury()
        else:
            self._waiting.popleft().answer = answer

    def _read(self, num_bytes: int) -> bytearray:
        """Read the next bytes of replies. Raises EOFError."""
        found = bytearray()
        while len(found) < num_bytes:
            more = os.read(self._replies.fileno(), num_bytes - len(found))
            if not more:
                raise EOFError
            found += more
        return found

    def begin(self) -> None:
        """Make the fork unless it exists. Raises ExecutorNotStarted, and then changes nothing."""
        if self._finalizer is not None:
            return
        try:
            with contextlib.ExitStack() as opened:
                self._fork(opened)
                opened.pop_all()
        except OSError as error:
            raise ExecutorNotStarted(reason=str(error)) from None

    def _fork(self, opened: contextlib.ExitStack) -> None:
        """Make the fork. opened: collects what must be closed if that fails."""
        calls, self._calls = _pipe(opened)
        self._replies, replies = _pipe(opened)
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)
        self._bell = memoryview(shared_bytes(8)).cast("Q")
        caller = os.getpid()
        with warnings.catch_warnings():
            # Python warns about the threads that a fork lacks; it does not wait for any of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process_id = os.fork()
        if not self.process_id:
            self._replies.close()
            self._calls.close()
            if self._core is not None:
                _stay_on(self._core)
            _run(self._target, calls, replies, self._bell)
        calls.close()
        replies.close()
        ends = (self._calls, self._replies)
        self._finalizer = weakref.finalize(self, _end, *ends, self.process_id, caller)

    def _bury(self) -> None:
        """Fail all pending replies, since the fork has died."""
        if self._finalizer is not None and self._finalizer.detach() is not None:
            _close(self._calls, self._replies)
            _, status = os.waitpid(self.process_id, 0)
            self._exit_code = os.waitstatus_to_exitcode(status)
        for reply in self._waiting:
            reply.answer = (None, ExecutorDied(exit_code=self._exit_code))
        self._waiting.clear()


def shared_bytes(num_bytes: int) -> mmap.mmap:
    """Map bytes that this process shares with its forks. Raises ExecutorNotStarted."""
    try:
        return mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise ExecutorNotStarted(reason=str(error)) from None


def _pipe(opened: contextlib.ExitStack) -> tuple[io.BufferedReader, io.BufferedWriter]:
    """Open a pipe and register both ends with `opened`."""
    reading, writing = os.pipe()
    ends = os.fdopen(reading, "rb"), os.fdopen(writing, "wb")
    for end in ends:
        opened.enter_context(end)
    return ends


def _stay_on(core: int) -> None:
    """Pin the calling thread, and those that it will start, to one core."""
    try:
        os.sched_setaffinity(0, {core})
    except (OSError, OverflowError, TypeError, ValueError):
        raise NoSuchCore(core=core) from None


def _close(calls: io.BufferedIOBase, replies: io.BufferedIOBase) -> None:
    with contextlib.suppress(OSError):
        calls.close()
    replies.close()


def _end(
    calls: io.BufferedWriter, replies: io.BufferedReader, process_id: int, caller: int
) -> None:
    """End a fork by a message, since forks made later also hold its pipes."""
    if os.getpid() != caller:
        return
    with contextlib.suppress(OSError):
        calls.write(bytes(SIZE_BYTES))
    _close(calls, replies)
    os.waitpid(process_id, 0)


def _run(
    target: object, calls: io.BufferedReader, replies: io.BufferedWriter, bell: memoryview
) -> NoReturn:
    """Run the fork: serve calls until there are no more."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _close_sockets()
        gc.freeze()  # a garbage collection would copy the pages of all the caller's objects
        thread = threading.Thread(target=_serve, args=(target, calls, replies, bell))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def _close_sockets() -> None:
    """Close the fork's copies of sockets: with them, a port or a connection that the caller closes
    stays open, and whoever is at its other end waits for ever. Standard output stays.
    """
    for each in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # of the listing itself
            if each > 2 and stat.S_ISSOCK(os.fstat(each).st_mode):
                os.close(each)


@torch.inference_mode()
def _serve(
    target: object, calls: io.BufferedReader, replies: io.BufferedWriter, bell: memoryview
) -> None:
    torch.set_num_threads(torch.get_num_threads())  # of the caller; a new thread has all cores
    num_calls = 0
    while True:
        until = time.perf_counter() + SPIN_SECONDS
        while bell[0] == num_calls and time.perf_counter() < until:
            pass
        num_calls += 1
        size = int.from_bytes(calls.read(SIZE_BYTES))
        call = calls.read(size)
        if not size or len(call) < size:  # the end, or the caller has died
            return
        name, arguments, is_answered = marshal.loads(call)
        if not is_answered:
            getattr(target, name)(*arguments)
            continue
        try:
            answer = pickle.dumps((getattr(target, name)(*arguments), None))
        except BaseException as error:
            answer = _packed(error)
        try:
            replies.write(len(answer).to_bytes(SIZE_BYTES) + answer)
            replies.flush()
        except OSError:
            return


def _packed(error: BaseException) -> bytes:
    """Pack an error for the caller; only its text if it cannot be pickled."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        answer = pickle.dumps((None, error))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps((None, ExecutorFailed(error=repr(error))))
    return answer
