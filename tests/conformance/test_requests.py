# SPDX-License-Identifier: Apache-2.0
"""Requests: which may look up, what a preemption keeps, how a look-up is counted.

Blocks hold two tokens; a fresh pool gives 1, 2, 3, ...
"""

from __future__ import annotations

import pytest

from kvcore import Hit, KVCacheBlocks, KVCacheManager, PrefixCacheStats, Request
from kvcore.types.errors import UnknownRequest
from tests.conftest import Backend
from tests.helpers.stories import (
    add,
    admit,
    blocks,
    drop,
    keyed,
    make,
    serve,
    step,
    unchanged,
)

NOTHING = Hit(KVCacheBlocks(((),)), 0)


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Return a manager with tokens 0 to 3 cached in blocks 1 and 2."""
    made = make(backend)
    serve(made, "a", [0, 1, 2, 3])
    step(made)
    made.take_stats()
    return made


@pytest.mark.seed("S000-54", "S001-76")
def test_who_declines_hits_computes_all_and_caches_all(manager: KVCacheManager) -> None:
    tokens = [0, 1, 2, 3, 4, 5]
    manager.add_request(Request("b", tokens, skip_reading_prefix_cache=True))
    assert manager.get_computed_blocks("b") == NOTHING
    assert admit(manager, "b") == [3, 4, 5]
    assert keyed(manager) == [1, 2, 3, 4, 5]
    # A request that asked for nothing.
    assert manager.take_stats() == PrefixCacheStats(requests=1, queries=0, hits=0)
    step(manager)
    add(manager, "c", [*tokens, 6])
    # Block 5 is new to the cache, and the older blocks answer for the others.
    assert manager.get_computed_blocks("c").blocks == KVCacheBlocks(((1, 2, 5),))


@pytest.mark.seed("S000-54", "S004-13")
def test_a_look_up_is_a_question(manager: KVCacheManager) -> None:
    add(manager, "b", [0, 1, 2, 3, 4])
    with unchanged(manager):
        first = manager.get_computed_blocks("b")
        assert manager.get_computed_blocks("b") == first == Hit(KVCacheBlocks(((1, 2),)), 4)


@pytest.mark.seed("S001-75")
def test_a_chain_is_kept_through_a_preemption_and_goes_with_its_request(
    manager: KVCacheManager,
) -> None:
    chain = manager.state().requests["a"].block_hashes
    assert len(chain) == 2
    manager.free("a")
    assert manager.state().requests["a"].block_hashes == chain
    manager.add_tokens("a", [4, 5])
    longer = manager.state().requests["a"].block_hashes
    assert (longer[:2], len(longer)) == (chain, 3)
    manager.remove_request("a")
    assert "a" not in manager.state().requests
    # Under the old name there is a new chain.
    add(manager, "a", [9, 9])
    assert manager.state().requests["a"].block_hashes[0] not in longer


@pytest.mark.seed("S000-55", "S001-77", "S001-84")
def test_statistics_count_all_tokens_and_are_handed_out_once(manager: KVCacheManager) -> None:
    # Of four tokens two can be hits; the block that is computed again is asked for all the same.
    serve(manager, "b", [0, 1, 2, 3])
    assert manager.take_stats() == PrefixCacheStats(requests=1, queries=4, hits=2)
    assert manager.take_stats() == PrefixCacheStats()


@pytest.mark.seed("S000-42", "S001-84", "S001-24")
def test_a_reset_is_told_with_the_next_statistics(manager: KVCacheManager) -> None:
    assert not manager.reset_prefix_cache()
    assert manager.take_stats() == PrefixCacheStats()
    drop(manager, "a")
    assert manager.reset_prefix_cache()
    serve(manager, "b", [0, 1, 2])
    assert manager.take_stats() == PrefixCacheStats(requests=1, queries=3, hits=0, reset=True)
    assert manager.take_stats() == PrefixCacheStats()


@pytest.mark.seed("S000-45")
def test_asking_for_a_stranger_changes_no_later_answer(manager: KVCacheManager) -> None:
    before = manager.get_num_common_prefix_blocks("a")
    with unchanged(manager), pytest.raises(UnknownRequest):
        manager.get_num_common_prefix_blocks("stranger")
    assert manager.get_num_common_prefix_blocks("a") == before == [2]


@pytest.mark.seed("S004-05", "S004-10", "S001-71")
def test_a_request_is_allocated_chunk_by_chunk(manager: KVCacheManager) -> None:
    add(manager, "b", range(50, 57))
    assert manager.allocate_slots("b", 3) == KVCacheBlocks(((3, 4),))
    step(manager)
    # The next token fills block 4, which is full then; the one after it opens another.
    assert manager.allocate_slots("b", 1) == KVCacheBlocks(((),))
    assert keyed(manager) == [1, 2, 3, 4]
    assert manager.allocate_slots("b", 3) == KVCacheBlocks(((5, 6),))
    assert blocks(manager, "b") == [3, 4, 5, 6]


@pytest.mark.seed("S004-09")
def test_of_one_step_the_second_request_hits_what_the_first_fills(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", [0, 1, 2, 3, 4])
    add(manager, "b", [0, 1, 2, 3, 5])
    assert manager.get_computed_blocks("b") == NOTHING
    admit(manager, "a")
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((1, 2),)), 4)


@pytest.mark.seed("S001-85", "S000-43")
def test_the_common_prefix_ends_at_the_first_block_that_one_lacks(manager: KVCacheManager) -> None:
    serve(manager, "b", [0, 1, 2, 3, 4, 5, 6])
    serve(manager, "c", [0, 1, 2, 3, 4, 5, 7])
    step(manager)
    # b and c share their third block too; a, which has two, does not.
    assert blocks(manager, "b")[:3] == blocks(manager, "c")[:3]
    assert [manager.get_num_common_prefix_blocks(name) for name in "abc"] == [[2], [2], [2]]
    drop(manager, "a")
    assert [manager.get_num_common_prefix_blocks(name) for name in "bc"] == [[3], [3]]
