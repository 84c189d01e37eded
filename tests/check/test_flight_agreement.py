# SPDX-License-Identifier: Apache-2.0
"""Worlds with batches in flight: both languages find equal numbers of states at each distance."""

from __future__ import annotations

import pytest

from kvcore import Config, Group, KVCacheManager, Request
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.search.flight_model import reporters
from kvcore.check.search.search import check
from kvcore.check.world.world import World
from tests.check.worlds import world
from tests.conftest import MaxStates, need_twin

NO_FORK = ("fork",)
WORLDS = {
    "one request": (world(2, 1, 2, max_in_flight=1, without=NO_FORK), 882, 2797),
    "swap": (
        world(2, 1, 2, "swap_out", "swap_in", max_in_flight=1, num_host_blocks=2, without=NO_FORK),
        1541,
        5020,
    ),
    "truncate": (world(2, 1, 3, "truncate", max_in_flight=1), 3950, 13373),
    "running ahead": (PROFILES["ahead-leave"].world, 1107, 3458),
}
TWIN_WORLDS = {
    "two requests": (world(2, 2, 2, max_in_flight=1, without=NO_FORK), 32400, 116465),
    "completed, merging": (
        world(
            2,
            2,
            2,
            max_in_flight=1,
            publish="completed",
            duplicates="merge",
            without=NO_FORK,
        ),
        31516,
        111713,
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_both_languages_know_the_same_nodes(name: str, max_states: MaxStates) -> None:
    need_twin()
    where, num_states, num_edges = WORLDS[name]
    depth = None if max_states(num_states, num_edges) is None else 6
    reports = [check(where, backend=backend, max_depth=depth) for backend in ("python", "rust")]
    for report in reports:
        assert report.violation is None
        assert depth or (report.num_states, report.num_edges) == (num_states, num_edges)
    assert reports[0].depths == reports[1].depths


@pytest.mark.slow
@pytest.mark.parametrize("name", TWIN_WORLDS)
def test_the_twin_explores_two_requests_to_the_end(name: str) -> None:
    need_twin()
    where, num_states, num_edges = TWIN_WORLDS[name]
    report = check(where, backend="rust")
    assert (report.verdict, report.violation) == ("complete", None)
    assert (report.num_states, report.num_edges) == (num_states, num_edges)


def test_a_world_of_two_requests_begins_alike() -> None:
    need_twin()
    where: World = TWIN_WORLDS["two requests"][0]
    reports = [check(where, backend=backend, max_depth=6) for backend in ("python", "rust")]
    assert reports[0].depths == reports[1].depths


def test_a_later_request_of_the_loaders_name_leaves_the_report_to_the_one_that_hit() -> None:
    manager = KVCacheManager(Config(3, groups=(Group(1),), max_in_flight=1), backend="python")
    for name in ("loads", "hits"):
        manager.add_request(Request(name, [0, 0]))
    manager.allocate_slots("loads", 0, num_external_computed_tokens=1)
    manager.allocate_slots("hits", 1, manager.get_computed_blocks("hits"))
    batch, row = manager.take_batch().number, 0
    assert reporters(manager.state(), batch, row, 0) == ["loads", "hits"]
    manager.free("loads")
    manager.remove_request("loads")
    manager.add_request(Request("loads", [0]))
    assert reporters(manager.state(), batch, row, 0) == ["hits"]
