# SPDX-License-Identifier: Apache-2.0
"""What code that was written for V0 does with it, beyond what the facts say of each call."""

from __future__ import annotations

import pytest

from kvcore.legacy.null_block import NullBlock
from kvcore.legacy.sequences import Sequence
from tests.conftest import Backend
from tests.helpers.legacy_v0 import admit, manager, unchanged


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
