# SPDX-License-Identifier: Apache-2.0
"""The first block manager: room for new tokens, copies on write, forks, and windows of both."""

from __future__ import annotations

import pytest

from kvcore.legacy.v0_3.block_space_manager import Prefix, Sequence, SequenceStatus
from kvcore.legacy.v0_3.errors import EmptyTable, OnOtherDevice, OutOfMemory, UnknownSequence
from kvcore.types.commands import Allocate, CopyOnWrite
from kvcore.types.errors import KvcoreError
from tests.conformance.legacy_v03.stories import (
    SIZE,
    admit,
    append,
    commands,
    fork,
    group,
    make,
    owners,
    stack,
    swap_in,
    swap_out,
    table,
    unchanged,
)
from tests.conftest import Backend


@pytest.mark.seed("S003-17", "X-10")
def test_each_running_sequence_must_find_a_free_block(backend: Backend) -> None:
    manager = make(backend, 4, watermark=0.5)
    admitted = admit(manager, 1, 2)
    # Two sequences, two free blocks, and a watermark of two that does not matter.
    assert manager.can_append_slot(admitted)
    fork(manager, admitted, 1, 3)
    assert not manager.can_append_slot(admitted)
    admitted.find(2).status = SequenceStatus.SWAPPED
    assert manager.can_append_slot(admitted)
    for seq in admitted.get_seqs():
        seq.status = SequenceStatus.FINISHED_STOPPED
    admit(manager, 9)
    assert manager.get_num_free_gpu_blocks() == 0
    assert manager.can_append_slot(admitted)


@pytest.mark.seed("S003-18")
def test_a_new_logical_block_gets_a_block(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1, num_tokens=3)
    seq = admitted.find(1)
    assert append(manager, seq) == [None]
    assert table(manager, admitted, 1) == [7, 6]
    assert append(manager, seq) == [None]
    assert table(manager, admitted, 1) == [7, 6, 5]
    assert owners(manager, 5) == [1]


@pytest.mark.seed("S003-18", "X-11")
def test_a_full_window_takes_no_block(backend: Backend) -> None:
    manager = make(backend, sliding_window=4)
    admitted = admit(manager, 1, num_tokens=2)
    seq = admitted.find(1)
    commands(manager)
    append(manager, seq, 2)
    assert (table(manager, admitted, 1), commands(manager)) == ([7, 6], [Allocate(6)])
    append(manager, seq, 5)
    assert (table(manager, admitted, 1), commands(manager)) == ([7, 6, 7, 6, 7], [])


@pytest.mark.seed("S003-19")
def test_one_call_adds_one_block(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1, num_tokens=2)
    seq = admitted.find(1)
    for token in range(4):
        seq.append_token_id(token)
    assert manager.append_slot(seq) is None
    assert table(manager, admitted, 1) == [7, 6]
    assert manager.append_slot(seq) is None
    assert table(manager, admitted, 1) == [7, 6, 5]


@pytest.mark.seed("S003-19")
def test_a_block_that_a_window_uses_again_is_not_copied(backend: Backend) -> None:
    manager = make(backend, sliding_window=4)
    admitted = admit(manager, 1, num_tokens=4)
    fork(manager, admitted, 1, 2)
    # Both write the fifth token into block 7: the original's promise, mended by copy_reused.
    assert append(manager, admitted.find(1)) == append(manager, admitted.find(2)) == [None]
    assert table(manager, admitted, 1) == table(manager, admitted, 2) == [7, 6, 7]
    # The sixth is written behind it, so that a copy is made now.
    assert append(manager, admitted.find(1)) == [(7, 5)]
    assert table(manager, admitted, 1) == [5, 6, 5]
    assert append(manager, admitted.find(2)) == [None]


@pytest.mark.seed("S003-19", "S003-37")
def test_a_block_that_a_window_uses_again_is_copied_on_demand(backend: Backend) -> None:
    manager = make(backend, sliding_window=4, copy_reused=True)
    admitted = admit(manager, 1, num_tokens=4)
    fork(manager, admitted, 1, 2)
    commands(manager)
    assert append(manager, admitted.find(1), 3) == [(7, 5), None, (6, 4)]
    assert table(manager, admitted, 1) == [5, 4, 5, 4]
    assert append(manager, admitted.find(2), 3) == [None, None, None]
    assert table(manager, admitted, 2) == [7, 6, 7, 6]
    copies = [each for each in commands(manager) if isinstance(each, CopyOnWrite)]
    assert copies == [CopyOnWrite(7, 5), CopyOnWrite(6, 4)]
    assert owners(manager, 7, 6, 5, 4) == [1, 1, 1, 1]


