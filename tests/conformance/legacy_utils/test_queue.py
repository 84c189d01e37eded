# SPDX-License-Identifier: Apache-2.0
"""Seed 001's free queue over block objects."""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

import pytest

from kvcore.legacy.blocks.views import AlreadyInQueue, NoFreeBlocks, NotInQueue
from kvcore.legacy.v1_0_8.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from kvcore.types.errors import WrongArgument
from tests.conftest import Backend

NUM_CALLS = 3000


def make(backend: Backend, *ids: int) -> tuple[list[KVCacheBlock], FreeKVCacheBlockQueue]:
    """Return blocks of these ids and the queue that holds them."""
    blocks = [KVCacheBlock(block_id, backend=backend) for block_id in ids]
    return blocks, FreeKVCacheBlockQueue(blocks)


def ids(queue: FreeKVCacheBlockQueue) -> list[int]:
    """Return the queue from head to tail; links in both directions must agree with it."""
    blocks = queue.get_all_free_blocks()
    assert len(blocks) == queue.num_free_blocks
    ends = [None, *blocks, None]
    for before, block, after in zip(ends, blocks, ends[2:], strict=False):
        assert block.prev_free_block is before
        assert block.next_free_block is after
    assert queue.free_list_head is (blocks[0] if blocks else None)
    assert queue.free_list_tail is (blocks[-1] if blocks else None)
    return [block.block_id for block in blocks]


@pytest.mark.seed("S001-11", "S001-17")
def test_the_first_order_is_the_list_s_and_reading_takes_nothing(backend: Backend) -> None:
    blocks, queue = make(backend, 0, 1, 2, 3, 4)
    assert ids(queue) == [0, 1, 2, 3, 4]
    assert ids(queue) == [0, 1, 2, 3, 4]
    assert all(
        mine is theirs for mine, theirs in zip(queue.get_all_free_blocks(), blocks, strict=True)
    )
    assert ids(make(backend, 7, 3, 3)[1]) == [7, 3, 3]  # ids are the blocks' own affair


@pytest.mark.seed("S001-12")
def test_who_frees_reverses_the_queue_does_not(backend: Backend) -> None:
    blocks, queue = make(backend, 0, 1, 2, 3, 4)
    taken = [queue.popleft() for _ in range(4)]
    for block in taken[:2]:
        queue.append(block)
    for block in reversed(taken[2:]):
        queue.append(block)
    assert ids(queue) == [4, 0, 1, 3, 2]
    assert taken == blocks[:4]


@pytest.mark.seed("S001-13", "S001-19")
def test_blocks_leave_at_the_head_until_none_is_left(backend: Backend) -> None:
    blocks, queue = make(backend, 5, 6)
    assert queue.popleft() is blocks[0]
    assert ids(queue) == [6]
    assert queue.free_list_head is queue.free_list_tail is blocks[1]
    assert queue.popleft() is blocks[1]
    assert ids(queue) == []
    with pytest.raises(NoFreeBlocks) as caught:
        queue.popleft()
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == "No free blocks available"
    assert queue.num_free_blocks == 0


@pytest.mark.seed("S001-14", "S001-10")
@pytest.mark.parametrize(
    ("place", "left"), [(0, [1, 2, 3]), (1, [0, 2, 3]), (2, [0, 1, 3]), (3, [0, 1, 2])]
)
def test_a_block_leaves_from_anywhere(backend: Backend, place: int, left: list[int]) -> None:
    blocks, queue = make(backend, 0, 1, 2, 3)
    queue.remove(blocks[place])
    assert ids(queue) == left
    assert blocks[place].prev_free_block is blocks[place].next_free_block is None
    queue.append(blocks[place])
    assert ids(queue) == [*left, place]


@pytest.mark.seed("S001-15")
def test_what_is_not_in_the_queue_is_not_taken_out(backend: Backend) -> None:
    blocks, queue = make(backend, 0, 1, 2)
    others, second = make(backend, 8, 9)
    queue.remove(blocks[1])
    # The original lowers its count each time and says nothing.
    for block in (blocks[1], others[0], KVCacheBlock(1, backend=backend)):
        with pytest.raises(NotInQueue, match=f"block {block.block_id}") as caught:
            queue.remove(block)
        assert isinstance(caught.value, RuntimeError)
    with pytest.raises(WrongArgument):
        queue.remove(1)  # type: ignore[arg-type] # no block
    assert (ids(queue), ids(second)) == ([0, 2], [8, 9])


