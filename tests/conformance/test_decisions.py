# SPDX-License-Identifier: Apache-2.0
"""Decisions between seeds that no numbered fact shows: the watermark, and what it does not hold.

Blocks hold two tokens. Unless told otherwise five blocks are usable, and two are to stay free.
"""

from __future__ import annotations

import pytest

from kvcore import KVCacheBlocks, KVCacheManager, Reason, Refused
from tests.conftest import Backend
from tests.helpers.stories import add, drop, make, serve, step, unchanged

LATER, NEVER = Reason.LATER, Reason.NEVER


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager in which "a" holds three of the five blocks."""
    made = make(backend, 6, watermark_blocks=2, num_host_blocks=5)
    serve(made, "a", range(5))
    step(made)
    return made


@pytest.mark.seed("X-10")
def test_an_admission_leaves_the_watermark_free(manager: KVCacheManager) -> None:
    add(manager, "b", [50])
    with unchanged(manager):
        assert manager.allocate_slots("b", 1) == Refused(LATER, needed=1, available=0)
    drop(manager, "a")
    assert manager.allocate_slots("b", 1) == KVCacheBlocks(((4,),))


@pytest.mark.seed("X-10")
def test_what_never_leaves_the_watermark_free_is_never_admitted(manager: KVCacheManager) -> None:
    drop(manager, "a")
    add(manager, "b", range(50, 58))
    with unchanged(manager):
        assert manager.allocate_slots("b", 7) == Refused(NEVER, needed=4, available=3)
    assert manager.allocate_slots("b", 6)


@pytest.mark.seed("X-10")
def test_who_runs_may_go_below_the_watermark(manager: KVCacheManager) -> None:
    manager.add_tokens("a", range(5, 10))
    assert manager.allocate_slots("a", 5) == KVCacheBlocks(((4, 5),))


@pytest.mark.seed("X-10")
def test_by_default_there_is_no_watermark(backend: Backend) -> None:
    manager = make(backend, 3)
    assert serve(manager, "a", [0, 1, 2]) == [1, 2]


@pytest.mark.seed("X-10")
def test_the_way_back_from_the_host_leaves_the_watermark_free(manager: KVCacheManager) -> None:
    assert manager.swap_out(["a"])
    step(manager)
    serve(manager, "b", [50])
    step(manager)
    # Four blocks are free, "a" takes three.
    with unchanged(manager):
        assert manager.swap_in(["a"]) == Refused(LATER, needed=3, available=2)
    drop(manager, "b")
    assert manager.swap_in(["a"])


@pytest.mark.seed("X-10")
def test_whoever_asks_may_reserve_more(backend: Backend) -> None:
    manager = make(backend, 7)
    serve(manager, "a", range(3))
    serve(manager, "b", [50])
    step(manager)
    manager.add_tokens("a", range(3, 8))
    # Three blocks are free; the five tokens need two, also of a request that runs.
    with unchanged(manager):
        refused = manager.allocate_slots("a", 5, reserved_blocks=2)
        assert refused == Refused(LATER, needed=2, available=1)
    assert manager.allocate_slots("a", 5, reserved_blocks=1) == KVCacheBlocks(((4, 5),))
