# SPDX-License-Identifier: Apache-2.0
"""A few damaged inputs for every door: `make explore` has a million each."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bytes.doors import DOORS, Door
from tests.bytes.texts import TEXT_DOORS

ALL = [*DOORS, *TEXT_DOORS]


@pytest.mark.parametrize("door", ALL, ids=lambda door: door.name)
def test_damaged_bytes_are_refused_with_the_place_or_are_themselves_again(door: Door) -> None:
    hold_damaged(door)


def hold_damaged(door: Door) -> None:
    """Give a door a few damaged inputs."""
    damager = door.make()

    @given(random=st.randoms(use_true_random=False))
    @settings(max_examples=20 if door.name == "replays" else 100)
    def hold(random: Random) -> None:
        door.read(damager.make(random))

    hold()


@pytest.mark.parametrize("door", ALL, ids=lambda door: door.name)
def test_what_is_not_damaged_goes_in(door: Door) -> None:
    hold_whole(door)


def hold_whole(door: Door) -> None:
    """Give a door what it takes."""
    for sample in door.make().samples:
        assert not door.read(b"".join(sample.fields))
