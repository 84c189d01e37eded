# SPDX-License-Identifier: Apache-2.0
"""The first block manager: swaps between the devices, with prefixes, forks and windows."""

from __future__ import annotations

import pytest

from kvcore.legacy.v0_3.block_space_manager import Prefix, SequenceStatus
from kvcore.legacy.v0_3.errors import OnOtherDevice, OutOfMemory, PrefixNotReady, UnknownSequence
from kvcore.types.commands import Allocate, Free, SwapIn, SwapOut
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
    set_status,
    stack,
    swap_in,
    swap_out,
    table,
    unchanged,
)
from tests.conftest import Backend


@pytest.mark.seed("S003-24", "S003-27")
def test_a_group_s_blocks_are_those_of_its_unfinished_sequences(backend: Backend) -> None:
    manager = make(backend, 8, 4)
    admitted = admit(manager, 1, num_tokens=5)
    fork(manager, admitted, 1, 2)
    append(manager, admitted.find(2))
    # 7, 6 and 5 of the first, 7, 6 and 4 of the second: four blocks.
    assert manager.can_swap_out(admitted)
    append(manager, admitted.find(2), 2)
    assert table(manager, admitted, 2) == [7, 6, 4, 3]
    assert not manager.can_swap_out(admitted)
    admitted.find(1).status = SequenceStatus.FINISHED_STOPPED
    assert manager.can_swap_out(admitted)


@pytest.mark.seed("S003-25", "S003-35", "X-10")
def test_a_swap_in_leaves_a_block_a_sequence_and_the_watermark(backend: Backend) -> None:
    manager = make(backend, 10, 4, watermark=0.2)
    admitted = admit(manager, 1, 2, num_tokens=4)
    swap_out(manager, admitted)
    # Two blocks, two sequences, a watermark of two: six.
    held = admit(manager, 8, num_tokens=8)
    assert manager.get_num_free_gpu_blocks() == 6
    assert manager.can_swap_in(admitted)
    append(manager, held.find(8))
    assert manager.get_num_free_gpu_blocks() == 5
    assert not manager.can_swap_in(admitted)


@pytest.mark.seed("S003-35")
def test_after_a_swap_in_that_was_allowed_each_sequence_finds_its_block(backend: Backend) -> None:
    manager = make(backend, 4, 4)
    admitted = admit(manager, 1, 2, num_tokens=4)
    swap_out(manager, admitted)
    assert manager.can_swap_in(admitted)
    swap_in(manager, admitted)
    assert manager.can_append_slot(admitted)
    for seq in admitted.get_seqs():
        append(manager, seq)
    assert manager.get_num_free_gpu_blocks() == 0


@pytest.mark.seed("S003-28")
def test_a_swap_out_moves_each_block_once(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1, num_tokens=5)
    fork(manager, admitted, 1, 2)
    append(manager, admitted.find(2))
    commands(manager)
    # In the order of first use: 7, 6, 5 of sequence 1, then 4 of sequence 2.
    mapping = swap_out(manager, admitted)
    assert list(mapping.items()) == [(7, 3), (6, 2), (5, 1), (4, 0)]
    assert table(manager, admitted, 1) == [3, 2, 1]
    assert table(manager, admitted, 2) == [3, 2, 0]
    blocks = manager.block_tables[1]
    assert [(b.device.name, b.ref_count) for b in blocks] == [("CPU", 2), ("CPU", 2), ("CPU", 1)]
    # 5 is free after sequence 1; 7, 6 and 4 after sequence 2.
    assert stack(manager) == [0, 1, 2, 3, 5, 7, 6, 4]
    assert commands(manager) == [
        *(SwapOut(7, 3), SwapOut(6, 2), SwapOut(5, 1), SwapOut(4, 0)),
        *(Free(5, False), Free(7, False), Free(6, False), Free(4, False)),
    ]


