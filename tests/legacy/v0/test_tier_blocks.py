# SPDX-License-Identifier: Apache-2.0
"""Several contents of V0 at once: what is found, what is new, what is evicted on the way."""

from __future__ import annotations

from kvcore import Allocate, Evict, Touch
from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.v0.tier_blocks import TierBlocks
from kvcore.pool.priority_eviction import NEVER
from kvcore.types.keys import KEY_SIZE
from tests.conftest import Backend

A, B, C = (letter * KEY_SIZE for letter in (b"a", b"b", b"c"))


def blocks_of(backend: Backend, num_blocks: int) -> TierBlocks:
    """Return blocks that are named as in the core."""
    backing = Backing(num_blocks, 2, eviction="priority", backend=backend)
    return TierBlocks(backing, "device", range(num_blocks))


def test_what_is_found_is_shared_and_what_is_not_is_new(backend: Backend) -> None:
    blocks = blocks_of(backend, 4)
    assert blocks.find_or_take([A, B, None], [2, 4, 5]) == ([0, 1, 2], [0, 1, 2], [])
    blocks.set_priority([1], 7.0)
    blocks.release([1])
    blocks.backing.take_batch()
    assert blocks.find_or_take([A, B, A, C], [2, 4, 2, 4]) == ([0, 1, 0, 3], [3], [1])
    assert list(blocks.backing.take_batch()) == [Touch(1), Allocate(3)]
    assert blocks.owners_of([C, A, b"d" * KEY_SIZE, B]) == [1, 3, None, 1]
    assert (blocks.priority_of(1), blocks.priority_of(2)) == ((NEVER, 4), (NEVER, 0))
    blocks.release([1])
    assert blocks.owners_of([B]) == [0]


def test_a_content_is_new_if_it_was_evicted_for_one_before_it(backend: Backend) -> None:
    blocks = blocks_of(backend, 2)
    blocks.find_or_take([A, B], [2, 4])
    blocks.release([0, 1])
    blocks.backing.take_batch()
    # Block 1 ends the longer chain, so it leaves first; then block 0 leaves for what was in 1.
    assert blocks.find_or_take([C, B], [2, 4]) == ([1, 0], [1, 0], [])
    evicted = [Evict(1, B), Allocate(1), Evict(0, A), Allocate(0)]
    assert list(blocks.backing.take_batch()) == evicted


def test_one_content_takes_one_block(backend: Backend) -> None:
    blocks = blocks_of(backend, 2)
    assert blocks.find_or_take([C, C, C], [2] * 3) == ([0, 0, 0], [0], [])
    assert blocks.ref_counts([0, 1]) == (3, 0)


def test_what_does_not_fit_takes_nothing(backend: Backend) -> None:
    blocks = blocks_of(backend, 3)
    blocks.find_or_take([A, B], [2, 4])
    blocks.release([1])
    before = blocks.backing.state()
    assert blocks.find_or_take([A, None, B, C, C], [2] * 5) == 3
    assert blocks.find_or_take([None, None, B, C], [2] * 4) == 4
    assert blocks.backing.state() == before
    blocks.take(1)
    assert blocks.find_or_take([None, None], [2] * 2) == 2
    blocks.release([2])
    assert blocks.find_or_take([B, A, B, None], [4, 2, 4, 5]) == ([1, 0, 1, 2], [2], [1])
