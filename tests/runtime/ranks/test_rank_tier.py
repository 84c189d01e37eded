# SPDX-License-Identifier: Apache-2.0
"""Orders that another rank cannot carry out: no slot is freed while rank 0's tier has it."""

from types import SimpleNamespace
from typing import Any

import pytest
from kvcore_runtime.far.manual import ManualTier
from kvcore_runtime.ranks.errors import StepFailed
from kvcore_runtime.ranks.exchange import RankTier

from kvcore.far.page import PageOwner
from tests.runtime.far.test_far_directory import SIZE, empty, name


def links(answers: list[int]) -> Any:
    """Return links to one other rank, which reports these statuses."""
    return SimpleNamespace(
        number=0, world=2, ended={}, broadcast=lambda _: None, collect=lambda: answers.pop(0)
    )


@pytest.mark.parametrize("operation", ["submit_load", "submit_store"])
def test_a_ticket_that_rank_0_has_begun_keeps_its_slots(operation: str) -> None:
    tier, slot = ManualTier(), empty()
    ranks = RankTier(tier, links([0, -1, 0]))
    ranks.attach(memoryview(bytearray(SIZE)), SIZE)
    ranks.own([PageOwner(bytes(32), rank, 2) for rank in range(2)], [slot])
    ticket = getattr(ranks, operation)([name()], [slot])
    (begun,) = tier.pending
    assert ticket == begun.ticket, "an error here would free the slot"
    assert isinstance(ranks.failed, StepFailed)
    assert "rank 1 says why" in str(ranks.failed)
    tier.answer(begun)
    assert ranks.poll() == [], "nobody knows how it ends on the other rank"
