# SPDX-License-Identifier: Apache-2.0
"""V0's tables: objects that are made on a look and stay the same, and how little a call asks.

What is gated is the number of calls that reach the core, not time: `benches/legacy.py` has that.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvcore import SwapIn, SwapOut
from kvcore.legacy.v0.block_allocator import BlockAllocator
from kvcore.legacy.v0.block_manager import BlockSpaceManager
from kvcore.legacy.v0.block_table import BlockTable
from kvcore.legacy.v0.interfaces import Device
from kvcore.legacy.v0.prefix_caching_block import PrefixCachingBlock
from kvcore.legacy.v0.sequences import AllocStatus, Sequence, SequenceGroup, SequenceStatus
from tests.conftest import Backend
from tests.legacy.v0.small import admit, ids, manager, two_tiers, unchanged

CACHING = [False, True]
RUNNING, SWAPPED = SequenceStatus.RUNNING, SequenceStatus.SWAPPED


@pytest.mark.seed("S002-66")
@pytest.mark.parametrize("caching", CACHING)
def test_a_block_that_was_looked_at_stays_the_one_that_it_is(
    backend: Backend, caching: bool
) -> None:
    held = manager(backend, enable_caching=caching)
    seq = Sequence(0, range(3))
    group = admit(held, seq)
    table = held.block_tables[0]
    blocks = table.blocks
    first, last = blocks
    tokens = last.token_ids
    assert table.blocks is blocks
    assert (ids(blocks), tokens) == ([0, 1], [2])
    seq.append_token_id(3)
    seq.append_token_id(4)
    held.append_slots(seq, 1)
    assert blocks[:2] == [first, last]
    assert (ids(blocks), tokens, blocks[2].token_ids) == ([0, 1, 2], [2, 3], [4])
    assert (last.content_hash is not None) is caching
    assert blocks[2].prev_block is last
    held.swap_out(group)
    assert table.blocks is blocks
    assert (first.block_id, ids(blocks)) == (8, [8, 9, 10])
    seq.status = SWAPPED
    held.swap_in(group)
    assert held.get_block_table(seq) == ids(blocks)
    held.free(seq)
    assert (ids(blocks), first.token_ids) == ([None] * 3, [0, 1])
    assert table.blocks == []


@pytest.mark.seed("S002-36", "S002-37", "S002-57")
def test_objects_say_what_happened_before_anybody_looked(backend: Backend) -> None:
    held = manager(backend, enable_caching=True)
    seq = Sequence(0, [1, 1, 2, 2, 3], extra_hash=7)
    admit(held, seq)
    twin = Sequence(1, [1, 1, 2, 2], extra_hash=7)
    admit(held, twin)
    seq.append_token_id(3)
    held.append_slots(seq, 0)
    blocks, shared = held.block_tables[0].blocks, held.block_tables[1].blocks
    parent = None
    for at, block in enumerate(blocks):
        parent = PrefixCachingBlock.hash_block_tokens(at == 0, parent, [at + 1] * 2, 7)
        assert (block.content_hash, block.extra_hash) == (parent, 7)
        assert block.prev_block is (blocks[at - 1] if at else None)
        assert block.num_tokens_total == 2 * (at + 1)
    assert [block.computed for block in [*blocks, *shared]] == [False] * 3 + [True] * 2
    assert ids(shared) == [0, 1]
    held.fork(seq, child := seq.fork(2))
    forked = held.block_tables[child.seq_id].blocks
    assert ids(forked) == [0, 1, 2]
    assert not any(block.computed for block in forked)
    assert not {id(block) for block in forked} & {id(block) for block in blocks}


@pytest.mark.seed("S002-66", "S002-69")
def test_a_window_drops_objects_and_looks_on(backend: Backend) -> None:
    tiers = two_tiers(backend, 8, 0)
    seen, unseen = (BlockTable(2, tiers, max_block_sliding_window=1) for _ in range(2))
    for table in (seen, unseen):
        table.allocate([1, 1, 2, 2, 3])
    dropped = seen.blocks[0]
    for table in (seen, unseen):
        table.append_token_ids([3, 4], num_computed_slots=4)
    null = tiers.allocate_or_get_null_block()
    for table in (seen, unseen):
        assert table.blocks[0] is null
        assert table.physical_block_ids[0] == null.block_id
        first = table.blocks[1].prev_block
        assert first is not None
        assert (first.block_id, first.token_ids) == (None, [1, 1])
    assert seen.blocks[1].prev_block is dropped
    assert [block.content_hash for block in seen.blocks[1:3]] == [
        block.content_hash for block in unseen.blocks[1:3]
    ]


@pytest.mark.seed("S002-25", "S002-66")
def test_what_is_done_to_an_object_by_hand_counts_for_its_table(backend: Backend) -> None:
    tiers = two_tiers(backend, 6, 6)
    table = BlockTable(2, tiers)
    table.allocate([1, 1, 2])
    blocks = table.blocks
    blocks[1].append_token_ids([2])
    tiers.swap(blocks, Device.GPU, Device.CPU)
    fork = table.fork()
    assert fork.physical_block_ids == ids(blocks) == [6, 7]
    assert fork.blocks[1].content_hash == blocks[1].content_hash is not None
    fork.free()
    tiers.free(blocks[0], keep_block_object=True)
    for call in (table.free, table.fork, lambda: table.append_token_ids([3])):
        error = unchanged(call, tiers, table)
        assert isinstance(error, AssertionError)
    table = BlockTable(2, tiers)
    table.allocate([5])
    table.blocks[0].computed = True
    error = unchanged(lambda: table.append_token_ids([6, 7, 8]), tiers, table)
    assert isinstance(error, AssertionError)
    assert "is computed: 3 tokens cannot be added" in str(error)


@pytest.mark.seed("S002-68")
@pytest.mark.parametrize("caching", CACHING)
def test_slots_ahead_of_no_tokens_copy_nothing(backend: Backend, caching: bool) -> None:
    held = manager(backend, 3, 0, enable_caching=caching)
    seqs = [Sequence(number, [1, 1, 1]) for number in range(2)]
    admit(held, *seqs)
    assert held.append_slots(seqs[0], 3) == []
    assert [held.get_block_table(seq) for seq in seqs] == [[0, 1, 2], [0, 1]]


class Counting:
    """Blocks that count the calls that reach them."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._blocks, name)


