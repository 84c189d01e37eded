# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.8.5's V1 manager and its pool: duplicates, owners, and what is refused unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.legacy.v1_0_8.errors import (
    AlreadyHashed,
    ForeignBlock,
    HitsWhileRunning,
    NotOneGroup,
    StaleHit,
    TokensMissing,
)
from kvcore.legacy.v1_0_8.kv_cache_interface import KVCacheConfig
from kvcore.legacy.v1_0_8.kv_cache_manager import BlockPool, KVCacheManager
from kvcore.legacy.v1_0_8.kv_cache_utils import (
    BlockHashType,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    hash_request_tokens,
)
from kvcore.types.errors import InvalidCount, KvcoreError, UnusedBlock, WrongArgument
from tests.conformance.legacy_utils.requests import EngineRequest, Span
from tests.conformance.legacy_utils.stories import admit, all_of, finish, free, ids, make
from tests.conftest import Backend

PROMPT = list(range(10, 21))


@pytest.mark.seed("S001-82")
def test_of_duplicates_the_first_answers_then_the_next(backend: Backend) -> None:
    manager = make(backend, 4)
    first = EngineRequest("0", [1, 2, 3, 4])
    second = EngineRequest("1", [1, 2, 3, 4])
    third = EngineRequest("2", [1, 2, 3, 4, 5])
    for request in (first, second):
        assert manager.allocate_slots(request, 4) is not None
    cached = manager.block_pool.cached_block_hash_to_block
    (record,) = cached
    assert (len(cached), list(cached[record])) == (1, [1, 2])
    assert cached[record][1] is manager.block_pool.blocks[1]
    assert ids(manager.get_computed_blocks(third)[0]) == [1]
    finish(manager, first)
    assert free(manager) == [3, 1]
    assert ids(manager.block_pool.get_new_blocks(2)) == [3, 1]
    assert ids(manager.get_computed_blocks(third)[0]) == [2]
    assert list(cached[record]) == [2]
    manager.free(second)
    manager.block_pool.get_new_blocks(1)
    assert (manager.get_computed_blocks(third), len(cached)) == (([], 0), 0)


@pytest.mark.seed("S001-83")
def test_a_hit_adds_an_owner_and_leaves_the_queue(backend: Backend) -> None:
    manager = make(backend)
    first = admit(manager, "0", PROMPT)
    admit(manager, "1", PROMPT)
    blocks = manager.block_pool.blocks
    assert [block.ref_cnt for block in blocks[1:5]] == [2, 2, 1, 1]
    finish(manager, first)
    assert [block.ref_cnt for block in blocks[1:5]] == [1, 1, 0, 1]
    assert free(manager) == [5, 6, 7, 8, 9, 10, 3]
    for request in ("1",):
        manager.free(EngineRequest(request, PROMPT))
    assert free(manager) == [5, 6, 7, 8, 9, 10, 3, 4, 2, 1]
    manager.block_pool.touch([blocks[2], blocks[0]])
    assert free(manager) == [5, 6, 7, 8, 9, 10, 3, 4, 1]
    assert [block.ref_cnt for block in blocks[:3]] == [0, 0, 1]
    manager.block_pool.free_blocks([blocks[0], blocks[2]])
    assert free(manager) == [5, 6, 7, 8, 9, 10, 3, 4, 1, 2]


def test_a_hash_that_was_set_by_hand_stays(backend: Backend) -> None:
    manager = make(backend)
    request = admit(manager, "0", [1, 2, 3])
    block = manager.req_to_blocks["0"][0]
    block.block_hash = BlockHashType(7, (7,))
    request.all_token_ids.append(4)
    assert manager.allocate_slots(request, 1) == []
    assert block.block_hash == BlockHashType(7, (7,))
    assert len(manager.req_to_block_hashes["0"]) == 1
    manager.check()


def test_freeing_or_asking_for_who_is_not_known_changes_nothing(backend: Backend) -> None:
    manager = make(backend)
    admit(manager, "0", PROMPT)
    before = all_of(manager)
    manager.free(EngineRequest("7", [1]))
    manager.free_block_hashes(EngineRequest("7", [1]))
    assert manager.req_to_blocks["7"] == []
    assert manager.req_to_block_hashes["7"] == []
    assert all_of(manager) == before


def test_wrong_hits_are_refused_before_anything_changes(backend: Backend) -> None:
    manager, other = make(backend), make(backend)
    running = admit(manager, "0", range(12))
    request = EngineRequest("1", list(range(13)))
    hits, _ = manager.get_computed_blocks(request)
    blocks = manager.block_pool.blocks
    wrong: list[tuple[type[KvcoreError], EngineRequest, list[Any]]] = [
        (ForeignBlock, request, [other.block_pool.blocks[1]]),
        (ForeignBlock, request, [KVCacheBlock(1, backend=backend)]),
        (ForeignBlock, request, [1]),
        (StaleHit, request, [hits[1]]),
        (StaleHit, request, [blocks[0], hits[1]]),
        (StaleHit, request, [*hits, blocks[9]]),
        (StaleHit, EngineRequest("2", [9] * 17), hits),
        (HitsWhileRunning, running, hits),
        (TokensMissing, EngineRequest("3", [1, 2, 3]), []),
    ]
    before = all_of(manager)
    for error, asker, given in wrong:
        with pytest.raises(error, match=r"\d"):
            manager.allocate_slots(asker, 5, given)
        assert all_of(manager) == before


