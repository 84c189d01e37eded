# SPDX-License-Identifier: Apache-2.0
"""Small worlds, explored to their end: nothing is broken, and the twin agrees on every edge.

The counts are pinned: another count means that the core can reach other states, or that another
world is explored. Say which in the commit that changes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import Group
from kvcore.check.profiles.features import FEATURES
from kvcore.check.search.report import Report
from kvcore.check.search.search import check
from kvcore.check.world.world import World
from tests.check.worlds import world
from tests.conftest import MaxStates, need_twin

GROUP = Group(2)
SLOT = Group(1)
WINDOW = Group(1, kind="sliding_window", window=2)
CHUNKS = Group(1, kind="chunked_local", window=2)
BASIC_GOALS = (
    "Evict",
    "Touch",
    "full hit",
    "sharing",
    "CopyOnWrite",
    "duplicates",
    "refused later",
)
SWAP_CALLS = ("swap_out", "swap_in")
LOADS: dict[str, Any] = {"num_external": 1, "loads_fail": True}


Explore = Callable[..., Report]


@pytest.fixture
def explore(max_states: MaxStates) -> Explore:
    """Explore a world on both backends: all of it, or the first states of a large one.

    A complete world has the given numbers of states and edges, and every goal is reached somewhere.
    """

    def explore(where: World, num_states: int, num_edges: int, *goals: str) -> Report:
        need_twin()
        most = max_states(num_states, num_edges)
        report = check(where, backend="both", max_states=most)
        assert report.violation is None, report.violation
        if most is None:
            assert report.verdict == "complete"
            assert (report.num_states, report.num_edges) == (num_states, num_edges)
            missing = [goal for goal in goals if not report.goals[goal]]
            assert not missing, f"never reached: {missing}"
        return report

    return explore


@pytest.mark.parametrize("name", FEATURES)
def test_a_named_world_of_a_feature_is_right_on_every_edge_of_both_languages(
    name: str, explore: Explore
) -> None:
    wanted = FEATURES[name]
    explore(wanted.world, wanted.num_states, wanted.num_edges)


def test_swapping_is_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 3, *SWAP_CALLS, num_host_blocks=2, enable_events=True)
    explore(where, 2584, 18646, *BASIC_GOALS, "SwapOut", "SwapIn", "swap_in", "swap_out")


def test_merging_duplicates_is_right_on_every_edge_of_two_calls_a_batch(explore: Explore) -> None:
    where = world(2, 2, 2, duplicates="merge", moves_per_batch=2)
    report = explore(where, 199, 8929, "Evict", "sharing", "CopyOnWrite", "merge")
    assert not report.goals["duplicates"]


def test_uncached_first_is_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 3, eviction="uncached_first", enable_events=True)
    explore(where, 525, 4086, *BASIC_GOALS)


def test_what_waiting_requests_look_up_is_spared_on_every_edge(explore: Explore) -> None:
    explore(world(2, 2, 3, eviction="queue_aware"), 814, 5997, *BASIC_GOALS)


def test_two_groups_with_a_null_block_are_right_on_every_edge(explore: Explore) -> None:
    where = world(4, 2, 3, groups=(GROUP, GROUP), null_block=True, num_preallocate_tokens=2)
    explore(where, 671, 5265, "Evict", "Touch", "sharing", "CopyOnWrite", "duplicates")


def test_a_full_and_a_windowed_group_are_right_on_every_edge(explore: Explore) -> None:
    where = world(4, 2, 3, groups=(SLOT, WINDOW), enable_events=True)
    explore(where, 949, 8100, "Evict", "Touch", "sharing", "duplicates", "trim", "refused never")


def test_groups_of_two_block_sizes_are_right_on_every_edge(explore: Explore) -> None:
    where = world(4, 2, 3, groups=(GROUP, WINDOW), without=("reset_prefix_cache",))
    explore(where, 2139, 14977, *BASIC_GOALS, "trim")


def test_dropping_the_last_hit_is_right_on_every_edge(explore: Explore) -> None:
    where = world(6, 1, 3, use_eagle=True, groups=(Group(1, eagle=True), WINDOW))
    explore(where, 437, 1951, "Evict", "Touch", "trim")


def test_drafts_accepted_in_any_number_are_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 3, num_drafts=2)
    explore(where, 1432, 13542, *BASIC_GOALS, "add_drafts", "accept", "DraftsPending")


def test_drafts_behind_a_window_are_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 3, num_drafts=2, groups=(WINDOW,), without=("fork",))
    explore(where, 1142, 11206, "Evict", "Touch", "accept", "trim")


def test_external_tokens_that_fail_to_come_are_right_on_every_edge(explore: Explore) -> None:
    where = world(4, 2, 2, groups=(SLOT, WINDOW), **LOADS)
    explore(where, 732, 22791, "Evict", "Touch", "sharing", "reached", "trim", "refused later")


def test_hits_on_tokens_that_fail_to_come_are_right_on_every_edge_of_two_calls_a_batch(
    explore: Explore,
) -> None:
    without = ("fork", "append", "remove_request", "reset_prefix_cache")
    where = world(2, 2, 2, groups=(SLOT,), moves_per_batch=2, without=without, **LOADS)
    explore(where, 108, 19817, "Evict", "Touch", "sharing", "rewind", "reached")


@pytest.mark.slow
def test_delayed_caching_of_external_tokens_is_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 3, "cache_blocks", delays=(True,), **LOADS)
    explore(where, 885, 33340, *BASIC_GOALS, "cache_blocks", "rewind")


def test_stores_and_loads_that_fail_are_right_on_every_edge(explore: Explore) -> None:
    without = ("fork", "append", "reset_prefix_cache")
    where = world(2, 2, 3, "load", "store", groups=(SLOT,), loads_fail=True, without=without)
    explore(where, 702, 9423, "Evict", "Touch", "store", "load", "complete_operation", "sharing")


def test_cutting_and_rewinding_behind_a_window_is_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 3, "truncate", "rewind", groups=(WINDOW,))
    explore(where, 993, 9701, "Evict", "truncate", "rewind", "HeldByOthers", "trim")


def test_swapping_behind_a_window_is_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 3, *SWAP_CALLS, num_host_blocks=2, groups=(WINDOW,), enable_caching=False)
    explore(where, 529, 3635, "SwapOut", "SwapIn", "sharing", "trim", "refused later")


@pytest.mark.slow
def test_merging_longer_requests_is_right_on_every_edge_of_two_calls_a_batch(
    explore: Explore,
) -> None:
    where = world(2, 2, 3, duplicates="merge", moves_per_batch=2)
    explore(where, 530, 36063, "Evict", "Touch", "sharing", "CopyOnWrite", "merge")


@pytest.mark.slow
def test_four_blocks_two_requests_four_tokens_are_right_on_every_edge(explore: Explore) -> None:
    goals = [goal for goal in BASIC_GOALS if goal != "refused later"]  # two blocks each: all fit
    explore(world(4, 2, 4, enable_events=True), 81886, 818809, *goals)


@pytest.mark.slow
def test_full_and_windowed_groups_of_whole_blocks_are_right_on_every_edge(explore: Explore) -> None:
    where = world(4, 2, 4, groups=(GROUP, Group(2, kind="sliding_window", window=2)))
    explore(where, 5005, 48432, *BASIC_GOALS, "trim")


@pytest.mark.slow
def test_two_block_sizes_of_longer_requests_are_right_on_every_edge(explore: Explore) -> None:
    where = world(4, 2, 4, groups=(GROUP, WINDOW))
    explore(where, 6411, 61271, *BASIC_GOALS, "trim", "refused never")


@pytest.mark.slow
def test_full_and_windowed_groups_are_right_on_every_edge_of_two_calls_a_batch(
    explore: Explore,
) -> None:
    where = world(4, 2, 2, groups=(SLOT, WINDOW), moves_per_batch=2)
    explore(where, 426, 22112, "Evict", "Touch", "sharing", "duplicates")


@pytest.mark.slow
def test_drafts_of_longer_requests_are_right_on_every_edge(explore: Explore) -> None:
    explore(world(2, 2, 4, num_drafts=2), 3404, 40246, *BASIC_GOALS, "accept", "DraftsPending")


@pytest.mark.slow
def test_cutting_requests_with_drafts_is_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 3, "truncate", "rewind", num_drafts=1, without=("fork", "append"))
    explore(where, 1211, 11907, "Evict", "Touch", "accept", "truncate", "rewind", "HeldByOthers")


@pytest.mark.slow
def test_two_external_tokens_that_fail_to_come_are_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 4, num_external=2, loads_fail=True)
    explore(where, 1383, 213597, *BASIC_GOALS, "reached")


@pytest.mark.slow
def test_external_tokens_behind_a_window_are_right_on_every_edge(explore: Explore) -> None:
    where = world(
        *(2, 2, 3, "remove_skipped_blocks"), num_external=2, loads_fail=True, groups=(WINDOW,)
    )
    explore(where, 2249, 241678, "Evict", "Touch", "rewind", "trim", "remove_skipped_blocks")


@pytest.mark.slow
def test_delayed_caching_of_duplicates_that_merge_is_right_on_every_edge(explore: Explore) -> None:
    where = world(
        *(2, 2, 2, "cache_blocks"),
        groups=(SLOT,),
        delays=(False, True),
        duplicates="merge",
        moves_per_batch=2,
        without=("fork", "append", "reset_prefix_cache"),
    )
    explore(where, 203, 13136, "Evict", "Touch", "sharing", "merge", "cache_blocks")


@pytest.mark.slow
def test_delayed_caching_of_longer_requests_is_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 4, "cache_blocks", delays=(True, False), enable_events=True)
    explore(where, 2258, 30285, *BASIC_GOALS, "cache_blocks")


@pytest.mark.slow
def test_cutting_whole_blocks_behind_a_window_is_right_on_every_edge(explore: Explore) -> None:
    group = Group(2, kind="sliding_window", window=2)
    where = world(2, 2, 4, "truncate", "rewind", groups=(group,))
    explore(where, 3590, 42201, *BASIC_GOALS, "truncate", "rewind", "HeldByOthers", "trim")


@pytest.mark.slow
def test_rewinding_behind_a_window_is_right_on_every_edge_of_two_calls_a_batch(
    explore: Explore,
) -> None:
    where = world(
        2, 2, 3, "rewind", groups=(WINDOW,), moves_per_batch=2, without=("fork", "append")
    )
    explore(where, 890, 83969, "Evict", "Touch", "rewind", "HeldByOthers", "trim")


@pytest.mark.slow
def test_swapping_two_requests_behind_a_window_is_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 3, *SWAP_CALLS, num_host_blocks=1, groups=(WINDOW,))
    explore(where, 3029, 23869, "Evict", "SwapOut", "SwapIn", "trim", "refused later")


@pytest.mark.slow
def test_chunks_of_two_requests_are_right_on_every_edge(explore: Explore) -> None:
    where = world(2, 2, 4, groups=(CHUNKS,))
    explore(where, 4928, 47082, "Evict", "Touch", "sharing", "trim", "refused later")


@pytest.mark.slow
def test_loads_behind_a_window_are_right_on_every_edge(explore: Explore) -> None:
    where = world(
        3, 1, 4, "load", groups=(WINDOW,), loads_fail=True, without=("reset_prefix_cache",)
    )
    explore(where, 4214, 33096, "Evict", "Touch", "load", "complete_operation", "trim")


@pytest.mark.slow
def test_lookahead_is_right_on_every_edge(explore: Explore) -> None:
    explore(world(2, 2, 4, num_lookahead=1), 1420, 20353, *BASIC_GOALS, "refused never")
