# SPDX-License-Identifier: Apache-2.0
"""Every property finds the bugs that it is there for; bugs that only cost hits are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore import trace
from kvcore.check.mutants import MUTANTS, Mutant, Patcher
from kvcore.check.mutants.hunt import hunt
from kvcore.check.search import EDGE_PROPERTIES
from kvcore.errors import TraceError
from kvcore.invariants import PROPERTIES

TRACES = Path(__file__).parents[1] / "traces"
LONGEST_STORY = 8
OF_TIME = {"QUARANTINE", "IN-FLIGHT"}
"""Properties of batches in flight, of which no world has any yet."""


@pytest.mark.parametrize(
    ("mutant", "name"),
    [(mutant, name) for mutant in MUTANTS for name in mutant.broken],
    ids=str,
)
def test_seeded_bug_is_found_by_its_property_alone(mutant: Mutant, name: str) -> None:
    kill = hunt(mutant, mutant.world, {name})
    assert kill.found == name
    assert len(kill.story) <= LONGEST_STORY


def test_every_property_has_a_seeded_bug_that_breaks_it() -> None:
    broken = {name for mutant in MUTANTS for name in mutant.broken}
    assert broken == {*PROPERTIES, *EDGE_PROPERTIES} - OF_TIME


@pytest.mark.parametrize("mutant", [each for each in MUTANTS if each.trace], ids=str)
def test_bug_that_only_costs_hits_is_harmless_but_fails_its_trace(mutant: Mutant) -> None:
    assert hunt(mutant, mutant.world, {*PROPERTIES, *EDGE_PROPERTIES}).found is None
    story = trace.read_trace(TRACES / f"{mutant.trace}.trace")
    with Patcher() as patcher:
        mutant.patch(patcher)
        with pytest.raises(TraceError):
            trace.replay(story, "python")
