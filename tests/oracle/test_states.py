# SPDX-License-Identifier: Apache-2.0
"""The engine for states and hits inside blocks finds nothing wrong, and finds what is seeded."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from kvcore.check.mutants import MUTANTS
from tests.conftest import need_twin
from tests.oracle.backends import Language
from tests.oracle.seeded import hunt_states
from tests.oracle.states import run

LANGUAGES: tuple[tuple[Language, ...], ...] = (("rust",), ("python",), ("python", "rust"))
NUM_RUNS = 150
NUM_RUNS_EXPLORED = int(os.environ.get("KVCORE_ORACLE_RUNS_OF_STATES", "30000"))
REACHED = (
    *("fork", "free", "truncate", "swap_out", "swap_in", "checkpoint_stop", "remove_request"),
    *("Refused", "HitInOpenBatch"),
)
FOUND = {
    **dict.fromkeys(("m_state_no_copy", "m_state_no_zero", "m_state_keyed_by_the_call"), 0),
    **dict.fromkeys(("m_state_keyed_inside_a_block", "m_mark_is_forgotten"), 1),
    **dict.fromkeys(("m_truncate_keeps_state", "m_state_column_of_another_group"), 0),
    **dict.fromkeys(("m_tail_no_copy", "m_tail_keyed_by_the_call", "m_keyed_state_in_place"), 0),
    **dict.fromkeys(("m_fit_query_marks", "m_state_keyed_by_preempted_request"), 20),
    **dict.fromkeys(("m_fork_shares_what_is_written", "m_shared_state_in_place"), 40),
    "m_truncate_resumes_by_position": 100,
}
"""Seeded bugs of recurrent states and of tails, each with the seed at which its hunt begins."""


def check_runs(seeds: range) -> Counter[str]:
    """Assert that these runs find nothing wrong; return what they reached."""
    reached = Counter[str]()
    for seed in seeds:
        engine, wrong = run(seed, LANGUAGES[seed % len(LANGUAGES)])
        assert wrong is None, f"{wrong}\n{engine.manager.program()}"
        reached += engine.manager.reached
    return reached


def test_engines_with_states_find_nothing_wrong() -> None:
    need_twin()
    reached = check_runs(range(NUM_RUNS))
    assert not set(REACHED) - set(reached)


@pytest.mark.slow
def test_engines_with_states_find_nothing_wrong_in_many_runs() -> None:
    need_twin()
    check_runs(range(NUM_RUNS, NUM_RUNS + NUM_RUNS_EXPLORED))


@pytest.mark.parametrize("name", FOUND)
def test_a_seeded_bug_of_states_is_found(name: str) -> None:
    mutant = next(each for each in MUTANTS if each.name == name)
    assert hunt_states(mutant, range(FOUND[name], FOUND[name] + 50)) is not None
