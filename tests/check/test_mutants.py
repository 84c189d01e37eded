# SPDX-License-Identifier: Apache-2.0
"""Every seeded bug is found by each property that it names; every row of the catalogue has one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvcore.check.cli.mutants import LONGEST_RUN
from kvcore.check.mutants import FILES, MUTANTS, Mutant, Patcher, worlds
from kvcore.check.mutants.catalogue import NOT_EXPRESSED, SENTENCES, by_row
from kvcore.check.mutants.hunt import hunt, observe
from kvcore.check.mutants.observed import ObservedModel
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.search.search import check
from kvcore.pool.block_pool import PoolTransaction
from kvcore.pool.hash_index import HashIndexTransaction
from kvcore.pool.tails import KeyedTransaction
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.trace import trace_file
from kvcore.transitions import TRANSITIONS
from kvcore.types.effects import Effects
from kvcore.types.errors import TraceError
from tests.conftest import need_twin

TRACES = {path.stem: path for path in (Path(__file__).parents[1] / "traces").rglob("*.trace")}


def size(mutant: Mutant) -> float:
    """Return the number of edges of a bug's named world."""
    return PROFILES[mutant.profile].num_edges if mutant.profile else math.inf


FIRSTS = [
    (min((each for each in MUTANTS if name in each.broken), key=size), name)
    for name in sorted({name for each in MUTANTS for name in each.broken})
]
"""For each property the bug of the smallest world; `make mutants` hunts all."""
ROWS_MIN = 87
"""Least number of rows of the catalogue that have a seeded bug."""


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        pytest.param(mutant, name, marks=[] if (mutant, name) in FIRSTS else [pytest.mark.slow])
        for mutant in MUTANTS
        for name in mutant.broken
    ],
    ids=str,
)
def test_seeded_bug_is_found_by_its_property_alone(mutant: Mutant, name: str) -> None:
    if name == "REFINE":
        need_twin()
    kill = hunt(mutant, mutant.world, {name})
    assert kill.found == name
    assert len(kill.calls) <= LONGEST_RUN


RUN_AHEAD = {
    "a position without a token has a key": ("m_placeholder_hashed",),
    "a block has a key before a batch in flight writes it": (
        "m_completed_placeholder_hashed",
        "m_late_token_publishes_what_is_in_flight",
    ),
    "a batch begins behind drafts that were rejected": ("m_rejected_keeps_count",),
    "a window is trimmed for positions to come": ("m_window_moves_with_positions_to_come",),
    "a copy is judged from the known tokens": ("m_copies_from_the_known_tokens_on",),
    "a child shares positions to come": ("m_child_counts_positions_to_come",),
    "a request that leaves its step loses output to come": ("m_leaving_loses_output_to_come",),
    "output of an older life is taken": (
        "m_scheduled_anew_takes_old_output",
        "m_cut_takes_old_output",
        "m_stale_output_taken",
    ),
    "a swapped request keeps the token that is sampled again": ("m_swap_keeps_to_come",),
    "a row is given again in the same batch": ("m_row_given_at_once",),
    "a token is appended that cannot have been sampled": ("m_append_in_open_batch",),
    "a filled block has no key": ("m_fill_publishes_no_block",),
    "a table column misses a copy": ("m_grown_misses_copy",),
}
"""Without a rule of engines that run ahead -> the seeded bugs that show what breaks."""
AHEAD_ROWS = (72, 73, 74, 75, 76, 77, 78, 80, 88, 89, 93)
"""Rows of the catalogue whose bugs are of the time between a plan and its output."""
BY_NAME = {str(each): each for each in MUTANTS}
OF_ROWS = [str(each) for each in MUTANTS if not set(AHEAD_ROWS).isdisjoint(each.rows)]
NUM_STATES_MAX = 700
"""Most states until a bug is found that takes less than a second on one core."""


