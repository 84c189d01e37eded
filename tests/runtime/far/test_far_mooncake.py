# SPDX-License-Identifier: Apache-2.0
"""Pages in a real Mooncake store: full, without a master, with a keeper that stops or dies."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from threading import Timer

import pytest
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.demos.processes import (
    HOST,
    ended,
    find_mooncake,
    mooncake_master,
    quiet,
    wait_for,
)
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.errors import PackageMissing
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.far.mooncake_store import MooncakeStore
from kvcore_runtime.far.threaded import ThreadedTier

from kvcore import Config
from kvcore.far.errors import InvalidTier
from kvcore.far.options import FarOptions
from kvcore.far.tier import FarStatus
from tests.runtime.far.mooncake import Mooncake, mooncake
from tests.runtime.far.servers import free_port
from tests.runtime.far.test_apart import check_deaths
from tests.runtime.far.test_far_directory import SIZE, empty, name, page, wait
from tests.runtime.far.test_far_redis import ask, far
from tests.runtime.model.questions import DEEP_MODELS, model_of
from tests.runtime.test_demos import WAIT_S, left_over, start

pytestmark = [
    pytest.mark.mooncake,
    pytest.mark.skipif(
        not find_mooncake(), reason="Mooncake is not installed: `make engines-mooncake`"
    ),
]
made: list[MooncakeStore] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the stores of a test at its end."""
    yield
    while made:
        made.pop().close()


@pytest.fixture(scope="module")
def server() -> Iterator[Mooncake]:
    with mooncake() as started:
        yield started


def make_store(server: Mooncake) -> MooncakeStore:
    made.append(MooncakeStore(server.address))
    return made[-1]


def test_a_page_is_kept_found_had_and_removed(server: Mooncake) -> None:
    store, got = make_store(server), [empty(), empty()]
    assert store.put([name(1), name(2)], [page(1), page(2)]) == [FarStatus.OK] * 2
    assert store.put([name(1)], [page(2)]) == [FarStatus.OK]
    assert store.find([name(1), name(3)], 1.0) == [True, False]
    assert store.get([name(1), name(3)], got) == [SIZE, FarStatus.MISSING]
    assert got[0] == page(1), "nothing is overwritten"
    store.remove([name(1), name(2)])
    assert store.find([name(1), name(2)], 1.0) == [False, False]
    store.close()
    assert store.find([name(1)], 1.0) == [False], "a late call sets the client up again"


def test_slots_that_are_attached_before_or_after_the_first_call_are_used(server: Mooncake) -> None:
    for first in (True, False):
        store, memory = make_store(server), memoryview(bytearray(2 * SIZE))
        if first:
            store.find([name(1)], 1.0)
        store.attach(memory, SIZE)
        memory[:SIZE] = page(1)
        assert store.put([name(1)], [memory[:SIZE]]) == [FarStatus.OK]
        assert store.get([name(1)], [memory[SIZE:]]) == [SIZE]
        assert memory[SIZE:] == page(1)
        store.remove([name(1)])


def test_what_is_not_this_page_is_damaged_and_goes(server: Mooncake) -> None:
    store = MooncakeStore(server.address)
    tier = ThreadedTier(store)  # which closes it
    other = memoryview(bytearray(page(1)) + b"\0")
    for spoilt in (page(2), page(1)[:-1], other):
        store.put([name(1)], [spoilt])
        (status,) = wait(tier, tier.submit_load([name(1)], [empty()]))
        assert status in (FarStatus.DAMAGED, FarStatus.FAILED), "too large for a slot: no answer"
        if status is FarStatus.DAMAGED:
            assert store.find([name(1)], 1.0) == [False]
        store.remove([name(1)])
    tier.close(10)


def test_a_full_keeper_loses_pages_and_damages_none() -> None:
    with mooncake(keeps=16 << 20) as server:
        store, size = make_store(server), 1 << 20
        names = [name(each) for each in range(48)]
        for at, each in enumerate(names):
            large = memoryview(bytes([at]) * size)
            assert store.put([each], [memoryview(bytearray(large))])[0] in (
                FarStatus.OK,
                FarStatus.FULL,
                FarStatus.FAILED,
            )
        kept = 0
        for at, each in enumerate(names):
            slot = memoryview(bytearray(size))
            if store.get([each], [slot]) == [size]:
                kept += 1
                assert slot == bytes([at]) * size
        assert 0 < kept <= 16


