# SPDX-License-Identifier: Apache-2.0
"""Epochs of weights: hits, publication, and the order of eviction."""

from __future__ import annotations

import msgspec

from kvcore import Config, KVCacheManager, Request
from kvcore.codec.event_msgpack import encode_events
from kvcore.types.commands import EvictAll
from kvcore.types.events import AllBlocksCleared, BlockStored, replay
from tests.conftest import Backend

PROMPT = list(range(9))


def make(backend: Backend, **options: object) -> KVCacheManager:
    config = Config(16, 2, **options)  # type: ignore[arg-type] # by name
    return KVCacheManager(config, backend=backend)


def serve(manager: KVCacheManager, name: str, tokens: list[int]) -> int:
    """Admit a request after its longest hit, compute it, and return how much was hit."""
    manager.add_request(Request(name, tokens))
    hit = manager.get_computed_blocks(name)
    assert manager.allocate_slots(name, len(tokens) - hit.num_tokens, hit)
    manager.take_batch()
    return hit.num_tokens


def test_after_an_epoch_a_manager_answers_as_a_fresh_one(backend: Backend) -> None:
    used, fresh = make(backend), make(backend)
    serve(used, "old", PROMPT)
    used.free("old")
    used.remove_request("old")
    used.take_batch()
    assert used.advance_epoch() == used.epoch == 1
    used.take_batch()
    for manager in (used, fresh):
        assert [serve(manager, name, PROMPT) for name in "ab"] == [0, 8]
        assert manager.num_free_blocks == 15 - 6


def test_content_of_an_epoch_that_ended_counts_as_cached_no_more(backend: Backend) -> None:
    manager = make(backend, hash_block_size=1)
    for name in "ab":
        serve(manager, name, PROMPT)
        manager.free(name)
        assert manager.num_cached_blocks == 5  # the last one has a key for its one token
        manager.advance_epoch()
        assert manager.num_cached_blocks == 0
        manager.take_batch()


def test_no_key_of_a_new_epoch_is_one_of_a_restored_older_block(backend: Backend) -> None:
    manager, zeros = make(backend), [bytes(32)]
    for name in "ab":
        manager.add_request(Request(name, PROMPT[:3], block_hashes=zeros))
        assert manager.allocate_slots(name, 3)
        manager.take_batch()
        if name == "a":
            manager.advance_epoch()
            manager.take_batch()
    manager.restore(manager.encode())
    manager.check()
    for name in "cd":
        manager.add_request(Request(name, PROMPT[:3], block_hashes=zeros))
    assert manager.allocate_slots("c", 3)
    manager.evict_blocks([3])  # that of b
    assert manager.get_computed_blocks("d").blocks.blocks == ((5,),)


def test_an_epoch_flushes_nothing_and_is_told_once(backend: Backend) -> None:
    manager = make(backend, enable_events=True)
    serve(manager, "a", PROMPT)
    manager.take_events()
    manager.advance_epoch(3)
    assert manager.epoch == 3
    batch = manager.take_batch()
    assert (batch.epoch, list(batch)) == (3, [EvictAll()])
    assert list(manager.take_events()) == [AllBlocksCleared()]
    assert manager.get_block_ids("a") == ([1, 2, 3, 4, 5],)
    serve(manager, "b", PROMPT)
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.epoch == 3
    assert len(replay([stored])) == 4


def test_an_event_names_its_epoch_in_the_map_form_alone(backend: Backend) -> None:
    manager = make(backend, enable_events=True)
    serve(manager, "a", PROMPT)
    manager.advance_epoch()
    serve(manager, "b", PROMPT)
    events = manager.take_events()
    by_name = [
        event.get("epoch") for event in msgspec.msgpack.decode(encode_events(events, 0.0))[1]
    ]
    assert by_name == [None, None, 1]
    rows = msgspec.msgpack.decode(encode_events(events, 0.0, form="array"))[1]
    assert len(rows[0]) == len(rows[2])


def test_a_request_of_older_weights_goes_on_and_is_found_by_nobody(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", PROMPT)
    manager.advance_epoch()
    manager.take_batch()
    assert manager.stale_requests() == ["a"]
    manager.append(["a"], [9])
    manager.cache_blocks("a", 10)
    assert serve(manager, "b", [*PROMPT, 9, 10]) == 0
    manager.free("a")
    assert manager.stale_requests() == []
    assert manager.get_computed_blocks("a").num_tokens == 8


def test_what_had_a_key_of_an_older_epoch_is_taken_first(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", PROMPT[:8])
    manager.advance_epoch()
    for name, first in (("b", 20), ("c", 30)):
        serve(manager, name, list(range(first, first + 8)))
    manager.free("b")
    manager.free("a")
    assert manager.num_free_blocks == 3 + 4 + 4
    manager.take_batch()
    # Three blocks were never taken, and four are a's: b's keys survive seven allocations.
    serve(manager, "d", list(range(50, 64)))
    assert manager.num_free_blocks == 4
    assert manager.get_computed_blocks("b").num_tokens == 6
    assert all(manager.get_cached_block(key) for key in manager.get_block_keys("b")[0])


def test_a_manager_may_begin_in_any_epoch(backend: Backend) -> None:
    manager = make(backend, epoch=7)
    assert serve(manager, "a", PROMPT) == 0
    assert manager.stale_requests() == []
    assert manager.advance_epoch() == 8
    assert manager.stale_requests() == ["a"]