@pytest.mark.seed("S003-26")
def test_a_swap_in_moves_each_block_once(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1, num_tokens=5)
    fork(manager, admitted, 1, 2)
    append(manager, admitted.find(2))
    swap_out(manager, admitted)
    commands(manager)
    # CPU blocks 3, 2, 1 and 0; the stack's top is 4, 6, 7, 5.
    mapping = swap_in(manager, admitted)
    assert list(mapping.items()) == [(3, 4), (2, 6), (1, 7), (0, 5)]
    assert table(manager, admitted, 1) == [4, 6, 7]
    assert table(manager, admitted, 2) == [4, 6, 5]
    assert owners(manager, 4, 6, 7, 5) == [2, 2, 1, 1]
    assert manager.get_num_free_cpu_blocks() == 4
    assert cpu_stack(manager) == [1, 3, 2, 0]
    assert commands(manager) == [
        *(Allocate(4), Allocate(6), Allocate(7), Allocate(5)),
        *(SwapIn(3, 4), SwapIn(2, 6), SwapIn(1, 7), SwapIn(0, 5)),
    ]


@pytest.mark.seed("S003-26", "S003-28")
def test_swaps_are_of_running_and_of_swapped_sequences(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1, num_tokens=4)
    second = fork(manager, admitted, 1, 2)
    second.status = SequenceStatus.FINISHED_STOPPED
    assert manager.swap_in(admitted) == {}
    assert manager.swap_out(admitted) == {7: 3, 6: 2}
    manager.check()
    assert table(manager, admitted, 2) == [7, 6]
    assert owners(manager, 7, 6) == [1, 1]
    assert manager.swap_out(group(9)) == {}


@pytest.mark.seed("S003-28", "S003-12")
def test_a_swap_out_lets_the_prefix_go_and_a_swap_in_puts_it_first(backend: Backend) -> None:
    manager = make(backend)
    prefix = Prefix(range(4), SIZE)
    admitted = admit(manager, 1, 2, num_tokens=6, prefix=prefix)
    prefix.computed = True
    assert owners(manager, 7, 6, 5) == [3, 3, 2]
    assert swap_out(manager, admitted) == {5: 3}
    assert table(manager, admitted, 1) == [3]
    assert owners(manager, 7, 6, 5) == [1, 1, 0]
    assert swap_in(manager, admitted) == {3: 5}
    assert table(manager, admitted, 1) == table(manager, admitted, 2) == [7, 6, 5]
    assert owners(manager, 7, 6, 5) == [3, 3, 2]


@pytest.mark.seed("S003-26", "X-14")
def test_a_swap_in_needs_its_prefix_computed(backend: Backend) -> None:
    manager = make(backend)
    prefix = Prefix(range(4), SIZE)
    admitted = admit(manager, 1, num_tokens=6, prefix=prefix)
    swap_out(manager, admitted)
    text = "prefix of group 'g1' must be .* allocated is True, computed is False"
    with unchanged(manager), pytest.raises(AssertionError, match=text) as caught:
        manager.swap_in(admitted)
    assert isinstance(caught.value, PrefixNotReady)
    manager.free_prefix(prefix)
    with unchanged(manager), pytest.raises(PrefixNotReady, match="allocated is False"):
        manager.swap_in(admitted)


@pytest.mark.seed("S003-27")
def test_a_prefix_needs_no_room_on_the_cpu(backend: Backend) -> None:
    manager = make(backend, 8, 1)
    prefix = Prefix(range(4), SIZE)
    admitted = admit(manager, 1, num_tokens=6, prefix=prefix)
    # Three blocks, of which one moves.
    assert manager.can_swap_out(admitted)
    assert swap_out(manager, admitted) == {5: 0}
    other = admit(manager, 2, num_tokens=6, prefix=prefix)
    assert not manager.can_swap_out(other)


@pytest.mark.seed("S003-29", "X-11")
def test_a_window_s_blocks_are_swapped_once(backend: Backend) -> None:
    manager = make(backend, sliding_window=4)
    admitted = admit(manager, 1, 2, num_tokens=9)
    commands(manager)
    assert table(manager, admitted, 1) == [7, 6, 7, 6, 7]
    assert swap_out(manager, admitted) == {7: 3, 6: 2}
    assert table(manager, admitted, 1) == [3, 2, 3, 2, 3]
    assert [block.ref_count for block in manager.block_tables[1][:2]] == [2, 2]
    assert manager.get_num_free_gpu_blocks() == 8
    assert swap_in(manager, admitted) == {3: 6, 2: 7}
    assert table(manager, admitted, 2) == [6, 7, 6, 7, 6]
    assert manager.get_num_free_cpu_blocks() == 4
    # The ring goes on: the tenth token has its slot, the eleventh takes the next block.
    assert append(manager, admitted.find(1), 1) == [(6, 5)]
    assert table(manager, admitted, 1) == [5, 7, 5, 7, 5]