@pytest.mark.seed("S003-20")
def test_a_block_of_one_owner_is_written_in_place(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1, num_tokens=3)
    commands(manager)
    assert append(manager, admitted.find(1)) == [None]
    assert (table(manager, admitted, 1), commands(manager)) == ([7, 6], [])


@pytest.mark.seed("S003-20", "S003-21")
def test_a_shared_last_block_is_copied_for_who_writes(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1, num_tokens=3)
    fork(manager, admitted, 1, 2)
    commands(manager)
    assert append(manager, admitted.find(2)) == [(6, 5)]
    assert table(manager, admitted, 1) == [7, 6]
    assert table(manager, admitted, 2) == [7, 5]
    assert owners(manager, 7, 6, 5) == [2, 1, 1]
    assert commands(manager) == [Allocate(5), CopyOnWrite(6, 5)]
    # Its other owner is alone now, and writes in place.
    assert append(manager, admitted.find(1)) == [None]
    assert commands(manager) == []


@pytest.mark.seed("S003-20", "X-14")
def test_slots_are_for_sequences_on_the_gpu(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1, num_tokens=3)
    swap_out(manager, admitted)
    seq = admitted.find(1)
    for _ in range(2):  # within its block, and past it
        text = "block 2 of sequence 1 is on the CPU, must be on the GPU"
        with unchanged(manager), pytest.raises(AssertionError, match=text) as caught:
            manager.append_slot(seq)
        assert isinstance(caught.value, OnOtherDevice)
        seq.append_token_id(1)
        seq.append_token_id(2)


@pytest.mark.seed("X-14")
def test_who_left_only_a_prefix_behind_is_on_the_cpu_too(backend: Backend) -> None:
    manager = make(backend)
    prefix = Prefix(range(4), SIZE)
    admitted = admit(manager, 1, prefix=prefix)
    assert swap_out(manager, admitted) == {}
    admitted.find(1).append_token_id(1)
    with unchanged(manager), pytest.raises(OnOtherDevice, match="block None of sequence 1"):
        manager.append_slot(admitted.find(1))
    prefix.computed = True
    assert swap_in(manager, admitted) == {}
    assert append(manager, admitted.find(1)) == [None]
    assert table(manager, admitted, 1) == [7, 6, 5]


@pytest.mark.seed("S003-14", "S003-20")
def test_a_copy_of_the_prefix_s_last_block_is_the_ring_s_first(backend: Backend) -> None:
    manager = make(backend, sliding_window=4)
    admitted = admit(manager, 1, prefix=Prefix(range(4), SIZE))
    seq = admitted.find(1)
    # No token came: what is written next is the prefix's last block, which the prefix holds too.
    assert manager.append_slot(seq) == (6, 5)
    manager.check()
    assert append(manager, seq, 4) == [None] * 4
    assert table(manager, admitted, 1) == [7, 5, 4, 5]
    assert owners(manager, 7, 6, 5, 4) == [2, 1, 1, 1]


@pytest.mark.seed("S003-21")
def test_a_copy_needs_a_block_beside_the_one_that_it_replaces(backend: Backend) -> None:
    manager = make(backend, 2)
    admitted = admit(manager, 1, num_tokens=3)
    fork(manager, admitted, 1, 2)
    admitted.find(2).append_token_id(5)
    text = "Out of memory! .* sequence 2 needs 1, 0 of 2 blocks on the GPU"
    with unchanged(manager), pytest.raises(ValueError, match=text) as caught:
        manager.append_slot(admitted.find(2))
    assert isinstance(caught.value, OutOfMemory)


@pytest.mark.seed("S003-21", "X-05")
def test_a_new_block_that_is_not_there_changes_nothing(backend: Backend) -> None:
    manager = make(backend, 2)
    admitted = admit(manager, 1, num_tokens=4)
    admitted.find(1).append_token_id(5)
    with unchanged(manager), pytest.raises(OutOfMemory, match="sequence 1 needs 1, 0 of 2"):
        manager.append_slot(admitted.find(1))


