# SPDX-License-Identifier: Apache-2.0
"""Small worlds, explored to their end: nothing is broken, and the twin agrees on every edge.

The counts are pinned: another count means that the core can reach other states, or that another
world is explored. Say which in the commit that changes one.
"""

from __future__ import annotations

import pytest

from kvcore import Group
from kvcore.actions import World
from kvcore.explore import Explorer, Report
from tests.conftest import need_twin
from tests.explore.worlds import Parity, world

GROUP = Group(2)
BASIC_GOALS = ("Evict", "Touch", "sharing", "CopyOnWrite", "duplicates", "refused later")
SWAP_CALLS = ("swap_out", "swap_in")


def explore(where: World, num_states: int, num_edges: int, *goals: str) -> Report:
    """Explore a world on both backends; every goal must be reached somewhere."""
    need_twin()
    report = Explorer(where, Parity(where)).run()
    assert (report.num_states, report.num_edges) == (num_states, num_edges)
    missing = [goal for goal in goals if not report.goals[goal]]
    assert not missing, f"never reached: {missing}"
    return report


def test_three_blocks_two_requests_four_tokens_are_right_on_every_edge() -> None:
    explore(world(3, 2, 4, enable_events=True), 9891, 96082, *BASIC_GOALS)


def test_cutting_requests_is_right_on_every_edge() -> None:
    where = world(2, 2, 4, "truncate", enable_events=True)
    explore(where, 1722, 17943, *BASIC_GOALS, "truncate")


def test_swapping_is_right_on_every_edge() -> None:
    where = world(2, 2, 3, *SWAP_CALLS, num_host_blocks=2, enable_events=True)
    explore(where, 2584, 18646, *BASIC_GOALS, "SwapOut", "SwapIn", "swap_in", "swap_out")


def test_merging_duplicates_is_right_on_every_edge_of_two_calls_a_batch() -> None:
    where = world(2, 2, 2, duplicates="merge", calls_per_batch=2)
    report = explore(where, 199, 8929, "Evict", "sharing", "CopyOnWrite", "merge")
    assert not report.goals["duplicates"]


def test_uncached_first_is_right_on_every_edge() -> None:
    where = world(2, 2, 3, eviction="uncached_first", enable_events=True)
    explore(where, 525, 4086, *BASIC_GOALS)


def test_two_groups_with_a_null_block_are_right_on_every_edge() -> None:
    where = world(5, 2, 3, groups=(GROUP, GROUP), null_block=True, num_preallocate_tokens=2)
    explore(where, 671, 5265, "Evict", "Touch", "sharing", "CopyOnWrite", "duplicates")


@pytest.mark.slow
def test_cutting_and_swapping_are_right_on_every_edge_of_two_calls_a_batch() -> None:
    where = world(2, 2, 2, "truncate", *SWAP_CALLS, num_host_blocks=1, calls_per_batch=2)
    goals = ("SwapOut", "SwapIn", "truncate", "refused never", "CopyOnWrite")
    explore(where, 835, 48758, *goals)


@pytest.mark.slow
def test_merging_longer_requests_is_right_on_every_edge_of_two_calls_a_batch() -> None:
    where = world(2, 2, 3, duplicates="merge", calls_per_batch=2)
    explore(where, 530, 36063, "Evict", "Touch", "sharing", "CopyOnWrite", "merge")


@pytest.mark.slow
def test_leaving_the_open_batch_is_right_on_every_edge_of_three_calls_a_batch() -> None:
    where = world(2, 2, 3, "truncate", calls_per_batch=3, without=("append", "remove_request"))
    explore(where, 418, 135340, "HitInOpenBatch", "Touch", "sharing")


@pytest.mark.slow
def test_four_blocks_two_requests_four_tokens_are_right_on_every_edge() -> None:
    explore(world(4, 2, 4, enable_events=True), 81886, 818809, *BASIC_GOALS)
