# SPDX-License-Identifier: Apache-2.0
"""Queries of `kvcore.compat` on blocks, steps and look-ups: statistics, events, `KVCacheBlocks`.

Nine usable blocks of two tokens unless a test says otherwise.
"""

from __future__ import annotations

import pytest

from kvcore import AllBlocksCleared, BlockStored, Group, PrefixCacheStats
from kvcore.compat import KVCacheManager, NotOneGroup
from kvcore.types.errors import UnknownBlock
from tests.compat.stories import admit, finish, make
from tests.compat.worker import EngineRequest
from tests.conftest import Backend

WINDOW = (Group(2), Group(2, kind="sliding_window", window=3))


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager with one group."""
    return make(backend)


@pytest.mark.seed("S000-42", "S000-55", "S000-56")
def test_statistics_are_of_tokens_and_say_that_the_cache_was_reset(backend: Backend) -> None:
    manager = make(backend)
    assert make(backend, log_stats=False).make_prefix_cache_stats() is None
    first, _ = admit(manager, "first", [1, 2, 3, 4, 5])
    assert manager.usage == pytest.approx(3 / 9)
    assert manager.reset_prefix_cache() is False
    manager.free(first)
    first.num_computed_tokens, first.status = 0, "PREEMPTED"
    blocks, num_hit = manager.get_computed_blocks(first)
    assert manager.allocate_slots(first, 5 - num_hit, num_hit, blocks) is not None
    stats = manager.make_prefix_cache_stats()
    assert stats == PrefixCacheStats(
        requests=1, queries=5, hits=0, preempted_requests=1, preempted_queries=5, preempted_hits=4
    )
    manager.free(first)
    assert manager.reset_prefix_cache() is True
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(reset=True)
    assert manager.make_prefix_cache_stats() == PrefixCacheStats()
    assert manager.get_computed_blocks(EngineRequest("again", [1, 2, 3, 4]))[1] == 0


@pytest.mark.seed("S000-55")
def test_who_was_not_looked_up_is_not_counted(backend: Backend) -> None:
    for options in ({"enable_caching": False}, {}):
        manager = make(backend, **options)
        given = manager.empty_kv_cache_blocks if options else None
        assert manager.allocate_slots(EngineRequest("r", [1, 2, 3]), 3, 0, given) is not None
        assert manager.make_prefix_cache_stats() == PrefixCacheStats()


@pytest.mark.seed("S000-46", "S000-47")
def test_events_are_handed_out_once_as_a_list(backend: Backend) -> None:
    assert make(backend).take_events() == []
    manager = make(backend, enable_events=True)
    request, _ = admit(manager, "r", [1, 2, 3, 4])
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.tokens == (1, 2, 3, 4)
    assert manager.take_events() == []
    finish(manager, request)
    manager.reset_prefix_cache()
    events = manager.take_events()
    events.extend([])
    assert events == [AllBlocksCleared()]


@pytest.mark.seed("S000-50", "S000-51")
def test_new_block_ids_are_drained_and_a_step_without_work_changes_nothing(
    backend: Backend,
) -> None:
    manager = make(backend, record_new_blocks=True)
    admit(manager, "r", [1, 2, 3])
    assert manager.take_new_block_ids() == [1, 2]
    assert manager.take_new_block_ids() == []
    manager.new_step_starts()
    before = manager.core.encode()
    manager.new_step_starts()
    assert manager.core.encode() == before


@pytest.mark.seed("S000-53")
def test_blocks_add_up_by_group_and_tell_who_has_no_hash(backend: Backend) -> None:
    manager = make(backend)
    admit(manager, "r", [1, 2, 3])
    blocks = manager.get_blocks("r")
    assert blocks.get_block_ids() == ([1, 2],)
    assert blocks.get_unhashed_block_ids() == [2]
    both = blocks + manager.create_kv_cache_blocks([[7]])
    assert both.blocks == ((1, 2, 7),)
    assert both == manager.create_kv_cache_blocks([[1, 2, 7]])
    none = blocks.new_empty()
    assert none.get_block_ids() == ([],)
    assert none.get_block_ids(allow_none=True) is None
    assert blocks.get_block_ids(allow_none=True) == ([1, 2],)
    manager.evict_blocks({1})
    assert blocks.get_unhashed_block_ids() == [1, 2]


@pytest.mark.seed("S000-53", "S000-39", "S000-44")
def test_the_null_block_is_never_unhashed(backend: Backend) -> None:
    manager = make(backend, 20, groups=WINDOW)
    request, _ = admit(manager, "r", list(range(7)))
    manager.new_step_starts()
    # At 7 tokens positions 0 to 4 are out of the window: two blocks of it.
    manager.remove_skipped_blocks("r", 100)
    manager.remove_skipped_blocks("nobody", 100)
    blocks = manager.get_blocks("r")
    assert blocks.blocks[1][:2] == (0, 0)
    assert blocks.blocks[1][2] != 0
    unhashed = [[blocks.blocks[0][3]], [blocks.blocks[1][3]]]
    assert blocks.get_unhashed_block_ids_all_groups() == unhashed
    assert blocks.new_empty().blocks == ((), ())
    assert manager.get_num_common_prefix_blocks("r") == [4, 0]
    with pytest.raises(NotOneGroup, match="2 groups"):
        blocks.get_unhashed_block_ids()
    finish(manager, request)


@pytest.mark.seed("S000-43", "S000-45")
def test_the_common_prefix_of_all_who_hold_blocks(manager: KVCacheManager) -> None:
    first, _ = admit(manager, "first", [1, 2, 3, 4, 5])
    manager.new_step_starts()
    admit(manager, "second", [1, 2, 3, 4, 6])
    assert manager.get_num_common_prefix_blocks("second") == [2]
    assert manager.get_num_common_prefix_blocks("nobody") == [0]
    assert manager.get_num_common_prefix_blocks("second") == [2]
    manager.free(first)
    assert manager.get_num_common_prefix_blocks("second") == [3]


@pytest.mark.seed("S000-41")
def test_evicted_blocks_are_not_found_and_the_null_block_has_no_key(
    manager: KVCacheManager,
) -> None:
    first, table = admit(manager, "first", [1, 2, 3, 4, 5])
    manager.evict_blocks({0, table[0][1]})
    assert manager.get_computed_blocks(EngineRequest("again", [1, 2, 3, 4, 6]))[1] == 2
    assert manager.get_block_ids("first") == (table[0],)
    before = manager.core.encode()
    with pytest.raises(UnknownBlock):
        manager.evict_blocks({10})
    assert manager.core.encode() == before
    finish(manager, first)