@pytest.mark.seed("S001-16", "S001-18", "S001-19")
def test_blocks_join_at_the_tail_also_of_a_queue_that_never_had_any(backend: Backend) -> None:
    queue = FreeKVCacheBlockQueue([])
    assert ids(queue) == []
    assert queue.num_free_blocks == 0
    blocks = [KVCacheBlock(block_id, backend=backend) for block_id in range(5)]
    for count, block in enumerate(blocks, 1):
        queue.append(block)
        assert ids(queue) == list(range(count))
    assert queue.popleft() is blocks[0]
    queue.append(blocks[0])
    assert ids(queue) == [1, 2, 3, 4, 0]


@pytest.mark.seed("S001-15", "S001-16")
def test_a_block_is_in_one_queue_once(backend: Backend) -> None:
    blocks, queue = make(backend, 0, 1, 2)
    others, second = make(backend, 8)
    for block in (blocks[1], others[0]):
        with pytest.raises(AlreadyInQueue, match=f"block {block.block_id}"):
            queue.append(block)
    for listed in ([blocks[0]], [others[0]]):
        with pytest.raises(AlreadyInQueue):
            FreeKVCacheBlockQueue(listed)
    lone = KVCacheBlock(4, backend=backend)
    with pytest.raises(AlreadyInQueue):
        FreeKVCacheBlockQueue([lone, lone])
    assert lone.next_free_block is None
    assert (ids(queue), ids(second)) == ([0, 1, 2], [8])


@pytest.mark.seed("S001-16")
def test_blocks_move_from_queue_to_queue(backend: Backend) -> None:
    blocks, first = make(backend, *range(4))
    second = FreeKVCacheBlockQueue([])
    for _ in range(3):
        for source, target in ((first, second), (second, first)):
            for block in blocks:
                source.remove(block)
                target.append(block)
    assert (ids(first), ids(second)) == ([0, 1, 2, 3], [])


@pytest.mark.seed("S001-20")
def test_several_leave_and_join_in_order(backend: Backend) -> None:
    _, queue = make(backend, 0, 1, 2, 3)
    several = [queue.popleft() for _ in range(3)]
    for block in several:
        queue.append(block)
    assert ids(queue) == [3, 0, 1, 2]


@pytest.mark.seed("S001-10")
def test_a_call_does_as_much_however_long_the_queue(backend: Backend) -> None:
    def num_lines(length: int) -> int:
        """Count the Python lines of a call at each end, in the middle and between neighbours."""
        blocks, queue = make(backend, *range(length))
        lines: Counter[str] = Counter()

        def trace(_: object, event: str, __: object) -> Any:
            lines[event] += 1
            return trace

        sys.settrace(trace)
        try:
            block = queue.popleft()
            queue.remove(blocks[length // 2])
            queue.append(block)
            ends = (queue.free_list_tail, blocks[length // 2 - 1].next_free_block)
        finally:
            sys.settrace(None)
        assert ends == (block, blocks[length // 2 + 1])
        return lines["line"]

    assert num_lines(500) == num_lines(5)


@pytest.mark.seed("S001-10", "S001-12")
@pytest.mark.parametrize("seed", range(3))
def test_the_queue_is_a_list_that_blocks_join_and_leave(backend: Backend, seed: int) -> None:
    dice = random.Random(seed)
    blocks, queue = make(backend, *range(8))
    expected = list(blocks)
    for _ in range(NUM_CALLS // 3):
        outside = [block for block in blocks if all(block is not each for each in expected)]
        choice = dice.random()
        if choice < 0.3 and expected:
            assert queue.popleft() is expected.pop(0)
        elif choice < 0.5 and expected:
            queue.remove(expected.pop(dice.randrange(len(expected))))
        elif choice < 0.55:
            blocks.append(KVCacheBlock(len(blocks), backend=backend))
        elif outside:
            expected.append(dice.choice(outside))
            queue.append(expected[-1])
    assert ids(queue) == [block.block_id for block in expected]
