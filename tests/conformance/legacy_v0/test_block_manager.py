# SPDX-License-Identifier: Apache-2.0
"""V0's manager for sequences: admission, growth, windows, swap."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcore.legacy.v0.block_manager import BlockSpaceManager
from kvcore.legacy.v0.prefix_caching_block import Device, NoFreeBlocksError
from kvcore.legacy.v0.sequences import AllocStatus, Sequence, SequenceGroup, SequenceStatus
from tests.conftest import Backend
from tests.legacy.v0.small import admit, manager, unchanged

CACHING = [False, True]


def waiting(seq_id: int, num_tokens: int) -> SequenceGroup:
    """Return a group of one sequence of different tokens."""
    return SequenceGroup(f"r{seq_id}", [Sequence(seq_id, range(num_tokens))])


def move(group: SequenceGroup, status: SequenceStatus) -> None:
    for seq in group.seqs:
        seq.status = status


@pytest.mark.seed("S002-72", "X-10")
@pytest.mark.parametrize("caching", CACHING)
def test_admission_heeds_the_watermark_and_growth_does_not(backend: Backend, caching: bool) -> None:
    held = manager(backend, 8, 0, watermark=0.3, enable_caching=caching)
    assert held.watermark_blocks == 2  # of 2.4
    tokens = {12: AllocStatus.OK, 13: AllocStatus.NEVER}
    assert {num: held.can_allocate(waiting(1, num)) for num in tokens} == tokens
    assert held.can_allocate(waiting(1, 11), num_lookahead_slots=2) is AllocStatus.NEVER
    group = admit(held, Sequence(1, range(8)))
    assert held.can_allocate(waiting(2, 4)) is AllocStatus.OK
    assert held.can_allocate(waiting(2, 5)) is AllocStatus.LATER
    seq = group.seqs[0]
    other = seq.fork(3)
    held.fork(seq, other)
    group.seqs.append(other)
    for each in (seq, other):
        each.append_token_id(9)
    # Each of the two touches one block, with four slots ahead three.
    assert held.can_append_slots(group, 3)
    assert not held.can_append_slots(group, 5)
    other.status = SequenceStatus.FINISHED_STOPPED
    assert held.can_append_slots(group, 7)
    assert not held.can_append_slots(group, 8)
    held.append_slots(seq, 7)
    assert held.get_num_free_gpu_blocks() == 0
    with pytest.raises(AssertionError, match=r"watermark -0\.1 is below 0"):
        manager(backend, watermark=-0.1)
    assert BlockSpaceManager(2, 150, 0, backend=backend).watermark_blocks == 1


@pytest.mark.seed("S002-69")
@pytest.mark.parametrize("caching", CACHING)
@pytest.mark.parametrize("window", [3, 4, 5])
def test_a_window_keeps_its_blocks_and_two_more(
    backend: Backend, caching: bool, window: int
) -> None:
    kept = window // 2 + 2
    held = manager(backend, 32, 0, sliding_window=window, enable_caching=caching)
    assert held.max_block_sliding_window == kept
    seq = Sequence(1, range(1))
    admit(held, seq)
    for token in range(1, 20):
        # All but the newest token were computed in earlier steps.
        seq.data.num_computed_tokens = token
        seq.append_token_id(token)
        held.append_slots(seq, 0)
        table = held.get_block_table(seq)
        null = held.block_allocator.allocate_or_get_null_block().block_id
        real = [at for at, block in enumerate(table) if block != null]
        assert len(table) == (token + 2) // 2
        # This many are kept before the block that is written.
        assert sum(at < token // 2 for at in real) == min(token // 2, kept)
        # What the window sees is there: the newest token and those before it.
        first_seen = max(0, token - window + 1) // 2
        assert set(range(first_seen, len(table))) <= set(real)
        assert 32 - held.get_num_free_gpu_blocks() == len(real) + 1
    free = held.get_num_free_gpu_blocks()
    fork = seq.fork(2)
    held.fork(seq, fork)
    assert held.get_block_table(fork) == held.get_block_table(seq)
    held.free(seq)
    assert held.get_num_free_gpu_blocks() == free
    held.free(fork)
    assert held.get_num_free_gpu_blocks() == 31


@pytest.mark.seed("S002-69")
def test_admission_counts_a_window_s_blocks_alone(backend: Backend) -> None:
    held = manager(backend, 4, 0, sliding_window=4)
    assert held.max_block_sliding_window == 4
    group = waiting(1, 12)
    assert held.can_allocate(group) is AllocStatus.OK
    # The prompt takes all its blocks nevertheless, and finds that they are not there.
    error = unchanged(lambda: held.allocate(group), held)
    assert isinstance(error, NoFreeBlocksError)
    assert "sequence 1: 6 blocks are needed, 4 of 4 are free" in str(error)
    assert manager(backend, 4, 0).can_allocate(group) is AllocStatus.NEVER


@pytest.mark.seed("S002-63", "S002-72")
@pytest.mark.parametrize("caching", CACHING)
def test_a_group_shares_its_prompt_and_is_freed_sequence_by_sequence(
    backend: Backend, caching: bool
) -> None:
    held = manager(backend, enable_caching=caching)
    first, second = Sequence(1, range(3)), Sequence(2, range(3))
    group = admit(held, first, second)
    assert held.get_block_table(first) == held.get_block_table(second) == [0, 1]
    second.append_token_id(9)
    assert held.append_slots(second, 0) == [(1, 2)]
    assert held.get_num_cached_tokens(first) == 0
    held.access_all_blocks_in_seq(first, 4.0)
    calls: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: held.allocate(SequenceGroup("r", [Sequence(1, [1])])), AssertionError),
        (lambda: held.allocate(group), AssertionError),
        (lambda: held.fork(first, second), AssertionError),
        (lambda: held.append_slots(Sequence(7, [1]), 0), KeyError),
        (lambda: held.get_block_table(Sequence(7, [1])), KeyError),
    ]
    for call, kind in calls:
        assert isinstance(unchanged(call, held, group), kind)
    held.free(Sequence(7, [1]))
    held.fork(Sequence(7, [1]), Sequence(8, [1]))
    held.free(first)
    # The second one was never asked for its cached tokens; it is freed all the same.
    held.free(second)
    held.free(second)
    assert (held.block_tables, held.get_num_free_gpu_blocks()) == ({}, 8)
    held.block_allocator.backing.check([], [])


@pytest.mark.seed("S002-50", "S002-72")
@pytest.mark.parametrize("caching", CACHING)
def test_a_group_is_swapped_as_a_whole(backend: Backend, caching: bool) -> None:
    held = manager(backend, 4, 3, watermark=0.25, enable_caching=caching)
    group = admit(held, Sequence(1, range(3)))
    seq = group.seqs[0]
    assert held.can_swap_out(group)
    assert held.swap_out(group) == [(0, 0), (1, 1)]
    assert held.get_block_table(seq) == [4, 5]
    move(group, SequenceStatus.SWAPPED)
    assert held.can_swap_in(group, 0) is AllocStatus.OK
    big = admit(held, Sequence(2, range(50, 53)))
    assert held.can_swap_in(group, 0) is AllocStatus.LATER
    assert held.can_swap_in(group, 5) is AllocStatus.LATER
    # Four blocks with tokens and slots ahead, and one full block: more than there are.
    assert held.can_swap_in(group, 6) is AllocStatus.NEVER
    assert not held.can_swap_out(big)
    error = unchanged(lambda: held.swap_out(big), held, big)
    assert isinstance(error, NoFreeBlocksError)
    assert "sequence 2: 2 blocks are needed, 1 of 3 are free" in str(error)
    held.free(big.seqs[0])
    mapping = held.swap_in(group)
    assert [cpu for cpu, _ in mapping] == [0, 1]
    assert [gpu for _, gpu in mapping] == held.get_block_table(seq)
    # A swapped sequence is freed where it is.
    move(group, SequenceStatus.RUNNING)
    held.access_all_blocks_in_seq(seq, 3.0)
    held.swap_out(group)
    held.free(seq)
    assert (held.get_num_free_gpu_blocks(), held.get_num_free_cpu_blocks()) == (4, 3)


@pytest.mark.seed("S002-72")
def test_a_swap_counts_the_empty_blocks_that_it_moves(backend: Backend) -> None:
    held = manager(backend, 8, 3)
    group = admit(held, Sequence(1, range(3)))
    held.append_slots(group.seqs[0], 5)
    assert len(held.get_block_table(group.seqs[0])) == 4
    assert not held.can_swap_out(group)
    assert isinstance(unchanged(lambda: held.swap_out(group), held), NoFreeBlocksError)


@pytest.mark.seed("S002-39", "S002-41", "S002-59")
def test_common_computed_blocks_are_the_cached_part_of_all_tables(backend: Backend) -> None:
    held = manager(backend, enable_caching=True)
    first, second = Sequence(1, range(5)), Sequence(2, [0, 1, 2, 3, 9])
    group = admit(held, first)
    held.mark_blocks_as_computed(group, 5)
    admit(held, second)
    assert held.get_block_table(second) == [0, 1, 3]
    assert held.get_common_computed_block_ids([first, second]) == [0, 1]
    assert held.get_common_computed_block_ids([second]) == [0, 1]
    assert held.get_prefix_cache_hit_rate(Device.GPU) == 0.5
    assert held.reset_prefix_cache() is False
    held.free(first)
    held.free(second)
    assert held.reset_prefix_cache() is True
