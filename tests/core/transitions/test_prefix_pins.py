# SPDX-License-Identifier: Apache-2.0
"""Pins of prefixes: what a later request must find stays, whatever becomes of the first one."""

from __future__ import annotations

import pytest

from kvcore import Config, Free, Group, KVCacheBlocks, KVCacheManager, Request
from kvcore.explain.refusal import Holder
from kvcore.types.errors import (
    LoadUnconfirmed,
    LoadUnfinished,
    NothingToPin,
    NotPinned,
    StaleRequest,
)
from tests.conftest import Backend
from tests.helpers.stories import add, admit, blocks, drop, make, owners, queue, serve, step

PROMPT = list(range(7))


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager of eight blocks of two; four may be pinned; "a" has seven tokens in 1 to 4."""
    made = make(backend, 9, max_model_len=8, max_pinned_blocks=4)
    serve(made, "a", PROMPT)
    step(made)
    return made


def fill(manager: KVCacheManager) -> None:
    """Let others take every free block, and go."""
    names = list[str]()
    while manager.num_free_blocks >= len(manager.config.groups):
        names.append(f"x{len(names)}")
        first = 50 + 2 * len(names)
        serve(manager, names[-1], range(first, first + 2))
    for name in names:
        drop(manager, name)
    step(manager)


def test_a_pinned_prefix_outlives_its_request_and_the_pool(manager: KVCacheManager) -> None:
    assert manager.pin_prefix("system", "a", 5) == 4
    drop(manager, "a")
    assert [owners(manager, block) for block in (1, 2, 3, 4)] == [1, 1, 0, 0]
    fill(manager)
    add(manager, "b", PROMPT)
    assert manager.get_computed_blocks("b").num_tokens == 4


def test_what_is_unpinned_leaves_behind_all_that_was_freed_before(manager: KVCacheManager) -> None:
    manager.pin_prefix("system", "a", 7)
    drop(manager, "a")
    step(manager)
    manager.unpin_prefix("system")
    assert step(manager) == [Free(3, True), Free(2, True), Free(1, True)]
    assert queue(manager) == [5, 6, 7, 8, 4, 3, 2, 1]


def test_pins_of_one_prefix_share_its_blocks(manager: KVCacheManager) -> None:
    manager.pin_prefix("short", "a", 4)
    manager.pin_prefix("long", "a", 6)  # five names of blocks, three blocks: below the most
    drop(manager, "a")
    manager.unpin_prefix("long")
    assert [owners(manager, block) for block in (1, 2, 3)] == [1, 1, 0]
    manager.unpin_prefix("short")
    assert manager.num_free_blocks == 8


def test_only_finished_tokens_are_pinned(backend: Backend) -> None:
    manager = make(backend, 9, max_in_flight=1, max_model_len=8, max_pinned_blocks=4)
    serve(manager, "a", PROMPT[:4])
    with pytest.raises(NothingToPin, match="0 are computed"):
        manager.pin_prefix("p", "a", 4)
    first = manager.take_batch()
    with pytest.raises(NothingToPin, match="0 are computed"):
        manager.pin_prefix("p", "a", 4)
    manager.add_tokens("a", [9, 9])
    assert isinstance(manager.allocate_slots("a", 2), KVCacheBlocks)
    manager.complete(first.number)
    assert manager.pin_prefix("p", "a", 6) == 4
    manager.take_batch()
    manager.cancel(1)
    manager.check()
    assert owners(manager, 1) == 2


def test_a_pinned_block_is_not_written_again(manager: KVCacheManager) -> None:
    manager.pin_prefix("system", "a", 6)
    manager.rewind(["a"], 2)
    assert isinstance(manager.allocate_slots("a", 5), KVCacheBlocks)
    assert blocks(manager, "a") == [1, 5, 6, 7]
    step(manager)
    fill(manager)
    add(manager, "b", PROMPT)
    assert manager.get_computed_blocks("b").num_tokens == 6


def test_a_pin_holds_what_a_window_sees_at_its_end(backend: Backend) -> None:
    groups = (Group(2), Group(2, kind="sliding_window", window=2))
    manager = make(backend, 20, groups=groups, max_model_len=12, max_pinned_blocks=7)
    serve(manager, "a", range(9))
    step(manager)
    assert manager.pin_prefix("p", "a", 8) == 8
    table, windowed = manager.get_block_ids("a")
    assert [owners(manager, block) for block in table] == [2, 2, 2, 2, 1]
    assert [owners(manager, block) for block in windowed] == [1, 1, 1, 2, 1]
    manager.remove_skipped_blocks("a", 8)
    assert manager.pin_prefix("q", "a", 2) == 2  # given back, and still cached
    manager.evict_blocks([windowed[0]])
    with pytest.raises(NothingToPin, match="no whole block of them is found"):
        manager.pin_prefix("r", "a", 3)
    manager.unpin_prefix("q")
    drop(manager, "a")
    fill(manager)
    add(manager, "b", range(9))
    assert manager.get_computed_blocks("b").num_tokens == 8


def test_a_pin_holds_the_block_that_a_drafter_drops(backend: Backend) -> None:
    manager = make(backend, 9, use_eagle=True, max_model_len=8, max_pinned_blocks=3)
    serve(manager, "a", PROMPT)
    step(manager)
    assert manager.pin_prefix("p", "a", 6) == 4
    assert [owners(manager, block) for block in blocks(manager, "a")] == [2, 2, 2, 1]
    drop(manager, "a")
    fill(manager)
    add(manager, "b", PROMPT)
    assert manager.get_computed_blocks("b").num_tokens == 4


def test_an_older_epoch_stays_pinned_and_is_not_found(backend: Backend) -> None:
    manager = make(backend, 5, max_model_len=6, max_pinned_blocks=1)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    manager.pin_prefix("p", "a", 2)
    manager.advance_epoch()
    with pytest.raises(StaleRequest, match="is of epoch 0, the weights are of epoch 1"):
        manager.pin_prefix("q", "a", 2)
    drop(manager, "a")
    serve(manager, "c", [7])
    add(manager, "b", range(6))
    why = manager.explain_refusal("b", 6)
    assert why.holders == (
        Holder(kind="request", name="c", blocks=1, alone=1),
        Holder(kind="named_pin", name="p", blocks=1, alone=1, stale=True),
    )
    manager.unpin_prefix("p")
    assert queue(manager) == [4, 1, 2]  # what is old leaves before what is freed after it


def test_blocks_pinned_by_name_are_not_unpinned_by_id(manager: KVCacheManager) -> None:
    manager.pin_prefix("system", "a", 2)
    manager.pin([1])
    manager.unpin([1])
    with pytest.raises(NotPinned, match="block 1 has 0 pins"):
        manager.unpin([1])
    assert owners(manager, 1) == 2


def test_a_prefix_that_is_being_loaded_is_not_pinned(backend: Backend) -> None:
    manager = make(backend, 9, max_model_len=8, max_pinned_blocks=2)
    add(manager, "a", [0, 1, 2])
    started = manager.load("a", 2)
    assert isinstance(started, tuple)
    with pytest.raises(LoadUnfinished):
        manager.pin_prefix("p", "a", 2)
    manager.take_batch()
    manager.complete_operation(started[0], True)
    assert manager.pin_prefix("p", "a", 2) == 2


def test_external_tokens_are_pinned_once_their_load_is_sure(backend: Backend) -> None:
    manager = make(backend, 9, max_in_flight=1, max_model_len=8, max_pinned_blocks=2)
    add(manager, "a", [0, 1, 2, 3, 4])
    manager.allocate_slots("a", 1, num_external_computed_tokens=4)
    manager.take_batch()
    with pytest.raises((LoadUnconfirmed, NothingToPin)):
        manager.pin_prefix("p", "a", 4)
    manager.complete(0)
    assert manager.pin_prefix("p", "a", 4) == 4


def test_pins_are_in_the_bytes_of_a_state(manager: KVCacheManager, backend: Backend) -> None:
    manager.pin_prefix("system", "a", 4)
    manager.pin_prefix("täglich", "a", 2)
    again = KVCacheManager(Config(2), backend)
    again.restore(manager.encode())
    again.check()
    assert again.config == manager.config
    assert again.encode() == manager.encode()
    again.unpin_prefix("täglich")
    again.unpin_prefix("system")
    drop(again, "a")
    assert again.num_free_blocks == 8


def test_a_quarter_of_the_pool_may_be_pinned_if_nothing_is_said(backend: Backend) -> None:
    assert Config(17).most_pinned == 4
    assert Config(17, max_model_len=224).most_pinned == 2  # of 16 blocks a request takes 14
    assert Config(17, max_model_len=224, watermark_blocks=2).most_pinned == 0
    manager = KVCacheManager(Config(9), backend)
    manager.add_request(Request("a", list(range(48))))
    admit(manager, "a")
    manager.take_batch()
    assert manager.pin_prefix("p", "a", 47) == 32
