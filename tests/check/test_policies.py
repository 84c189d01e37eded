# SPDX-License-Identifier: Apache-2.0
"""Eviction policies may cost hits, never correctness: worlds whose policy remembers uses."""

from __future__ import annotations

import pytest

from kvcore.check.profiles.registry import PROFILES
from kvcore.check.search.search import check
from tests.check.worlds import world
from tests.conftest import need_twin


@pytest.mark.parametrize("name", ["policy-due", "policy-lru2", "policy-s3fifo", "policy-epoch"])
def test_a_world_of_a_policy_is_right_on_every_edge(name: str) -> None:
    need_twin()
    profile = PROFILES[name]
    report = check(profile.world, backend="rust")
    counts = (report.num_states, report.num_edges)
    assert (report.verdict, report.violation) == ("complete", None)
    assert counts == (profile.num_states, profile.num_edges)


@pytest.mark.parametrize("name", ["policy-lru2", "policy-epoch"])
def test_both_languages_tell_apart_what_a_policy_remembers(name: str) -> None:
    profile = PROFILES[name]
    report = check(profile.world, backend="python", max_depth=4)
    other = check(profile.world, backend="rust", max_depth=4)
    assert report.violation is None
    assert (report.num_states, report.num_edges) == (other.num_states, other.num_edges)


def test_learned_is_right_on_every_edge_to_a_depth() -> None:
    need_twin()
    report = check(world(2, 2, 3, eviction="learned"), backend="rust", max_depth=9)
    assert (report.verdict, report.violation) == ("bounded by depth", None)
    assert (report.num_states, report.num_edges) == (25623, 58682)
