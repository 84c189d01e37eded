# SPDX-License-Identifier: Apache-2.0
"""Users check parts of their own: a property."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from kvcore import State
from kvcore.check.properties.registry import Property
from kvcore.check.search.search import check
from kvcore.check.stories.story import render
from tests.check.test_own import SMALL, found


def test_a_property_of_ones_own_is_checked_and_told() -> None:
    def holds(state: State) -> Iterator[str]:
        if state.device.num_free == 0:
            yield "every block is held"

    said = "a block is always free"
    mine = Property(name="ROOM", sentence=said, scope="state", severity="quality", holds=holds)
    report = check(SMALL, properties=[mine])
    assert found(report) == ("ROOM", "every block is held")


def test_a_property_that_raises_is_told_with_its_state() -> None:
    def holds(state: State) -> Iterator[str]:
        if state.device.num_free == 0:
            raise ZeroDivisionError("no block is free")
        yield from ()

    mine = Property(name="MINE", sentence="mine", scope="state", severity="quality", holds=holds)
    report = check(SMALL, properties=[mine])
    name, detail = found(report)
    assert name == "MINE"
    assert "raised" in detail
    assert "ZeroDivisionError: no block is free" in detail
    assert report.violation is not None
    assert "in a state with 0 free blocks and '0' running" in detail
    assert "allocate_slots" in render(report.violation, SMALL, colour=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([3], "MINE yields 3: it must yield what is wrong, in words, in a state with 2 free"),
        ("all wrong", "MINE gives 'all wrong': it must yield what is wrong, in words, in a state"),
        (True, "MINE raised TypeError: 'bool' object is not iterable, in a state"),
    ],
)
def test_a_property_that_gives_no_words_is_told_as_such(given: Any, said: str) -> None:
    def holds(*_: Any) -> Any:
        return given

    mine = Property(name="MINE", sentence="mine", scope="state", severity="quality", holds=holds)
    name, detail = found(check(SMALL, properties=[mine]))
    assert name == "MINE"
    assert said in detail


def test_a_property_that_checks_nothing_is_refused() -> None:
    empty = Property(name="MINE", sentence="mine", scope="state", severity="quality")
    with pytest.raises(ValueError, match="the property MINE checks nothing"):
        check(SMALL, properties=[empty])
    full = attrs.evolve(empty, holds=lambda _: iter(()))
    with pytest.raises(ValueError, match="two properties are named MINE"):
        check(SMALL, properties=[full, attrs.evolve(full, sentence="another")])
    with pytest.raises(ValueError, match="holds of MINE is 7, which is not a function"):
        attrs.evolve(empty, holds=7)  # type: ignore[arg-type] # that is what is wrong


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "cuda"}, "there is no backend 'cuda': say python, rust, both"),
        ({"workers": 0}, "workers is 0, it must be above 0"),
        ({"max_states": 0}, "max_states is 0, it must be above 0"),
        ({"max_seconds": -1}, "max_seconds is -1, it must be above 0"),
        ({"properties": ["KV-READ", 3]}, "a property is named, or is a Property, and not 3"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(SMALL, **options)
