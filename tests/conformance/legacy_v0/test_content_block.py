# SPDX-License-Identifier: Apache-2.0
"""V0's block with a content hash, and what counts owners."""

from __future__ import annotations

import pytest

from kvcore.legacy.v0.common import RefCounter
from kvcore.legacy.v0.naive_block import NaiveBlock, NaiveBlockAllocator
from kvcore.legacy.v0.prefix_caching_block import (
    Block,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
)
from kvcore.legacy.v0.tier_blocks import hash_of_key, key_of_hash
from kvcore.types.keys import KEY_SIZE
from tests.conftest import Backend
from tests.legacy.v0.small import allocator, full, ids, unchanged


def chain(
    blocks: PrefixCachingBlockAllocator, *parts: list[int], extra: int | None = None
) -> list[PrefixCachingBlock]:
    """Return blocks without ids, each after the one before."""
    made: list[PrefixCachingBlock] = []
    for part in parts:
        before = made[-1] if made else None
        made.append(PrefixCachingBlock(before, part, 2, blocks, extra_hash=extra))
    return made


@pytest.mark.seed("S002-51")
def test_a_block_has_the_original_s_arguments_and_copies_before_it_writes(backend: Backend) -> None:
    blocks = allocator(backend)
    block = PrefixCachingBlock(
        prev_block=None,
        token_ids=[1],
        block_size=2,
        allocator=blocks,
        block_id=3,
        computed=True,
        extra_hash=5,
    )
    assert (block.prev_block, block.token_ids, block.block_size) == (None, [1], 2)
    assert (block.block_id, block.computed, block.extra_hash) == (3, True, 5)
    assert isinstance(block, Block)
    mutable = blocks.allocate_mutable_block(None)
    mutable.append_token_ids([1])
    (forked,) = blocks.fork(mutable)
    forked.append_token_ids([2])
    assert (mutable.token_ids, forked.token_ids) == ([1], [1, 2])
    assert (ids([mutable, forked]), blocks.clear_copy_on_writes()) == ([0, 1], [(0, 1)])


@pytest.mark.seed("S002-52")
def test_what_stands_before_and_the_allocator_are_of_its_kind(backend: Backend) -> None:
    blocks = allocator(backend)
    naive = NaiveBlockAllocator(NaiveBlock, 2, 2, backend=backend)
    plain = naive.allocate_mutable_block(None)
    with pytest.raises(AssertionError, match="a NaiveBlockAllocator caches no prefixes"):
        PrefixCachingBlock(None, [], 2, naive)
    with pytest.raises(AssertionError, match="a NaiveBlock cannot precede"):
        PrefixCachingBlock(plain, [], 2, blocks)
    for call in (
        lambda: blocks.allocate_mutable_block(plain),
        lambda: blocks.allocate_immutable_block(plain, [1, 2]),
    ):
        assert isinstance(unchanged(call, blocks), AssertionError)


@pytest.mark.seed("S002-53")
def test_a_hash_comes_when_the_block_is_full_and_stays(backend: Backend) -> None:
    block = PrefixCachingBlock(None, [], 2, allocator(backend))
    assert block.content_hash is None
    block.append_token_ids([1])
    assert block.content_hash is None
    block.append_token_ids([2])
    content_hash = block.content_hash
    assert content_hash == PrefixCachingBlock.hash_block_tokens(True, None, [1, 2])
    block.token_ids[0] = 9
    assert block.content_hash == content_hash


@pytest.mark.seed("S002-54", "X-12")
def test_the_hash_is_python_s_of_place_parent_tokens_and_extra(backend: Backend) -> None:
    of = PrefixCachingBlock.hash_block_tokens
    assert of(True, None, [1, 2]) == hash((True, hash("None"), 1, 2, None))
    assert of(False, 7, [1, 2], 3) == hash((False, 7, 1, 2, 3))
    assert of(False, None, [1, 2]) == hash((False, None, 1, 2, None))
    first, second = chain(allocator(backend), [1, 2], [3, 4], extra=6)
    assert first.content_hash == of(True, None, [1, 2], 6)
    assert second.content_hash == of(False, first.content_hash, [3, 4], 6)
    assert first.content_hash != chain(allocator(backend), [1, 2])[0].content_hash


@pytest.mark.seed("S002-55")
def test_behind_a_block_without_hash_there_is_none(backend: Backend) -> None:
    blocks = allocator(backend)
    part_full = blocks.allocate_mutable_block(None)
    part_full.append_token_ids([1])
    behind = blocks.allocate_mutable_block(part_full)
    behind.append_token_ids([3, 4])
    # The original gives it the hash of a block behind None, for any tokens before it.
    assert behind.content_hash is None
    assert blocks._touched_blocks == set()
    blocks.free(behind)
    assert (blocks.evictor.num_blocks, blocks.get_num_free_blocks()) == (0, 3)


