# SPDX-License-Identifier: Apache-2.0
"""One manager, one call at a time: a call that meets another one raises, and nothing is lost."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore import Config, KVCacheManager, Request, Verdict
from kvcore.errors import ConcurrentCall
from kvcore.record.recorder import Recorder
from kvcore.replay.records.rerun import rerun
from tests.conftest import Backend
from tests.helpers.stories import add, make

PYTHON = pytest.mark.parametrize("backend", ["python"], indirect=True)
RUST = pytest.mark.parametrize("backend", ["rust"], indirect=True)
LONG = array("I", range(1_000_000))


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def on_threads(*calls: Callable[[], object]) -> list[BaseException]:
    """Return what these raise, each on a thread of its own."""
    raised: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_no_request_of_four_threads_is_lost(backend: Backend) -> None:
    manager = KVCacheManager(Config(300, 2, hash_seed=b"seed"), backend)
    added: list[str] = []

    def drive(name: str) -> Callable[[], None]:
        def run() -> None:
            for turn in range(50):
                try:
                    manager.add_request(Request(f"{name}{turn}", [turn, 1, 2]))
                except ConcurrentCall:
                    continue
                added.append(f"{name}{turn}")

        return run

    assert on_threads(*map(drive, "abcd")) == []
    assert sorted(manager.state().requests) == sorted(added)
    manager.check()


def test_managers_of_different_threads_have_nothing_in_common(backend: Backend) -> None:
    managers = [make(backend, 9) for _ in range(4)]

    def drive(manager: KVCacheManager) -> Callable[[], None]:
        def run() -> None:
            for turn in range(30):
                add(manager, str(turn), [turn, 1, 2])
                manager.allocate_slots(str(turn), 3)
                manager.free(str(turn))

        return run

    assert on_threads(*map(drive, managers)) == []
    assert len({manager.encode() for manager in managers}) == 1


@PYTHON
def test_a_call_meets_one_that_another_thread_makes(backend: Backend) -> None:
    # The tokens are read inside the call, so another thread can ask while it runs.
    manager = make(backend)
    add(manager, "a", [0, 1])
    met: list[BaseException] = []

    def tokens() -> Iterator[int]:
        met.extend(on_threads(lambda: manager.free("a"), lambda: manager.num_free_blocks))
        met.extend(on_threads(lambda: manager.num_tokens("a"), lambda: add(manager, "b", [1])))
        yield manager.num_tokens("a")

    manager.add_tokens("a", tokens())
    assert [str(error) for error in met] == [ConcurrentCall.message] * 4
    assert list(manager.state().requests) == ["a"]
    assert list(manager.state().requests["a"].tokens) == [0, 1, 2]


def test_an_argument_changes_nothing_while_it_is_read(backend: Backend) -> None:
    # What the inner call did would be lost when the outer one ends.
    manager = make(backend)
    add(manager, "a", [0, 1])
    before = manager.encode()

    def tokens() -> Iterator[int]:
        add(manager, "b", [0])
        yield 7

    with pytest.raises(ConcurrentCall):
        manager.add_tokens("a", tokens())
    assert manager.encode() == before
    manager.add_tokens("a", [7])


class CallsBack:
    """A number, flag or tensor that calls a manager when it is read."""

    dtype, shape = "bool", ()

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __index__(self) -> int:
        self.call()
        return 1

    def __bool__(self) -> bool:
        return bool(self.__index__())


class TensorCallsBack(CallsBack):
    def numpy(self) -> list[int]:
        return [self.__index__()]


Read = Callable[[KVCacheManager, Any], object]
READ: list[Read] = [
    lambda m, each: m.add_request(Request("c", [each])),
    lambda m, each: m.add_tokens("a", [each]),
    lambda m, each: m.add_tokens("a", TensorCallsBack(each.call)),
    lambda m, each: m.add_tokens("a", [7], num_rejected=each),
    lambda m, each: m.add_tokens("a", [7], batch=each),
    lambda m, each: m.add_drafts("a", [each]),
    lambda m, each: m.accept("a", each),
    lambda m, each: m.append(["a"], [each]),
    lambda m, each: m.append(TensorCallsBack(each.call), [7]),
    lambda m, each: m.append(["a"], [7], batch=each),
    lambda m, each: m.allocate_slots("a", each),
    lambda m, each: m.allocate_slots("a", 1, num_lookahead_tokens=each),
    lambda m, each: m.allocate_slots("a", 1, delay_cache_blocks=each),
    lambda m, each: m.cache_blocks("a", each),
    lambda m, each: m.truncate("a", each),
    lambda m, each: m.unschedule("a", each),
    lambda m, each: m.rewind(["a"], each),
    lambda m, each: m.remove_skipped_blocks("a", each),
    lambda m, each: m.load("a", each),
    lambda m, each: m.store([each]),
    lambda m, each: m.pin([each]),
    lambda m, each: m.unpin([each]),
    lambda m, each: m.evict_blocks([each]),
    lambda m, each: m.pin_prefix("name", "a", each),
    lambda m, each: m.advance_epoch(each),
    lambda m, each: m.complete(each),
    lambda m, each: m.cancel(each),
    lambda m, each: m.complete_operation(each, done=True),
    lambda m, each: m.tick(each),
]


@pytest.mark.parametrize("read", READ)
def test_a_number_that_changes_the_manager_ends_the_call(backend: Backend, read: Read) -> None:
    def retained() -> KVCacheManager:
        made = make(backend, eviction="retention")
        add(made, "a", [0, 1])
        made.allocate_slots("a", 2)
        made.take_batch()
        return made

    manager = retained()
    before, calls = manager.encode(), []

    def change() -> None:
        calls.append(manager.num_tokens("a"))
        add(manager, "b", [1])

    with pytest.raises(ConcurrentCall) as caught:
        read(manager, CallsBack(change))
    assert str(caught.value) == ConcurrentCall.message
    assert calls == [2], "an argument may ask"
    assert manager.encode() == before


def test_a_query_takes_a_number_that_changes_the_manager(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", [0, 1])
    each: Any = CallsBack(lambda: add(manager, "b", [1]))
    assert manager.can_allocate("a", each) is Verdict.OK
    assert set(manager.state().requests) == {"a", "b"}


def test_a_recorded_call_reads_an_argument_that_looks_up(backend: Backend, tmp_path: Path) -> None:
    manager = make(backend)
    add(manager, "a", [0, 1])
    manager.start_recording(Recorder(tmp_path / "record"))
    count: Any = CallsBack(lambda: manager.get_computed_blocks("a"))
    assert manager.allocate_slots("a", count)
    manager.stop_recording()
    assert rerun(tmp_path / "record", [backend]).difference is None


@RUST
@pytest.mark.parametrize("call", ["add_request", "add_tokens"])
def test_the_twin_lets_other_threads_run_while_it_hashes(backend: Backend, call: str) -> None:
    manager = make(backend)
    met: list[ConcurrentCall] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                _ = manager.num_free_blocks
            except ConcurrentCall as error:
                met.append(error)

    def hash_long() -> None:
        try:
            for turn in range(100):
                if not met:
                    first = LONG if call == "add_request" else [1]
                    manager.add_request(Request(f"{turn}", first))
                    if call == "add_tokens":
                        manager.add_tokens(f"{turn}", LONG)
                    manager.remove_request(f"{turn}")
        finally:
            ended.set()

    assert on_threads(ask, hash_long) == []
    assert met
    manager.check()
