# SPDX-License-Identifier: Apache-2.0
"""Statuses of V0's sequences: an engine's own enumerations count by name."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from kvcore.legacy.v0.errors import NoneWaits
from kvcore.legacy.v0.sequences import AllocStatus, Sequence, SequenceGroup, SequenceStatus
from tests.conftest import Backend
from tests.legacy.v0.small import manager


@pytest.mark.parametrize("kind", [enum.Enum, enum.IntEnum])
def test_an_engine_keeps_its_own_statuses(backend: Backend, kind: Any) -> None:
    """They count by name, whatever their class is called and their numbers are."""
    own = kind("Status", ["FINISHED_STOPPED", "SWAPPED", "RUNNING", "WAITING"])

    def move(status: Any) -> None:
        seq.status = status

    held, seq = manager(backend, 4, 4), Sequence(0, [1, 2, 3], status=own.WAITING)
    group = SequenceGroup("r", [seq])
    assert held.can_allocate(group) is AllocStatus.OK
    held.allocate(group)
    with pytest.raises(NoneWaits):
        held.allocate(SequenceGroup("q", [Sequence(1, [1], status=own.FINISHED_STOPPED)]))
    move(own.RUNNING)
    assert held.can_append_slots(group, 0)
    assert held.can_swap_out(group)
    assert held.swap_out(group) == [(0, 0), (1, 1)]
    move(own.SWAPPED)
    assert held.can_swap_in(group, 0) is AllocStatus.OK
    assert len(held.swap_in(group)) == 2


def test_a_status_has_the_number_and_the_order_of_the_original() -> None:
    waiting, running = SequenceStatus.WAITING, SequenceStatus.RUNNING
    assert waiting < running <= 1 < SequenceStatus.FINISHED_STOPPED
    assert (running == 1, running == 2, [running] == [1], int(running)) == (True, False, True, 1)
    assert running not in (waiting, "RUNNING", None)
    assert len({running, waiting, SequenceStatus.RUNNING}) == 2
