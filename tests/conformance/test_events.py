# SPDX-License-Identifier: Apache-2.0
"""Events of a publication, a removal and a reset, and the mirror that follows from them.

Blocks hold two tokens; a fresh pool gives 1, 2, 3, ...
"""

from __future__ import annotations

import pytest

from kvcore import AllBlocksCleared, BlockRemoved, BlockStored, Group, KVCacheManager, Request
from kvcore.types.events import replay
from kvcore.types.extra_inputs import LoRA, MediaItem
from tests.conftest import Backend
from tests.helpers.stories import add, admit, drop, keyed, make, serve, step

THREE = Group(2, kind="sliding_window", window=3)


def chain(manager: KVCacheManager, request_id: str) -> list[bytes]:
    """Return the hashes of a request's full blocks."""
    return list(manager.state().requests[request_id].block_hashes)


@pytest.mark.seed("S000-47")
def test_a_publication_says_all_that_a_router_needs(backend: Backend) -> None:
    manager = make(backend, enable_events=True)
    manager.add_request(
        Request(
            "a",
            range(7),
            lora=LoRA("adapter"),
            media=(MediaItem("picture", 3, 2),),
            cache_salt="salt",
        )
    )
    manager.allocate_slots("a", 2)
    manager.allocate_slots("a", 5)
    first, second, third = chain(manager, "a")
    one, two = manager.take_events()
    assert isinstance(one, BlockStored)
    assert isinstance(two, BlockStored)
    assert (one.block_hashes, one.parent_hash, one.tokens) == ((first,), None, (0, 1))
    assert (two.block_hashes, two.parent_hash, two.tokens) == ((second, third), first, (2, 3, 4, 5))
    for event in (one, two):
        assert (event.block_size, event.group_id) == (2, 0)
        assert (event.lora_name, event.medium) == ("adapter", "GPU")
    # The salt is in the first block, the adapter in each; the picture covers tokens 3 and 4, so the
    # second half of the second block and the first of the third.
    assert [[tag for tag, _ in keys] for keys in one.extra_keys] == [[1, 3]]
    assert [[tag for tag, _ in keys] for keys in two.extra_keys] == [[1, 2], [1, 2]]
    media = [dict(keys)[2] for keys in two.extra_keys]
    assert media == [
        (1).to_bytes(4, "little") + b"picture",
        (-1).to_bytes(4, "little", signed=True) + b"picture",
    ]


@pytest.mark.seed("S000-46", "S000-47")
def test_each_group_says_what_it_stored_in_blocks_of_its_own(backend: Backend) -> None:
    manager = make(backend, 20, groups=(Group(2), Group(4)), enable_events=True)
    add(manager, "a", range(9))
    manager.allocate_slots("a", 4)
    first, second, third, fourth = chain(manager, "a")
    assert manager.take_events() == [
        BlockStored((first, second), None, (0, 1, 2, 3), 2, 0),
        BlockStored((second,), None, (0, 1, 2, 3), 4, 1),
    ]
    manager.allocate_slots("a", 5)
    assert manager.take_events() == [
        BlockStored((third, fourth), second, (4, 5, 6, 7), 2, 0),
        BlockStored((fourth,), second, (4, 5, 6, 7), 4, 1),
    ]


@pytest.mark.seed("S000-46")
def test_without_events_not_even_a_reset_is_told(backend: Backend) -> None:
    manager = make(backend, 4)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    drop(manager, "a")
    serve(manager, "b", range(50, 56))
    step(manager)
    drop(manager, "b")
    assert manager.reset_prefix_cache()
    assert list(manager.take_events()) == []


@pytest.mark.seed("S000-47", "S000-41")
def test_a_removal_names_the_group_that_forgot(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2), Group(2)), enable_events=True)
    add(manager, "a", [0, 1, 2])
    admit(manager, "a")
    (first,) = chain(manager, "a")
    manager.take_events()
    assert keyed(manager) == [1, 3]
    manager.evict_blocks([3])
    assert manager.take_events() == [BlockRemoved(first, 1, "GPU")]
    manager.evict_blocks([3, 1])
    assert manager.take_events() == [BlockRemoved(first, 0, "GPU")]


@pytest.mark.seed("S000-47", "S000-35", "S001-82")
def test_of_two_copies_the_last_to_be_taken_is_the_removal(backend: Backend) -> None:
    manager = make(backend, 4, enable_events=True)
    serve(manager, "a", [0, 1])
    serve(manager, "b", [0, 1])
    (only,) = chain(manager, "a")
    step(manager)
    manager.take_events()
    drop(manager, "a")
    drop(manager, "b")
    # The queue is 3, 1, 2; blocks 1 and 2 hold the same.
    serve(manager, "c", [5, 6, 7])
    assert BlockRemoved(only, 0) not in list(manager.take_events())
    step(manager)
    serve(manager, "d", [8])
    assert manager.take_events() == [BlockRemoved(only, 0)]


@pytest.mark.seed("S000-47")
def test_a_window_that_moves_on_removes_nothing(backend: Backend) -> None:
    manager = make(backend, groups=(THREE,), enable_events=True)
    serve(manager, "a", range(8))
    step(manager)
    manager.take_events()
    manager.remove_skipped_blocks("a", 8)
    # What was given back can still be hit.
    assert manager.take_events() == []
    assert keyed(manager) == [1, 2, 3, 4]


@pytest.mark.seed("S000-47", "S000-42")
def test_a_mirror_of_all_events_is_the_index(backend: Backend) -> None:
    manager = make(backend, 10, groups=(Group(2), THREE), enable_events=True)
    mirrored, cleared = [], 0
    for turn in range(12):
        name = f"request {turn}"
        add(manager, name, [turn % 3, 1, 2, turn % 2, 4])
        admit(manager, name)
        step(manager)
        drop(manager, name)
        if turn == 6:
            assert manager.reset_prefix_cache()
        events = list(manager.take_events())
        cleared += events.count(AllBlocksCleared())
        mirrored += events
        assert replay(mirrored) == set(manager.state().device.index)
    assert cleared == 1
    assert any(isinstance(each, BlockRemoved) for each in mirrored)
