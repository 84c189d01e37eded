# SPDX-License-Identifier: Apache-2.0
"""Makes an attempt in a child process, so that an endless call or a crash counts as a failure.

Before each step the child sets a timer of its own processor time; the signal ends it even inside
compiled code. It records its steps in memory that both processes share. If no process can be
forked, the attempt is made in this one.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import struct
import traceback
import warnings
from collections.abc import Callable, Sequence
from mmap import mmap
from pathlib import Path
from typing import TypeVar

import attrs

from kvcore.replay.records.attempt import (
    Attempt,
    Broken,
    Going,
    Items,
    attempt,
    read_items,
)
from kvcore.replay.records.rerun import Backend
from kvcore.trace.calls import Call
from kvcore.types.config import Config
from kvcore.types.errors import KvcoreError

T = TypeVar("T")
HANG, CRASH = "hang", "crash"


@attrs.frozen
class Tried:
    """The result of an attempt. calls, is_misuse: those of the calls made, if requested."""

    broken: Broken | None
    calls: tuple[Call, ...] = ()
    is_misuse: tuple[bool, ...] = ()


@attrs.frozen
class Killed:
    """A child process that a signal ended, and the step that it was in."""

    number: int
    step: int


def tried(
    config: Config,
    items: Items,
    backends: Sequence[Backend],
    name: str | None,
    *,
    clamps: bool = False,
    returns_calls: bool = False,
    folder: Path | None = None,
) -> Tried:
    """Make items as `attempt` does, in a child process; "hang" and "crash" are failures, too.

    returns_calls: whether to return the calls. folder: where the last manager is recorded.
    """

    def work(going: Going) -> Tried:
        run, broken = attempt(
            config, items, backends, name, clamps=clamps, going=going, folder=folder
        )
        return _with_calls(run, broken) if returns_calls else Tried(broken)

    done = in_child(work)
    if isinstance(done, Tried):
        return done
    what = HANG if done.number == signal.SIGPROF else CRASH
    if name not in (None, what):
        return Tried(None)

    def before(going: Going) -> Tried:
        run, _ = attempt(config, items[: done.step], backends, what, clamps=clamps, going=going)
        call = run.call_of(items[done.step])
        run.is_misuse.append(False)
        ending = "does not end" if what == HANG else f"ends the process by signal {done.number}"
        return _with_calls(run, Broken(what, f"{call} {ending}", done.step))

    again = in_child(before)
    return again if isinstance(again, Tried) else Tried(None)


def read_in_child(path: str | os.PathLike[str], backend: Backend) -> tuple[Config, Items]:
    """Read the items of a record, up to a call that does not return. Raises as `read_items`."""
    done = in_child(lambda going: read_items(path, backend, going))
    if isinstance(done, Killed):
        last = done.step
        done = in_child(lambda going: read_items(path, backend, going, last))
    assert not isinstance(done, Killed)
    return done


def in_child(work: Callable[[Going], T]) -> T | Killed:
    """Run `work` in a child process; returns its result, or the signal that ended the process.

    work: gets a function to call at the start of each step, with the step's number and the seconds
    of processor time that it may take. Raises its KvcoreError or OSError.
    """
    if not hasattr(os, "fork"):
        return work(lambda *_: None)
    place = mmap(-1, 8)
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: none runs kvcore
        child = os.fork()
    if not child:
        os.close(reads)
        _be_child(work, place, writes)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        data = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Killed(os.WTERMSIG(status), struct.unpack("q", place)[0])
    if status:
        raise RuntimeError("an attempt raised in its child process; its traceback is above")
    given, error = pickle.loads(data)  # written by our own child
    if error is not None:
        raise error
    result: T = given
    return result


def _be_child(work: Callable[[Going], object], place: mmap, writes: int) -> None:
    """Run `work`, write its result, and exit."""
    code = 1
    try:
        gc.disable()
        for number in (signal.SIGPROF, signal.SIGINT, signal.SIGPIPE):  # ends without a traceback
            signal.signal(number, signal.SIG_DFL)

        def going(step: int, seconds: float) -> None:
            struct.pack_into("q", place, 0, step)
            signal.setitimer(signal.ITIMER_PROF, seconds)

        try:
            given, error = work(going), None
        except (KvcoreError, OSError) as raised:
            given, error = None, raised
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = pickle.dumps((given, error))
        with os.fdopen(writes, "wb") as file:
            file.write(data)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _with_calls(run: Attempt, broken: Broken | None) -> Tried:
    return Tried(broken, tuple(run.calls), tuple(run.is_misuse))
