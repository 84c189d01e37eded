# SPDX-License-Identifier: Apache-2.0
"""Tickets that a tier answers late: each is a failure, and a store keeps its slot until then."""

import pytest
from kvcore_runtime.far.manual import ManualTier

from kvcore.far.breaker import NUM_FAILURES_MAX
from kvcore.far.page import check_page
from kvcore.far.pending import PendingTransfer
from kvcore.far.tier import FarStatus
from tests.conftest import Backend
from tests.runtime.far.adversary import HandClock, far, make_engine, run
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
