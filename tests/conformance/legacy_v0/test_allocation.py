# SPDX-License-Identifier: Apache-2.0
"""The V0 allocator: construction, what is hit, what is taken, and in which order."""

from __future__ import annotations

import pytest

from kvcore.legacy.v0.prefix_caching_block import (
    Block,
    BlockAllocator,
    BlockTracker,
    Device,
    EvictionPolicy,
    NoFreeBlocksError,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
)
from kvcore.types.errors import KvcoreError
from tests.conftest import Backend
from tests.legacy.v0.small import SIZE, allocator, full, ids, unchanged, use_up


@pytest.mark.seed("S002-01")
def test_each_block_has_a_record_of_its_use(backend: Backend) -> None:
    assert BlockTracker.__slots__ == ("active", "computed", "last_accessed")
    fresh = BlockTracker()
    assert (fresh.active, fresh.last_accessed, fresh.computed) == (False, -1, False)
    blocks = allocator(backend, 2)
    block = blocks.allocate_mutable_block(None)
    assert block.block_id == 0
    assert [blocks._tracker(each).active for each in (0, 1)] == [True, False]


@pytest.mark.seed("S002-02")
def test_a_record_begins_anew_when_a_block_is_taken_and_when_it_is_given_back(
    backend: Backend,
) -> None:
    blocks = allocator(backend, 1)
    tracker = blocks._tracker(0)
    with pytest.raises(AssertionError):
        tracker.disable()
    block = blocks.allocate_immutable_block(None, [1, 1])
    with pytest.raises(AssertionError):
        tracker.enable()
    blocks.mark_blocks_as_computed([])
    blocks.mark_blocks_as_accessed([0], 7.0)
    assert (tracker.active, tracker.last_accessed, tracker.computed) == (True, 7.0, True)
    blocks.free(block)
    assert (tracker.active, tracker.last_accessed, tracker.computed) == (False, -1, False)


@pytest.mark.seed("S002-04")
def test_ids_count_from_0_or_are_those_given_in_the_order_given(backend: Backend) -> None:
    assert use_up(allocator(backend, 3)) == [0, 1, 2]
    assert use_up(allocator(backend, 3, block_ids=[9, 4, 6])) == [9, 4, 6]
    assert use_up(PrefixCachingBlockAllocator(3, SIZE, range(5, 8), backend=backend)) == [5, 6, 7]
    for wrong in ([1, 2], [1, 2, 3, 4], [1, 2, 2]):
        with pytest.raises(AssertionError, match=f"{len(set(wrong))} different ids .* 3 blocks"):
            allocator(backend, 3, block_ids=wrong)


@pytest.mark.seed("S002-05")
def test_block_objects_are_used_again_and_doubled_when_they_run_out(backend: Backend) -> None:
    blocks = allocator(backend, 1)
    assert blocks._block_pool.pool_size == 4
    first = blocks.allocate_immutable_block(None, [1, 1], extra_hash=3)
    blocks.free(first)
    again = blocks.allocate_mutable_block(None)
    assert again is first
    assert (again.token_ids, again.content_hash, again.extra_hash) == ([], None, None)
    forks = [blocks.fork(again)[0] for _ in range(4)]
    assert blocks._block_pool.pool_size == 8
    assert len({id(each) for each in [again, *forks]}) == 5


@pytest.mark.seed("S002-06")
def test_blocks_without_content_are_those_of_a_naive_allocator_with_the_same_owners(
    backend: Backend,
) -> None:
    blocks = allocator(backend, 3)
    inner = blocks._hashless_allocator
    assert inner.all_block_ids == blocks.all_block_ids == {0, 1, 2}
    held = blocks.allocate_immutable_block(None, [1, 1])
    assert (inner.get_num_free_blocks(), blocks.get_num_free_blocks()) == (2, 2)
    blocks.fork(held)
    assert inner.refcounter.get(0) == blocks.refcounter.get(0) == 2
    blocks.free(held)
    other = blocks.allocate_immutable_block(None, [2, 2])
    blocks.free(other)
    assert (inner.get_num_free_blocks(), blocks.get_num_free_blocks()) == (1, 2)


