# SPDX-License-Identifier: Apache-2.0
"""An engine of the first block manager keeps its own classes, and imports the manager alone."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from kvcore.legacy import block_space_manager as legacy
from kvcore.legacy.space_sequences import seqs_of
from tests.conftest import Backend


class SequenceStatus(enum.Enum):
    """An engine's own, with numbers of its own."""

    SWAPPED = 10
    RUNNING = 20
    WAITING = 30
    FINISHED_STOPPED = 40


class AllocStatus(enum.Enum):
    """An engine's own."""

    NEVER = "never"
    LATER = "later"
    OK = "ok"


class EngineSequence:
    """What a manager asks of a sequence."""

    def __init__(self, seq_id: int, num_blocks: int) -> None:
        self.seq_id = seq_id
        self.logical_token_blocks = [None] * num_blocks
        self.status: Any = SequenceStatus.WAITING

    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status is SequenceStatus.FINISHED_STOPPED


class EngineGroup:
    """What a manager asks of a group, statuses compared as an engine does: its own with its own."""

    prefix = None
    request_id = "r"

    def __init__(self, seqs: list[EngineSequence], compare: str) -> None:
        self.seqs = seqs
        self.compare = compare

    def get_seqs(self, status: Any = None) -> list[EngineSequence]:
        """Sequences of one status."""
        if status is None:
            return list(self.seqs)
        if self.compare == "by name":
            return [seq for seq in self.seqs if seq.status.name == status.name]
        if self.compare == "by identity":
            return [seq for seq in self.seqs if seq.status is status]
        return [seq for seq in self.seqs if seq.status == status]

    def num_seqs(self, status: Any = None) -> int:
        """How many these are."""
        return len(self.get_seqs(status))


@pytest.mark.parametrize("compare", ["by value", "by name", "by identity"])
def test_an_engine_keeps_its_own_sequences_and_statuses(backend: Backend, compare: str) -> None:
    """Two wait and one has finished: three owners a block, and each is given back by its own."""
    manager: Any = legacy.BlockSpaceManager(4, 6, 6, watermark=0.0, backend=backend)
    first, second, done = (EngineSequence(number, 2) for number in range(3))
    done.status = SequenceStatus.FINISHED_STOPPED
    group = EngineGroup([first, second, done], compare)
    assert manager.can_allocate(group) is legacy.AllocStatus.OK
    manager.allocate(group)
    manager.check()
    assert sorted(manager.block_tables) == [0, 1]
    assert [block.ref_count for block in manager.block_tables[0]] == [3, 3]
    first.status = second.status = SequenceStatus.RUNNING
    manager.free(done)
    assert [block.ref_count for block in manager.block_tables[0]] == [2, 2]

    assert manager.can_append_slot(group)
    first.logical_token_blocks.append(None)
    assert manager.append_slot(first) is None
    table = manager.get_block_table(first)
    assert manager.can_swap_out(group)
    assert list(manager.swap_out(group)) == table
    assert manager.get_num_free_gpu_blocks() == 6
    first.status = second.status = SequenceStatus.SWAPPED
    assert manager.can_swap_in(group)
    assert len(manager.swap_in(group)) == 3
    assert manager.get_num_free_cpu_blocks() == 6
    manager.check()
    manager.free(first)
    manager.free(second)
    manager.check()
    assert manager.get_num_free_gpu_blocks() == 6


def test_two_swapped_sequences_ask_for_two_blocks_more(backend: Backend) -> None:
    """2 blocks and one more for each of 2 sequences are 4: three free ones are too few."""
    manager: Any = legacy.BlockSpaceManager(4, 3, 3, watermark=0.0, backend=backend)
    seqs = [EngineSequence(0, 2), EngineSequence(1, 2)]
    group = EngineGroup(seqs, "by value")
    manager.allocate(group)
    for seq in seqs:
        seq.status = SequenceStatus.RUNNING
    manager.swap_out(group)
    for seq in seqs:
        seq.status = SequenceStatus.SWAPPED
    assert not manager.can_swap_in(group)
    seqs.pop()
    assert manager.can_swap_in(group)


def test_who_runs_is_counted_by_the_status_name(backend: Backend) -> None:
    """Three run and two blocks are free."""
    manager: Any = legacy.BlockSpaceManager(4, 4, 0, watermark=0.0, backend=backend)
    seqs = [EngineSequence(number, 2) for number in range(3)]
    group = EngineGroup(seqs, "by value")
    manager.allocate(group)
    for seq in seqs:
        seq.status = SequenceStatus.RUNNING
    assert not manager.can_append_slot(group)
    seqs[0].status = SequenceStatus.FINISHED_STOPPED
    assert manager.can_append_slot(group)


def test_an_engine_compares_answers_with_its_own_statuses(backend: Backend) -> None:
    """4 blocks: of two groups of 3 the second waits, one of 5 never fits."""
    manager: Any = legacy.BlockSpaceManager(4, 4, 0, watermark=0.0, backend=backend)
    groups = [EngineGroup([EngineSequence(number, size)], "") for number, size in enumerate((3, 5))]
    assert manager.can_allocate(groups[0]) == AllocStatus.OK
    assert manager.can_allocate(groups[1]) == AllocStatus.NEVER
    manager.allocate(groups[0])
    later = manager.can_allocate(EngineGroup([EngineSequence(7, 3)], ""))
    assert (later == AllocStatus.LATER) is (AllocStatus.LATER == later) is True  # noqa: SIM300
    assert later != AllocStatus.NEVER
    assert {AllocStatus.LATER: "waits"}[later] == "waits"
    assert later != SequenceStatus.WAITING
    assert later != "LATER"


def test_statuses_of_both_kinds_may_stand_in_a_group_of_ours() -> None:
    """An engine's sequences in `SequenceGroup`."""
    seqs: list[Any] = [EngineSequence(0, 1), legacy.Sequence(1, "", [1], 4), EngineSequence(2, 1)]
    seqs[2].status = SequenceStatus.RUNNING
    group = legacy.SequenceGroup("g", seqs)
    waiting: Any = SequenceStatus.WAITING
    for status in (legacy.SequenceStatus.WAITING, waiting):
        assert [seq.seq_id for seq in group.get_seqs(status)] == [0, 1]
    assert [seq.seq_id for seq in seqs_of(group, legacy.SequenceStatus.RUNNING)] == [2]
