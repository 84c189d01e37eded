# SPDX-License-Identifier: Apache-2.0
"""The V0 allocator: giving back, eviction and its order, promotion, copy-on-write, fork."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcore import Allocate, CopyOnWrite, Evict, Free
from kvcore.legacy.v0.prefix_caching_block import (
    Device,
    EvictionPolicy,
    LRUEvictor,
    NoFreeBlocksError,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
    make_evictor,
)
from kvcore.types.errors import KvcoreError
from tests.conftest import Backend
from tests.legacy.v0.small import allocator, full, ids, unchanged, use_up


def evictable(
    backend: Backend, times: list[float | None], *, order: list[int]
) -> PrefixCachingBlockAllocator:
    """Free blocks of one full block each, used at these times, in this order."""
    blocks = allocator(backend, len(times))
    held = [blocks.allocate_immutable_block(None, tokens) for tokens in full(*range(len(times)))]
    for block, time in enumerate(times):
        if time is not None:
            blocks.mark_blocks_as_accessed([block], time)
    for block in order:
        blocks.free(held[block])
    return blocks


@pytest.mark.seed("S002-03")
def test_what_was_never_accessed_is_evicted_before_all_that_was(backend: Backend) -> None:
    blocks = evictable(backend, [0.0, None, 5.0, None], order=[2, 0, 3, 1])
    assert use_up(blocks) == [1, 3, 0, 2]


@pytest.mark.seed("S002-19", "X-03")
def test_eviction_is_by_time_then_longest_chain_then_lowest_id(backend: Backend) -> None:
    blocks = evictable(backend, [3.0, 1.0, 2.0, 1.0], order=[3, 0, 1, 2])
    assert use_up(blocks) == [1, 3, 2, 0]
    blocks = allocator(backend, 4)
    chain = blocks.allocate_immutable_blocks(None, full(1, 2, 3))
    other = blocks.allocate_immutable_block(None, [9, 9])
    for block in [*chain, other]:
        blocks.free(block)
    # Ids 0 to 2 end at tokens 2, 4 and 6; id 3 ends at token 2, as id 0 does.
    assert use_up(blocks) == [2, 1, 0, 3]


@pytest.mark.seed("S002-20")
def test_length_is_the_chain_s_and_time_is_that_of_freeing(backend: Backend) -> None:
    # Block 2 has the longest chain, and in the second case the latest time, which counts first.
    for last_access, order in ((1.0, [2, 0, 1]), (4.0, [0, 1, 2])):
        blocks = allocator(backend, 3)
        short = blocks.allocate_immutable_block(None, [9, 9])
        chain = blocks.allocate_immutable_blocks(None, full(1, 2))
        blocks.mark_blocks_as_accessed([0, 1, 2], 1.0)
        blocks.free(short)
        blocks.mark_blocks_as_accessed([2], last_access)
        for block in chain:
            blocks.free(block)
        assert use_up(blocks) == order


@pytest.mark.seed("S002-21")
def test_an_empty_evictor_and_an_absent_block_are_value_errors(backend: Backend) -> None:
    blocks = allocator(backend, 2)
    block = blocks.allocate_immutable_block(None, [1, 2])
    evictor = make_evictor(EvictionPolicy.LRU, blocks.blocks)
    assert isinstance(evictor, LRUEvictor)
    with pytest.raises(ValueError, match=r"No usable cache memory left.* 2 blocks"):
        evictor.evict()
    for absent in (0, 1, 7):
        with pytest.raises(ValueError, match=f"block {absent} is not in the evictor"):
            evictor.remove(absent)
    content_hash = block.content_hash
    assert content_hash is not None
    with pytest.raises(AssertionError, match="block 1 has 0 owners"):
        evictor.add(1, content_hash, 2, 0.0)
    evictor.add(0, content_hash, 2, 0.0)
    assert (0 in evictor, evictor.num_blocks) == (True, 1)
    assert evictor.evict() == (0, content_hash)
    assert (0 in evictor, evictor.num_blocks, blocks.refcounter.get(0)) == (False, 0, 1)


@pytest.mark.seed("S002-22")
def test_nothing_stale_gathers_in_the_evictor(backend: Backend) -> None:
    blocks = evictable(backend, [1.0, 2.0], order=[0, 1])
    for time in range(3, 203):
        blocks.mark_blocks_as_accessed([time % 2], float(time))
    assert blocks.evictor.num_blocks == 2
    assert len(blocks.blocks.backing.free_blocks()) == 2
    assert use_up(blocks) == [1, 0]  # last used at 201 and 202


@pytest.mark.seed("S002-23", "X-03")
def test_a_block_accessed_while_evictable_is_evicted_by_its_new_time(backend: Backend) -> None:
    blocks = evictable(backend, [1.0, 2.0], order=[0, 1])
    blocks.mark_blocks_as_accessed([0], 3.0)
    assert blocks.get_num_free_blocks() == 2
    assert use_up(blocks) == [1, 0]
    blocks = evictable(backend, [1.0], order=[0])
    blocks.mark_blocks_as_accessed([0], 9.0)
    assert blocks.allocate_mutable_block(None).block_id == 0


@pytest.mark.seed("S002-24")
def test_content_stays_to_be_hit_and_a_plain_block_is_free_at_once(backend: Backend) -> None:
    blocks = allocator(backend, 3)
    cached = blocks.allocate_immutable_block(None, [1, 2])
    plain = blocks.allocate_mutable_block(None)
    plain.append_token_ids([1])
    blocks.free(cached)
    blocks.free(plain)
    assert blocks.evictor.num_blocks == 1
    assert blocks._hashless_allocator.get_num_free_blocks() == 2
    assert blocks.allocate_immutable_block(None, [1, 2]).block_id == 0
    commands = list(blocks.take_batch())
    assert [each for each in commands if isinstance(each, Free)] == [Free(0, True), Free(1, False)]


@pytest.mark.seed("S002-25")
def test_a_freed_block_has_no_id_and_cannot_be_freed_again(backend: Backend) -> None:
    blocks = allocator(backend)
    cached = blocks.allocate_immutable_block(None, [1, 2])
    shared = blocks.fork(cached)[0]
    plain = blocks.allocate_mutable_block(None)
    for block in (shared, cached, plain):
        blocks.free(block, keep_block_object=True)
        assert block.block_id is None
        error = unchanged(blocks.free, blocks, block, given=(block,))
        assert isinstance(error, AssertionError)
        assert isinstance(error, KvcoreError)
        assert "Freeing unallocated block is undefined" in str(error)


@pytest.mark.seed("S002-26")
def test_a_shared_block_is_free_when_its_last_holder_frees_it(backend: Backend) -> None:
    blocks = allocator(backend)
    holders = [blocks.allocate_immutable_block(None, [1, 2]) for _ in range(3)]
    free = []
    for block in holders:
        blocks.free(block)
        free.append(blocks.get_num_free_blocks())
    assert free == [3, 3, 4]


@pytest.mark.seed("S002-27")
def test_a_plain_block_is_tracked_until_its_last_holder_frees_it(backend: Backend) -> None:
    blocks = allocator(backend)
    first = blocks.allocate_mutable_block(None)
    first.append_token_ids([1])
    second = blocks.fork(first)[0]
    blocks.mark_blocks_as_accessed([0], 2.0)
    blocks.free(first)
    assert (blocks._tracker(0).active, blocks._tracker(0).last_accessed) == (True, 2.0)
    blocks.free(second)
    assert not blocks._tracker(0).active


@pytest.mark.seed("S002-28")
def test_free_blocks_are_those_without_content_and_the_evictable_ones(backend: Backend) -> None:
    blocks = allocator(backend)
    blocks.free(blocks.allocate_immutable_block(None, [1, 2]))
    held = blocks.allocate_mutable_block(None)
    plain = blocks._hashless_allocator.get_num_free_blocks()
    assert (plain, blocks.evictor.num_blocks, blocks.get_num_free_blocks()) == (2, 1, 3)
    assert held.block_id == 1
    with pytest.raises(AssertionError):
        blocks.get_num_free_blocks(device=Device.GPU)


@pytest.mark.seed("S002-29")
def test_all_blocks_are_counted_and_named(backend: Backend) -> None:
    blocks = allocator(backend, 3, block_ids=[5, 3, 8])
    blocks.allocate_mutable_block(None)
    assert blocks.get_num_total_blocks() == 3
    assert blocks.all_block_ids == frozenset({3, 5, 8})
    assert isinstance(blocks.all_block_ids, frozenset)


@pytest.mark.seed("S002-30")
def test_new_content_is_registered_under_its_own_block(backend: Backend) -> None:
    blocks = allocator(backend)
    block = blocks.allocate_mutable_block(None)
    block.append_token_ids([1])
    with pytest.raises(AssertionError):
        blocks.is_block_cached(block)
    block.append_token_ids([2])
    assert (block.block_id, blocks.is_block_cached(block)) == (0, True)
    assert not blocks.block_is_computed(0)
    blocks.mark_blocks_as_computed([])
    assert blocks.block_is_computed(0)


@pytest.mark.seed("S002-31", "X-02")
def test_content_that_is_known_takes_the_block_s_place(backend: Backend) -> None:
    blocks = allocator(backend)
    blocks.free(blocks.allocate_immutable_block(None, [1, 2]))
    block = blocks.allocate_mutable_block(None)
    assert block.block_id == 1
    block.append_token_ids([1, 2])
    assert (block.block_id, blocks.refcounter.get(0), blocks.refcounter.get(1)) == (0, 1, 0)
    assert blocks.block_is_computed(0)
    assert blocks._hashless_allocator.get_num_free_blocks() == 3
    assert use_up(blocks) == [1, 2, 3]
    # A block that is found in use gets one owner more.
    blocks = allocator(backend)
    held = [blocks.allocate_immutable_block(None, [1, 2]), blocks.allocate_mutable_block(None)]
    held[1].append_token_ids([1, 2])
    assert (ids(held), blocks.refcounter.get(0)) == ([0, 0], 2)
    # What is promoted twice stays where it is.
    assert blocks.promote_to_immutable_block(held[1]) == 0
    assert blocks.refcounter.get(0) == 2


@pytest.mark.seed("S002-32")
def test_only_a_full_block_with_an_owner_is_promoted(backend: Backend) -> None:
    blocks = allocator(backend)
    part_full = blocks.allocate_mutable_block(None)
    part_full.append_token_ids([1])
    without_id = PrefixCachingBlock(None, [1, 2], 2, blocks)
    without_owner = PrefixCachingBlock(None, [1, 2], 2, blocks, block_id=3)
    for block in (part_full, without_id, without_owner):
        error = unchanged(blocks.promote_to_immutable_block, blocks, given=(block,))
        assert isinstance(error, AssertionError)
    error = unchanged(lambda: blocks.is_block_cached(part_full), blocks)
    assert isinstance(error, AssertionError)
    assert "block 0 has no content hash: 1 of 2 tokens" in str(error)


def shared_part_full(blocks: PrefixCachingBlockAllocator) -> tuple[PrefixCachingBlock, ...]:
    """Return a block of one token that two sequences hold."""
    block = blocks.allocate_mutable_block(None)
    block.append_token_ids([1])
    pair = (block, blocks.fork(block)[0])
    assert isinstance(pair[0], PrefixCachingBlock)
    assert isinstance(pair[1], PrefixCachingBlock)
    return pair[0], pair[1]


@pytest.mark.seed("S002-33")
def test_a_block_that_others_hold_is_copied_before_it_is_written(backend: Backend) -> None:
    blocks = allocator(backend)
    first, second = shared_part_full(blocks)
    blocks.take_batch()
    assert blocks.cow_block_if_not_appendable(second) == 1
    assert [blocks.refcounter.get(each) for each in (0, 1)] == [1, 1]
    assert ids([first, second]) == [0, 1]
    assert blocks.cow_block_if_not_appendable(first) == 0
    assert blocks.clear_copy_on_writes() == [(0, 1)]
    assert list(blocks.take_batch()) == [Allocate(1), CopyOnWrite(0, 1)]


@pytest.mark.seed("S002-34")
def test_copies_are_handed_out_in_order_and_once(backend: Backend) -> None:
    blocks = allocator(backend, 4)
    first, second = shared_part_full(blocks)
    blocks.free(blocks.allocate_immutable_block(None, [7, 8]))
    third = blocks.fork(first)[0]
    assert blocks.clear_copy_on_writes() == []
    second.append_token_ids([5])
    blocks.allocate_mutable_block(None)
    third.append_token_ids([6])
    assert blocks.clear_copy_on_writes() == [(0, 2), (0, 1)]
    assert blocks.clear_copy_on_writes() == []
    # Block 1 was evicted to be the second target.
    evicted = [each.block for each in blocks.take_batch() if isinstance(each, Evict)]
    assert evicted == [1]


@pytest.mark.seed("S002-35")
def test_without_a_free_block_a_copy_changes_nothing(backend: Backend) -> None:
    blocks = allocator(backend, 1)
    first, second = shared_part_full(blocks)
    calls: list[Callable[[], object]] = [
        lambda: second.append_token_ids([2]),
        lambda: blocks.cow_block_if_not_appendable(second),
    ]
    for call in calls:
        error = unchanged(call, blocks, first, second)
        assert isinstance(error, NoFreeBlocksError)
        assert "a copy of block 0: 1 blocks are needed, 0 of 1 are free" in str(error)
    assert (second.block_id, second.token_ids, blocks.refcounter.get(0)) == (0, [1], 2)
    blocks.free(first)
    second.append_token_ids([2])
    assert (second.block_id, blocks.clear_copy_on_writes()) == (0, [])


@pytest.mark.seed("S002-36")
def test_a_fork_is_a_chain_of_its_own_over_the_same_blocks(backend: Backend) -> None:
    blocks = allocator(backend)
    chain = blocks.allocate_immutable_blocks(None, full(1, 2), extra_hash=6)
    tail = blocks.allocate_mutable_block(chain[-1], extra_hash=6)
    tail.append_token_ids([3])
    forked = blocks.fork(tail)
    assert ids(forked) == [0, 1, 2]
    assert [block.prev_block for block in forked] == [None, *forked[:2]]
    assert [block.extra_hash for block in forked] == [6, 6, 6]
    assert [block.token_ids for block in forked] == [[1, 1], [2, 2], [3]]
    assert [block.content_hash for block in forked[:2]] == [block.content_hash for block in chain]
    assert [blocks.refcounter.get(each) for each in range(3)] == [2, 2, 2]
    blocks.free(chain[1], keep_block_object=True)
    error = unchanged(lambda: blocks.fork(tail), blocks, tail)
    assert isinstance(error, AssertionError)


@pytest.mark.seed("S002-37")
def test_forked_blocks_are_not_computed(backend: Backend) -> None:
    blocks = allocator(backend)
    blocks.allocate_immutable_block(None, [1, 2])
    hit = blocks.allocate_immutable_block(None, [1, 2])
    (forked,) = blocks.fork(hit)
    assert (hit.computed, forked.computed) == (True, False)