@pytest.mark.seed("S003-29")
def test_a_window_behind_a_prefix_comes_back_behind_it(backend: Backend) -> None:
    manager = make(backend, sliding_window=4)
    prefix = Prefix(range(2), SIZE)
    admitted = admit(manager, 1, num_tokens=8, prefix=prefix)
    prefix.computed = True
    assert table(manager, admitted, 1) == [7, 6, 5, 6]
    assert swap_out(manager, admitted) == {6: 3, 5: 2}
    assert table(manager, admitted, 1) == [3, 2, 3]
    assert swap_in(manager, admitted) == {3: 5, 2: 6}
    assert table(manager, admitted, 1) == [7, 5, 6, 5]
    append(manager, admitted.find(1), 4)
    assert table(manager, admitted, 1) == [7, 5, 6, 5, 6, 5]


@pytest.mark.seed("S003-30")
def test_no_call_changes_a_status(backend: Backend) -> None:
    manager = make(backend)
    requested = group(1)
    for status, calls in (
        (SequenceStatus.WAITING, (manager.can_allocate, manager.allocate)),
        (SequenceStatus.RUNNING, (manager.can_append_slot, manager.swap_out)),
        (SequenceStatus.SWAPPED, (manager.can_swap_in, manager.swap_in)),
    ):
        set_status(requested, status)
        for call in calls:
            call(requested)
            assert requested.find(1).status is status
    manager.free(requested.find(1))
    assert requested.find(1).status is SequenceStatus.SWAPPED


@pytest.mark.seed("S003-26", "S003-28", "X-05")
def test_a_swap_that_does_not_fit_moves_nothing(backend: Backend) -> None:
    manager = make(backend, 4, 2)
    admitted = admit(manager, 1, num_tokens=5)
    with unchanged(manager), pytest.raises(OutOfMemory, match=r"'g1' needs 3, 2 of 2 .* CPU"):
        manager.swap_out(admitted)
    manager.free(admitted.find(1))
    swapped = admit(manager, 2, num_tokens=4)
    swap_out(manager, swapped)
    admit(manager, 3, num_tokens=6)
    with unchanged(manager), pytest.raises(OutOfMemory, match=r"'g2' needs 2, 1 of 4 .* GPU"):
        manager.swap_in(swapped)


def test_without_a_cpu_tier_nothing_can_be_swapped_out(backend: Backend) -> None:
    manager = make(backend, 4, 0)
    admitted = admit(manager, 1)
    assert manager.get_num_free_cpu_blocks() == 0
    assert not manager.can_swap_out(admitted)
    with unchanged(manager), pytest.raises(OutOfMemory, match="needs 2, 0 of 0"):
        manager.swap_out(admitted)


@pytest.mark.seed("X-14")
def test_what_lies_on_the_other_device_is_not_moved_again(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1)
    set_status(admitted, SequenceStatus.SWAPPED)
    with unchanged(manager), pytest.raises(OnOtherDevice, match="on the GPU, must be on the CPU"):
        manager.swap_in(admitted)
    set_status(admitted, SequenceStatus.RUNNING)
    swap_out(manager, admitted)
    set_status(admitted, SequenceStatus.RUNNING)
    with unchanged(manager), pytest.raises(OnOtherDevice, match="on the CPU, must be on the GPU"):
        manager.swap_out(admitted)


@pytest.mark.seed("X-14")
def test_a_stranger_in_a_group_stops_the_swap_before_it_begins(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1)
    admitted.add(group(5).find(5))
    set_status(admitted, SequenceStatus.RUNNING)
    with unchanged(manager), pytest.raises(UnknownSequence, match="sequence 5"):
        manager.swap_out(admitted)
    set_status(admitted, SequenceStatus.SWAPPED)
    admitted.remove(1)
    with unchanged(manager), pytest.raises(KeyError, match="sequence 5"):
        manager.swap_in(admitted)