@pytest.mark.seed("S002-07")
def test_there_is_one_policy(backend: Backend) -> None:
    assert allocator(backend, eviction_policy=EvictionPolicy.LRU).eviction_policy.name == "LRU"
    for unknown in (None, "LRU", 1):
        with pytest.raises(ValueError, match="unknown eviction policy"):
            allocator(backend, eviction_policy=unknown)


@pytest.mark.seed("S002-08")
def test_the_same_content_is_the_same_block(backend: Backend) -> None:
    blocks = allocator(backend)
    first = blocks.allocate_immutable_block(None, [1, 2])
    same = blocks.allocate_immutable_block(None, [1, 2])
    assert (first.block_id, same.block_id) == (0, 0)
    assert blocks.refcounter.get(0) == 2
    others = [
        blocks.allocate_immutable_block(None, [2, 1]),
        blocks.allocate_immutable_block(None, [1, 2], extra_hash=5),
        blocks.allocate_immutable_block(first, [1, 2]),
    ]
    assert ids(others) == [1, 2, 3]
    assert blocks.get_num_free_blocks() == 0


@pytest.mark.seed("S002-09")
def test_a_hit_makes_the_object_computed_and_closed(backend: Backend) -> None:
    blocks = allocator(backend)
    first = blocks.allocate_immutable_block(None, [1, 2])
    hit = blocks.allocate_immutable_block(None, [1, 2])
    assert (first.computed, hit.computed) == (False, True)
    assert not blocks.block_is_computed(0)
    for block in (first, hit):
        error = unchanged(block.append_token_ids, blocks, block, given=([],))
        assert isinstance(error, AssertionError)
    open_block = blocks.allocate_mutable_block(None)
    assert isinstance(open_block, PrefixCachingBlock)
    open_block.computed = True
    with pytest.raises(AssertionError, match="block 1 is computed: 1 tokens"):
        open_block.append_token_ids([1])


@pytest.mark.seed("S002-10")
def test_a_hit_on_an_evictable_block_takes_it_out_and_counts_as_computed(backend: Backend) -> None:
    blocks = allocator(backend, 2)
    blocks.free(blocks.allocate_immutable_block(None, [1, 2]))
    assert 0 in blocks.evictor
    hit = blocks.allocate_immutable_block(None, [1, 2])
    assert (hit.block_id, 0 in blocks.evictor, blocks.evictor.num_blocks) == (0, False, 0)
    assert blocks.block_is_computed(0)
    assert use_up(blocks) == [1]


@pytest.mark.seed("S002-11")
def test_a_miss_is_a_mutable_block_that_became_full(backend: Backend) -> None:
    twins = [allocator(backend), allocator(backend)]
    at_once = twins[0].allocate_immutable_block(None, [1, 2], extra_hash=4)
    in_steps = twins[1].allocate_mutable_block(None, extra_hash=4)
    in_steps.append_token_ids([1, 2])
    assert at_once.content_hash == in_steps.content_hash is not None
    assert twins[0].blocks.backing.state() == twins[1].blocks.backing.state()
    assert twins[0]._touched_blocks == twins[1]._touched_blocks == {0}


@pytest.mark.seed("S002-12")
def test_an_immutable_block_is_full_and_no_device_is_named(backend: Backend) -> None:
    blocks = allocator(backend)
    part_full = blocks.allocate_mutable_block(None)
    part_full.append_token_ids([1])
    for tokens in ([], [1], [1, 2, 3]):
        error = unchanged(blocks.allocate_immutable_block, blocks, given=(None, tokens))
        assert isinstance(error, AssertionError)
        assert f"has 2 tokens, {len(tokens)} are given" in str(error)
    for prev, device in ((None, Device.GPU), (part_full, None)):
        error = unchanged(
            blocks.allocate_immutable_block, blocks, given=(prev, [1, 2], None, device)
        )
        assert isinstance(error, AssertionError)
    with pytest.raises(AssertionError):
        blocks.allocate_mutable_block(None, device=Device.CPU)


