# SPDX-License-Identifier: Apache-2.0
"""A forked worker: what goes in and comes back, errors, and the end of either process."""

import errno
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcore_runtime.cache.errors import TierFailed
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.errors import (
    ExecutorDied,
    ExecutorFailed,
    ExecutorNotStarted,
    NoSuchCore,
)
from kvcore_runtime.engine.forked_worker import ForkedWorker
from kvcore_runtime.errors import ShapeMismatch

from kvcore import Config
from tests.helpers.open_files import open_files
from tests.runtime.model.questions import MODELS, model_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux only")


class Desk:
    """A called object that remembers its earlier calls."""

    def __init__(self) -> None:
        self.reported: list[Any] = []

    def send(self, value: Any) -> list[Any]:
        self.reported.append(value)
        return self.reported

    def fail(self, kind: str) -> None:
        raise ERRORS[kind]

    def die(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def multiply(self) -> int:
        """Use torch's threads; returns how many threads the process has then."""
        ones = torch.ones(512, 512)
        assert float((ones @ ones).exp().isinf().sum()) == 512 * 512
        return len(list(Path("/proc/self/task").iterdir()))

    def cores(self) -> set[int]:
        return os.sched_getaffinity(0)

    def process_id(self) -> int:
        return os.getpid()


DESK = Desk()


TIER_FAILED = TierFailed(key="k", place="p", reason="r")
ERRORS: dict[str, Exception] = {
    "mismatch": ShapeMismatch(name="k", expected=(1,), actual=(2,)),
    "tier failed": TIER_FAILED,
    "unsendable": ValueError(lambda: None),
}


def wait_for(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def is_gone(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_socket_that_the_caller_closes_is_closed() -> None:
    desk = Desk()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        near = socket.create_connection(address)
        far, _ = server.accept()
        worker = ForkedWorker(desk)
        assert worker.submit(desk.send, 1).result() == [1]
        far.close()
    with near:
        near.settimeout(20.0)
        assert near.recv(1) == b""
    socket.create_server(address).close()
    assert worker.submit(desk.send, 2).result() == [1, 2]


def test_calls_run_in_order_on_a_copy_of_the_object() -> None:
    desk = Desk()
    desk.send("before")
    worker = ForkedWorker(desk)
    replies = [worker.submit(desk.send, each) for each in ("a", "b", "c")]
    assert replies[2].result() == ["before", "a", "b", "c"]
    assert replies[0].result() == ["before", "a"]
    assert desk.reported == ["before"]


def test_what_is_told_runs_in_its_turn_and_has_no_reply() -> None:
    worker = ForkedWorker(DESK)
    first = worker.submit(DESK.send, 1)
    worker.send(DESK.send, 2)
    assert worker.submit(DESK.send, 3).result() == [1, 2, 3]
    assert first.result() == [1]
    worker.send(DESK.fail, "mismatch")
    with pytest.raises(ExecutorDied, match="with exit code 0"):
        worker.submit(DESK.send, 4).result()


def test_what_is_no_plain_data_is_refused_and_leaves_the_worker_as_it_was() -> None:
    worker = ForkedWorker(DESK)
    first = worker.submit(DESK.send, 1)
    with pytest.raises(ValueError, match="unmarshallable"):
        worker.submit(DESK.send, DESK)
    assert worker.submit(DESK.send, 2).result() == [1, 2]
    assert first.result() == [1]


def test_more_than_the_system_keeps_may_be_told() -> None:
    worker = ForkedWorker(DESK)
    large = bytes(9 << 10)
    replies = []
    for _ in range(20):
        worker.send(DESK.send, large)
        replies.append(worker.submit(DESK.send, large))
    assert [len(each.result()) for each in replies] == [*range(2, 42, 2)]


def test_large_calls_and_large_replies_do_not_wait_for_each_other() -> None:
    worker = ForkedWorker(DESK)
    large = bytes(1 << 20)
    replies = [worker.submit(DESK.send, each) for each in (1, large, large, 2, large)]
    assert replies[4].result() == [1, large, large, 2, large]


def test_errors_keep_their_kind_their_fields_and_where_they_rose() -> None:
    worker = ForkedWorker(DESK)
    with pytest.raises(ShapeMismatch, match=r"k has shape \(2,\), expected \(1,\)") as caught:
        worker.submit(DESK.fail, "mismatch").result()
    assert caught.value.fields == {"name": "k", "expected": (1,), "actual": (2,)}
    assert "in fail" in "".join(caught.value.__notes__)
    error = worker.submit(DESK.fail, "tier failed").exception()
    assert isinstance(error, TierFailed)
    assert (str(error), error.key) == (str(TIER_FAILED), "k")


def test_an_error_that_cannot_be_sent_is_told_by_another() -> None:
    worker = ForkedWorker(DESK)
    with pytest.raises(ExecutorFailed, match=r"raised ValueError.*lambda"):
        worker.submit(DESK.fail, "unsendable").result()
    assert worker.submit(DESK.send, 1).result() == [1]


SYSTEM_CALLS = [(os, "pipe"), (os, "fork"), (mmap, "mmap")]


@pytest.mark.parametrize(("module", "name"), SYSTEM_CALLS)
def test_a_worker_that_the_system_refuses_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    worker, before = ForkedWorker(DESK), open_files()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse)
        with pytest.raises(ExecutorNotStarted, match=r"started: .*Cannot allocate memory"):
            worker.submit(DESK.send, 1)
    assert open_files() <= before
    assert worker.submit(DESK.send, 2).result() == [2]


def refuse(*_: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_worker_is_told_to_all_who_wait_and_who_come(number: signal.Signals) -> None:
    worker = ForkedWorker(DESK)
    replies = [worker.submit(DESK.die, int(number)), worker.submit(DESK.send, 1)]
    for reply in replies:
        with pytest.raises(ExecutorDied, match=f"has ended, with exit code -{number}"):
            reply.result()
    with pytest.raises(ExecutorDied):
        worker.submit(DESK.send, 1).result()


def test_ctrl_c_leaves_the_worker_to_its_caller() -> None:
    worker = ForkedWorker(DESK)
    worker.submit(DESK.die, int(signal.SIGINT)).result()
    assert worker.submit(DESK.send, 1).result() == [1]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_worker_computes_with_as_many_threads_as_its_caller(num_threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        DESK.multiply()
        # One more waits for the one that computes.
        assert ForkedWorker(DESK).submit(DESK.multiply).result() == 1 + num_threads
    finally:
        torch.set_num_threads(before)


def test_a_worker_stays_on_the_core_that_it_is_given() -> None:
    allowed = os.sched_getaffinity(0)
    for core in allowed:
        assert ForkedWorker(DESK, core).submit(DESK.cores).result() == {core}
    assert ForkedWorker(DESK).submit(DESK.cores).result() == allowed
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize("core", [-1, 100_000, 2**70, "0"])
def test_a_core_that_is_not_there_is_refused_before_anything_is_forked(core: Any) -> None:
    allowed = os.sched_getaffinity(0)
    with pytest.raises(NoSuchCore, match=f"core {core!r} is none that this process may run on"):
        ForkedWorker(DESK, core)
    assert os.sched_getaffinity(0) == allowed


def test_an_engine_refuses_a_core_that_is_not_there() -> None:
    groups = make_groups(MODELS["full"], 16)
    with pytest.raises(NoSuchCore, match="core 100000 is none"):
        Engine(
            model_of(MODELS["full"]),
            Config(20, groups=groups, max_in_flight=1),
            EngineOptions(executor_core=100_000),
        )


def test_a_worker_ends_with_its_object_though_later_forks_hold_its_connection() -> None:
    first, second = ForkedWorker(DESK), ForkedWorker(DESK)
    ids = [each.submit(DESK.process_id).result() for each in (first, second)]
    del first
    assert is_gone(ids[0])
    assert not is_gone(ids[1])


PROGRAM = """
import os
from kvcore_runtime.engine.forked_worker import ForkedWorker
class Desk:
    def process_id(self):
        return os.getpid()
desk = Desk()
workers = [ForkedWorker(desk) for _ in range(2)]
print(*(each.submit(desk.process_id).result() for each in workers))
"""


def test_workers_end_at_the_end_of_their_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    ids = [int(each) for each in done.stdout.split()]
    assert len(ids) == 2
    for each in ids:
        wait_for(partial(is_gone, each))


class Caller(Desk):
    """An object whose process has two workers of its own."""

    def start(self) -> list[int]:
        self.workers = [ForkedWorker(DESK) for _ in range(2)]
        return [each.submit(DESK.process_id).result() for each in self.workers]


def test_workers_end_when_their_process_is_killed() -> None:
    caller = Caller()
    process = ForkedWorker(caller)
    ids = process.submit(caller.start).result()
    assert len(ids) == 2
    dead = process.submit(caller.die, int(signal.SIGKILL))
    with pytest.raises(ExecutorDied, match="9"):
        dead.result()
    for each in ids:
        wait_for(partial(is_gone, each))
