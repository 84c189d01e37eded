# SPDX-License-Identifier: Apache-2.0
"""An engine of the first block manager keeps its own classes, and imports the manager alone."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.legacy.v0_3 import block_space_manager as legacy
from kvcore.legacy.v0_3.sequences import seqs_of
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


class Device(enum.Enum):
    """An engine's own."""

    CPU = 1
    GPU = 2


class EngineSequence:
    """A sequence with what a manager reads of it."""

    def __init__(self, seq_id: int, num_blocks: int) -> None:
        self.seq_id = seq_id
        self.logical_token_blocks = [None] * num_blocks
        self.status: Any = SequenceStatus.WAITING

    def is_finished(self) -> bool:
        """Tell whether it has ended."""
        return self.status is SequenceStatus.FINISHED_STOPPED


class EngineGroup:
    """A group as a manager reads it; an engine compares its own statuses with its own."""

    prefix = None
    request_id = "r"

    def __init__(self, seqs: list[EngineSequence], compare: str) -> None:
        self.seqs = seqs
        self.compare = compare

    def get_seqs(self, status: Any = None) -> list[EngineSequence]:
        """Return the sequences of one status."""
        if status is None:
            return list(self.seqs)
        if self.compare == "by name":
            return [seq for seq in self.seqs if seq.status.name == status.name]
        if self.compare == "by identity":
            return [seq for seq in self.seqs if seq.status is status]
        return [seq for seq in self.seqs if seq.status == status]

    def num_seqs(self, status: Any = None) -> int:
        """Count these."""
        return len(self.get_seqs(status))


@pytest.mark.parametrize("compare", ["by value", "by name", "by identity"])
def test_an_engine_keeps_its_own_sequences_and_statuses(backend: Backend, compare: str) -> None:
    """Two wait and one has finished, so each block has three owners, who free it separately."""
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
    """Two blocks and one more for each of two sequences are 4, so three free ones are too few."""
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
    """With 4 blocks, the second of two groups of 3 waits, and a group of 5 never fits."""
    manager: Any = legacy.BlockSpaceManager(4, 4, 0, watermark=0.0, backend=backend)
    groups = [EngineGroup([EngineSequence(number, size)], "") for number, size in enumerate((3, 5))]
    assert manager.can_allocate(groups[0]) == AllocStatus.OK
    assert manager.can_allocate(groups[1]) == AllocStatus.NEVER
    manager.allocate(groups[0])
    later = manager.can_allocate(EngineGroup([EngineSequence(7, 3)], ""))
    assert later == AllocStatus.LATER
    assert AllocStatus.LATER == later  # noqa: SIM300 # the engine's own comparison is asked
    assert later != AllocStatus.NEVER
    assert {AllocStatus.LATER: "waits"}[later] == "waits"
    assert later != SequenceStatus.WAITING
    assert later != "LATER"


def test_statuses_of_both_kinds_may_stand_in_a_group_of_ours() -> None:
    """An engine's sequences are in a `SequenceGroup`."""
    seqs: list[Any] = [EngineSequence(0, 1), legacy.Sequence(1, "", [1], 4), EngineSequence(2, 1)]
    seqs[2].status = SequenceStatus.RUNNING
    group = legacy.SequenceGroup("g", seqs)
    waiting: Any = SequenceStatus.WAITING
    for status in (legacy.SequenceStatus.WAITING, waiting):
        assert [seq.seq_id for seq in group.get_seqs(status)] == [0, 1]
    assert [seq.seq_id for seq in seqs_of(group, legacy.SequenceStatus.RUNNING)] == [2]


def test_adapters_do_not_share_a_prefix() -> None:
    """The same tokens under another adapter have other keys and values."""
    pool = legacy.PrefixPool(2)
    plain, first, second = (pool.add_or_get_prefix([1, 2, 3], number) for number in range(3))
    assert plain is not None
    assert first is not None
    assert second is not None
    assert len({id(plain), id(first), id(second)}) == len(pool.prefixes) == 3
    assert plain.hash == hash(first) == hash((1, 2))
    assert plain != first
    assert pool.add_or_get_prefix([1, 2], lora_int_id=2) is second
    assert pool.add_or_get_prefix([1, 2]) is plain
    assert pool.add_or_get_prefix([1], 1) is None


