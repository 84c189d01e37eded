# SPDX-License-Identifier: Apache-2.0
"""Reasons of a refused allocation. HOLDERS-EXACT: a holder that leaves frees what was reported."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from kvcore import Config, KVCacheManager, Refused, Request, Verdict
from kvcore.explain.refusal import Holder, explain_refusal
from kvcore.trace.calls import Call, Misuse, perform
from tests.conftest import Backend
from tests.helpers.amount import examples
from tests.helpers.lockstep import Lockstep
from tests.helpers.machine import DATA, Machine
from tests.helpers.worlds import configs

LEAVING = {
    "request": lambda name: Call("free", (name,), {}),
    "pin": lambda name: Call("unpin", ([int(name)],), {}),
    "named_pin": lambda name: Call("unpin_prefix", (name,), {}),
    "operation": lambda name: Call("complete_operation", (int(name), True), {}),
    "batch": lambda name: Call("complete", (int(name),), {}),
}


def reported(holders: tuple[Holder, ...]) -> list[tuple[str, str, int, int]]:
    return [(each.kind, each.name, each.blocks, each.alone) for each in holders]


def test_holders_stand_by_what_their_leaving_brings(backend: Backend) -> None:
    """Of 9 blocks a and its child share 2, b has 3, one of b's is pinned, one is free."""
    manager = KVCacheManager(Config(10, 4), backend)
    for name, first, length in (("a", 0, 8), ("b", 50, 12), ("c", 90, 8), ("wants", 200, 20)):
        manager.add_request(Request(name, list(range(first, first + length))))
    for name, length in (("a", 8), ("b", 12), ("c", 8)):
        manager.allocate_slots(name, length)
    manager.take_batch()
    manager.fork("a", "child")
    manager.pin(manager.get_block_ids("b")[0][:1])
    before = manager.encode()
    why = manager.explain_refusal("wants", 20)
    refused = manager.allocate_slots("wants", 20)
    assert isinstance(refused, Refused)
    assert (why.verdict, why.needed, why.available) == (Verdict.LATER, 5, 2)
    assert (refused.needed, refused.available, refused.pending) == (5, 2, why.pending)
    pinned = str(manager.get_block_ids("b")[0][0])
    assert reported(why.holders) == [
        ("request", "b", 3, 2),
        ("request", "c", 2, 2),
        ("request", "a", 2, 0),
        ("request", "child", 2, 0),
        ("pin", pinned, 1, 0),
    ]
    assert manager.encode() == before
    manager.free("b")
    assert manager.explain_refusal("wants", 20).available == 4


def test_a_call_that_fits_has_no_holders(backend: Backend) -> None:
    manager = KVCacheManager(Config(10, 4), backend)
    manager.add_request(Request("a", list(range(8))))
    why = manager.explain_refusal("a", 8)
    assert (why.verdict, why.needed, why.available, why.holders) == (Verdict.OK, 2, 9, ())


def test_reserve_and_watermark_are_holders_too() -> None:
    manager = KVCacheManager(Config(10, 4, watermark_blocks=2), "python")
    manager.add_request(Request("a", list(range(28))))
    why = manager.explain_refusal("a", 28, reserved_blocks=3)
    assert (why.needed, why.available) == (7, 4)
    assert reported(why.holders) == [("reserve", "", 3, 3), ("watermark", "", 2, 2)]


def test_a_batch_in_flight_holds_what_was_freed_under_it() -> None:
    manager = KVCacheManager(Config(4, 4, max_in_flight=1), "python")
    for name in ("a", "b"):
        manager.add_request(Request(name, list(range(12))))
    manager.allocate_slots("a", 12)
    batch = manager.take_batch().number
    manager.free("a")
    why = manager.explain_refusal("b", 12)
    assert (why.available, why.pending) == (0, 3)
    assert reported(why.holders) == [("batch", str(batch), 3, 3)]


def check_holders(run: Lockstep, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Let each holder leave, by one call each."""
    state = run.state
    outcome = perform(state, Call("allocate_slots", args, options))
    if not isinstance(outcome.value, Refused):
        return
    why = explain_refusal(state, *args, **options)
    seen = (why.needed, why.available, why.pending)
    assert seen == (outcome.value.needed, outcome.value.available, outcome.value.pending)
    assert [each.alone for each in why.holders] == sorted(
        (each.alone for each in why.holders), reverse=True
    )
    oldest = str(state.in_flight[0].number) if state.in_flight else None
    for each in why.holders:
        if each.kind not in LEAVING or (each.kind == "batch" and each.name != oldest):
            continue
        after = state
        for _ in range(state.device.pins.get(int(each.name), 1) if each.kind == "pin" else 1):
            left = perform(after, LEAVING[each.kind](each.name))
            after = left.state
        again = perform(after, Call("allocate_slots", args, options)).value
        if isinstance(left.value, Misuse):
            assert each.alone == 0
        elif isinstance(again, Refused):
            assert again.available - why.available == each.alone, each


class Refusing(Machine):
    """The machine, on pools that are too small, with each refusal explained."""

    twin = False

    @initialize(data=DATA)
    def start(self, data: st.DataObject) -> None:
        self.run = Lockstep(data.draw(configs(least=self.least, most=self.most)), twin=False)
        self.hits = []
        real = self.run.call

        def call(name: str, *args: Any, **options: Any) -> Any:
            if name == "allocate_slots":
                check_holders(self.run, args, options)
            return real(name, *args, **options)

        self.run.call = call  # type: ignore[method-assign] # of this run alone


TestRefusing = Refusing.TestCase
TestRefusing.settings = settings(max_examples=examples(20), stateful_step_count=40)


def test_misuse_is_that_of_the_allocation(backend: Backend) -> None:
    manager = KVCacheManager(Config(10, 4), backend)
    with pytest.raises(Exception, match="nobody"):
        manager.explain_refusal("nobody", 4)
