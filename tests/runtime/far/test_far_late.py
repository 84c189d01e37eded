# SPDX-License-Identifier: Apache-2.0
"""Tickets that a tier answers late: each is a failure, and a store keeps its slot until then."""

from collections.abc import Callable

import attrs
import pytest
from kvcore_runtime.far.manual import ManualTier

from kvcore.far.breaker import NUM_FAILURES_MAX
from kvcore.far.page import check_page
from kvcore.far.pending import PendingTransfer
from kvcore.far.tier import FarStatus
from tests.conftest import Backend
from tests.runtime.far.adversary import HandClock, far, make_engine, reported, run
from tests.runtime.far.test_far_engine import one


class Ticking(HandClock):
    """A clock that advances by a step each time it is read."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self._step = step

    def monotonic(self) -> float:
        self.now += self._step
        return self.now


@pytest.mark.parametrize("step", [0.0, 0.001, 0.03, 0.07, 0.15])
def test_each_late_find_is_a_failure_whenever_the_clock_is_read(
    backend_of_engine: Backend, step: float
) -> None:
    tier = ManualTier()
    engine = make_engine("full", backend_of_engine, tier, Ticking(step))
    num_pages = (len(one().prompt) - 1) // 16
    engine.add_request(one())
    run(engine, tier)  # from here on the tier is known to have the pages, and nothing is stored
    for number in range(1, NUM_FAILURES_MAX + 1):
        assert far(engine).is_up
        engine.manager.reset_prefix_cache()
        engine.add_request(one())
        run(engine, tier, lambda: None)
        assert far(engine).counts.pages["find", "timeout"] == number * num_pages
    assert not far(engine).is_up


def test_late_gets_take_the_tier_down_though_every_find_is_answered(
    backend_of_engine: Backend,
) -> None:
    tier, clock = ManualTier(), HandClock()
    engine = make_engine("full", backend_of_engine, tier, clock)

    def find() -> None:
        for each in tier.pending[:]:
            if each.operation == "find":
                tier.answer(each)

    def seconds(act: Callable[[], None]) -> float:
        """Ask for the same pages again; return how long the request waited for them."""
        engine.manager.reset_prefix_cache()
        engine.add_request(one())
        started = clock.now
        run(engine, tier, act)
        return clock.now - started

    def probe(wait_s: float) -> None:
        """Answer the probe that is sent after this time and not before."""
        clock.sleep(wait_s - 0.01)
        far(engine).flush(1.0)
        assert not any(each.operation == "find" for each in tier.pending)
        clock.sleep(0.02)
        far(engine).flush(1.0)
        find()
        far(engine).flush(1.0)
        assert far(engine).is_up

    seconds(tier.answer_all)
    for _ in range(NUM_FAILURES_MAX):
        assert far(engine).is_up
        assert seconds(find) >= 1.0
    assert not far(engine).is_up
    for wait_s in (1.0, 2.0, 4.0):
        assert seconds(find) == 0.0
        probe(wait_s)
        assert seconds(find) >= 1.0, "the probe has shown nothing of gets"
        assert not far(engine).is_up
    probe(8.0)
    tier.answer_all()
    seconds(tier.answer_all)
    assert far(engine).counts.num_hits > 0
    for _ in range(NUM_FAILURES_MAX):
        assert far(engine).is_up
        seconds(find)
    assert not far(engine).is_up
    probe(1.0)


def test_pages_are_loaded_from_a_tier_that_keeps_no_more(backend_of_engine: Backend) -> None:
    """Nothing waits for a store, so its failures alone do not take away what is there."""
    tier = ManualTier()
    engine = make_engine("full", backend_of_engine, tier, HandClock())

    def refuse() -> None:
        for each in tier.pending[:]:
            is_store = each.operation == "store"
            tier.answer(each, [reported(FarStatus.FAILED)] * len(each.names) if is_store else [])

    engine.add_request(one())
    run(engine, tier)
    for number in range(2 * NUM_FAILURES_MAX):
        engine.manager.reset_prefix_cache()
        for request in (attrs.evolve(one(), cache_salt=f"{number}"), one()):
            engine.add_request(request)
            run(engine, tier, refuse)
        assert far(engine).is_up
        assert far(engine).counts.num_hits == (number + 1) * ((len(one().prompt) - 1) // 16 * 16)
    assert far(engine).counts.pages["store", "failed"] > 0


def test_a_page_is_stored_again_while_a_late_store_still_has_its_slot(
    backend_of_engine: Backend,
) -> None:
    tier, clock = ManualTier(), HandClock()
    engine = make_engine("full", backend_of_engine, tier, clock)
    late: list[PendingTransfer] = []

    def act() -> None:
        for each in tier.pending[:]:
            if each.operation != "store":
                tier.answer(each)
            elif not late:
                late.append(each)
            elif each not in late:
                tier.answer(each)

    engine.add_request(one())
    run(engine, tier, act)
    clock.sleep(10.0)
    far(engine).flush(1.0)
    assert late[0].is_cancelled
    for view in late[0].views:
        view[-1] ^= 1  # a copy into the slot would restore it
    held = [bytes(view) for view in late[0].views]
    engine.manager.reset_prefix_cache()
    engine.add_request(one())
    run(engine, tier, act)
    act()
    far(engine).flush(1.0)
    assert [bytes(view) for view in late[0].views] == held
    assert set(late[0].names) <= set(tier.entries)
    for name, page in tier.entries.items():
        assert check_page(bytearray(page), name, len(page)) is FarStatus.OK
