# SPDX-License-Identifier: Apache-2.0
"""The V0 allocator: access and computation, common and cached prefixes, reset, hit rate, swap."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import Allocate
from kvcore.legacy.v0.common import CacheMetricData
from kvcore.legacy.v0.prefix_caching_block import (
    Block,
    NoFreeBlocksError,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
)
from tests.conftest import Backend
from tests.legacy.v0.small import allocator, full, ids, unchanged, use_up


def hashes(*numbers: int) -> list[int]:
    """Return the content hashes of a chain of full blocks."""
    found: list[int] = []
    for tokens in full(*numbers):
        parent = found[-1] if found else None
        found.append(PrefixCachingBlock.hash_block_tokens(not found, parent, tokens))
    return found


def free_all(blocks: PrefixCachingBlockAllocator, chain: list[Block]) -> None:
    for block in chain:
        blocks.free(block)


@pytest.mark.seed("S002-38")
def test_access_is_noted_for_used_and_for_evictable_blocks_and_for_no_other(
    backend: Backend,
) -> None:
    blocks = allocator(backend, 3)
    used = blocks.allocate_immutable_block(None, [1, 2])
    blocks.free(blocks.allocate_immutable_block(None, [3, 4]))
    blocks.mark_blocks_as_accessed([0, 1], 5.0)
    assert blocks._tracker(0).last_accessed == 5.0
    wrong: list[tuple[list[int], Any, str]] = [
        ([0, 2], 6.0, "Mark block as accessed which is not belonged to GPU: block 2"),
        ([0, 3], 6.0, "block 3 is not known"),
        ([0], float("nan"), "finite number"),
        ([0], "soon", "finite number"),
    ]
    for block_ids, now, text in wrong:
        error = unchanged(blocks.mark_blocks_as_accessed, blocks, given=(block_ids, now))
        assert isinstance(error, ValueError)
        assert text in str(error)
    blocks.free(used)
    blocks.mark_blocks_as_accessed([1], 4.0)
    assert use_up(blocks) == [2, 1, 0]


@pytest.mark.seed("S002-39", "X-13")
def test_what_was_promoted_since_the_last_time_becomes_computed(backend: Backend) -> None:
    blocks = allocator(backend)
    blocks.allocate_immutable_blocks(None, full(1, 2))
    blocks.mark_blocks_as_computed([3])
    assert [blocks.block_is_computed(each) for each in (0, 1)] == [True, True]
    blocks.allocate_immutable_block(None, [7, 7])
    assert not blocks.block_is_computed(2)
    blocks.mark_blocks_as_computed([])
    assert blocks.block_is_computed(2)
    assert blocks._touched_blocks == set()


@pytest.mark.seed("S002-40")
def test_a_used_block_is_computed_if_marked_and_another_if_it_is_kept(backend: Backend) -> None:
    blocks = allocator(backend)
    block = blocks.allocate_immutable_block(None, [1, 2])
    assert not blocks.block_is_computed(0)
    blocks.free(block)
    assert blocks.block_is_computed(0)
    assert not blocks.block_is_computed(1)
    with pytest.raises(KeyError, match="block 9 is not known"):
        blocks.block_is_computed(9)


@pytest.mark.seed("S002-41")
def test_common_computed_ids_are_what_all_non_empty_lists_begin_with(backend: Backend) -> None:
    common = allocator(backend).get_common_computed_block_ids
    one = [4, 5]
    assert common([one]) is one
    assert common([[]]) == []
    assert common([[1, 2, 3], [], [1, 2, 4], [1, 2]]) == [1, 2]
    assert common([[1], [2]]) == []
    assert common([[7, 8], [7, 8]]) == [7, 8]
    # The original answers '' if every list is empty.
    assert common([[], []]) == []
    assert common([]) == []


@pytest.mark.seed("S002-42")
def test_full_blocks_touched_are_those_without_an_owner_here(backend: Backend) -> None:
    here = allocator(backend)
    used = here.allocate_immutable_block(None, [1, 1])
    here.free(here.allocate_immutable_block(None, [2, 2]))
    there = allocator(backend, 8)
    known = there.allocate_immutable_block(None, [1, 1])
    evictable = there.allocate_immutable_block(None, [2, 2])
    new = there.allocate_immutable_block(None, [3, 3])
    part_full = there.allocate_mutable_block(None)
    part_full.append_token_ids([1])
    empty = there.allocate_mutable_block(part_full)
    count = here.get_num_full_blocks_touched
    assert [count([each]) for each in (known, evictable, new, part_full, empty)] == [0, 1, 1, 0, 0]
    assert count([known, evictable, new, part_full, empty]) == 2
    here.free(used)
    assert count([known]) == 1


@pytest.mark.seed("S002-43")
def test_a_physical_id_is_the_place_among_all_ids(backend: Backend) -> None:
    blocks = allocator(backend, 3, block_ids=[30, 10, 20])
    assert [blocks.get_physical_block_id(each) for each in (10, 20, 30)] == [0, 1, 2]
    blocks.allocate_mutable_block(None)
    # The first id given is 30, whose place in the core is 2.
    assert list(blocks.take_batch())[-1] == Allocate(2)
    for unknown in (0, 15, 31, -10):
        with pytest.raises(ValueError, match=f"block {unknown} is not known: there are 3"):
            blocks.get_physical_block_id(unknown)


@pytest.mark.seed("S002-44")
def test_the_cached_prefix_is_what_is_there_and_computed(backend: Backend) -> None:
    blocks = allocator(backend)
    chain = hashes(1, 2, 3)
    assert blocks.find_cached_blocks_prefix(chain) == []
    blocks.allocate_immutable_blocks(None, full(1, 2))
    blocks.mark_blocks_as_computed([])
    assert blocks.find_cached_blocks_prefix(chain) == chain[:2]
    assert blocks.find_cached_blocks_prefix(chain[:1]) == chain[:1]
    assert blocks.find_cached_blocks_prefix([]) == []
    assert blocks.find_cached_blocks_prefix([2**300, *chain]) == []


@pytest.mark.seed("S002-45")
def test_a_hole_in_the_prefix_ends_it(backend: Backend) -> None:
    blocks = allocator(backend, 4)
    chain = blocks.allocate_immutable_blocks(None, full(1, 2, 3))
    blocks.mark_blocks_as_accessed([1, 2], 5.0)
    blocks.mark_blocks_as_accessed([0], 1.0)
    free_all(blocks, chain)
    blocks.allocate_mutable_block(None)
    blocks.allocate_mutable_block(None)
    # Block 0, the chain's head, was evicted; halving the list would look at the second one.
    assert blocks.blocks.content_hash(0) is None
    assert blocks.find_cached_blocks_prefix(hashes(1, 2, 3)) == []


@pytest.mark.seed("S002-46", "X-13")
def test_what_is_promoted_in_a_batch_is_not_found_in_it(backend: Backend) -> None:
    blocks = allocator(backend)
    blocks.allocate_immutable_block(None, [1, 1])
    assert blocks.find_cached_blocks_prefix(hashes(1)) == []
    assert blocks.allocate_immutable_block(None, [1, 1]).block_id == 0
    assert blocks.find_cached_blocks_prefix(hashes(1)) == []
    blocks.mark_blocks_as_computed([])
    assert blocks.find_cached_blocks_prefix(hashes(1)) == hashes(1)


@pytest.mark.seed("S002-47")
def test_reset_forgets_all_content_unless_a_block_is_used(backend: Backend) -> None:
    blocks = allocator(backend)
    chain = blocks.allocate_immutable_blocks(None, full(1, 2))
    hit = blocks.allocate_immutable_block(None, [1, 1])
    blocks.free(chain[1])
    before = blocks.blocks.backing.state()
    assert blocks.reset_prefix_cache() is False
    assert blocks.blocks.backing.state() == before
    free_all(blocks, [chain[0], hit])
    assert blocks.get_prefix_cache_hit_rate() > 0.0
    assert blocks.reset_prefix_cache() is True
    assert (blocks.evictor.num_blocks, blocks.get_num_free_blocks()) == (0, 4)
    assert blocks.get_prefix_cache_hit_rate() == 0.0
    assert not any(blocks._tracker(each).active for each in range(4))
    blocks.mark_blocks_as_computed([])
    assert blocks.find_cached_blocks_prefix(hashes(1, 2)) == []
    assert blocks.allocate_immutable_block(None, [1, 1]).computed is False


@pytest.mark.seed("S002-48")
def test_after_a_reset_blocks_leave_in_the_reverse_order_of_eviction(backend: Backend) -> None:
    blocks = allocator(backend, 4)
    for number, time in ((1, 3.0), (2, 1.0), (3, 2.0)):
        block = blocks.allocate_immutable_block(None, [number] * 2)
        assert block.block_id is not None
        blocks.mark_blocks_as_accessed([block.block_id], time)
        blocks.free(block)
    assert blocks._touched_blocks == {0, 1, 2}
    assert blocks.reset_prefix_cache()
    # What was promoted before a reset is not due to become computed after it.
    assert blocks._touched_blocks == set()
    first = use_up(blocks)
    times = {0: 3.0, 1: 1.0, 2: 2.0}
    evicted = sorted(times, key=lambda block: times[block])
    assert first == [*reversed(evicted), 3]


@pytest.mark.seed("S002-49")
def test_the_hit_rate_is_over_look_ups_of_full_blocks(backend: Backend) -> None:
    blocks = allocator(backend)
    assert blocks.get_prefix_cache_hit_rate() == 0.0
    blocks.allocate_mutable_block(None).append_token_ids([1, 1])
    assert blocks.get_prefix_cache_hit_rate() == 0.0
    for tokens in ([1, 1], [2, 2], [1, 1], [2, 2]):
        blocks.allocate_immutable_block(None, tokens)
    assert blocks.get_prefix_cache_hit_rate() == 3 / 4
    unchanged(lambda: blocks.allocate_immutable_blocks(None, full(5, 6, 7)), blocks)
    assert blocks.get_prefix_cache_hit_rate() == 3 / 4
    data = CacheMetricData()
    assert data.block_size == 1000
    for number in range(2500):
        data.query(hit=number < 500 or number >= 2000)
    assert (data.num_completed_blocks, data.num_incompleted_block_queries) == (2, 500)
    # Two batches of 0.5 and 0.0, and half of a batch of 1.0.
    assert data.get_hit_rate() == pytest.approx((0.5 + 0.0 + 0.5 * 1.0) / 2.5)


@pytest.mark.seed("S002-50")
def test_swap_out_keeps_objects_and_swap_in_gives_them_blocks_again(backend: Backend) -> None:
    here, there = allocator(backend, 4), allocator(backend, 4)
    chain = here.allocate_immutable_blocks(None, full(1, 2))
    tail = here.allocate_mutable_block(chain[-1])
    tail.append_token_ids([3])
    held = [*chain, tail]
    there.allocate_immutable_block(None, [9, 9])
    there.allocate_immutable_block(None, [1, 1])
    here.swap_out(held)
    assert ids(held) == [None, None, None]
    assert (here.get_num_free_blocks(), here.evictor.num_blocks) == (4, 2)
    there.swap_in(held)
    # The first is a hit, the others are new.
    assert ids(held) == [1, 2, 3]
    assert there.refcounter.get(1) == 2
    assert [block.token_ids for block in held] == [[1, 1], [2, 2], [3]]
    error = unchanged(lambda: there.swap_in(held), there, *held)
    assert isinstance(error, AssertionError)
    there.swap_out(held)
    assert here.allocate_mutable_block(None).block_id == 2
    here.swap_in(held[:1])
    small = allocator(backend, 1)
    error = unchanged(lambda: small.swap_in(held[1:]), small, *held)
    assert isinstance(error, NoFreeBlocksError)
    assert "swap in of 2 blocks: 2 blocks are needed, 1 of 1 are free" in str(error)