@pytest.mark.seed("S003-21", "X-14")
def test_a_stranger_is_a_key_error_with_a_sentence(backend: Backend) -> None:
    manager = make(backend)
    admit(manager, 1)
    stranger = Sequence(5, "", [1], SIZE)
    calls = (
        lambda: manager.append_slot(stranger),
        lambda: manager.get_block_table(stranger),
        lambda: manager.fork(stranger, Sequence(6, "", [1], SIZE)),
        lambda: manager.can_swap_out(group(5)),
        lambda: manager.can_swap_in(group(5)),
    )
    for call in calls:
        with unchanged(manager), pytest.raises(KeyError) as caught:
            call()
        assert isinstance(caught.value, UnknownSequence)
        assert isinstance(caught.value, KvcoreError)
        assert str(caught.value) == "sequence 5 has no block table: 1 sequences have one"


def test_a_sequence_of_nothing_has_nothing_to_append_to(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1, num_tokens=0)
    with unchanged(manager), pytest.raises(IndexError, match="sequence 1 has no blocks") as caught:
        manager.append_slot(admitted.find(1))
    assert isinstance(caught.value, EmptyTable)
    assert append(manager, admitted.find(1)) == [None]
    assert table(manager, admitted, 1) == [7]


@pytest.mark.seed("S003-22")
def test_a_fork_shares_every_block_and_takes_none(backend: Backend) -> None:
    manager = make(backend, 3)
    admitted = admit(manager, 1, num_tokens=6)
    assert manager.get_num_free_gpu_blocks() == 0
    commands(manager)
    fork(manager, admitted, 1, 2)
    assert table(manager, admitted, 2) == [2, 1, 0]
    assert owners(manager, 2, 1, 0) == [2, 2, 2]
    fork(manager, admitted, 2, 3)
    assert owners(manager, 2, 1, 0) == [3, 3, 3]
    assert commands(manager) == []


@pytest.mark.seed("S003-22")
def test_a_fork_of_a_swapped_sequence_shares_on_the_cpu(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1)
    swap_out(manager, admitted)
    fork(manager, admitted, 1, 2)
    blocks = manager.block_tables[2]
    assert blocks == list(manager.block_tables[1])
    assert [(b.block_number, b.device.name, b.ref_count) for b in blocks] == [
        (3, "CPU", 2),
        (2, "CPU", 2),
    ]


def test_a_fork_gives_back_the_table_that_it_replaces(backend: Backend) -> None:
    manager = make(backend)
    admitted, other = admit(manager, 1, 2), admit(manager, 3)
    manager.fork(admitted.find(1), admitted.find(2))  # both had the blocks of their prompt
    manager.fork(admitted.find(1), admitted.find(1))
    assert owners(manager, 7, 6, 5, 4) == [2, 2, 1, 1]
    manager.fork(admitted.find(1), other.find(3))
    manager.check()
    assert [len(manager.block_tables[seq_id]) for seq_id in (1, 2, 3)] == [2, 2, 2]
    assert owners(manager, 7, 6, 5, 4) == [3, 3, 0, 0]
    for seq in (*admitted.get_seqs(), *other.get_seqs()):
        manager.free(seq)
    assert manager.get_num_free_gpu_blocks() == 8


@pytest.mark.seed("S003-23", "S003-37")
@pytest.mark.parametrize("copy_reused", [False, True])
def test_forks_of_windows_lose_no_block(backend: Backend, copy_reused: bool) -> None:
    manager = make(backend, sliding_window=4, copy_reused=copy_reused)
    admitted = admit(manager, 1, num_tokens=11)
    assert table(manager, admitted, 1) == [7, 6, 7, 6, 7, 6]
    fork(manager, admitted, 1, 2)
    # One owner more for each block, not for each place.
    assert owners(manager, 7, 6) == [2, 2]
    for seq_id in (2, 1, 2, 1):
        append(manager, admitted.find(seq_id), 3)
    for seq in admitted.get_seqs():
        manager.free(seq)
        manager.check()
    assert stack(manager)[:4] == [0, 1, 2, 3]
    assert manager.get_num_free_gpu_blocks() == 8


@pytest.mark.seed("S003-14", "S003-23")
def test_a_copy_takes_all_the_places_of_its_block_in_a_ring(backend: Backend) -> None:
    manager = make(backend, sliding_window=4)
    admitted = admit(manager, 1, num_tokens=5)
    fork(manager, admitted, 1, 2)
    assert append(manager, admitted.find(2)) == [(7, 5)]
    assert table(manager, admitted, 2) == [5, 6, 5]
    # The ring goes on with its own blocks.
    append(manager, admitted.find(2), 4)
    assert table(manager, admitted, 2) == [5, 4, 5, 4, 5]
