# SPDX-License-Identifier: Apache-2.0
"""V0's trackers of sequences: their hashes, and the times of their last use."""

from __future__ import annotations

import pytest

from kvcore.legacy.v0.interfaces import Device
from kvcore.legacy.v0.prefix_caching_block import ComputedBlocksTracker, LastAccessBlocksTracker
from kvcore.legacy.v0.sequences import Sequence
from tests.conftest import Backend
from tests.legacy.v0.small import full, two_tiers, unchanged


@pytest.mark.seed("S002-59")
def test_cached_tokens_are_those_of_leading_cached_blocks(backend: Backend) -> None:
    tiers = two_tiers(backend)
    tracker = ComputedBlocksTracker(tiers, 2, True)
    assert tracker.get_num_cached_tokens(Sequence(1, [1, 1, 2, 2, 3])) == 0
    tiers.allocate_immutable_blocks(None, full(1, 2), Device.GPU)
    tiers.mark_blocks_as_computed([])
    assert tracker.get_num_cached_tokens(Sequence(2, [1, 1, 2, 2, 3])) == 4
    assert tracker.get_num_cached_tokens(Sequence(3, [1, 1, 2])) == 2
    assert tracker.get_num_cached_tokens(Sequence(4, [1])) == 0
    off = ComputedBlocksTracker(tiers, 2, False)
    assert off.get_num_cached_tokens(Sequence(5, [1, 1, 2, 2])) == 0


@pytest.mark.seed("S002-60")
def test_hashes_grow_with_the_sequence_and_are_the_allocator_s(backend: Backend) -> None:
    tiers = two_tiers(backend)
    tracker = ComputedBlocksTracker(tiers, 2, True)
    seq = Sequence(1, [1, 1, 2], extra_hash=8)
    tracker.get_num_cached_tokens(seq)
    known = tracker._seq_id_to_blocks_hashes[1]
    assert len(known) == 1
    for token in (2, 3, 3):
        seq.append_token_id(token)
    tracker.get_num_cached_tokens(seq)
    chain = tiers.allocate_immutable_blocks(None, full(1, 2, 3), Device.GPU, extra_hash=8)
    assert known == [block.content_hash for block in chain]
    assert tracker._seq_id_to_blocks_hashes[1] is known
    other = tiers.allocator(Device.CPU).allocate_immutable_blocks(None, full(1, 2, 3))
    assert known != [block.content_hash for block in other]


@pytest.mark.seed("S002-61")
def test_in_prefill_the_first_answer_stays_and_in_decode_it_is_asked_anew(
    backend: Backend,
) -> None:
    tiers = two_tiers(backend)
    tracker = ComputedBlocksTracker(tiers, 2, True)
    seq = Sequence(1, [1, 1, 2, 2])
    assert seq.is_prefill()
    assert tracker.get_num_cached_tokens(seq) == 0
    tiers.allocate_immutable_blocks(None, full(1, 2), Device.GPU)
    tiers.mark_blocks_as_computed([])
    assert tracker.get_num_cached_tokens(seq) == 0
    seq.data.num_computed_tokens = 4
    assert not seq.is_prefill()
    assert tracker.get_num_cached_tokens(seq) == 4
    # What decode found is what a sequence that computes its prompt again is told.
    seq.data.num_computed_tokens = 0
    tiers.reset_prefix_cache()
    assert tracker.get_num_cached_tokens(seq) == 4


@pytest.mark.seed("S002-62")
def test_a_sequence_that_lost_tokens_is_an_error(backend: Backend) -> None:
    tracker = ComputedBlocksTracker(two_tiers(backend), 2, True)
    tracker.get_num_cached_tokens(Sequence(7, [1, 1, 2, 2]))
    shorter = Sequence(7, [1, 1, 2])
    error = unchanged(lambda: tracker.get_num_cached_tokens(shorter), tracker)
    assert isinstance(error, AssertionError)
    assert "sequence 7 has 3 tokens, 4 were hashed" in str(error)


@pytest.mark.seed("S002-63")
def test_a_sequence_is_removed_once_after_it_was_asked_for(backend: Backend) -> None:
    tiers = two_tiers(backend)
    ComputedBlocksTracker(tiers, 2, False).remove_seq(1)
    tracker = ComputedBlocksTracker(tiers, 2, True)
    error = unchanged(lambda: tracker.remove_seq(1), tracker)
    assert isinstance(error, AssertionError)
    assert "sequence 1 is not tracked" in str(error)
    tracker.get_num_cached_tokens(Sequence(1, [1, 1]))
    tracker.remove_seq(1)
    assert not tracker.tracks(1)
    assert isinstance(unchanged(lambda: tracker.remove_seq(1), tracker), AssertionError)
    # Half a record is none.
    tracker._seq_id_to_blocks_hashes[2] = []
    assert isinstance(unchanged(lambda: tracker.remove_seq(2), tracker), AssertionError)


@pytest.mark.seed("S002-64")
def test_last_access_is_told_for_tracked_sequences_that_were_used(backend: Backend) -> None:
    tiers = two_tiers(backend)
    tracker = LastAccessBlocksTracker(tiers)
    block = tiers.allocate_immutable_block(None, [1, 1], Device.GPU)
    assert block.block_id == 0
    tracker.add_seq(5)
    wrong = [
        lambda: tracker.add_seq(5),
        lambda: tracker.remove_seq(6),
        lambda: tracker.update_last_access(6, 1.0),
        lambda: tracker.update_seq_blocks_last_access(6, [0]),
    ]
    for call in wrong:
        error = unchanged(call, tracker)
        assert isinstance(error, AssertionError)
        assert "sequence" in str(error)
    record = tiers.allocator(Device.GPU)._tracker(0)
    tracker.update_seq_blocks_last_access(5, [0])
    assert record.last_accessed == -1
    tracker.update_last_access(5, 3.0)
    assert record.last_accessed == -1
    tracker.update_seq_blocks_last_access(5, [0])
    assert record.last_accessed == 3.0
    tracker.remove_seq(5)
    assert isinstance(unchanged(lambda: tracker.remove_seq(5), tracker), AssertionError)