@pytest.mark.seed("S002-13")
def test_several_blocks_are_a_chain_in_order(backend: Backend) -> None:
    blocks = allocator(backend)
    chain = blocks.allocate_immutable_blocks(None, full(1, 2, 3))
    assert ids(chain) == [0, 1, 2]
    assert [block.prev_block for block in chain] == [None, *chain[:2]]
    one_by_one: list[Block] = []
    for tokens in full(1, 2, 3):
        before = one_by_one[-1] if one_by_one else None
        one_by_one.append(blocks.allocate_immutable_block(before, tokens))
    assert ids(one_by_one) == [0, 1, 2]
    error = unchanged(lambda: blocks.allocate_immutable_blocks(None, full(1, 7, 8)), blocks)
    assert isinstance(error, NoFreeBlocksError)
    assert blocks.allocate_immutable_blocks(None, []) == []


@pytest.mark.seed("S002-14")
def test_blocks_without_content_are_taken_before_any_content_goes(backend: Backend) -> None:
    blocks = allocator(backend, 3)
    blocks.free(blocks.allocate_immutable_block(None, [1, 2]))
    assert [blocks.allocate_mutable_block(None).block_id for _ in range(2)] == [1, 2]
    assert 0 in blocks.evictor
    last = blocks.allocate_mutable_block(None, extra_hash=3)
    assert (last.block_id, last.prev_block, last.extra_hash) == (0, None, 3)
    assert blocks.evictor.num_blocks == 0


@pytest.mark.seed("S002-15")
def test_no_block_at_all_is_an_error_of_its_own(backend: Backend) -> None:
    blocks = allocator(backend, 1)
    block = blocks.allocate_mutable_block(None)
    assert BlockAllocator.NoFreeBlocksError is NoFreeBlocksError
    for call in (
        lambda: blocks.allocate_mutable_block(None),
        lambda: blocks.allocate_immutable_block(None, [1, 2]),
    ):
        error = unchanged(call, blocks, block)
        assert isinstance(error, BlockAllocator.NoFreeBlocksError)
        assert isinstance(error, ValueError)
        assert isinstance(error, KvcoreError)
        assert "0 of 1 are free" in str(error)


@pytest.mark.seed("S002-16", "X-01")
def test_ids_come_lowest_first_and_a_freed_one_next(backend: Backend) -> None:
    blocks = allocator(backend)
    taken = [blocks.allocate_mutable_block(None) for _ in range(3)]
    assert ids(taken) == [0, 1, 2]
    blocks.free(taken[0])
    blocks.free(taken[2])
    assert use_up(blocks) == [2, 0, 3]


@pytest.mark.seed("S002-17")
def test_an_evicted_block_loses_content_and_computation(backend: Backend) -> None:
    blocks = allocator(backend, 1)
    blocks.free(blocks.allocate_immutable_block(None, [1, 2]))
    content_hash = PrefixCachingBlock.hash_block_tokens(True, None, [1, 2])
    assert blocks.find_cached_blocks_prefix([content_hash]) == [content_hash]
    block = blocks.allocate_mutable_block(None)
    assert (block.block_id, blocks.refcounter.get(0)) == (0, 1)
    assert not blocks.block_is_computed(0)
    assert blocks.find_cached_blocks_prefix([content_hash]) == []
    # A mark that was still due for the old content is not the new owner's.
    blocks.mark_blocks_as_computed([])
    assert not blocks.block_is_computed(0)


@pytest.mark.seed("S002-18")
def test_one_content_never_runs_out(backend: Backend) -> None:
    blocks = allocator(backend, 1)
    many = [blocks.allocate_immutable_block(None, [1, 2]) for _ in range(100)]
    assert {block.block_id for block in many} == {0}
    assert blocks.refcounter.get(0) == 100
    for block in many:
        blocks.free(block)
    assert blocks.get_num_free_blocks() == 1
