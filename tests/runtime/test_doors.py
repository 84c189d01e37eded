# SPDX-License-Identifier: Apache-2.0
"""A few damaged inputs for every door of the runtime; `make explore` tries a million each."""

from __future__ import annotations

import pytest

from tests.bytes.doors import Door
from tests.bytes.of_runtime import RUNTIME_DOORS
from tests.bytes.test_doors import hold_damaged, hold_whole


@pytest.mark.parametrize("door", RUNTIME_DOORS, ids=lambda door: door.name)
def test_damaged_bytes_are_refused_with_the_place_or_are_themselves_again(door: Door) -> None:
    hold_damaged(door)


@pytest.mark.parametrize("door", RUNTIME_DOORS, ids=lambda door: door.name)
def test_what_is_not_damaged_goes_in(door: Door) -> None:
    hold_whole(door)
