# SPDX-License-Identifier: Apache-2.0
"""A tier made by threads from a store that stops, fails, or has no thread."""

import threading
import time

import pytest
from kvcore_runtime.far.threaded import HELD_UP_S, NUM_WAITING_MAX, ThreadedTier

from kvcore.far.errors import UnknownTicket
from kvcore.far.tier import Done, FarStatus
from tests.runtime.far.test_far_directory import empty, name, page, wait


class Stopped:
    """A store whose calls wait until they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.removed: list[str] = []
        self.is_closed = False

    def attach(self, memory: memoryview, slot_bytes: int) -> None:
        del memory, slot_bytes

    def find(self, names: list[str], lease_s: float) -> list[bool]:
        del lease_s
        self._wait()
        return [True] * len(names)

    def get(self, names: list[str], views: list[memoryview]) -> list[int | FarStatus]:
        self._wait()
        views[0][:] = bytes(len(views[0]))
        return [len(views[0])] * len(names)

    def put(self, names: list[str], views: list[memoryview]) -> list[FarStatus]:
        del names, views
        raise ConnectionError("the client library says no")

    def remove(self, names: list[str]) -> None:
        self.removed += names

    def close(self) -> None:
        self.is_closed = True

    def _wait(self) -> None:
        self.begun.release()
        assert self.go.wait(30)


def all_done(tier: ThreadedTier, count: int) -> list[Done]:
    done: list[Done] = []
    end = time.monotonic() + 30
    while len(done) < count and time.monotonic() < end:
        done += tier.poll()
        time.sleep(0.001)
    return done


def test_a_stopped_store_stops_no_call_and_every_ticket_ends_once() -> None:
    store = Stopped()
    tier = ThreadedTier(store)  # type: ignore[arg-type] # lists for sequences
    first = tier.submit_find([name()], 1.0)
    assert first is not None
    assert store.begun.acquire(timeout=30)
    others = [tier.submit_find([name(), name(1)], 1.0) for _ in range(NUM_WAITING_MAX + 1)]
    assert others[-1] is None, "the queue is bounded"
    assert None not in others[:-1]
    waiting = others[0]
    assert waiting is not None
    tier.cancel(waiting)
    assert tier.poll() == []
    store.go.set()
    done = {each.ticket: each.statuses for each in all_done(tier, len(others))}
    assert len(done) == len(others)
    assert done[first] == (FarStatus.OK,)
    assert done[waiting] == (FarStatus.FAILED,) * 2
    for ticket in (first, waiting, 999):
        with pytest.raises(UnknownTicket, match=f"ticket {ticket} is not on its way"):
            tier.cancel(ticket)
    assert wait(tier, tier.submit_store([name()], [page()])) == (FarStatus.FAILED,)
    assert wait(tier, tier.submit_load([name()], [empty()])) == (FarStatus.DAMAGED,)
    assert store.removed == [name()]
    tier.close(10)
    assert store.is_closed
    assert tier.submit_find([name()], 1.0) is None


def test_gets_wait_for_one_that_is_short_and_pass_one_that_is_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("kvcore_runtime.far.threaded.time.monotonic", lambda: now)
    store = Stopped()
    tier = ThreadedTier(store)  # type: ignore[arg-type] # lists for sequences
    tier.submit_load([name()], [empty()])
    assert store.begun.acquire(timeout=30)
    others = [tier.submit_load([name(each)], [empty()]) for each in (1, 2)]
    now += HELD_UP_S
    assert tier.poll() == []
    assert not store.begun.acquire(timeout=0.05), "the first may end soon"
    now += 0.01
    tier.poll()
    assert store.begun.acquire(timeout=30), "the second runs beside the first"
    now += 1.0
    tier.poll()
    assert not store.begun.acquire(timeout=0.05), "there is no third thread"
    store.go.set()
    ended: list[Done] = []
    while len(ended) < 3:
        tier.wait(30)
        ended += tier.poll()
    assert {each.ticket for each in ended} > set(others)
    tier.close(10)


def test_a_store_that_is_stopped_for_ever_does_not_hold_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Stopped()
    tier = ThreadedTier(store)  # type: ignore[arg-type] # lists for sequences
    tier.submit_find([name()], 1.0)
    assert store.begun.acquire(timeout=30)
    waited: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr("kvcore_runtime.far.threaded.time.monotonic", lambda: sum(waited))
        # A thread that never ends takes all the time that it is given.
        patched.setattr(threading.Thread, "join", lambda _, timeout: waited.append(timeout))
        tier.close(0.25)
    assert (waited[0], sum(waited)) == (0.25, 0.25)
    assert store.is_closed
    assert tier.poll() == []
    store.go.set()


def test_what_waits_when_a_tier_is_closed_is_not_begun() -> None:
    store = Stopped()
    tier = ThreadedTier(store)  # type: ignore[arg-type] # lists for sequences
    tickets = [tier.submit_find([name(each)], 1.0) for each in range(3)]
    assert store.begun.acquire(timeout=30)
    tier.close(0.0)
    store.go.set()
    done = {each.ticket: each.statuses for each in all_done(tier, 3)}
    assert [done[each] for each in tickets if each is not None] == [
        (FarStatus.OK,),
        (FarStatus.FAILED,),
        (FarStatus.FAILED,),
    ]
    assert not store.begun.acquire(timeout=0)


def test_a_tier_goes_on_once_there_is_a_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Stopped()
    tier = ThreadedTier(store)  # type: ignore[arg-type] # lists for sequences

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            tier.submit_store([name()], [page()])
    for each in range(2):
        tier.submit_load([name(each)], [empty()])
    assert store.begun.acquire(timeout=30)
    with monkeypatch.context() as patched:
        patched.setattr("kvcore_runtime.far.threaded.HELD_UP_S", -1.0)
        stored = tier.submit_store([name()], [page()])
        patched.setattr(threading.Thread, "start", refuse)
        assert wait(tier, stored) == (FarStatus.FAILED,), "the second get waits for its thread"
    store.go.set()
    assert len(all_done(tier, 2)) == 2
    tier.close(10)