def test_a_sequence_keeps_its_tokens_and_log_probabilities() -> None:
    """The prompt is 5 6 7, the answer 8 9; -0.5 and -1.5 are -2 together, over 4 or 5 tokens."""
    adapter = SimpleNamespace(lora_int_id=4)
    seq = legacy.Sequence(3, "text", [5, 6, 7], 2, adapter)
    seq.append_token_id(8, {8: -0.5, 1: -9.0})
    seq.append_token_id(9, {9: -1.5})
    assert (seq.data.prompt_token_ids, seq.data.output_token_ids) == ([5, 6, 7], [8, 9])
    assert seq.get_output_token_ids() is seq.data.output_token_ids
    assert seq.output_logprobs == [{8: -0.5, 1: -9.0}, {9: -1.5}]
    assert seq.get_cumulative_logprob() == seq.data.cumulative_logprob == -2.0
    assert seq.get_beam_search_score() == -2.0
    assert seq.get_beam_search_score(1.0) == -0.4
    assert seq.get_beam_search_score(1.0, eos_token_id=9) == -0.5
    assert seq.get_beam_search_score(1.0, eos_token_id=8) == -0.4
    assert seq.get_beam_search_score(2.0, seq_len=1) == -2.0
    assert (seq.lora_int_id, seq.output_text, seq.tokens) == (4, "", None)
    assert legacy.Sequence(4, "", [1], 2).lora_int_id == 0
    child = seq.fork(5)
    child.append_token_id(1, {1: -1.0})
    assert (child.data.cumulative_logprob, seq.data.cumulative_logprob) == (-3.0, -2.0)


def test_a_token_without_its_log_probability_is_refused() -> None:
    seq = legacy.Sequence(3, "", [5], 2)
    with pytest.raises(AssertionError, match="token 7 of sequence 3 is not in its 1 logprobs"):
        seq.append_token_id(7, {8: -0.5})
    assert (seq.get_token_ids(), seq.output_logprobs) == ([5], [])
    assert seq.logical_token_blocks[0].get_token_ids() == [5]


def test_a_logical_block_has_slots() -> None:
    """A slot without a token has -1, as in the original."""
    block = legacy.LogicalTokenBlock(6, 3)
    with pytest.raises(AssertionError, match="block 6 has no tokens"):
        block.get_last_token_id()
    block.append_tokens([4, 5])
    assert (block.token_ids, block.num_tokens, block.get_token_ids()) == ([4, 5, -1], 2, [4, 5])
    assert (block.get_last_token_id(), block.get_num_empty_slots()) == (5, 1)
    with pytest.raises(AssertionError, match="block 6 has 1 empty slots, 2 tokens are appended"):
        block.append_tokens([6, 7])
    assert block.token_ids == [4, 5, -1]
    block.append_tokens([6])
    assert block.is_full()


def test_a_group_counts_who_runs_and_who_has_ended() -> None:
    """One of three has ended; best_of=4 asks for 4 sequences until there are 4."""
    seqs = [legacy.Sequence(number, "text", [1, 2], 2) for number in range(3)]
    params = SimpleNamespace(best_of=4, use_beam_search=False)
    group = legacy.SequenceGroup("g", seqs, params, 0.0, SimpleNamespace(lora_int_id=2))
    seqs[1].status = legacy.SequenceStatus.FINISHED_ABORTED
    assert (group.num_unfinished_seqs(), group.num_finished_seqs()) == (2, 1)
    assert (group.prompt, group.prompt_token_ids, group.lora_int_id) == ("text", [1, 2], 2)
    assert group.get_max_num_running_seqs() == 4
    params.best_of = 3
    assert group.get_max_num_running_seqs() == 2
    params.use_beam_search = True
    assert group.get_max_num_running_seqs() == 3
    assert group.prompt_logprobs is None


