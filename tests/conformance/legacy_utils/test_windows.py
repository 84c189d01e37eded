# SPDX-License-Identifier: Apache-2.0
"""Sliding windows in vLLM 0.8.5's V1 manager: which hits count, and what is given back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcore.legacy.v1_0_8.kv_cache_manager import KVCacheManager
from kvcore.legacy.v1_0_8.kv_cache_utils import BlockHashType
from kvcore.legacy.v1_0_8.specialized_manager import SlidingWindowManager
from kvcore.types.errors import DoubleFree
from tests.conformance.legacy_utils.requests import EngineRequest
from tests.conformance.legacy_utils.stories import (
    admit,
    all_of,
    decode,
    finish,
    free,
    ids,
    make,
    resume,
    table,
)
from tests.conftest import Backend

RECORDS = [BlockHashType(number, (number,)) for number in range(6)]


def cache(manager: KVCacheManager, places: Sequence[int]) -> None:
    """Put the records of these places into the cache: that of place p in block p + 1."""
    blocks = manager.block_pool.get_new_blocks(len(RECORDS))
    for place in places:
        blocks[place].block_hash = RECORDS[place]
    manager.block_pool.free_blocks(blocks)


def found(manager: KVCacheManager, **options: int) -> list[int]:
    """Return the blocks that a look-up of all records finds."""
    hit = manager.specialized_manager.find_longest_cache_hit(RECORDS, **options)
    return [block.block_id for block in hit]


@pytest.mark.seed("S001-79")
@pytest.mark.parametrize(
    ("places", "hit"),
    [
        ([], []),
        ([0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 5, 6]),  # the last two, nulls before them
        ([0, 1, 2, 3, 5], [0, 0, 3, 4]),  # a block alone at the end is not enough
        ([1, 2, 4], [0, 2, 3]),
        ([0, 2, 4], [1]),  # fewer than two count only from block 0 on
        ([1, 3, 5], []),
        ([0], [1]),
    ],
)
def test_a_window_takes_the_last_run_that_is_long_enough(
    backend: Backend, places: list[int], hit: list[int]
) -> None:
    manager = make(backend, window=9)  # eight tokens before the query: two blocks of four
    cache(manager, places)
    assert isinstance(manager.specialized_manager, SlidingWindowManager)
    assert manager.specialized_manager.sliding_window_contiguous_blocks == 2
    before = all_of(manager)
    assert found(manager) == hit
    assert all_of(manager) == before


@pytest.mark.seed("S001-79", "S001-78")
def test_with_eagle_a_window_finds_one_block_more_and_drops_it(backend: Backend) -> None:
    manager = make(backend, window=9)
    cache(manager, [1, 2, 4, 5])
    assert found(manager) == [0, 0, 0, 0, 5, 6]
    assert found(manager, num_dropped=1) == []
    longer = make(backend, window=9)
    cache(longer, [1, 2, 3, 5])
    assert found(longer, num_dropped=1) == [0, 2, 3]  # what the next query sees is all there


@pytest.mark.seed("S001-81")
def test_a_window_of_one_needs_no_block_in_a_row(backend: Backend) -> None:
    manager = make(backend, window=1)
    assert isinstance(manager.specialized_manager, SlidingWindowManager)
    assert manager.specialized_manager.sliding_window_contiguous_blocks == 0
    assert found(manager) == []
    cache(manager, [1, 3])
    assert found(manager) == [0, 0, 0, 4]


@pytest.mark.seed("S001-80")
@pytest.mark.parametrize(
    ("window", "num_computed", "removed", "left"),
    [
        (4, 0, [], [1, 2, 3, 4, 5]),
        (4, 6, [], [1, 2, 3, 4, 5]),  # (6 - 4 + 1) // 4 = 0
        (4, 7, [1], [0, 2, 3, 4, 5]),
        (4, 11, [2, 1], [0, 0, 3, 4, 5]),
        (1, 8, [2, 1], [0, 0, 3, 4, 5]),
        (4, 1000, [5, 4, 3, 2, 1], [0, 0, 0, 0, 0]),
    ],
)
def test_what_no_query_sees_is_taken_out_highest_first(
    backend: Backend, window: int, num_computed: int, removed: list[int], left: list[int]
) -> None:
    manager = make(backend, window=window)
    blocks = manager.block_pool.get_new_blocks(5)
    owners = [block.ref_cnt for block in blocks]
    taken = list(blocks)
    gone = manager.specialized_manager.remove_skipped_blocks(blocks, num_computed)
    assert (ids(gone), ids(blocks)) == (removed, left)
    # The search itself frees nothing.
    assert [block.ref_cnt for block in taken] == owners
    assert manager.specialized_manager.remove_skipped_blocks(blocks, num_computed) == []


@pytest.mark.seed("S001-80")
def test_the_search_stops_at_the_first_null_block(backend: Backend) -> None:
    manager = make(backend, window=4)
    first, *others = manager.block_pool.get_new_blocks(3)
    blocks = [first, manager.block_pool.null_block, *others]
    assert ids(manager.specialized_manager.remove_skipped_blocks(blocks, 15)) == [2]
    assert ids(blocks) == [1, 0, 0, 3]


@pytest.mark.seed("S001-80", "S001-71")
def test_a_running_request_gives_back_what_it_does_not_see(backend: Backend) -> None:
    manager = make(backend, 7, window=5)
    request = admit(manager, "0", range(12))
    assert (table(manager, request), free(manager)) == ([1, 2, 3], [4, 5, 6])
    # Query 12 sees 8 to 12: two blocks come back, highest first, and one is taken.
    assert decode(manager, request, 12) == [4]
    assert (table(manager, request), free(manager)) == ([0, 0, 3, 4], [5, 6, 2, 1])
    finish(manager, request)
    assert free(manager) == [5, 6, 2, 1, 4, 3]


@pytest.mark.seed("S001-71", "S001-80")
def test_what_a_window_gives_back_is_there_for_the_same_call(backend: Backend) -> None:
    manager = make(backend, 4, window=5)
    request = admit(manager, "0", range(12))
    assert free(manager) == []
    assert decode(manager, request, 12) == [2]
    assert (table(manager, request), free(manager)) == ([0, 0, 3, 2], [1])
    # What others hold does not come back.
    shared = make(backend, 4, window=5)
    first = admit(shared, "0", range(12))
    shared.block_pool.touch(shared.req_to_blocks["0"][:2])
    first.all_token_ids += [12]
    assert shared.allocate_slots(first, 1) is None
    assert (table(shared, first), free(shared)) == ([0, 0, 3], [])


def test_a_block_that_its_owner_lost_by_hand_stops_a_trim_before_it_begins(
    backend: Backend,
) -> None:
    manager = make(backend, 7, window=5)
    request = admit(manager, "0", range(12))
    manager.req_to_blocks["0"][0].decr_ref()
    request.all_token_ids += [12]
    before = all_of(manager)
    with pytest.raises(DoubleFree, match="block 1 has 0 owners"):
        manager.allocate_slots(request, 1)
    with pytest.raises(DoubleFree, match="block 1 has 0 owners"):
        manager.free(request)
    assert all_of(manager) == before


@pytest.mark.seed("S001-71", "S001-80")
def test_a_refused_request_has_given_back_and_nothing_else(backend: Backend) -> None:
    manager = make(backend, 4, window=5)
    request = admit(manager, "0", range(12))
    request.all_token_ids += range(12, 30)
    assert manager.allocate_slots(request, 18) is None
    assert (table(manager, request), free(manager)) == ([0, 0, 3], [2, 1])
    manager.check()
    assert ids(manager.allocate_slots(request, 8)) == [2, 1]


@pytest.mark.seed("S001-79", "S001-83")
def test_a_hit_with_null_blocks_is_held_and_given_back(backend: Backend) -> None:
    manager = make(backend, window=5)
    request = admit(manager, "0", range(13))
    decode(manager, request, 13)
    assert table(manager, request) == [0, 0, 3, 4]
    late = EngineRequest("1", list(range(13)))
    blocks, num_hit = manager.get_computed_blocks(late)
    assert (ids(blocks), num_hit) == ([0, 0, 3], 12)
    assert ids(manager.allocate_slots(late, 1, blocks)) == [5]
    manager.check()
    assert [block.ref_cnt for block in manager.block_pool.blocks[:6]] == [0, 0, 0, 2, 1, 1]
    manager.free(late)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 10
    assert resume(manager, EngineRequest("2", list(range(13)))) == [6]


@pytest.mark.seed("S001-72", "S001-79")
def test_null_blocks_of_a_hit_cost_nothing(backend: Backend) -> None:
    manager = make(backend, 5, window=5)
    request = admit(manager, "0", range(13))
    finish(manager, request)
    assert free(manager) == [4, 3, 2, 1]
    held = manager.block_pool.get_new_blocks(1)
    late = EngineRequest("1", list(range(13)))
    blocks, _ = manager.get_computed_blocks(late)
    assert (ids(blocks), ids(held)) == ([0, 0, 3], [4])
    # Free are 3, 2 and 1; the hit takes 3, and two are left though two of its places are null.
    assert ids(manager.allocate_slots(late, 1, blocks, num_lookahead_tokens=4)) == [2, 1]