OF_STATES = {
    *("m_state_no_copy", "m_state_no_zero", "m_state_keyed_by_the_call"),
    *("m_state_keyed_inside_a_block", "m_shared_state_in_place", "m_keyed_state_in_place"),
    *("m_tail_keyed_by_the_call", "m_tail_no_copy", "m_cache_copies_refuse_for_ever"),
    *("m_truncate_keeps_state", "m_truncate_resumes_by_position", "m_fork_shares_what_is_written"),
    *("m_fork_shares_the_last_state_alone", "m_cancel_keeps_state_count"),
    *("m_state_source_released_at_once", "m_batch_holds_no_checkpoint"),
    *("m_accept_keeps_running_state", "m_leaves_with_the_moved_target"),
    *("m_accept_loses_the_boundary", "m_state_column_of_another_group"),
    *("m_state_keyed_by_preempted_request", "m_failed_load_keeps_states", "m_fit_query_marks"),
    "m_same_step_is_refused",
}
"""Without a rule of recurrent states and of hits inside blocks."""


@pytest.mark.parametrize(
    "name", sorted({*OF_ROWS, *OF_STATES, *(n for each in RUN_AHEAD.values() for n in each)})
)
def test_bug_of_running_ahead_or_of_states_is_found_in_a_second(name: str) -> None:
    mutant = BY_NAME[name]
    kills = [hunt(mutant, mutant.world, {each}) for each in mutant.broken]
    assert [kill.found for kill in kills] == list(mutant.broken)
    assert max(len(kill.calls) for kill in kills) < 10
    assert max(kill.num_states for kill in kills) <= NUM_STATES_MAX


def test_every_row_of_running_ahead_has_a_seeded_bug() -> None:
    found = by_row(MUTANTS)
    assert [row for row in AHEAD_ROWS if not found[row]] == []


def test_the_bug_of_rejected_drafts_has_a_named_world() -> None:
    assert BY_NAME["m_rejected_keeps_count"].profile == "ahead-drafts"


@pytest.mark.parametrize("mutant", [each for each in MUTANTS if each.trace], ids=str)
def test_bug_that_only_costs_hits_fails_its_trace(mutant: Mutant) -> None:
    story = trace_file.read_trace(TRACES[str(mutant.trace)])
    with Patcher() as patcher:
        mutant.patch(patcher)
        with pytest.raises(TraceError):
            trace_file.replay(story, "python")


def test_every_row_of_the_catalogue_has_a_seeded_bug_or_a_reason() -> None:
    assert list(SENTENCES) == list(range(1, 95))
    expressed = {row for row, mutants in by_row(MUTANTS).items() if mutants}
    assert len(expressed) >= ROWS_MIN
    assert set(SENTENCES) - expressed == set(NOT_EXPRESSED)


def test_every_seeded_bug_has_what_finds_it_and_a_name_of_its_own() -> None:
    assert all(mutant.broken or mutant.trace for mutant in MUTANTS)
    assert all((mutant.shows is None) == (mutant.costs is not None) for mutant in MUTANTS)
    assert all((mutant.profile is None) == (mutant.unnamed is not None) for mutant in MUTANTS)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.patch.__module__ for mutant in MUTANTS} == {file.__name__ for file in FILES}


def test_a_user_sees_nothing_wrong_without_a_seeded_bug() -> None:
    report = check(ObservedModel(worlds.world(2, 1, 3, enable_events=True)))
    assert (report.verdict, report.violation, report.num_states) == ("complete", None, 1051)


def test_a_user_sees_a_seeded_bug_that_no_call_shows() -> None:
    found = observe(next(each for each in MUTANTS if each.name == "m_publishes_the_whole_prompt"))
    assert (found.found, len(found.calls)) == ("KV-READ", 4)


def test_a_patcher_puts_everything_back() -> None:
    before = _core()
    for mutant in MUTANTS:
        with Patcher() as patcher:
            mutant.patch(patcher)
        assert _core() == before, mutant.name


def _core() -> list[object]:
    """Collect most of the functions that seeded bugs replace."""
    owners = (
        PoolTransaction,
        KeyedTransaction,
        Effects,
        HashIndexTransaction,
        Transaction,
        RequestState,
    )
    attributes = [each for owner in owners for each in vars(owner).values()]
    return [*attributes, *TRANSITIONS.values()]