def test_a_group_has_each_sequence_once() -> None:
    seq = legacy.Sequence(1, "", [1], 2)
    group = legacy.SequenceGroup("g", [seq])
    with pytest.raises(ValueError, match="group 'g' has a sequence 1"):
        group.add(legacy.Sequence(1, "", [2], 2))
    for call in (group.find, group.remove):
        with pytest.raises(ValueError, match="sequence 7 is not one of the 1 of group 'g'"):
            call(7)
    assert group.find(1) is seq
    group.remove(1)
    assert group.num_seqs() == 0


def test_clients_are_told_why_a_sequence_has_ended() -> None:
    status = legacy.SequenceStatus
    reasons = {each.name: status.get_finished_reason(each) for each in status}
    ended = {"STOPPED": "stop", "LENGTH_CAPPED": "length", "ABORTED": "abort", "IGNORED": "length"}
    running = dict.fromkeys(("WAITING", "RUNNING", "SWAPPED"))
    assert reasons == running | {f"FINISHED_{name}": reason for name, reason in ended.items()}


def test_a_group_may_be_admitted_before_it_is_forked(backend: Backend) -> None:
    """Parent and child wait together and share a block; a fork changes nothing, a write copies."""
    manager = legacy.BlockSpaceManager(4, 4, 4, watermark=0.0, backend=backend)
    parent = legacy.Sequence(1, "one two three", [1, 2, 3], 4)
    child = parent.fork(2)
    manager.allocate(legacy.SequenceGroup("g", [parent, child]))
    child.append_token_id(4, {4: 0.0})
    manager.fork(parent, child)
    manager.check()
    assert manager.append_slot(child) == (3, 2)
    assert (manager.get_num_free_gpu_blocks(), manager.get_block_table(parent)) == (2, [3])


def test_a_fork_replaces_a_table_on_another_device(backend: Backend) -> None:
    """A child that did not wait when its group came keeps its blocks."""
    manager = legacy.BlockSpaceManager(2, 4, 4, watermark=0.0, backend=backend)
    seqs = [legacy.Sequence(number, "", [1, 2], 2) for number in range(3)]
    status = legacy.SequenceStatus
    seqs[2].status = status.RUNNING
    manager.allocate(legacy.SequenceGroup("g", [seqs[0], seqs[2]]))
    other = legacy.SequenceGroup("h", [seqs[1]])
    manager.allocate(other)
    seqs[1].status = status.RUNNING
    assert len(manager.swap_out(other)) == 1
    manager.fork(seqs[0], seqs[1])
    assert (manager.get_num_free_cpu_blocks(), manager.get_num_free_gpu_blocks()) == (4, 3)
    manager.fork(seqs[0], seqs[2])
    manager.check()
    assert manager.block_tables[0][0].ref_count == 4
    for seq in seqs:
        manager.free(seq)
    manager.check()
    assert manager.get_num_free_gpu_blocks() == 4


@pytest.mark.parametrize("watermark", ["0.1", None, -0.1, float("nan"), float("inf")])
def test_a_watermark_is_a_share(watermark: Any) -> None:
    with pytest.raises(AssertionError, match="watermark is"):
        legacy.BlockSpaceManager(4, 4, 4, watermark)


def test_an_engine_names_a_device_in_its_own_way(backend: Backend) -> None:
    """Blocks of a GPU are taken with commands for its tensor; those of a CPU with none."""
    for device, num_commands in ((Device.GPU, 1), (Device.CPU, 0)):
        given: Any = device
        allocator = legacy.BlockAllocator(given, 4, 2, backend=backend)
        block: Any = allocator.allocate()
        assert (block.block_number, block.device) == (1, device)
        assert block.device == legacy.Device[device.name]
        assert len(allocator.take_batch()) == num_commands
