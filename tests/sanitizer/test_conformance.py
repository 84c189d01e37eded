# SPDX-License-Identifier: Apache-2.0
"""The conformance test passes the template's adapter and fails each wrong one, and says why."""

from __future__ import annotations

import pytest

from kvcore.sanitizer.hunter.conformance import problems
from kvcore.sanitizer.hunter.template import Adapter
from tests.sanitizer import broken

FAULTS = {
    broken.TellsNoDecode: "no step reported that positions",
    broken.TellsWrongStart: "no step reported that positions [0]",
    broken.BeginsTwice: "it lives already",
    broken.CountsWrong: "13 blocks are free when all have left, 12 before",
    broken.Samples: "the fake model gave",
    broken.IsMoody: "one world gave two runs",
    broken.HasNoSize: "AXES has no values of block_size",
    broken.KnowsTooMuch: "MOVES names teleport",
    broken.Forgets: "Engine has no finish_batches",
}


def test_the_template_conforms() -> None:
    assert problems(Adapter) == []


@pytest.mark.parametrize(("adapter", "reason"), FAULTS.items())
def test_a_wrong_adapter_fails(adapter: type[Adapter], reason: str) -> None:
    found = problems(adapter, num_runs=30)
    assert any(reason in each for each in found), found
