# SPDX-License-Identifier: Apache-2.0
"""A client of Mooncake's, made up here, that writes into slots after its get has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import memmove
from types import SimpleNamespace

import pytest
from kvcore_runtime.far import mooncake_store
from kvcore_runtime.far.mooncake_store import MISSING, MooncakeStore

from kvcore.far.tier import FarStatus
from tests.runtime.far.test_far_directory import SIZE, empty, name, page

TRANSFER_FAILED = -800
WAIT_S = 30.0


class Client:
    """Fails to get a page, whose bytes come later, unless it is closed before."""

    made: list[Client]
    code = TRANSFER_FAILED

    def __init__(self) -> None:
        self.is_closed = False
        self.registered: list[tuple[int, int]] = []
        self.late: list[tuple[int, int]] = []
        self.finds = threading.Semaphore(0)
        self.found = threading.Event()
        self.found.set()
        Client.made.append(self)

    def setup(self, *_: object) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.append((address, size))
        return 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self.finds.release()
        assert self.found.wait(WAIT_S)
        assert not self.is_closed, "the library would crash"
        return [1] * len(names)

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.late += zip(addresses, sizes, strict=True)
        return [Client.code] * len(names)

    def close(self) -> int:
        self.is_closed = True
        return 0

    def go_on(self) -> None:
        """Let what was asked for come now."""
        for address, size in () if self.is_closed else self.late:
            memmove(address, b"\xff" * size, size)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MooncakeStore:
    library = SimpleNamespace(MooncakeDistributedStore=Client)
    monkeypatch.setattr(mooncake_store, "load_extra", lambda *_, **__: library)
    monkeypatch.setattr(Client, "made", [], raising=False)
    return MooncakeStore()


def test_a_slot_is_not_written_after_its_get_has_failed(store: MooncakeStore) -> None:
    slot = empty()
    store.attach(slot, SIZE)
    assert store.get([name()], [slot]) == [FarStatus.FAILED]
    slot[:] = page()  # which the slot holds next
    for each in Client.made:
        each.go_on()
    assert slot == page()
    assert store.find([name()], 1.0) == [True]
    first, second = Client.made
    assert first.registered == second.registered != []
    assert not second.is_closed


def test_each_client_has_the_slots_of_all_engines(store: MooncakeStore) -> None:
    slots = [empty(), empty()]
    for slot in slots:
        store.attach(slot, SIZE)
    for slot in slots:
        store.get([name()], [slot])
    store.find([name()], 1.0)
    first, *others = Client.made
    assert len(first.registered) == len(slots)
    assert [each.registered for each in others] == [first.registered] * 2


def test_the_last_call_of_a_closed_store_closes_its_client(store: MooncakeStore) -> None:
    (client,) = Client.made
    assert client.finds.acquire(timeout=WAIT_S)
    client.found.clear()
    thread = threading.Thread(target=store.find, args=([name()], 1.0))
    thread.start()
    assert client.finds.acquire(timeout=WAIT_S)
    store.close()
    assert not client.is_closed
    client.found.set()
    thread.join(WAIT_S)
    assert client.is_closed


def test_a_page_that_is_missing_costs_no_client(
    store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "code", MISSING)
    assert store.get([name()], [empty()]) == [FarStatus.MISSING]
    assert len(Client.made) == 1


def test_a_client_is_closed_once_no_call_uses_it(store: MooncakeStore) -> None:
    (client,) = Client.made
    assert client.finds.acquire(timeout=WAIT_S)
    client.found.clear()
    results: dict[str, object] = {}
    threads: dict[str, Callable[[], object]] = {
        "find": lambda: store.find([name()], 1.0),
        "get": lambda: store.get([name()], [empty()]),
        "get too": lambda: store.get([name()], [empty()]),
    }

    def run(what: str) -> None:
        results[what] = threads[what]()

    started = {what: threading.Thread(target=run, args=(what,)) for what in threads}
    started["find"].start()
    assert client.finds.acquire(timeout=WAIT_S)
    for what in ("get", "get too"):
        started[what].start()
    started["get"].join(0.05)
    assert not client.is_closed
    assert results == {}, "their slots are not given back yet"
    client.found.set()
    for each in started.values():
        each.join(WAIT_S)
    assert results["find"] == [True]
    assert results["get"] == results["get too"] == [FarStatus.FAILED]
    assert client.is_closed
    store.close()
    assert store.find([name()], 1.0) == [True]
