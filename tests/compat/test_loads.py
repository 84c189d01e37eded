# SPDX-License-Identifier: Apache-2.0
"""Loads that fail, come in part or come late under `kvcore.compat`.

An engine lowers its count to what came and computes the rest in the blocks that it has. Nine usable
blocks of two tokens unless a test says otherwise.
"""

from __future__ import annotations

import pytest

from kvcore import Group, Reason, Refused
from kvcore.compat import BehindWindow, KVCacheManager
from tests.compat.stories import admit, decode, finish, make, num_found
from tests.compat.worker import EngineRequest
from tests.conftest import Backend


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager with one group."""
    return make(backend)


def test_what_a_failed_load_left_is_computed_again_in_place(manager: KVCacheManager) -> None:
    request = EngineRequest("r", [1, 2, 3, 4, 5, 6, 7])
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=6) is not None
    request.num_computed_tokens = 7
    table = manager.get_block_ids("r")
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 9]) == 6
    # Only the first two tokens came: the engine lowers its count and computes in two chunks.
    request.num_computed_tokens = 2
    assert decode(manager, request, 2) == ()
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 9]) == 2
    assert decode(manager, request, 3) == ()
    assert manager.get_block_ids("r") == table
    request.output.append(8)
    assert decode(manager, request, 1) == ()
    assert manager.core.num_computed_tokens("r") == 8


def test_what_a_delayed_load_brought_in_part_is_published_when_it_is_whole(
    manager: KVCacheManager,
) -> None:
    request = EngineRequest("r", [1, 2, 3, 4, 5, 6, 7])
    assert manager.allocate_slots(request, 0, 0, None, 0, 6, True) is not None
    manager.new_step_starts()
    request.num_computed_tokens = 2
    manager.cache_blocks(request, 2)
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 9]) == 2
    assert manager.allocate_slots(request, 5) is not None
    assert manager.get_block_ids("r") == ([1, 2, 3, 4],)
    # Not while the step is scheduled: the request may still be preempted.
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 9]) == 2
    request.num_computed_tokens = 7
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 9]) == 6


def test_the_gate_of_the_whole_sequence_counts_what_lies_behind_slots_that_are_there(
    manager: KVCacheManager,
) -> None:
    request = EngineRequest("r", list(range(14)))
    assert manager.allocate_slots(request, 0, 0, None, 0, 8, True) is not None
    other, _ = admit(manager, "other", list(range(20, 28)))
    request.num_computed_tokens = 2  # of the load; it goes on in four of the seven blocks it needs
    assert manager.allocate_slots(request, 4, full_sequence_must_fit=True) is None
    assert manager.last_refusal == Refused(Reason.LATER, needed=3, available=1)
    assert manager.core.num_computed_tokens("r") == 8
    finish(manager, other)
    assert manager.allocate_slots(request, 4, full_sequence_must_fit=True) is not None
    assert manager.last_refusal is None


def test_nothing_that_was_to_be_computed_again_stays_findable(manager: KVCacheManager) -> None:
    request = EngineRequest("r", [1, 2, 3, 4, 5, 6, 7])
    assert manager.allocate_slots(request, 0, 0, None, 0, 6, True) is not None
    manager.new_step_starts()
    request.num_computed_tokens = 2
    assert manager.allocate_slots(request, 5) is not None
    manager.free(request)
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 9]) == 0
    request.num_computed_tokens = 0
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=6) is not None
    request.num_computed_tokens = 7
    manager.new_step_starts()
    # Removed before the load is confirmed: its other two tokens can no longer be reported.
    request.num_computed_tokens = 2
    finish(manager, request)
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 9]) == 0


def test_what_is_computed_again_with_delayed_caching_waits_to_be_cached(
    manager: KVCacheManager,
) -> None:
    request = EngineRequest("r", [1, 2, 3, 4, 5])
    assert manager.allocate_slots(request, 0, 0, None, 0, 4, True) is not None
    manager.new_step_starts()
    request.num_computed_tokens = 2
    assert manager.allocate_slots(request, 3, delay_cache_blocks=True) is not None
    request.num_computed_tokens = 5
    manager.new_step_starts()
    assert num_found(manager, [1, 2, 3, 4, 9]) == 0
    manager.cache_blocks(request, 5)
    assert num_found(manager, [1, 2, 3, 4, 9]) == 4


def test_who_ends_while_it_is_computed_again_is_not_published_later(
    manager: KVCacheManager,
) -> None:
    request = EngineRequest("r", [1, 2, 3, 4, 5])
    assert manager.allocate_slots(request, 0, 0, None, 0, 4, True) is not None
    manager.new_step_starts()
    request.num_computed_tokens = 2
    assert manager.allocate_slots(request, 3) is not None
    finish(manager, request)
    manager.new_step_starts()
    assert num_found(manager, [1, 2, 3, 4, 9]) == 0


def test_an_engine_may_count_a_load_when_it_is_done(manager: KVCacheManager) -> None:
    first, _ = admit(manager, "first", [1, 2, 3])
    finish(manager, first)
    request = EngineRequest("r", [1, 2, 3, 4, 5])
    blocks, num_hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 0, num_hit, blocks, 0, 2, True) is not None
    manager.new_step_starts()
    # Aborted before that: what it hit stays findable.
    finish(manager, request)
    assert num_found(manager, [1, 2, 9]) == 2


def test_a_load_that_failed_behind_a_window_starts_anew(backend: Backend) -> None:
    manager = make(backend, 20, groups=(Group(2), Group(2, kind="sliding_window", window=3)))
    request = EngineRequest("r", list(range(9)))
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=8) is not None
    request.num_computed_tokens = 9
    manager.new_step_starts()
    request.num_computed_tokens = 4
    before = manager.core.encode()
    with pytest.raises(BehindWindow, match="keeps nothing before token 6"):
        manager.allocate_slots(request, 5)
    assert manager.core.encode() == before
    manager.free(request)
    request.num_computed_tokens = 0
    assert manager.allocate_slots(request, 9) is not None