def test_a_hash_function_that_raises_has_changed_nothing(backend: Backend) -> None:
    manager = make(backend)
    request = EngineRequest("0", PROMPT, mm_positions=[Span(0, 2)], mm_hashes=[])
    before = all_of(manager)
    for call in (
        lambda: manager.get_computed_blocks(request),
        lambda: manager.allocate_slots(request, 11),
    ):
        with pytest.raises(KvcoreError, match="multi-modal hashes"):
            call()
        assert all_of(manager) == before


def test_a_hash_that_no_key_can_be_made_of_has_changed_nothing(backend: Backend) -> None:
    manager = make(backend)
    media: Any = {"mm_positions": [Span(0, 2)], "mm_hashes": [lambda: 0]}
    request = EngineRequest("0", list(PROMPT), **media)
    before = all_of(manager)
    with pytest.raises(WrongArgument, match="block hash"):
        manager.get_computed_blocks(request)
    with pytest.raises(WrongArgument, match="block hash"):
        manager.allocate_slots(request, 11)
    assert all_of(manager) == before


@pytest.mark.seed("S001-08", "S001-41", "S001-75", "S001-82")
def test_full_blocks_are_published_by_hand_too(backend: Backend) -> None:
    pool = BlockPool(6, True, backend=backend)
    request = EngineRequest("0", list(range(11)))
    blocks, hashes = pool.get_new_blocks(3), hash_request_tokens(hash, 4, request)
    known = hashes[:1]
    pool.cache_full_blocks(request, blocks, known, 0, 2, 4, hash)
    assert known == hashes
    assert [block.block_hash for block in blocks] == [*hashes, None]
    before = pool.backing.state()
    wrong: list[tuple[type[KvcoreError], list[KVCacheBlock], int, int]] = [
        (TokensMissing, blocks, 2, 3),
        (AlreadyHashed, blocks, 1, 2),
        (UnusedBlock, [blocks[0], pool.blocks[5]], 1, 2),
        (ForeignBlock, [KVCacheBlock(1)], 0, 1),
    ]
    for error, given, num_cached, num_full in wrong:
        with pytest.raises(error):
            pool.cache_full_blocks(request, given, known, num_cached, num_full, 4, hash)
        assert (pool.backing.state(), known) == (before, hashes)
    assert pool._maybe_evict_cached_block(blocks[0]) is True
    assert pool._maybe_evict_cached_block(blocks[0]) is False
    assert pool.get_cached_block(hashes[0]) is None
    assert pool.get_cached_block(hashes[1]) is blocks[1]


@pytest.mark.seed("S001-83")
def test_a_pool_s_queue_moves_with_its_owners_alone(backend: Backend) -> None:
    manager = make(backend, 4)
    queue, blocks = manager.block_pool.free_block_queue, manager.block_pool.blocks
    assert (queue.free_list_head, queue.free_list_tail) == (blocks[1], blocks[3])
    assert (blocks[2].prev_free_block, blocks[2].next_free_block) == (blocks[1], blocks[3])
    assert (blocks[0].prev_free_block, blocks[0].next_free_block) == (None, None)
    before = all_of(manager)
    for call in (
        queue.popleft,
        lambda: queue.remove(blocks[1]),
        lambda: queue.append(blocks[1]),
        lambda: FreeKVCacheBlockQueue(blocks[1:]),
        lambda: blocks[1].incr_ref(),
        lambda: blocks[1].decr_ref(),
        lambda: manager.block_pool.get_new_blocks(4),
        lambda: manager.block_pool.free_blocks([blocks[1]]),
        lambda: manager.block_pool.touch([blocks[1]]),
    ):
        with pytest.raises(KvcoreError):
            call()
        assert all_of(manager) == before
    (taken,) = manager.block_pool.get_new_blocks(1)
    taken.incr_ref()
    assert (taken.ref_cnt, taken.next_free_block, queue.num_free_blocks) == (2, None, 2)
    taken.decr_ref()
    taken.decr_ref()
    assert free(manager) == [2, 3, 1]


def test_a_manager_serves_one_group(backend: Backend) -> None:
    with pytest.raises(NotOneGroup) as caught:
        KVCacheManager(KVCacheConfig(5, {}, []), 10, backend=backend)
    assert isinstance(caught.value, AssertionError)
    with pytest.raises(WrongArgument, match="caching_hash_algo"):
        make(backend, caching_hash_algo=256)
    with pytest.raises(InvalidCount):
        make(backend, max_model_len=0)
    with pytest.raises(KvcoreError, match="num_blocks"):
        make(backend, 0)