def test_a_master_that_cannot_be_reached_is_an_error_or_is_tried_again() -> None:
    port = free_port()
    address = f"{HOST}:{port}"
    with pytest.raises(TierUnusable, match=f"{address}: Mooncake: the master does not answer"):
        MooncakeStore(address)
    made.append(store := MooncakeStore(address, required=False))
    with pytest.raises(ConnectionError, match="the master does not answer"):
        store.find([name(1)], 1.0)
    with ended(quiet(mooncake_master(port))):
        wait_for(f"mooncake://{address}")
        assert store.find([name(1)], 1.0) == [False]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidTier, match="segment_bytes is -1, expected at least 0"):
        MooncakeStore(segment_bytes=-1)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(PackageMissing, match=r"pip install 'kvcore-runtime\[mooncake\]'"):
        MooncakeStore(f"127.0.0.1:{free_port()}")


def make_engine(server: Mooncake) -> Engine:
    options = FarOptions(
        min_fetch_tokens=16, weights="tiny", fetch_timeout_s=0.5, store_timeout_s=1.0
    )
    tier = ThreadedTier(MooncakeStore(server.address))  # the tier closes it
    return Engine(
        model_of(DEEP_MODELS["full"]),
        Config(300, hash_seed=b"seed"),
        exchange=lambda engine: FarExchange(engine, tier, options),
    )


def test_pages_come_back_and_a_stopped_or_killed_keeper_changes_no_answer() -> None:
    with mooncake() as server:
        engine = make_engine(server)
        ask(engine)
        assert far(engine).flush(30)
        ask(engine)
        assert far(engine).counts.num_hits > 0
        server.keeper.send_signal(signal.SIGSTOP)
        ask(engine)
        server.kill(server.keeper)
        ask(engine)
        server.start_keeper()
        hits, end = far(engine).counts.num_hits, time.monotonic() + 60
        while far(engine).counts.num_hits == hits and time.monotonic() < end:
            far(engine).flush(0.1)
            ask(engine)
        assert far(engine).counts.num_hits > hits, "pages come back from the new keeper"
        server.kill(server.master)
        ask(engine)
        far(engine).close()


@pytest.mark.slow
def test_a_keeper_that_goes_on_late_writes_into_no_slot() -> None:
    """It stops in the middle of a get, which fails a minute later; its slots then hold others."""
    with mooncake() as server:
        store, size, count = make_store(server), 8 << 20, 24
        memory = memoryview(bytearray(count * size))
        store.attach(memory, size)
        slots = [memory[at * size : (at + 1) * size] for at in range(count)]
        names = [name(at) for at in range(count)]
        assert store.put(names, slots) == [FarStatus.OK] * count
        started = time.monotonic()
        assert store.get(names, slots) == [size] * count
        stop = Timer((time.monotonic() - started) / 2, server.keeper.send_signal, [signal.SIGSTOP])
        stop.start()
        assert FarStatus.FAILED in store.get(names, slots), "it was stopped too late"
        other = b"o" * size
        for slot in slots:
            slot[:] = other
        server.keeper.send_signal(signal.SIGCONT)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            assert all(slot == other for slot in slots)
            time.sleep(0.2)
        assert store.find(names[:1], 1.0) != [], "there is another client"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill", "keeper", "master"])
def test_who_dies_costs_time_and_no_token(victim: str) -> None:
    with mooncake() as server:
        if victim == "keeper":
            check_deaths(server.place, lambda: server.kill(server.keeper), server.start_keeper)
        elif victim == "master":
            check_deaths(server.place, lambda: server.kill(server.master), server.start_master)
        else:
            check_deaths(server.place)


@pytest.mark.slow
def test_the_demonstration_goes_through_mooncake() -> None:
    demo = start("apart", "--mooncake")
    output, errors = demo.communicate(timeout=WAIT_S)
    assert demo.returncode == 0, errors
    assert "pages go through Mooncake" in output
    assert "all tokens are equal" in output
    assert left_over(demo) == []
