# SPDX-License-Identifier: Apache-2.0
"""Statistics of look-ups, and events of the hash index: what is counted, when, and once."""

from __future__ import annotations

import pytest

from kvcore import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Group,
    KVCacheManager,
    PrefixCacheStats,
    PromptEmbeds,
    Refused,
    Request,
    Verdict,
)
from kvcore.types.errors import InvalidCount
from kvcore.types.events import replay
from tests.conftest import Backend
from tests.helpers.stories import add, admit, drop, make, serve, step, unchanged


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager of nine usable blocks of two tokens, with events."""
    return make(backend, enable_events=True)


def hashes(manager: KVCacheManager, request_id: str) -> tuple[bytes, ...]:
    """Return the chain of a request."""
    return tuple(manager.state().requests[request_id].block_hashes)


@pytest.mark.seed("S000-55")
def test_look_ups_are_counted_in_tokens_with_the_allocation_that_uses_them(
    manager: KVCacheManager,
) -> None:
    serve(manager, "a", [0, 1, 2, 3, 4])
    serve(manager, "b", [0, 1, 2, 3, 5, 6])
    # Two requests, of 5 and 6 tokens; the second found 4.
    stats = manager.take_stats()
    assert stats == PrefixCacheStats(requests=2, queries=11, hits=4)
    assert stats.hit_rate == pytest.approx(4 / 11)
    assert manager.take_stats() == PrefixCacheStats()
    assert PrefixCacheStats().hit_rate == 0.0


def test_a_hit_that_is_taken_alone_is_counted_once(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2])
    manager.take_stats()
    add(manager, "b", [0, 1, 3])
    hit = manager.get_computed_blocks("b")
    with unchanged(manager), pytest.raises(InvalidCount):
        manager.allocate_slots("b", 0)
    events = len(manager.take_events())
    assert manager.can_allocate("b", 0, hit) is Verdict.OK
    assert events == 1
    taken = manager.allocate_slots("b", 0, hit)
    assert taken
    assert taken.blocks == ((),)
    assert manager.take_stats() == PrefixCacheStats(requests=1, queries=3, hits=2)
    assert manager.allocate_slots("b", 1)
    assert manager.take_stats() == PrefixCacheStats()
    assert not manager.take_events()
    assert manager.num_computed_tokens("b") == 3


def test_asking_is_not_counted(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2])
    manager.take_stats()
    add(manager, "b", [0, 1, 3])
    with unchanged(manager):
        manager.get_computed_blocks("b")
        manager.can_allocate("b", 1, manager.get_computed_blocks("b"))
    # Nor is an allocation that brings no look-up.
    manager.allocate_slots("b", 3)
    assert manager.take_stats() == PrefixCacheStats()


def test_later_chunks_of_a_request_are_not_counted_again(manager: KVCacheManager) -> None:
    add(manager, "a", [0, 1, 2, 3, 4])
    manager.allocate_slots("a", 2, manager.get_computed_blocks("a"))
    manager.allocate_slots("a", 3)
    assert manager.take_stats() == PrefixCacheStats(requests=1, queries=5)


def test_a_refused_look_up_is_not_counted(backend: Backend) -> None:
    manager = make(backend, 2)
    add(manager, "a", [0, 1, 2])
    refused = manager.allocate_slots("a", 3, manager.get_computed_blocks("a"))
    assert isinstance(refused, Refused)
    assert manager.take_stats() == PrefixCacheStats()


@pytest.mark.seed("S000-55", "X-07")
def test_preempted_requests_are_counted_apart(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2])
    step(manager)
    manager.free("a")
    manager.take_stats()
    admit(manager, "a")  # it finds its own first block again
    expected = PrefixCacheStats(preempted_requests=1, preempted_queries=3, preempted_hits=2)
    assert manager.take_stats() == expected
    assert expected.hit_rate == 0.0


@pytest.mark.seed("S000-46", "S000-47")
def test_a_publication_is_one_event_with_all_its_blocks(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2, 3, 4])
    first, second = hashes(manager, "a")
    assert manager.take_events() == [BlockStored((first, second), None, (0, 1, 2, 3), 2, 0)]
    assert manager.take_events() == []


@pytest.mark.seed("S000-31", "S000-47")
def test_the_next_chunk_names_the_block_that_it_continues(manager: KVCacheManager) -> None:
    add(manager, "a", [0, 1, 2, 3, 4])
    manager.allocate_slots("a", 3)
    manager.allocate_slots("a", 2)
    first, second = hashes(manager, "a")
    assert manager.take_events() == [
        BlockStored((first,), None, (0, 1), 2, 0),
        BlockStored((second,), first, (2, 3), 2, 0),
    ]


@pytest.mark.seed("S000-27", "S000-47")
def test_hits_are_not_announced_again(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2])
    manager.take_events()
    serve(manager, "b", [0, 1, 7, 8])
    first, second = hashes(manager, "b")
    assert manager.take_events() == [BlockStored((second,), first, (7, 8), 2, 0)]


@pytest.mark.seed("S000-47")
def test_a_content_is_removed_with_its_last_block(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1])
    serve(manager, "b", [0, 1])  # a full hit is computed again: a second block
    (only,) = hashes(manager, "a")
    manager.take_events()
    manager.evict_blocks([1])
    assert manager.take_events() == []
    manager.evict_blocks([2])
    assert manager.take_events() == [BlockRemoved(only, 0)]


@pytest.mark.seed("S000-35", "S000-47")
def test_reuse_of_a_block_removes_what_it_held(backend: Backend) -> None:
    manager = make(backend, 3, enable_events=True)
    serve(manager, "a", [0, 1])
    (old,) = hashes(manager, "a")
    step(manager)
    drop(manager, "a")
    manager.take_events()
    serve(manager, "b", [7, 8, 9])  # takes 2, then 1, which held "a"
    (new,) = hashes(manager, "b")
    assert manager.take_events() == [
        BlockRemoved(old, 0),
        BlockStored((new,), None, (7, 8), 2, 0),
    ]


def test_what_leaves_the_open_batch_is_removed_again(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2])
    (only,) = hashes(manager, "a")
    manager.free("a")
    assert manager.take_events() == [
        BlockStored((only,), None, (0, 1), 2, 0),
        BlockRemoved(only, 0),
    ]


@pytest.mark.seed("S000-42", "S000-47")
def test_a_reset_is_one_event_and_a_mirror_is_empty_after_it(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 2, 3])
    step(manager)
    events = manager.take_events()
    mirrored = {each + bytes(4) for each in hashes(manager, "a")}
    assert replay(events) == mirrored
    manager.free("a")
    manager.reset_prefix_cache()
    cleared = manager.take_events()
    assert cleared == [AllBlocksCleared()]
    assert replay([*events, *cleared]) == set()


@pytest.mark.seed("S000-49")
def test_delayed_blocks_are_announced_when_they_are_cached(manager: KVCacheManager) -> None:
    add(manager, "a", [0, 1, 2])
    manager.allocate_slots("a", 3, delay_cache_blocks=True)
    assert manager.take_events() == []
    manager.cache_blocks("a", 3)
    (only,) = hashes(manager, "a")
    assert manager.take_events() == [BlockStored((only,), None, (0, 1), 2, 0)]


def test_a_merged_block_is_announced_only_where_it_takes_over(backend: Backend) -> None:
    manager = make(backend, duplicates="merge", enable_events=True)
    serve(manager, "a", [0, 1])
    serve(manager, "b", [0, 1])
    (only,) = hashes(manager, "a")
    stored = BlockStored((only,), None, (0, 1), 2, 0)
    assert manager.take_events() == [stored]
    manager.evict_blocks([1])
    assert manager.take_events() == [BlockRemoved(only, 0)]
    step(manager)
    assert manager.take_events() == [stored]


@pytest.mark.seed("S000-46")
def test_events_are_made_only_where_they_are_asked_for(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1])
    step(manager)
    manager.evict_blocks([1])
    assert manager.take_events() == []


def test_a_coarse_block_tells_all_its_embeddings(backend: Backend) -> None:
    # A block of 300 tokens is hashed token by token, since another group has blocks of one.
    manager = make(backend, 610, groups=(Group(1), Group(300)), enable_events=True)
    rows = PromptEmbeds(bytes(301), 1)
    manager.add_request(Request("a", range(301), prompt_embeds=rows))
    admit(manager, "a")
    coarse = [event for event in manager.take_events() if getattr(event, "block_size", 0) == 300]
    (stored,) = coarse
    assert isinstance(stored, BlockStored)
    assert [len(keys) for keys in stored.extra_keys] == [300]