@pytest.mark.seed("S002-56")
def test_tokens_go_into_an_open_block_and_the_last_one_closes_it(backend: Backend) -> None:
    blocks = allocator(backend)
    block = blocks.allocate_mutable_block(None)
    block.append_token_ids([])
    assert (block.token_ids, block.num_empty_slots) == ([], 2)
    error = unchanged(lambda: block.append_token_ids([1, 2, 3]), blocks, block)
    assert isinstance(error, AssertionError)
    assert "block 0 has 2 empty slots, 3 tokens are given" in str(error)
    blocks.allocate_immutable_block(None, [1, 2])
    block.append_token_ids([1, 2])
    assert (block.block_id, blocks.refcounter.get(1)) == (1, 2)
    error = unchanged(lambda: block.append_token_ids([]), blocks, block)
    assert isinstance(error, AssertionError)
    unhashable = blocks.allocate_mutable_block(None)
    error = unchanged(unhashable.append_token_ids, blocks, unhashable, given=([[1], 2],))
    assert isinstance(error, TypeError)


@pytest.mark.seed("S002-57")
def test_the_total_counts_the_chain_and_grows(backend: Backend) -> None:
    blocks = allocator(backend)
    held = blocks.allocate_immutable_blocks(None, full(1, 2))
    tail = blocks.allocate_mutable_block(held[-1])
    assert [block.num_tokens_total for block in [*held, tail]] == [2, 4, 4]
    tail.append_token_ids([3])
    assert tail.num_tokens_total == 5
    assert blocks.fork(tail)[2].num_tokens_total == 5


@pytest.mark.seed("S002-58")
def test_what_a_block_knows_can_be_read_and_two_of_it_set(backend: Backend) -> None:
    block = PrefixCachingBlock(None, [1], 2, allocator(backend), extra_hash=4)
    assert (block.last_accessed, block.computed) == (-1, False)
    block.last_accessed, block.computed = 5.0, True
    assert (block.last_accessed, block.computed) == (5.0, True)
    assert (block.block_size, block.token_ids, block.num_empty_slots) == (2, [1], 1)
    assert (block.is_full, block.prev_block, block.extra_hash) == (False, None, 4)


@pytest.mark.seed("S002-73")
def test_owners_are_counted_for_known_blocks_and_never_below_none(backend: Backend) -> None:
    counter = RefCounter([4, 7, 9], backend=backend)
    assert [counter.incr(7), counter.incr(9), counter.incr(7), counter.get(7)] == [1, 1, 2, 2]
    assert [counter.decr(7), counter.decr(7), counter.get(4), counter.get(9)] == [1, 0, 0, 1]
    for wrong in (lambda: counter.decr(7), lambda: counter.decr(5)):
        assert isinstance(unchanged(wrong, counter), AssertionError)
    for call in (counter.incr, counter.get):
        with pytest.raises(AssertionError, match="block 5 is not known"):
            call(5)
    view = counter.as_readonly()
    counter.incr(4)
    assert view.get(4) == 1
    for change in (view.incr, view.decr):
        with pytest.raises(ValueError, match=r"read-only view .* block 4"):
            change(4)
    with pytest.raises(AssertionError):
        view.get(5)
    # An allocator's counter is a view on the same owners.
    blocks = allocator(backend)
    block = blocks.allocate_mutable_block(None)
    blocks.fork(block)
    assert blocks.refcounter.get(0) == 2
    with pytest.raises(ValueError, match="block 0"):
        blocks.refcounter.incr(0)
    naive = NaiveBlockAllocator(NaiveBlock, 3, 2, backend=backend)
    assert (naive.refcounter.incr(1), naive.refcounter.get(1)) == (1, 1)
    assert [naive.allocate_mutable_block(None).block_id for _ in range(2)] == [0, 2]


@pytest.mark.parametrize(
    "content_hash", [0, 1, -1, 2**63 - 1, -(2**63), 2**64, 2**192 + 5, 2**255 - 1, -(2**255)]
)
def test_a_key_has_its_hash_at_both_ends_and_gives_it_back(content_hash: int) -> None:
    key = key_of_hash(content_hash)
    assert (len(key), key[-4:]) == (KEY_SIZE, bytes(4))
    assert hash_of_key(key) == content_hash
    low = content_hash % 2**64
    assert int.from_bytes(key[:8], "big") == low
    if -(2**63) <= content_hash < 2**63:
        end = int.from_bytes(key[24:32], "big")
        assert end == (low if content_hash >= 0 else low ^ (2**64 - 1))


@pytest.mark.parametrize("content_hash", [2**255, -(2**255) - 1, 2**600])
def test_an_int_of_more_bytes_has_no_key(content_hash: int) -> None:
    with pytest.raises(OverflowError):
        key_of_hash(content_hash)