def count(held: BlockSpaceManager) -> list[str]:
    """Return the calls since the last time."""
    backing: Any = held.block_allocator.backing
    if not isinstance(backing.blocks, Counting):
        backing.blocks = Counting(backing.blocks)
    calls, backing.blocks.calls = backing.blocks.calls, []
    return list(calls)


@pytest.mark.parametrize("caching", CACHING)
def test_a_call_asks_the_core_a_few_times_for_each_block_that_it_changes(
    backend: Backend, caching: bool
) -> None:
    held = manager(backend, 64, 64, enable_caching=caching)
    seq = Sequence(0, range(32))
    group = SequenceGroup("r", [seq])
    count(held)
    assert held.can_allocate(group) is AllocStatus.OK
    assert count(held) == ["num_free"]
    held.allocate(group)
    new = [*["lookup"] * 16, "num_free", *["lookup", "take", "publish", "set_priority"] * 16]
    assert count(held) == (new if caching else ["take"])
    seq.status = RUNNING
    seq.append_token_id(1)
    assert held.can_append_slots(group, 0)
    assert count(held) == ["num_free"]
    held.append_slots(seq, 0)
    assert count(held) == ["take"]
    seq.append_token_id(1)
    held.append_slots(seq, 0)
    full = ["lookup", "publish", "set_priority"] if caching else []
    assert count(held) == ["ref_count", *full]
    seq.append_token_id(1)
    held.append_slots(seq, 0)
    held.fork(seq, child := seq.fork(1))
    assert count(held) == ["take", "touch"]
    group.seqs.append(child)
    child.append_token_id(2)
    assert held.append_slots(child, 0) == [(17, 18)]
    assert count(held) == ["ref_count", "copy", *full]
    # Two tables of 17 full blocks each, which they share, and one more, of which one is full.
    assert held.can_swap_out(group)
    assert count(held) == [*["lookup"] * (35 if caching else 0), "num_free"]
    held.take_batch()
    count(held)
    held.swap_out(group)
    # Of 18 contents one is asked for first, two tables name 36 blocks, and 17 are shared.
    place = {"lookup": 18 + 35, "num_free": 1, "take": 19, "publish": 18, "set_priority": 18}
    place |= {"ref_count": 17, "touch": 17}
    ends = {"ref_counts": 1, "release": 1}
    placed = {**place, "copy_out": 19} if caching else {"take": 1, "copy_out": 36}
    assert Counter(count(held)) == {**ends, **placed}
    assert sum(isinstance(each, SwapOut) for each in held.take_batch()) == (19 if caching else 36)
    for each in group.seqs:
        each.status = SWAPPED
    count(held)
    held.swap_in(group)
    # What is full was kept on the GPU; the parent's last block is not full.
    found = {"lookup": 18 + 35, "num_free": 1, "take": 1, "set_priority": 18, "touch": 35}
    found |= {"ref_count": 18 + 35, "copy_in": 1}
    assert Counter(count(held)) == {**ends, **(found if caching else {"take": 1, "copy_in": 36})}
    held.access_all_blocks_in_seq(seq, 3.0)
    held.free(seq)
    held.free(child)
    marks = ["ref_counts", "set_priority"] if caching else []
    assert count(held) == [*marks, "release", "release"]
    assert sum(isinstance(each, SwapIn) for each in held.take_batch()) == (1 if caching else 36)


