# SPDX-License-Identifier: Apache-2.0
"""Code that was written for V0, beyond the facts of each call."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest

from kvcore.legacy.v0.block import NullBlock
from kvcore.legacy.v0.block_manager import SelfAttnBlockSpaceManager
from kvcore.legacy.v0.errors import NotSupported
from kvcore.legacy.v0.interfaces import BlockSpaceManager, Device
from kvcore.legacy.v0.naive_block import NaiveBlock
from kvcore.legacy.v0.prefix_caching_block import NoFreeBlocksError, PrefixCachingBlock
from kvcore.legacy.v0.sequences import AllocStatus, Sequence, SequenceGroup, SequenceStatus
from kvcore.legacy.v0.utils import STR_NOT_IMPL_ENC_DEC_PREFIX_CACHE, STR_NOT_IMPL_ENC_DEC_SWA
from kvcore.types.errors import KvcoreError
from tests.conftest import Backend
from tests.legacy.v0.small import SIZE, admit, allocator, manager, two_tiers, unchanged

GPU = Device.GPU


def test_a_table_that_was_handed_out_survives_swaps_and_free(backend: Backend) -> None:
    held, seq = manager(backend), Sequence(0, [1, 2, 3])
    group = admit(held, seq)
    on_gpu, blocks = held.get_block_table(seq), held.block_tables[0].blocks
    seq.append_token_id(4)
    held.append_slots(seq, 2)
    assert on_gpu == [0, 1, 2]  # live while it grows
    assert [gpu for gpu, _ in held.swap_out(group)] == on_gpu
    on_cpu = held.get_block_table(seq)
    assert (on_gpu, on_cpu) == ([0, 1, 2], [8, 9, 10])
    assert held.block_tables[0].blocks is blocks
    held.free(seq)
    assert (on_cpu, len(blocks)) == ([8, 9, 10], 3)


@pytest.mark.parametrize(("computed", "passed"), [(7, 1), (8, 2), (9, 2), (10, 3), (11, 3)])
def test_a_step_may_be_computed_before_its_slots_are_asked_for(
    backend: Backend, computed: int, passed: int
) -> None:
    held = manager(backend, 16, 0, sliding_window=1)
    seq = Sequence(0, [1, 2, 3, 4, 5, 6])
    admit(held, seq)
    seq.get_token_ids().extend(range(7, 13))
    seq.data.num_computed_tokens = computed
    assert held.append_slots(seq, 0) == []
    blocks = held.block_tables[0].blocks
    assert [isinstance(block, NullBlock) for block in blocks] == [
        *[True] * passed,
        *[False] * (6 - passed),
    ]


def test_a_window_behind_the_slots_to_be_written_changes_nothing(backend: Backend) -> None:
    held = manager(backend, 16, 0, sliding_window=1)
    seq = Sequence(0, [1, 2, 3, 4, 5])
    admit(held, seq)
    seq.append_token_id(6)
    seq.data.num_computed_tokens = 10
    error = unchanged(held.append_slots, held, given=(seq, 0))
    assert isinstance(error, ValueError)
    assert "10 computed slots" in str(error)
    assert "5 tokens" in str(error)


def test_a_window_over_all_of_a_table_with_hashes_changes_nothing(backend: Backend) -> None:
    held = manager(backend, 16, 0, sliding_window=1, enable_caching=True)
    seq = Sequence(0, [1, 2, 3, 4])
    admit(held, seq)
    seq.append_token_id(5)
    seq.data.num_computed_tokens = 8
    error = unchanged(held.append_slots, held, given=(seq, 0))
    assert isinstance(error, AssertionError)


def test_the_tokens_of_a_table_can_be_read(backend: Backend) -> None:
    held, seq = manager(backend), Sequence(0, [1, 2, 3])
    admit(held, seq)
    assert held.block_tables[0]._get_all_token_ids() == [1, 2, 3]


def test_a_block_behind_the_hash_of_none_has_no_hash(backend: Backend) -> None:
    blocks = allocator(backend)

    class Hashed(PrefixCachingBlock):
        @property
        def content_hash(self) -> int | None:
            return hash("None")

    for before, is_hashed in ((None, True), (Hashed(None, [], SIZE, blocks), False)):
        block = PrefixCachingBlock(before, [1, 2], SIZE, blocks)
        assert (block.content_hash is not None) is is_hashed
    assert PrefixCachingBlock._none_hash == hash("None")


class Engine:
    """The state of an engine beside its manager."""

    class Device(enum.Enum):
        CPU = 1
        GPU = 2

    class Place(enum.Enum):
        GPU = 1

    class AllocStatus(enum.Enum):
        NEVER = 1
        LATER = 2
        OK = 3


def test_engines_keep_their_own_enumerations(backend: Backend) -> None:
    held = manager(backend, 2, 2)
    for size, name in ((2, "OK"), (4, "OK"), (5, "NEVER")):
        answer: Any = held.can_allocate(SequenceGroup("r", [Sequence(0, list(range(size)))]))
        assert [each.name for each in Engine.AllocStatus if each == answer] == [name]
        assert hash(answer) == hash(Engine.AllocStatus[name])
    gpu: Any = Engine.Device.GPU
    assert gpu == GPU != Device.CPU
    assert gpu != Engine.Place.GPU
    assert Engine.Place.GPU != GPU
    assert held.get_prefix_cache_hit_rate(gpu) == -1
    assert held.reset_prefix_cache(gpu)
    with pytest.raises(KeyError, match="Place"):
        held.get_prefix_cache_hit_rate(Engine.Place.GPU)  # type: ignore[arg-type] # on purpose


@pytest.mark.parametrize("kind", ["naive", "prefix_caching"])
def test_blocks_that_know_nothing_of_time_or_totals_say_so(backend: Backend, kind: str) -> None:
    tiers = two_tiers(backend, kind=kind)
    null, block = (
        tiers.allocate_or_get_null_block(),
        NaiveBlock(None, [1], SIZE, tiers.allocator(GPU)),
    )
    unknown: list[Callable[[], object]] = [
        lambda: null.num_tokens_total,
        lambda: block.num_tokens_total,
        lambda: block.last_accessed,
        lambda: setattr(block, "last_accessed", 1.0),
    ]
    if kind == "naive":
        unknown += [lambda: null.last_accessed]
    else:
        null.last_accessed = 7.0
        assert null.last_accessed == 7.0
    for call in unknown:
        with pytest.raises(NotImplementedError):
            call()


def test_managers_are_found_by_the_name_of_a_configuration() -> None:
    find = BlockSpaceManager.get_block_space_manager_class
    assert find("SelfAttn") is SelfAttnBlockSpaceManager
    make: Any = find("placeholder")
    placeholder = make(block_size=4)
    group = SequenceGroup("r", [Sequence(0, [1])])
    assert placeholder.can_allocate(group) == AllocStatus.OK
    assert (placeholder.append_slots(group.seqs[0], 0), placeholder.swap_out(group)) == ([], None)
    with pytest.raises(ValueError, match="'other'"):
        find("other")


def test_a_block_may_name_another_one_that_is_copied(backend: Backend) -> None:
    naive = two_tiers(backend, kind="naive").allocator(GPU)
    held = naive.allocate_mutable_block(None)
    naive.fork(held)
    block = NaiveBlock(None, [], SIZE, naive, held.block_id, held, 5)
    block.append_token_ids([1])
    assert (block.block_id, held.block_id, naive.clear_copy_on_writes()) == (1, 1, [(0, 1)])


def test_what_waits_for_nothing_raises_as_an_empty_list_does(backend: Backend) -> None:
    held, running = manager(backend), Sequence(0, [1], status=SequenceStatus.RUNNING)
    group = SequenceGroup("idle", [running])
    for call in (held.can_allocate, held.allocate):
        error = unchanged(call, held, given=(group,))
        assert isinstance(error, IndexError)
        assert "'idle'" in str(error)


def test_a_wrong_device_is_a_key_that_is_not_there(backend: Backend) -> None:
    tiers: Any = two_tiers(backend)
    for device in (None, "GPU", 1):
        for call in (tiers.get_num_free_blocks, tiers.get_num_total_blocks):
            error = unchanged(call, tiers, given=(device,))
            assert isinstance(error, KeyError)
            assert repr(device) in str(error)


def encoder_group(
    name: str, num_tokens: int, num_encoder: int
) -> tuple[SequenceGroup, list[Sequence]]:
    """Return a group of two decoder sequences of one prompt, and an encoder."""
    seqs = [Sequence(seq_id, list(range(num_tokens))) for seq_id in (0, 1)]
    return SequenceGroup(name, seqs, Sequence(7, list(range(num_encoder)))), seqs


def test_an_encoder_has_blocks_of_its_own(backend: Backend) -> None:
    held = manager(backend, 8, 4)
    group, seqs = encoder_group("r", 3, 5)
    assert held.can_allocate(group) is AllocStatus.OK
    held.free_cross(group)
    with pytest.raises(AssertionError, match="'r' has no blocks of an encoder"):
        held.get_cross_block_table(group)
    held.allocate(group)
    assert [held.get_block_table(seq) for seq in seqs] == [[0, 1], [0, 1]]
    assert held.get_cross_block_table(group) == [2, 3, 4]
    assert list(held.cross_block_tables) == ["r"]
    again = SequenceGroup("r", [Sequence(3, [1])], Sequence(8, [1]))
    error = unchanged(held.allocate, held, given=(again,))
    assert isinstance(error, AssertionError)
    assert "block table already exists" in str(error)
    for seq in seqs:
        held.free(seq)
    assert held.get_num_free_gpu_blocks() == 5
    held.free_cross(group)
    held.free_cross(group)
    assert (held.get_num_free_gpu_blocks(), held.cross_block_tables) == (8, {})
    silent = SequenceGroup("s", [Sequence(4, [])], Sequence(9, []))
    held.allocate(silent)
    assert held.get_cross_block_table(silent) == []


def test_admission_counts_the_encoder_s_blocks(backend: Backend) -> None:
    held = manager(backend, 6, 0, watermark=0.2)
    for num_encoder, answer in ((6, AllocStatus.OK), (7, AllocStatus.NEVER)):
        assert held.can_allocate(encoder_group("r", 3, num_encoder)[0]) is answer
    held.allocate(SequenceGroup("one", [Sequence(9, [1])]))
    group, _ = encoder_group("r", 3, 6)
    assert held.can_allocate(group) is AllocStatus.LATER
    held.allocate(SequenceGroup("two", [Sequence(8, [1])]))
    error = unchanged(held.allocate, held, given=(group,))
    assert isinstance(error, NoFreeBlocksError)
    assert "request 'r' with its encoder: 5 blocks are needed, 4 of 6 are free" in str(error)
    held.allocate(encoder_group("r", 3, 4)[0])
    assert held.get_num_free_gpu_blocks() == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sliding_window": 4}, STR_NOT_IMPL_ENC_DEC_SWA),
        ({"enable_caching": True}, STR_NOT_IMPL_ENC_DEC_PREFIX_CACHE),
    ],
)
def test_encoders_go_with_neither_windows_nor_caching(
    backend: Backend, options: dict[str, Any], text: str
) -> None:
    held = manager(backend, **options)
    for call in (held.can_allocate, held.allocate):
        error = unchanged(call, held, given=(encoder_group("r", 3, 5)[0],))
        assert isinstance(error, NotSupported)
        assert isinstance(error, NotImplementedError)
        assert str(error) == text
        assert error.fields["request"] == "r"
        call(SequenceGroup("r", [Sequence(4, [1])]))


def test_groups_of_engines_without_encoders_need_not_say_so(backend: Backend) -> None:
    class Group:
        request_id = "r"

        def get_seqs(self, status: object = None) -> list[Sequence]:
            return [Sequence(0, [1])] if status == SequenceStatus.WAITING else []

    held = manager(backend)
    assert held.can_allocate(Group()) is AllocStatus.OK
    held.allocate(Group())
    assert held.cross_block_tables == {}


@pytest.mark.parametrize("enable_caching", [False, True])
def test_a_sequence_that_is_swapped_out_does_not_grow(
    backend: Backend, enable_caching: bool
) -> None:
    held, seq = manager(backend, 4, 4, enable_caching=enable_caching), Sequence(0, [1, 2, 3])
    group = admit(held, seq)
    held.swap_out(group)
    seq.append_token_id(4)
    assert held.append_slots(seq, 0) == []  # the last block has room
    seq.append_token_id(5)
    for call, given in (
        (held.append_slots, (seq, 0)),
        (held.block_tables[0].ensure_num_empty_slots, (1,)),
    ):
        error = unchanged(call, held, given=given)
        assert isinstance(error, AssertionError)
        assert "a table of 2 blocks on the CPU cannot grow by 1" in str(error)
    held.free(seq)
    assert (held.get_num_free_gpu_blocks(), held.get_num_free_cpu_blocks()) == (4, 4)


@pytest.mark.parametrize("kind", ["naive", "prefix_caching"])
def test_an_object_that_is_named_twice_is_freed_once(backend: Backend, kind: str) -> None:
    tiers = two_tiers(backend, kind=kind)
    gpu = tiers.allocator(GPU)
    block = tiers.allocate_immutable_block(None, [1, 2], GPU)
    gpu.fork(block)
    calls: list[Callable[[], object]] = [
        lambda: gpu.swap_out([block, block]),
        lambda: tiers.swap([block, block], GPU, Device.CPU),
        lambda: tiers.free_all([block, block]),
    ]
    for call in calls:
        error = unchanged(call, tiers, block)
        assert isinstance(error, AssertionError)
        assert "an object of block 0 with 2 tokens is given 2 times" in str(error)
    gpu.swap_out([block])
    error = unchanged(gpu.swap_in, tiers, block, given=([block, block],))
    assert isinstance(error, AssertionError)
    assert gpu.refcounter.get(0) == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"num_gpu_blocks": "x"}, "num_gpu_blocks is 'x'"),
        ({"num_gpu_blocks": None}, "num_gpu_blocks is None"),
        ({"num_cpu_blocks": 2.5}, "num_cpu_blocks is 2.5"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks is -1"),
        ({"block_size": "4"}, "block_size is '4'"),
        ({"watermark": None}, "watermark is None"),
        ({"watermark": "x"}, "watermark is 'x'"),
        ({"watermark": float("inf")}, "watermark is inf"),
        ({"watermark": -0.5}, "watermark -0.5 is below 0"),
        ({"sliding_window": 2.5}, "sliding_window is 2.5"),
        ({"sliding_window": -1}, "sliding_window is -1"),
    ],
)
def test_sizes_that_are_none_are_told_by_name(
    backend: Backend, given: dict[str, Any], text: str
) -> None:
    sizes = {"block_size": 4, "num_gpu_blocks": 4, "num_cpu_blocks": 4, **given}
    with pytest.raises(KvcoreError, match=text):
        SelfAttnBlockSpaceManager(**sizes, backend=backend)


def test_a_window_of_no_tokens_keeps_two_blocks(backend: Backend) -> None:
    assert manager(backend, sliding_window=0).max_block_sliding_window == 2


def test_naive_blocks_are_not_asked_when_they_were_used(backend: Backend) -> None:
    two_tiers(backend, kind="naive").mark_blocks_as_accessed([0, 99], 1.0)
    caching: Any = two_tiers(backend)
    assert isinstance(unchanged(caching.mark_blocks_as_accessed, given=([99], 1.0)), KeyError)
    with pytest.raises(AssertionError, match="None"):
        caching.get_prefix_cache_hit_rate(None)


@pytest.mark.parametrize("enable_caching", [False, True])
def test_slots_ahead_alone_copy_nothing(backend: Backend, enable_caching: bool) -> None:
    held = manager(backend, 3, 0, enable_caching=enable_caching)
    seqs = [Sequence(seq_id, [1, 1, 1]) for seq_id in (0, 1)]
    admit(held, *seqs)
    assert held.append_slots(seqs[0], 2) == []
    assert [held.get_block_table(seq) for seq in seqs] == [[0, 1, 2], [0, 1]]
    seqs[1].append_token_id(1)
    error = unchanged(held.append_slots, held, given=(seqs[1], 0))
    assert isinstance(error, NoFreeBlocksError)


def test_totals_do_not_hang_on_who_looked_when(backend: Backend) -> None:
    totals = []
    for looks in (False, True):
        held, seq = manager(backend, enable_caching=True), Sequence(0, [1, 2, 3])
        admit(held, seq)
        held.append_slots(seq, 5)
        if looks:
            assert [block.num_tokens_total for block in held.block_tables[0].blocks] == [2, 3, 3, 3]
        for token in (4, 5):
            seq.append_token_id(token)
            held.append_slots(seq, 0)
        totals.append([block.num_tokens_total for block in held.block_tables[0].blocks])
    assert totals == [[2, 4, 5, 5]] * 2
