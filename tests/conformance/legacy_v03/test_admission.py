# SPDX-License-Identifier: Apache-2.0
"""The first block manager: what it is made for, whom it admits, and what they get."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.legacy.v0_3.block_space_manager import (
    AllocStatus,
    BlockSpaceManager,
    Prefix,
    PrefixPool,
    SequenceGroup,
    SequenceStatus,
)
from kvcore.legacy.v0_3.errors import (
    AlreadyAllocated,
    NoWaitingSequence,
    OutOfMemory,
    PrefixTooLong,
    UnknownPrefix,
    WrongWatermark,
    WrongWindow,
)
from kvcore.types.commands import Allocate
from kvcore.types.errors import InvalidCount, KvcoreError
from tests.conformance.legacy_v03.stories import (
    SIZE,
    admit,
    append,
    commands,
    group,
    make,
    owners,
    set_status,
    stack,
    table,
    unchanged,
)
from tests.conftest import Backend

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


@pytest.mark.seed("S003-04")
def test_there_are_three_answers() -> None:
    assert [status.name for status in AllocStatus] == ["OK", "LATER", "NEVER"]


@pytest.mark.seed("S003-04", "S003-05", "X-10")
def test_a_manager_shows_what_it_was_made_for(backend: Backend) -> None:
    manager = BlockSpaceManager(4, 250, 7, backend=backend)
    assert (manager.block_size, manager.block_sliding_window) == (4, None)
    assert (manager.num_total_gpu_blocks, manager.num_total_cpu_blocks) == (250, 7)
    # 0.01 of 250 blocks are 2.5, which is cut.
    assert (manager.watermark, manager.watermark_blocks) == (0.01, 2)
    assert BlockSpaceManager(4, 9, 0, 0.5, 12, backend=backend).block_sliding_window == 3
    assert isinstance(manager.can_allocate(group(1)), AllocStatus)


@pytest.mark.seed("S003-05", "X-14")
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sliding_window": 6}, WrongWindow),
        ({"sliding_window": 0}, WrongWindow),
        ({"sliding_window": -4}, WrongWindow),
        ({"watermark": -0.01}, WrongWatermark),
        ({"watermark": float("nan")}, WrongWatermark),
        ({"watermark": float("inf")}, WrongWatermark),
    ],
)
def test_windows_are_whole_blocks_and_watermarks_not_negative(
    backend: Backend, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(AssertionError) as caught:
        BlockSpaceManager(4, 8, 4, backend=backend, **options)
    assert caught.type is error
    assert isinstance(caught.value, KvcoreError)
    assert str(next(iter(options.values()))) in str(caught.value)


def test_sizes_that_are_none_are_refused(backend: Backend) -> None:
    bad: Any = ((0, 8, 4), (4, -1, 4), (4, 8, -1), (4, "x", 4))
    for sizes in bad:
        with pytest.raises(InvalidCount):
            BlockSpaceManager(*sizes, backend=backend)


@pytest.mark.seed("S003-07")
def test_a_group_is_judged_by_its_first_waiting_sequence(backend: Backend) -> None:
    manager = make(backend, 4)
    mixed = group(1, 2, 3, num_tokens=4)
    first, second, _ = mixed.get_seqs()
    for _ in range(20):
        first.append_token_id(9)
    assert manager.can_allocate(mixed) is NEVER
    first.status = SequenceStatus.FINISHED_STOPPED
    assert manager.can_allocate(mixed) is OK
    for _ in range(20):
        second.append_token_id(9)
    assert manager.can_allocate(mixed) is NEVER


@pytest.mark.seed("S003-07", "X-14")
def test_a_group_in_which_nobody_waits_is_refused(backend: Backend) -> None:
    manager = make(backend)
    running = group(1, 2)
    set_status(running, SequenceStatus.RUNNING)
    for call in (manager.can_allocate, manager.allocate):
        with (
            unchanged(manager),
            pytest.raises(IndexError, match="'g1' has no waiting sequence: 2") as caught,
        ):
            call(running)
        assert isinstance(caught.value, NoWaitingSequence)


@pytest.mark.seed("S003-08")
def test_a_group_needs_its_blocks_less_an_allocated_prefix(backend: Backend) -> None:
    manager = make(backend, 4)
    assert manager.can_allocate(group(1, num_tokens=8)) is OK
    assert manager.can_allocate(group(1, num_tokens=9)) is NEVER
    # Two of the blocks of five are the prefix's; but they count until it has them.
    prefix = Prefix(range(4), SIZE)
    assert manager.can_allocate(group(1, num_tokens=10, prefix=prefix)) is NEVER
    admit(manager, 1, num_tokens=4, prefix=prefix)
    assert manager.can_allocate(group(2, num_tokens=8, prefix=prefix)) is OK
    assert manager.can_allocate(group(2, num_tokens=10, prefix=prefix)) is LATER


@pytest.mark.seed("S003-08")
def test_a_window_caps_what_a_group_needs(backend: Backend) -> None:
    manager = make(backend, 4, sliding_window=6)
    assert manager.can_allocate(group(1, num_tokens=100)) is OK
    admit(manager, 1, num_tokens=100)
    assert manager.can_allocate(group(2, num_tokens=100)) is LATER
    assert make(backend, 2, sliding_window=6).can_allocate(group(1, num_tokens=6)) is NEVER


@pytest.mark.seed("S003-09", "X-10")
def test_admission_leaves_the_watermark_free(backend: Backend) -> None:
    manager = make(backend, 8, watermark=0.25)
    assert manager.watermark_blocks == 2
    # Of eight blocks, two stay free: six can be asked for, seven never.
    assert manager.can_allocate(group(1, num_tokens=12)) is OK
    assert manager.can_allocate(group(1, num_tokens=13)) is NEVER
    admit(manager, 1, num_tokens=4)
    assert manager.can_allocate(group(2, num_tokens=8)) is OK
    assert manager.can_allocate(group(2, num_tokens=9)) is LATER
    assert manager.can_allocate(group(2, num_tokens=13)) is NEVER


@pytest.mark.seed("S003-06", "S003-10", "S003-11", "S003-36")
def test_the_sequences_of_a_group_share_the_blocks_of_one_prompt(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1, 2, 3)
    assert [table(manager, admitted, seq_id) for seq_id in (1, 2, 3)] == [[7, 6]] * 3
    assert owners(manager, 7, 6, 5) == [3, 3, 0]
    assert commands(manager) == [Allocate(7), Allocate(6)]
    # Each has a table of its own: one grows, the others do not.
    append(manager, admitted.find(2))
    assert [len(manager.block_tables[seq_id]) for seq_id in (1, 2, 3)] == [2, 3, 2]
    assert sorted(manager.block_tables) == [1, 2, 3]


@pytest.mark.seed("S003-10", "S003-11")
def test_sequences_that_do_not_wait_are_counted_as_owners_without_a_table(
    backend: Backend,
) -> None:
    manager = make(backend)
    mixed = group(1, 2, 3)
    mixed.find(2).status = SequenceStatus.FINISHED_ABORTED
    manager.allocate(mixed)
    manager.check()
    assert owners(manager, 7, 6) == [3, 3]
    assert sorted(manager.block_tables) == [1, 3]
    # What the original loses, freeing that sequence gives back.
    for seq in mixed.get_seqs():
        manager.free(seq)
        manager.check()
    assert manager.get_num_free_gpu_blocks() == 8


@pytest.mark.seed("S003-36")
def test_prompts_are_taken_to_be_equal_without_a_look(backend: Backend) -> None:
    manager = make(backend)
    uneven = group(1, 2)
    uneven.find(2).append_token_id(5)
    manager.allocate(uneven)
    assert [len(each) for each in manager.block_tables.values()] == [2, 2]


@pytest.mark.seed("S003-13")
def test_a_new_prefix_holds_the_first_blocks_itself(backend: Backend) -> None:
    manager = make(backend)
    prefix = Prefix(range(4), SIZE)
    assert not prefix.allocated
    admitted = admit(manager, 1, 2, num_tokens=6, prefix=prefix)
    assert table(manager, admitted, 1) == [7, 6, 5]
    assert (prefix.allocated, prefix.get_block_numbers()) == (True, [7, 6])
    assert owners(manager, 7, 6, 5) == [3, 3, 2]
    for seq in admitted.get_seqs():
        manager.free(seq)
    assert owners(manager, 7, 6, 5) == [1, 1, 0]
    manager.check()


@pytest.mark.seed("S003-12")
def test_an_allocated_prefix_comes_first_and_is_not_allocated_again(backend: Backend) -> None:
    manager = make(backend)
    prefix = Prefix(range(4), SIZE)
    admit(manager, 1, num_tokens=6, prefix=prefix)
    commands(manager)
    second = admit(manager, 2, 3, num_tokens=8, prefix=prefix)
    assert table(manager, second, 2) == table(manager, second, 3) == [7, 6, 4, 3]
    assert owners(manager, 7, 6, 5, 4, 3) == [4, 4, 1, 2, 2]
    assert commands(manager) == [Allocate(4), Allocate(3)]
    third = admit(manager, 4, num_tokens=4, prefix=prefix)
    assert table(manager, third, 4) == [7, 6]
    assert commands(manager) == []


@pytest.mark.seed("S003-14", "S003-15", "X-11")
def test_a_window_uses_its_blocks_again_as_a_ring(backend: Backend) -> None:
    manager = make(backend, sliding_window=4)
    admitted = admit(manager, 1, 2, num_tokens=9)
    assert table(manager, admitted, 1) == [7, 6, 7, 6, 7]
    # Used three times, owned once by each sequence.
    assert owners(manager, 7, 6) == [2, 2]
    assert stack(manager) == [0, 1, 2, 3, 4, 5]


@pytest.mark.seed("S003-14")
def test_a_window_s_ring_begins_behind_the_prefix(backend: Backend) -> None:
    manager = make(backend, sliding_window=4)
    prefix = Prefix(range(4), SIZE)
    first = admit(manager, 1, num_tokens=12, prefix=prefix)
    # Two blocks of the prefix, which others read, and a ring of two.
    assert table(manager, first, 1) == [7, 6, 5, 4, 5, 4]
    second = admit(manager, 2, num_tokens=10, prefix=prefix)
    assert table(manager, second, 2) == [7, 6, 3, 2, 3]
    assert append(manager, second.find(2), 2) == [None, None]
    assert append(manager, second.find(2), 2) == [None, None]
    assert table(manager, second, 2) == [7, 6, 3, 2, 3, 2, 3]
    assert owners(manager, 7, 6, 5, 4, 3, 2) == [3, 3, 1, 1, 1, 1]
    assert manager.can_allocate(group(3, num_tokens=100, prefix=prefix)) is OK


@pytest.mark.seed("S003-16", "X-05")
def test_a_group_that_does_not_fit_gets_nothing(backend: Backend) -> None:
    manager = make(backend, 4)
    admit(manager, 1, num_tokens=4)
    prefix = Prefix(range(4), SIZE)
    for requested in (group(2, 3, num_tokens=6), group(2, num_tokens=100, prefix=prefix)):
        needed = len(requested.get_seqs()[0].logical_token_blocks)
        text = rf"^Out of memory! .* group 'g2' needs {needed}, 2 of 4 blocks on the GPU are free"
        with unchanged(manager), pytest.raises(ValueError, match=text) as caught:
            manager.allocate(requested)
        assert isinstance(caught.value, OutOfMemory)
    assert not prefix.allocated


def test_a_sequence_is_admitted_once(backend: Backend) -> None:
    manager = make(backend)
    admitted = admit(manager, 1)
    set_status(admitted, SequenceStatus.WAITING)
    admitted.add(group(2).find(2))
    with unchanged(manager), pytest.raises(AlreadyAllocated, match="1 has a table of 2 blocks"):
        manager.allocate(admitted)


def test_a_prefix_is_part_of_the_prompt(backend: Backend) -> None:
    manager = make(backend)
    prefix = Prefix(range(6), SIZE)
    for call in (manager.can_allocate, manager.allocate):
        with unchanged(manager), pytest.raises(PrefixTooLong, match=r"2 blocks .* prefix has 3"):
            call(group(1, prefix=prefix))


def test_a_prefix_belongs_to_one_manager(backend: Backend) -> None:
    manager, other = make(backend), make(backend)
    prefix = Prefix(range(4), SIZE)
    admit(other, 1, prefix=prefix)
    prefix.computed = True
    for call in (manager.can_allocate, manager.allocate):
        with unchanged(manager), pytest.raises(UnknownPrefix, match="prefix of 4 tokens"):
            call(group(1, prefix=prefix))
    with unchanged(manager), pytest.raises(UnknownPrefix):
        manager.swap_in(group(1, prefix=prefix))
    with unchanged(manager), pytest.raises(UnknownPrefix):
        manager.free_prefix(prefix)


def test_a_prefix_is_whole_blocks() -> None:
    with pytest.raises(AssertionError, match="prefix of 3 tokens is not whole blocks of 2"):
        Prefix(range(3), SIZE)
    pool = PrefixPool(SIZE)
    found = pool.add_or_get_prefix([1, 2, 3])
    assert found is not None
    assert (found.token_ids, found.get_length(), found.get_num_blocks()) == ((1, 2), 2, 1)
    assert pool.add_or_get_prefix([1, 2]) is found
    assert pool.add_or_get_prefix([1]) is None


def test_a_prefix_s_own_blocks_can_be_given_back(backend: Backend) -> None:
    manager = make(backend)
    prefix = Prefix(range(4), SIZE)
    admitted: SequenceGroup = admit(manager, 1, num_tokens=4, prefix=prefix)
    prefix.computed = True
    manager.free_prefix(prefix)
    manager.check()
    assert (prefix.allocated, prefix.computed, owners(manager, 7, 6)) == (False, False, [1, 1])
    manager.free(admitted.find(1))
    assert stack(manager) == list(range(8))


class OwnPrefix:
    """A prefix as an engine may have it: no more than what the manager reads and writes."""

    def __init__(self, num_blocks: int) -> None:
        self.block_table: list[Any] | None = None
        self.computed = True
        self._num_blocks = num_blocks

    @property
    def allocated(self) -> bool:
        return self.block_table is not None

    def get_num_blocks(self) -> int:
        return self._num_blocks

    def get_length(self) -> int:
        return self._num_blocks * SIZE

    def set_block_table(self, block_table: list[Any]) -> None:
        self.block_table = block_table.copy()


@pytest.mark.seed("S003-12", "S003-13")
def test_an_engine_s_own_prefix_will_do(backend: Backend) -> None:
    manager = make(backend)
    prefix: Any = OwnPrefix(2)
    first = admit(manager, 1, num_tokens=6, prefix=prefix)
    second = admit(manager, 2, num_tokens=6, prefix=prefix)
    assert (table(manager, first, 1), table(manager, second, 2)) == ([7, 6, 5], [7, 6, 4])
    assert manager.swap_out(second) == {4: 3}
    set_status(second, SequenceStatus.SWAPPED)
    assert manager.swap_in(second) == {3: 4}
    manager.check()
    assert owners(manager, 7, 6, 5, 4) == [3, 3, 1, 1]