@pytest.mark.seed("S002-44", "S002-60")
def test_what_is_cached_of_a_sequence_is_one_look_at_all_its_hashes(backend: Backend) -> None:
    held = manager(backend, 64, 64, enable_caching=True)
    seq, other = Sequence(0, range(32)), Sequence(1, [9] * 4)
    for each in (seq, other):
        held.get_num_cached_tokens(each)
        admit(held, each)
        each.data.num_computed_tokens = len(each.get_token_ids())
    count(held)
    assert held.get_num_cached_tokens(seq) == 0
    assert count(held) == ["lookup_prefix", "ref_counts"]
    held.mark_blocks_as_computed(SequenceGroup("r", [seq]), 0)
    assert held.get_num_cached_tokens(seq) == 32
    assert count(held) == ["lookup_prefix"]
    assert held.get_common_computed_block_ids([seq]) == list(range(16))
    assert count(held) == ["lookup_prefix"]
    # What is done to the hashes by hand counts, whether they are plain ints or not.
    tracker = held._computed_blocks_tracker
    hashes = tracker._update_seq_hashes(seq)
    foreign = tracker._update_seq_hashes(other)[0]
    hashes[0] = foreign
    hashes[1] = 5
    assert held.get_num_cached_tokens(seq) == 2
    hashes[:] = map(int, hashes)
    assert held.get_num_cached_tokens(seq) == 2


@pytest.mark.seed("S002-67", "S002-69")
@pytest.mark.parametrize(("num_blocks", "num_ahead", "fits"), [(5, 0, True), (5, 8, False)])
def test_the_null_block_is_counted_beside_what_an_append_takes_and_no_more(
    backend: Backend, num_blocks: int, num_ahead: int, fits: bool
) -> None:
    held = BlockSpaceManager(8, num_blocks, 0, 0.0, 20, backend=backend)
    seq = Sequence(0, range(26))
    group = admit(held, seq)
    seq.data.num_computed_tokens = 26
    seq.append_token_id(1)
    # Four of five blocks are held, the last one of which has room: the fifth is the null block's.
    assert held.can_append_slots(group, num_ahead) is fits
    if fits:
        assert held.append_slots(seq, num_ahead) == []
        assert held.get_num_free_gpu_blocks() == 0
    else:
        error = unchanged(lambda: held.append_slots(seq, num_ahead), held)
        assert "blocks are needed" in str(error)


@pytest.mark.seed("S002-69")
@pytest.mark.parametrize(("num_appended", "fits"), [(1, True), (10, False)])
def test_what_a_window_gives_back_makes_room_for_what_an_append_takes(
    backend: Backend, num_appended: int, fits: bool
) -> None:
    held = BlockSpaceManager(2, 6, 0, 0.0, 2, backend=backend)
    seq = Sequence(0, range(10))
    group = admit(held, seq)
    seq.data.num_computed_tokens = 10
    for token in range(num_appended):
        seq.append_token_id(token)
    # Five of six blocks are held: the sixth becomes null, the window has passed two.
    assert held.can_append_slots(group, 0) is fits
    if fits:
        assert held.append_slots(seq, 0) == []
        assert held.get_num_free_gpu_blocks() == 1
    else:
        unchanged(lambda: held.append_slots(seq, 0), held)


def test_a_question_about_a_table_on_the_cpu_is_answered(backend: Backend) -> None:
    held = BlockSpaceManager(2, 8, 8, 0.0, 2, backend=backend)
    seq = Sequence(0, range(4))
    group = admit(held, seq)
    held.swap_out(group)
    seq.append_token_id(4)
    assert held.can_append_slots(group, 0)


@pytest.mark.parametrize("caching", CACHING)
def test_an_append_reads_objects_again_only_after_something_was_done_by_hand(
    backend: Backend, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    check_held = BlockAllocator.check_held

    def note_read(self: BlockAllocator, blocks: Any) -> Any:
        read.extend(blocks)
        return check_held(self, blocks)

    held = manager(backend, enable_caching=caching)
    seqs = [Sequence(0, range(7)), Sequence(1, range(20, 23))]
    for seq in seqs:
        admit(held, seq)
    monkeypatch.setattr(BlockAllocator, "check_held", note_read)
    blocks, others = (held.block_tables[at].blocks for at in (0, 1))
    for token in (7, 8, 9):
        seqs[0].append_token_id(token)
        held.append_slots(seqs[0], 0)
    assert read == []
    assert blocks[4].token_ids == [8, 9]
    others[1].append_token_ids([23])  # by hand: tables of this allocator read theirs again
    read.clear()
    seqs[0].append_token_id(10)
    held.append_slots(seqs[0], 0)
    assert read == blocks[:5]
    held.free(seqs[0])
    read.clear()
    seqs[1].append_token_id(23)
    held.append_slots(seqs[1], 0)
    assert read == others


def test_tokens_that_were_added_by_hand_count(backend: Backend) -> None:
    tiers = two_tiers(backend, 6, 6)
    table = BlockTable(2, tiers)
    table.allocate([1, 2, 3])
    table.blocks[1].append_token_ids([4])
    table.append_token_ids([5, 6])
    assert (table.num_full_slots, [block.token_ids for block in table.blocks]) == (
        6,
        [[1, 2], [3, 4], [5, 6]],
    )
    last = table.blocks[2]
    assert last.content_hash is not None
    assert tiers.allocator(Device.GPU).is_block_cached(last)
