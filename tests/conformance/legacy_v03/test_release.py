# SPDX-License-Identifier: Apache-2.0
"""The first block manager: freeing, resetting, and what can be read at any time."""

from __future__ import annotations

import pytest

from kvcore.legacy.v0_3.block_space_manager import (
    LogicalTokenBlock,
    Prefix,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)
from kvcore.types.commands import Free
from tests.conformance.legacy_v03.stories import (
    SIZE,
    admit,
    append,
    commands,
    cpu_stack,
    fork,
    group,
    make,
    owners,
    stack,
    swap_out,
    table,
    unchanged,
)
from tests.conftest import Backend


@pytest.mark.seed("S003-31")
def test_a_sequence_gives_back_each_block_once(backend: Backend) -> None:
    manager = make(backend, sliding_window=4)
    admitted = admit(manager, 1, 2, num_tokens=9)
    manager.free(admitted.find(1))
    assert owners(manager, 7, 6) == [1, 1]
    assert list(manager.block_tables) == [2]
    manager.free(admitted.find(2))
    assert manager.get_num_free_gpu_blocks() == 8
    manager.check()


@pytest.mark.seed("S003-31")
def test_a_sequence_without_table_is_left_as_it_is(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1)
    with unchanged(manager):
        manager.free(Sequence(9, "", [1], SIZE))
    manager.free(admitted.find(1))
    with unchanged(manager):
        manager.free(admitted.find(1))


@pytest.mark.seed("S003-31")
def test_a_swapped_sequence_gives_back_blocks_of_the_cpu(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1)
    swap_out(manager, admitted)
    commands(manager)
    manager.free(admitted.find(1))
    manager.check()
    assert cpu_stack(manager) == [0, 1, 2, 3]
    assert commands(manager) == []


@pytest.mark.seed("S003-32", "X-04")
def test_freeing_what_was_just_allocated_restores_the_stack(backend: Backend) -> None:
    manager = make(backend)
    admit(manager, 1)
    before = stack(manager)
    second = admit(manager, 2, num_tokens=6)
    assert table(manager, second, 2) == [5, 4, 3]
    commands(manager)
    manager.free(second.find(2))
    # Tail first, so that the head is on top.
    assert commands(manager) == [Free(3, False), Free(4, False), Free(5, False)]
    assert stack(manager) == before == [0, 1, 2, 3, 4, 5]


@pytest.mark.seed("S003-32")
def test_the_order_does_not_depend_on_addresses(backend: Backend) -> None:
    seen = set()
    for _ in range(20):
        manager = make(backend, 64)
        admitted = admit(manager, 1, num_tokens=100)
        manager.free(admitted.find(1))
        seen.add(tuple(stack(manager)))
    assert seen == {tuple(range(64))}


@pytest.mark.seed("S003-33")
def test_a_reset_frees_every_table_and_leaves_prefixes_their_blocks(backend: Backend) -> None:
    manager = make(backend, 10)
    prefix = Prefix(range(4), SIZE)
    admit(manager, 1, 2, num_tokens=6, prefix=prefix)
    mixed = group(3, 4)
    mixed.find(4).status = SequenceStatus.FINISHED_ABORTED
    manager.allocate(mixed)
    swapped = admit(manager, 5)
    swap_out(manager, swapped)
    manager.reset()
    manager.check()
    assert manager.block_tables == {}
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (8, 4)
    assert prefix.get_block_numbers() == [9, 8]
    assert owners(manager, 9, 8) == [1, 1]
    with unchanged(manager):
        manager.reset()


@pytest.mark.seed("S003-34")
def test_tables_and_free_counts_can_be_read(backend: Backend) -> None:
    manager = make(backend, 8, 4)
    admitted = admit(manager, 1, num_tokens=5)
    with unchanged(manager):
        assert manager.get_block_table(admitted.find(1)) == [7, 6, 5]
        assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (5, 4)
        with pytest.raises(KeyError):
            manager.get_block_table(Sequence(2, "", [1], SIZE))
    handed_out = manager.get_block_table(admitted.find(1))
    handed_out.clear()
    assert manager.get_block_table(admitted.find(1)) == [7, 6, 5]


@pytest.mark.seed("S003-37")
def test_the_ideas_that_a_later_release_tests(backend: Backend) -> None:
    """A group is followed through its life, with a pair of blocks per copy. Source: S003-37."""
    manager = make(backend, 8, 8)
    admitted = admit(manager, 1, num_tokens=3)
    parent = admitted.find(1)
    child = fork(manager, admitted, 1, 2)
    # The child writes first, and copies; then the parent is alone.
    assert append(manager, child) == [(6, 5)]
    assert append(manager, parent) == [None]
    before = [table(manager, admitted, seq_id) for seq_id in (1, 2)]
    assert manager.can_swap_out(admitted)
    out = swap_out(manager, admitted)
    assert list(out) == [7, 6, 5]
    for seq in admitted.get_seqs():
        seq.status = SequenceStatus.SWAPPED
    assert manager.can_swap_in(admitted)
    back = manager.swap_in(admitted)
    after = [table(manager, admitted, seq_id) for seq_id in (1, 2)]
    assert [[back[out[block]] for block in each] for each in before] == after
    manager.free(parent)
    manager.reset()
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (8, 8)


def test_a_kept_block_shows_its_owners(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1)
    kept = manager.block_tables[1][0]
    fork(manager, admitted, 1, 2)
    assert kept.ref_count == 2
    manager.reset()
    assert kept.ref_count == 0


def test_sequences_count_their_tokens_and_blocks() -> None:
    seq = Sequence(3, "text", [5, 6, 7], SIZE)
    seq.append_token_id(8, {8: -0.5})
    seq.append_token_id(9)
    assert (seq.get_len(), seq.get_prompt_len(), seq.get_output_len()) == (5, 3, 2)
    assert (seq.get_token_ids(), seq.get_output_token_ids()) == ([5, 6, 7, 8, 9], [8, 9])
    assert seq.get_last_token_id() == 9
    blocks: list[LogicalTokenBlock] = seq.logical_token_blocks
    assert [each.get_token_ids() for each in blocks] == [[5, 6], [7, 8], [9]]
    assert [each.is_full() for each in blocks] == [True, True, False]
    assert (blocks[2].get_num_empty_slots(), blocks[2].is_empty()) == (1, False)
    child = seq.fork(4)
    child.append_token_id(1)
    assert (child.seq_id, child.get_len(), seq.get_len()) == (4, 6, 5)
    assert seq.logical_token_blocks[2].get_token_ids() == [9]


def test_groups_list_their_sequences_by_status() -> None:
    seq_group: SequenceGroup = group(1, 2, 3)
    seq_group.find(2).status = SequenceStatus.RUNNING
    seq_group.find(3).status = SequenceStatus.FINISHED_IGNORED
    assert [seq.seq_id for seq in seq_group.get_seqs(SequenceStatus.RUNNING)] == [2]
    assert seq_group.num_seqs() == 3
    assert [seq.seq_id for seq in seq_group.get_unfinished_seqs()] == [1, 2]
    assert [seq.seq_id for seq in seq_group.get_finished_seqs()] == [3]
    assert not seq_group.is_finished()
    seq_group.remove(1)
    seq_group.remove(2)
    assert seq_group.is_finished()
    with pytest.raises(KeyError):
        seq_group.find(1)
