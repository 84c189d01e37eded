# SPDX-License-Identifier: Apache-2.0
"""The first manager with prefix caching: slots, room ahead, hits, duplicates, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvcore.legacy.v1_first.errors import (
    AlreadyAllocated,
    HitsWithoutCaching,
    NoTokensLeft,
    TooFewTokens,
    UnallocatedRequest,
)
from kvcore.legacy.v1_first.kv_cache_manager import KVCacheBlock, KVCacheManager, Request
from kvcore.manager import KVCacheManager as Core
from kvcore.types.commands import Allocate, Evict, Free, Touch
from kvcore.types.config import Config
from kvcore.types.errors import InvalidConfig, InvalidCount, InvalidToken, KvcoreError, StaleHits
from kvcore.types.keys import HASHINGS
from kvcore.types.values import Request as CoreRequest
from tests.conformance.legacy_v03.stories import columns
from tests.conftest import Backend


def make(
    backend: Backend, num_gpu_blocks: int = 10, block_size: int = 2, **options: Any
) -> KVCacheManager:
    """Return an empty manager of blocks of two tokens, by default without room ahead."""
    options.setdefault("num_preallocate_tokens", 0)
    return KVCacheManager(
        block_size, num_gpu_blocks, hash_seed=b"early", backend=backend, **options
    )


def ids(blocks: Sequence[KVCacheBlock] | None) -> list[int]:
    """Return the numbers of existing blocks."""
    assert blocks is not None
    return [block.block_id for block in blocks]


def admit(manager: KVCacheManager, request_id: str, tokens: Sequence[int]) -> Request:
    """Admit a request that was looked up; it gets its blocks and is computed."""
    request = Request(request_id, tokens)
    hits = manager.get_computed_blocks(request)
    num_new = len(tokens) - len(hits) * manager.block_size
    assert manager.allocate_slots(request, num_new, hits) is not None
    request.num_computed_tokens = len(tokens)
    manager.check()
    return request


def decode(manager: KVCacheManager, request: Request, token: int) -> list[int]:
    """Append a token, and give it a slot; return the new blocks."""
    request.append_output_token_ids(token)
    new = ids(manager.append_slots(request, 1))
    request.num_computed_tokens += 1
    manager.check()
    return new


def table(manager: KVCacheManager, request: Request) -> list[int]:
    """Return the blocks of a request."""
    return ids(manager.req_to_blocks[request.request_id])


def queue(manager: KVCacheManager) -> list[int]:
    """Return the free blocks, the next to be taken first."""
    return ids(manager.free_block_queue.get_all_free_blocks())


@contextmanager
def unchanged(manager: KVCacheManager) -> Iterator[None]:
    """Assert that the block leaves the manager as it was, to the byte."""

    def snapshot() -> bytes:
        tables = {name: ids(blocks) for name, blocks in manager.req_to_blocks.items()}
        return repr((columns(manager.state()), tables)).encode()

    before = snapshot()
    yield
    assert snapshot() == before
    manager.check()


@pytest.mark.seed("S004-05", "S004-10")
def test_a_prompt_gets_its_blocks_chunk_by_chunk(backend: Backend) -> None:
    manager = make(backend)
    request = Request("a", range(9))
    assert ids(manager.allocate_slots(request, 3, [])) == [0, 1]
    request.num_computed_tokens = 3
    # The fourth token fills block 1; the next three take two blocks more.
    assert ids(manager.append_slots(request, 1)) == []
    request.num_computed_tokens = 4
    assert ids(manager.append_slots(request, 3)) == [2, 3]
    assert table(manager, request) == [0, 1, 2, 3]


@pytest.mark.seed("S004-09", "S004-10")
def test_later_slots_fill_the_present_blocks_and_cache_them(backend: Backend) -> None:
    manager = make(backend)
    request = Request("a", range(7))
    manager.allocate_slots(request, 3, [])
    assert [block.block_hash is not None for block in manager.block_pool[:3]] == [1, 0, 0]
    request.num_computed_tokens = 3
    assert ids(manager.append_slots(request, 4)) == [2, 3]
    assert [block.block_hash is not None for block in manager.block_pool[:4]] == [1, 1, 1, 0]
    # At once: another request of the same step finds all three.
    assert ids(manager.get_computed_blocks(Request("b", range(7)))) == [0, 1, 2]


@pytest.mark.seed("S004-06", "S004-07")
def test_a_request_that_grows_gets_room_ahead(backend: Backend) -> None:
    manager = make(backend, num_preallocate_tokens=3)  # two blocks
    request = admit(manager, "a", [0])
    assert table(manager, request) == [0, 1, 2]
    assert [decode(manager, request, token) for token in range(1, 6)] == [[]] * 5
    assert decode(manager, request, 6) == [3, 4, 5]
    assert manager.num_preallocate_blocks == 2


@pytest.mark.seed("S004-07")
def test_room_ahead_is_what_is_free_and_refuses_nobody(backend: Backend) -> None:
    manager = make(backend, 3, num_preallocate_tokens=8)
    request = admit(manager, "a", [0, 1, 2])
    assert table(manager, request) == [0, 1, 2]
    with unchanged(manager):
        assert manager.allocate_slots(Request("b", [5]), 1, []) is None
    assert KVCacheManager(16, 100, backend=backend).num_preallocate_blocks == 4


@pytest.mark.seed("S004-07")
def test_room_ahead_ends_at_the_model_length_where_one_is_given(backend: Backend) -> None:
    manager = make(backend, num_preallocate_tokens=8, max_model_len=5)
    request = admit(manager, "a", [0])
    assert table(manager, request) == [0, 1, 2]


@pytest.mark.seed("S004-08", "S004-04")
def test_a_miss_a_hit_in_the_queue_and_a_hit_in_use(backend: Backend) -> None:
    manager = make(backend, 4)
    first = admit(manager, "a", range(4))
    manager.free(first)
    assert queue(manager) == [2, 3, 1, 0]
    list(manager.take_batch())
    # A hit in the queue leaves it; one in use gets an owner more.
    second = admit(manager, "b", [0, 1, 9])
    assert (table(manager, second), queue(manager)) == ([0, 2], [3, 1])
    assert list(manager.take_batch()) == [Touch(0), Allocate(2)]
    third = admit(manager, "c", [0, 1, 8])
    assert (table(manager, third), manager.block_pool[0].ref_cnt) == ([0, 3], 2)
    # A miss takes the head of the queue, whose content is lost.
    key = manager.block_pool[1].block_hash
    assert isinstance(key, bytes)
    list(manager.take_batch())
    fourth = admit(manager, "d", [7])
    assert table(manager, fourth) == [1]
    assert list(manager.take_batch()) == [Evict(1, key), Allocate(1)]
    assert ids(manager.get_computed_blocks(Request("e", range(4)))) == [0]


@pytest.mark.seed("S004-08")
def test_hits_in_the_queue_are_no_room_for_the_rest(backend: Backend) -> None:
    manager = make(backend, 3)
    manager.free(admit(manager, "a", range(4)))
    request = Request("b", range(8))
    hits = manager.get_computed_blocks(request)
    assert ids(hits) == [0, 1]
    # Three are free, two of them are the hits.
    with unchanged(manager):
        assert manager.allocate_slots(request, 4, hits) is None
    assert ids(manager.allocate_slots(request, 2, hits)) == [2]


@pytest.mark.seed("S004-11", "S004-12", "X-04")
@pytest.mark.parametrize("enable_caching", [True, False])
def test_freed_blocks_join_the_queue_tail_first(backend: Backend, enable_caching: bool) -> None:
    manager = make(backend, 5, enable_caching=enable_caching)
    request = admit(manager, "a", range(6))
    list(manager.take_batch())
    manager.free(request)
    assert queue(manager) == [3, 4, 2, 1, 0]
    cached = enable_caching
    assert list(manager.take_batch()) == [Free(2, cached), Free(1, cached), Free(0, cached)]
    with unchanged(manager):
        manager.free(request)
        manager.free(Request("never seen", [1]))


@pytest.mark.seed("S004-13")
def test_a_look_up_changes_nothing_and_may_find_all(backend: Backend) -> None:
    manager = make(backend)
    manager.free(admit(manager, "a", range(6)))
    with unchanged(manager):
        hits = manager.get_computed_blocks(Request("b", range(6)))
        assert ids(hits) == [0, 1, 2]
        assert manager.get_computed_blocks(Request("b", [9, *range(1, 6)])) == []
    # The engine computes the last block again: it takes that away, and the rest is a hit.
    request = Request("b", range(6))
    assert ids(manager.allocate_slots(request, 2, hits[:-1])) == [3]
    assert table(manager, request) == [0, 1, 3]


@pytest.mark.seed("S004-13")
def test_without_caching_nothing_is_found(backend: Backend) -> None:
    manager = make(backend, enable_caching=False)
    request = admit(manager, "a", range(6))
    assert [decode(manager, request, token) for token in (6, 7)] == [[3], []]
    assert manager.get_computed_blocks(Request("b", range(6))) == []
    assert [block.block_hash for block in manager.block_pool] == [None] * 10


@pytest.mark.seed("S004-14", "S004-15", "X-02")
def test_a_duplicate_stays_in_its_table_and_the_older_block_answers(backend: Backend) -> None:
    manager = make(backend)
    first, second = (admit(manager, name, [0, 1, 2]) for name in "ab")
    assert (table(manager, first), table(manager, second)) == ([0, 1], [0, 2])
    decode(manager, first, 3)
    decode(manager, second, 3)
    assert (table(manager, first), table(manager, second)) == ([0, 1], [0, 2])
    assert manager.block_pool[1].block_hash == manager.block_pool[2].block_hash
    third = admit(manager, "c", [0, 1, 2, 3, 4])
    assert table(manager, third) == [0, 1, 3]
    assert [block.ref_cnt for block in manager.block_pool[:4]] == [3, 2, 1, 1]


@pytest.mark.seed("S004-16")
def test_blocks_are_objects_that_show_their_owners(backend: Backend) -> None:
    manager = make(backend)
    request = admit(manager, "a", range(3))
    kept = manager.req_to_blocks["a"]
    (hit,) = manager.get_computed_blocks(Request("b", range(3)))
    assert hit is kept[0] is manager.block_pool[0]
    assert (hit.block_id, hit.ref_cnt) == (0, 1)
    second = admit(manager, "b", range(3))
    assert hit.ref_cnt == 2
    manager.free(request)
    manager.free(second)
    assert (hit.ref_cnt, repr(hit)) == (0, "KVCacheBlock(block_id=0, ref_cnt=0)")


@pytest.mark.seed("S004-18")
def test_the_sequence_that_this_manager_was_tested_by(backend: Backend) -> None:
    """There are ten blocks of 16 tokens, 16 tokens ahead. Source: S004-18."""
    manager = make(backend, 10, 16, num_preallocate_tokens=16)
    common = list(range(48))
    first = admit(manager, "0", [*common, *range(100, 107)])
    assert table(manager, first) == [0, 1, 2, 3, 4]
    second = Request("1", [*common, *range(200, 207)])
    hits = manager.get_computed_blocks(second)
    assert ids(hits) == [0, 1, 2]
    assert ids(manager.allocate_slots(second, 7, hits)) == [5, 6]
    manager.free(first)
    manager.free(second)
    assert queue(manager) == [7, 8, 9, 4, 3, 6, 5, 2, 1, 0]
    third = admit(manager, "2", [*common, *range(300, 306)])
    assert table(manager, third) == [0, 1, 2, 7, 8]
    manager.free(third)
    last = Request("3", range(1000, 1144))
    assert ids(manager.allocate_slots(last, 144, [])) == [9, 4, 3, 6, 5, 8, 7, 2, 1, 0]


@pytest.mark.seed("S004-19")
def test_the_worked_example_of_the_design(backend: Backend) -> None:
    """There are ten blocks of four tokens. Source: S004-19."""
    manager = make(backend, 10, 4)
    first = admit(manager, "0", range(15))
    assert decode(manager, first, 15) == []
    assert decode(manager, first, 16) == [4]
    second = admit(manager, "1", [*range(10), 90, 91, 92, 93])
    assert table(manager, second) == [0, 1, 5, 6]
    manager.free(first)
    manager.free(second)
    assert queue(manager) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    third = Request("2", [*range(12), *range(100, 117)])
    hits = manager.get_computed_blocks(third)
    assert ids(hits) == [0, 1, 2]
    assert ids(manager.allocate_slots(third, 17, hits)) == [7, 8, 9, 4, 3]
    assert queue(manager) == [6, 5]


@pytest.mark.seed("S004-05", "X-05")
def test_what_does_not_fit_is_none_and_changes_nothing(backend: Backend) -> None:
    manager = make(backend, 2, num_preallocate_tokens=4)
    with unchanged(manager):
        assert manager.allocate_slots(Request("a", range(5)), 5, []) is None
    request = admit(manager, "a", range(3))
    for token in (7, 8, 9):
        request.append_output_token_ids(token)
    # Block 1 would be full; but nothing is cached by a call that does not fit.
    with unchanged(manager):
        assert manager.append_slots(request, 3) is None
    assert ids(manager.append_slots(request, 1)) == []


@pytest.mark.seed("S004-05", "X-14")
@pytest.mark.parametrize("count", [0, -1, None, 1.5])
def test_slots_are_for_a_token_at_least(backend: Backend, count: Any) -> None:
    manager = make(backend)
    request = admit(manager, "a", [1])
    with unchanged(manager), pytest.raises(ValueError, match="num_tokens is") as caught:
        manager.allocate_slots(Request("b", [1]), count, [])
    assert isinstance(caught.value, InvalidCount)
    if count != 0:
        with unchanged(manager), pytest.raises(InvalidCount):
            manager.append_slots(request, count)


@pytest.mark.seed("S004-10", "X-14")
def test_a_stranger_gets_no_further_slots(backend: Backend) -> None:
    manager = make(backend)
    admit(manager, "a", [1])
    with unchanged(manager), pytest.raises(KeyError) as caught:
        manager.append_slots(Request("b", [1]), 1)
    assert isinstance(caught.value, UnallocatedRequest)
    assert str(caught.value) == "request 'b' has no blocks: 1 requests have some"


@pytest.mark.seed("X-14")
def test_wrong_calls_change_nothing(backend: Backend) -> None:
    manager, other = make(backend, 3), make(backend)
    request = admit(manager, "a", [0, 1, 2])
    admit(other, "a", [0, 1, 2])
    hits = manager.get_computed_blocks(request)
    foreign = other.get_computed_blocks(request)
    new = Request("b", [0, 1, 2])
    bad_tokens: Any = [0, -1, 2]
    calls: list[tuple[type[KvcoreError], type[Exception], Any]] = [
        (AlreadyAllocated, ValueError, lambda: manager.allocate_slots(request, 1, [])),
        (StaleHits, ValueError, lambda: manager.allocate_slots(new, 1, foreign)),
        (StaleHits, ValueError, lambda: manager.allocate_slots(Request("b", [5, 1, 2]), 1, hits)),
        (
            StaleHits,
            ValueError,
            lambda: manager.allocate_slots(Request("b", range(9)), 1, hits * 2),
        ),
        (NoTokensLeft, RuntimeError, lambda: manager.allocate_slots(Request("b", [0, 1]), 1, hits)),
        (TooFewTokens, AssertionError, lambda: manager.append_slots(request, 1)),
        (InvalidToken, ValueError, lambda: manager.allocate_slots(Request("b", bad_tokens), 3, [])),
        (InvalidToken, ValueError, lambda: manager.get_computed_blocks(Request("b", bad_tokens))),
    ]
    for kind, original, call in calls:
        with unchanged(manager), pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, original)
    # A hit that was evicted after the look-up, by the request that takes the last free blocks.
    manager.free(request)
    taker = Request("c", range(50, 56))
    assert manager.allocate_slots(taker, 6, []) is not None
    with unchanged(manager), pytest.raises(StaleHits, match="block 0 at position 0"):
        manager.allocate_slots(new, 1, hits)


@pytest.mark.seed("X-14")
def test_hits_where_nothing_is_cached_are_refused(backend: Backend) -> None:
    manager = make(backend, enable_caching=False)
    block = manager.block_pool[0]
    with unchanged(manager), pytest.raises(AssertionError, match="1 computed blocks") as caught:
        manager.allocate_slots(Request("a", range(4)), 2, [block])
    assert isinstance(caught.value, HitsWithoutCaching)


@pytest.mark.parametrize("sizes", [(0, 4), (2, -1), ("x", 4)])
def test_sizes_that_are_none_are_refused(backend: Backend, sizes: Any) -> None:
    with pytest.raises(InvalidCount):
        KVCacheManager(*sizes, backend=backend)
    for options in ({"num_preallocate_tokens": -1}, {"max_model_len": 0}):
        with pytest.raises(InvalidCount):
            make(backend, **options)
    for other in ({"hashing": "md5"}, {"hash_seed": "text"}):
        with pytest.raises(InvalidConfig):
            KVCacheManager(2, 4, backend=backend, **other)  # type: ignore[arg-type] # bad


@pytest.mark.seed("S004-13", "X-12")
@pytest.mark.parametrize("hashing", HASHINGS)
def test_keys_are_the_core_s_and_have_one_root_a_process(backend: Backend, hashing: Any) -> None:
    seeded = {"hash_seed": b"shared", "hashing": hashing, "backend": backend}
    managers = [KVCacheManager(2, 4, **seeded) for _ in range(2)]
    managers += [KVCacheManager(2, 4, hashing=hashing, backend=backend) for _ in range(2)]
    for manager in managers:
        admit(manager, "a", range(3))
    keys = [manager.block_pool[0].block_hash for manager in managers]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    core = Core(Config(5, 2, **{name: seeded[name] for name in ("hash_seed", "hashing")}), backend)
    core.add_request(CoreRequest("a", range(3)))
    assert core.get_block_keys("a") == ((keys[0],),)
