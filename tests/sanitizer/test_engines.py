# SPDX-License-Identifier: Apache-2.0
"""Three small engines, healthy and with bugs that only the sanitizer sees."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.conftest import Backend
from tests.helpers.amount import examples
from tests.sanitizer.engines import overlapped_bugs, paged_bugs, radix_bugs
from tests.sanitizer.engines.driver import hunt, play
from tests.sanitizer.engines.overlapped import Overlapped
from tests.sanitizer.engines.paged import Paged
from tests.sanitizer.engines.radix import Radix

BUGS = [*paged_bugs.BUGS, *radix_bugs.BUGS, *overlapped_bugs.BUGS]
SEEDS = {"rust": 400, "python": 100}
HUNTED, UNSEEN, COMPARED = 1000, 30, 5
HAPPENS: dict[Any, tuple[str, ...]] = {
    Paged: ("preempt", "copy_tail", "forget", "change_weights"),
    Radix: ("split", "store", "bring", "prune", "retract", "adopt", "change_weights"),
    Overlapped: ("preempt", "store", "load", "lose_step"),
}
"""What the runs of each must show."""


@pytest.mark.parametrize("engine", HAPPENS)
def test_a_healthy_engine_has_no_finding(engine: Any, backend: Backend) -> None:
    make = partial(engine, backend=backend)
    assert hunt(make, range(examples(SEEDS[backend]))) is None


@pytest.mark.parametrize("engine", HAPPENS)
def test_a_healthy_engine_does_what_it_is_for(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Counter[str]()
    for name in HAPPENS[engine]:
        monkeypatch.setattr(engine, name, counted(getattr(engine, name), name, seen))
    for seed in range(100):
        play(engine, seed)
    assert all(seen[name] >= 10 for name in HAPPENS[engine]), seen


def counted(method: Callable[..., Any], name: str, seen: Counter[str]) -> Callable[..., Any]:
    """Return a method that counts its calls."""

    def call(*args: Any) -> Any:
        seen[name] += 1
        return method(*args)

    return call


def test_there_are_thirty_mistakes() -> None:
    assert len(BUGS) >= 30
    assert len({each.__doc__ for each in BUGS}) == len(BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.__mro__[1].__name__}-{bug.__name__}")
def test_the_sanitizer_sees_a_mistake_that_nobody_else_sees(bug: Any) -> None:
    for seed in range(UNSEEN):
        play(bug, seed, on=True)
    found = hunt(bug, range(HUNTED))
    assert found is not None
    _, (first, *_) = found
    assert first.certain
    assert first.request is not None
    assert first.position is not None


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.__mro__[1].__name__}-{bug.__name__}")
def test_both_languages_find_a_mistake_at_one_place(bug: Any) -> None:
    def lines(backend: Backend, seed: int) -> list[str]:
        return [each.line for each in play(partial(bug, backend=backend), seed)]

    seeds = random.Random(bug.__name__).sample(range(HUNTED), COMPARED)
    assert [lines("rust", seed) for seed in seeds] == [lines("python", seed) for seed in seeds]
