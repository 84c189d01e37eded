# SPDX-License-Identifier: Apache-2.0
"""Swap: blocks go to the host tier and come back, each distinct one copied once.

Ten device blocks of two tokens (0 is the null block), four host blocks (none is).
"""

from __future__ import annotations

import pytest

from kvcore import (
    Allocate,
    BlockStored,
    CutTable,
    Free,
    KVCacheManager,
    SetTable,
    Status,
    SwapIn,
    SwapOut,
    Swapped,
    Touch,
)
from tests.conftest import Backend
from tests.helpers.stories import add, blocks, make, owners, queue, serve, step, unchanged


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Let "a" have three computed tokens in blocks 1 and 2, of which 1 is cached."""
    made = make(backend, num_host_blocks=4)
    serve(made, "a", [0, 1, 2])
    step(made)
    return made


def test_swapped_out_a_request_holds_host_blocks_and_no_others(manager: KVCacheManager) -> None:
    assert manager.swap_out(["a"]) == Swapped(num_copied=2, num_found=0)
    assert step(manager) == [
        SwapOut(1, 0),
        SwapOut(2, 1),
        Free(2, False),
        Free(1, True),
        CutTable(0, 0, 0),
    ]
    assert manager.status("a") is Status.SWAPPED
    assert (blocks(manager, "a"), manager.num_computed_tokens("a")) == ([], 3)
    assert (manager.num_free_blocks, manager.num_free_host_blocks) == (9, 2)


def test_back_on_the_device_a_cached_block_is_a_hit_and_the_rest_is_copied(
    manager: KVCacheManager,
) -> None:
    manager.swap_out(["a"])
    step(manager)
    assert manager.swap_in(["a"]) == Swapped(num_copied=1, num_found=1)
    # Block 1 still holds tokens 0 and 1 under their key. The partial block has no key, so host
    # block 1 is copied to the front of the queue, which is block 3.
    assert step(manager) == [
        Touch(1),
        Allocate(3),
        SwapIn(1, 3),
        SetTable(0, 0, 0, 1),
        SetTable(0, 0, 1, 3),
    ]
    assert manager.status("a") is Status.RUNNING
    assert (blocks(manager, "a"), manager.num_computed_tokens("a")) == ([1, 3], 3)
    assert manager.num_free_host_blocks == 4
    manager.append(["a"], [3])
    assert blocks(manager, "a") == [1, 3]


def test_without_its_key_a_block_is_copied_back(manager: KVCacheManager) -> None:
    manager.swap_out(["a"])
    manager.evict_blocks([1])
    step(manager)
    manager.swap_in(["a"])
    copies = [each for each in step(manager) if isinstance(each, SwapIn)]
    assert copies == [SwapIn(0, 3), SwapIn(1, 4)]
    assert blocks(manager, "a") == [3, 4]


def test_without_caching_every_block_is_copied_both_ways(backend: Backend) -> None:
    manager = make(backend, num_host_blocks=4, enable_caching=False)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    manager.swap_out(["a"])
    manager.swap_in(["a"])
    copies = [each for each in step(manager) if isinstance(each, SwapOut | SwapIn)]
    assert copies == [SwapOut(1, 0), SwapOut(2, 1), SwapIn(0, 3), SwapIn(1, 4)]


def test_what_a_set_of_requests_shares_is_copied_once_and_shared_again(backend: Backend) -> None:
    manager = make(backend, num_host_blocks=4)
    serve(manager, "a", [0, 1, 2, 3, 4])
    assert serve(manager, "b", [0, 1, 2, 3, 5]) == [1, 2, 4]
    step(manager)
    manager.swap_out(["a", "b"])
    copies = [each for each in step(manager) if isinstance(each, SwapOut)]
    # Six table entries, four distinct blocks: exactly what the host tier has.
    assert copies == [SwapOut(1, 0), SwapOut(2, 1), SwapOut(3, 2), SwapOut(4, 3)]
    assert manager.num_free_host_blocks == 0
    manager.evict_blocks([1, 2])
    manager.swap_in(["b", "a"])
    copies_back = [each for each in step(manager) if isinstance(each, SwapIn)]
    # b's table names host blocks 0, 1, 3, then a's adds 2; the queue was 5 to 9 and the freed.
    assert copies_back == [SwapIn(0, 5), SwapIn(1, 6), SwapIn(3, 7), SwapIn(2, 8)]
    assert (blocks(manager, "a"), blocks(manager, "b")) == ([5, 6, 8], [5, 6, 7])
    assert [owners(manager, block) for block in (5, 6, 7, 8)] == [2, 2, 1, 1]


def test_what_two_share_in_the_host_tier_stays_until_both_are_back(backend: Backend) -> None:
    manager = make(backend, num_host_blocks=4, enable_caching=False)
    serve(manager, "a", [0, 1, 2, 3])
    step(manager)
    manager.fork("a", "b")
    manager.swap_out(["a", "b"])
    assert manager.num_free_host_blocks == 2
    manager.swap_in(["a"])
    step(manager)
    assert manager.num_free_host_blocks == 2
    manager.swap_in(["b"])
    step(manager)
    assert manager.num_free_host_blocks == 4


def test_two_blocks_of_one_content_come_back_as_one(backend: Backend) -> None:
    manager = make(backend, num_host_blocks=4)
    assert (serve(manager, "a", [0, 1]), serve(manager, "b", [0, 1])) == ([1], [2])
    step(manager)
    manager.swap_out(["a", "b"])
    step(manager)
    manager.swap_in(["a", "b"])
    # Both find the older block, which leaves the free queue once and has two owners.
    assert step(manager) == [Touch(1), SetTable(0, 0, 0, 1), SetTable(1, 0, 0, 1)]
    assert owners(manager, 1) == 2


def test_a_block_that_came_back_by_copy_is_published_again_and_a_hit_is_not(
    backend: Backend,
) -> None:
    manager = make(backend, num_host_blocks=4, enable_events=True)
    serve(manager, "a", [0, 1, 2, 3])
    step(manager)
    manager.swap_out(["a"])
    manager.evict_blocks([1])
    step(manager)
    manager.take_events()
    manager.swap_in(["a"])
    assert blocks(manager, "a") == [3, 2]  # the first is a copy, the second was findable
    manager.append(["a"], [4])
    first, _ = manager.state().requests["a"].block_hashes
    assert manager.take_events() == [BlockStored((first,), None, (0, 1), 2, 0)]
    step(manager)


def test_a_block_that_another_request_holds_is_copied_and_stays(backend: Backend) -> None:
    manager = make(backend, num_host_blocks=4)
    serve(manager, "a", [0, 1, 2])
    serve(manager, "b", [0, 1, 3])
    step(manager)
    manager.swap_out(["a"])
    assert step(manager) == [SwapOut(1, 0), SwapOut(2, 1), Free(2, False), CutTable(0, 0, 0)]
    assert (blocks(manager, "b"), owners(manager, 1)) == ([1, 3], 1)
    # Its content is findable where b holds it, so it is not copied back.
    manager.swap_in(["a"])
    assert blocks(manager, "a") == [1, 4]
    assert owners(manager, 1) == 2


def test_what_the_open_batch_publishes_is_no_hit_for_a_swap_in(manager: KVCacheManager) -> None:
    # The swap runs before the forward pass that would write the block.
    manager.swap_out(["a"])
    manager.evict_blocks([1])
    step(manager)
    assert serve(manager, "b", [0, 1, 7]) == [3, 4]
    manager.swap_in(["a"])
    copies = [each for each in step(manager) if isinstance(each, SwapIn)]
    assert copies == [SwapIn(0, 5), SwapIn(1, 6)]
    assert blocks(manager, "a") == [5, 6]


def test_what_the_open_batch_scheduled_is_not_copied(manager: KVCacheManager) -> None:
    manager.add_tokens("a", [3, 4])
    manager.allocate_slots("a", 2)  # fills block 2, opens block 3
    assert blocks(manager, "a") == [1, 2, 3]
    manager.swap_out(["a"])
    copies = [each for each in step(manager) if isinstance(each, SwapOut)]
    assert copies == [SwapOut(1, 0), SwapOut(2, 1)]
    assert (manager.num_computed_tokens("a"), manager.num_tokens("a")) == (3, 5)
    manager.swap_in(["a"])
    assert (blocks(manager, "a"), manager.num_computed_tokens("a")) == ([1, 4], 3)


def test_a_request_of_which_nothing_was_computed_waits_instead(backend: Backend) -> None:
    manager = make(backend, num_host_blocks=4)
    serve(manager, "a", [0, 1, 2])
    assert manager.swap_out(["a"]) == Swapped(0, 0)
    assert not any(isinstance(each, SwapOut) for each in step(manager))
    assert (manager.status("a"), manager.num_computed_tokens("a")) == (Status.WAITING, 0)
    assert (manager.num_free_blocks, manager.num_free_host_blocks) == (9, 4)


def test_lookahead_is_given_back_and_not_copied(backend: Backend) -> None:
    manager = make(backend, num_host_blocks=4)
    add(manager, "a", range(3))
    manager.allocate_slots("a", 3, num_lookahead_tokens=3)
    step(manager)
    assert blocks(manager, "a") == [1, 2, 3]
    manager.swap_out(["a"])
    copies = [each for each in step(manager) if isinstance(each, SwapOut)]
    assert copies == [SwapOut(1, 0), SwapOut(2, 1)]


def test_freed_in_the_host_tier_a_request_waits_with_its_tokens(manager: KVCacheManager) -> None:
    manager.swap_out(["a"])
    step(manager)
    manager.free("a")
    assert (manager.status("a"), manager.num_computed_tokens("a")) == (Status.WAITING, 0)
    assert (manager.num_tokens("a"), manager.num_free_host_blocks) == (3, 4)
    assert step(manager) == []  # no device block and no table was touched
    # Host blocks go tail first too: 1, then 0, behind the two that were never used.
    state = manager.state()
    assert state.host is not None
    assert list(state.host.queue) == [2, 3, 1, 0]


def test_swapped_out_a_request_can_still_be_given_tokens(manager: KVCacheManager) -> None:
    manager.swap_out(["a"])
    manager.add_tokens("a", [3, 4])
    manager.swap_in(["a"])
    manager.allocate_slots("a", 2)
    assert (manager.num_computed_tokens("a"), len(blocks(manager, "a"))) == (5, 3)


def test_no_request_to_swap_is_no_change(manager: KVCacheManager) -> None:
    with unchanged(manager):
        for nothing in (manager.swap_out([]), manager.swap_in([])):
            assert nothing == Swapped(0, 0)
            assert nothing, "done, so true"


def test_a_pinned_block_is_copied_and_stays_on_the_device(manager: KVCacheManager) -> None:
    manager.pin([2])
    manager.swap_out(["a"])
    assert (owners(manager, 2), owners(manager, 1)) == (1, 0)
    assert queue(manager) == [3, 4, 5, 6, 7, 8, 9, 1]
    manager.swap_in(["a"])
    # Block 2 has no key, since it is half full, so the content is copied all the same.
    assert blocks(manager, "a") == [1, 3]
