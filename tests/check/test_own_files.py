# SPDX-License-Identifier: Apache-2.0
"""A violation in a user's own part is written as a test that imports it, or is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvcore import KVCacheManager, Request, State
from kvcore.check import NotWritable, Property, World, check, pytest_text, trace_text
from kvcore.check.extend.manager_model import ManagerModel
from kvcore.check.extend.policies import LRU, FreeBlock, check_policy, check_scheduler
from kvcore.check.world.model import Violation
from kvcore.trace.calls import Call
from kvcore.types.errors import InvariantViolation
from tests.check.worlds import world
from tests.check.wrong_managers import CONFIG, Mixes, Raises, Refuses, Stops, Unmade, Wrong

SMALL = world(2, 2, 3)


def room(state: State) -> Iterator[str]:
    """Yield the fault unless at least one block is free."""
    if state.device.num_free == 0:
        yield "every block is held"


ROOM = Property(
    name="ROOM", sentence="a block is always free", scope="state", severity="quality", holds=room
)


class Lost(LRU):
    """A policy that names no place."""

    def leave(self, queue: Sequence[FreeBlock]) -> int:
        return len(queue)


class Told(LRU):
    """A policy whose constructor takes an argument."""

    def __init__(self, place: int) -> None:
        self.place = place

    def leave(self, _: Sequence[FreeBlock]) -> int:
        return self.place


TOLD = Told(7)


def hold(_: World, state: State) -> Iterator[Call]:
    """Admit every request and free none."""
    for name in ("0", "b"):
        if name not in state.requests:
            yield Call("add_request", (Request(name, [1, 2]),))
        elif not state.requests[name].num_computed:
            yield Call("allocate_slots", (name, 2))


def lost(_: World, state: State) -> Iterator[Call]:
    """Raise once there is a request."""
    if len(state.requests):
        raise LookupError("nobody")
    yield Call("add_request", (Request("a", [1, 2]),))


def violation_of(report: Any) -> Violation:
    found: Violation | None = report.violation
    assert found is not None
    return found


def run_test(text: str, backend: str = "python") -> None:
    """Run the test that a file holds."""
    module: dict[str, Any] = {}
    exec(compile(text, "test_written.py", "exec"), module)
    test = next(run for name, run in module.items() if name.startswith("test_"))
    if "backend" in test.__code__.co_varnames:
        test(backend)
    else:
        test()


def check_that_it_fails(text: str, name: str) -> None:
    with pytest.raises(InvariantViolation) as caught:
        run_test(text)
    assert caught.value.name == name


def test_a_property_is_imported_and_checks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = violation_of(check(SMALL, properties=[ROOM]))
    text = pytest_text(found, SMALL)
    assert "from tests.check.test_own_files import room" in text
    assert "a block is always free" in text
    check_that_it_fails(text, "ROOM")
    assert trace_text(found, SMALL).startswith("# ROOM: a block is always free.")
    monkeypatch.setattr("tests.check.test_own_files.room", lambda _: ())
    run_test(text)


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (Lost(), "with installed(Lost()), CheckedManager("),
        (TOLD, "with installed(TOLD), CheckedManager("),
    ],
)
def test_a_policy_is_installed_again(policy: Any, line: str) -> None:
    found = violation_of(check_policy(policy, SMALL, properties=["POLICY"]))
    text = pytest_text(found, SMALL)
    assert line in text
    assert '"rust"' not in text
    check_that_it_fails(text, "POLICY")
    with pytest.raises(NotWritable, match="a trace is replayed without your policy"):
        trace_text(found, SMALL)


@pytest.mark.parametrize(("moves", "name"), [(hold, "DEADLOCK-FREE"), (lost, "SCHEDULER")])
def test_a_scheduler_is_asked_again(moves: Any, name: str) -> None:
    report = check_scheduler(moves, SMALL)
    text = pytest_text(violation_of(report), report.world)
    assert f"    moves={moves.__name__},\n" in text
    check_that_it_fails(text, name)
    assert f"# {name}" in trace_text(violation_of(report), report.world)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Raises, "NOCRASH"),
        (Refuses, "L-ADMIT"),
        (Stops, "DEADLOCK-FREE"),
        (Mixes, "KV-READ"),
        (Unmade, "MANAGER"),
    ],
)
def test_a_manager_is_made_and_driven_again(
    make: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ManagerModel(make, CONFIG, num_tokens=3, name=KVCacheManager.encode)
    found = violation_of(check(model, max_depth=4))
    text = pytest_text(found, model)
    check_that_it_fails(text, name)
    with pytest.raises(NotWritable, match="a trace is replayed on kvcore's own managers"):
        trace_text(found, model)
    monkeypatch.setattr(f"tests.check.wrong_managers.{make.__name__}", Wrong)
    run_test(text)


def test_what_cannot_be_imported_is_refused_in_a_sentence() -> None:
    def nearby(state: State) -> Iterator[str]:
        yield from room(state)

    here = Property(name="HERE", sentence="x", scope="state", severity="quality", holds=nearby)
    found = violation_of(check(SMALL, properties=[here]))
    with pytest.raises(NotWritable, match=r"cannot import .*nearby: put it at the top of tests"):
        pytest_text(found, SMALL)
    found = violation_of(check_policy(Told(7), SMALL, properties=["POLICY"]))
    with pytest.raises(NotWritable, match="make this Told again: give it a name in tests"):
        pytest_text(found, SMALL)
    with pytest.raises(
        NotWritable, match="OTHER is not a property of kvcore, and nothing says what checks it"
    ):
        pytest_text(Violation("OTHER", "wrong", ()), SMALL)
