# SPDX-License-Identifier: Apache-2.0
"""V0 in random lives: both backends alike, promises kept, owners counted."""

from __future__ import annotations

import pytest

from tests.conftest import need_twin
from tests.legacy.v0.walk import AllocatorWalk, ManagerWalk

NUM_CALLS = 400
SEEDS = range(3)
COPIES = {"Allocate", "Free", "CopyOnWrite", "SwapOut", "SwapIn"}
CACHED = {"Touch", "Evict", "EvictAll"}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("caching", [False, True])
def test_managers_of_both_backends_live_alike(caching: bool, window: int | None) -> None:
    need_twin()
    seen: set[str] = set()
    for seed in SEEDS:
        walk = ManagerWalk(seed, caching=caching, window=window)
        walk.run(NUM_CALLS)
        assert 0 < walk.refused < NUM_CALLS, seed
        seen |= walk.twins.seen
    assert seen - {"EvictAll"} == COPIES | (CACHED - {"EvictAll"} if caching else set())


def test_allocators_of_both_backends_live_alike() -> None:
    need_twin()
    seen: set[str] = set()
    for seed in SEEDS:
        walk = AllocatorWalk(seed)
        walk.run(NUM_CALLS)
        assert 0 < walk.refused < NUM_CALLS, seed
        seen |= walk.twins.seen
    assert seen == {"Allocate", "Free", "CopyOnWrite", *CACHED}
