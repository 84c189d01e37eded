# SPDX-License-Identifier: Apache-2.0
"""Stories of the blocks of a facade: about four blocks, on both backends."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.legacy.blocks.blocks import Backing
from kvcore.types.commands import (
    Allocate,
    CopyOnWrite,
    Evict,
    EvictAll,
    Free,
    SwapIn,
    SwapOut,
    Touch,
)
from kvcore.types.errors import InvalidConfig
from kvcore.types.keys import KEY_SIZE
from kvcore.types.values import Reason, Refused
from tests.conftest import Backend

A, B, C = (letter * KEY_SIZE for letter in (b"a", b"b", b"c"))


def cached(backend: Backend, num_cached: int, num_blocks: int = 5) -> Backing:
    """Return blocks of policy "priority": the first are free with keys a, b, c and no priority."""
    backing = Backing(num_blocks, eviction="priority", backend=backend)
    blocks = backing.take(num_cached)
    assert not isinstance(blocks, Refused)
    for block, key in zip(blocks, (A, B, C), strict=False):
        backing.publish(block, key)
    backing.release(list(blocks))
    return backing


@pytest.mark.seed("S002-16", "X-01")
def test_blocks_without_key_leave_lowest_first_and_come_back_to_the_front(backend: Backend) -> None:
    backing = Backing(4, eviction="priority", backend=backend)
    assert backing.take(3) == (0, 1, 2)
    backing.release([1, 0])
    assert backing.free_blocks() == (0, 1, 3)
    assert backing.take(1) == (0,)


@pytest.mark.seed("S002-19", "S002-03", "X-03")
def test_cached_blocks_leave_by_time_then_length_then_id(backend: Backend) -> None:
    backing = cached(backend, 3)
    assert backing.free_blocks() == (3, 4, 0, 1, 2), "lowest id"
    backing.set_priority([0, 1, 2], length=8)
    backing.set_priority([1], length=16)
    assert backing.free_blocks() == (3, 4, 1, 0, 2), "longest chain"
    backing.set_priority([1], time=2.0)
    backing.set_priority([2], time=1.0)
    assert backing.free_blocks() == (3, 4, 0, 2, 1), "never used, then least recent"
    assert backing.take(3) == (3, 4, 0)
    assert [each for each in backing.take_batch() if isinstance(each, Evict)] == [Evict(0, A)]


@pytest.mark.seed("S002-23")
def test_a_block_marked_while_it_is_free_moves_to_its_place(backend: Backend) -> None:
    backing = cached(backend, 3, num_blocks=3)
    backing.set_priority([0, 1, 2], time=1.0)
    backing.set_priority([0], time=5.0)
    assert backing.free_blocks() == (1, 2, 0)
    assert backing.take(3) == (1, 2, 0), "it counted as free, and can be evicted"


def test_a_block_that_is_taken_loses_its_priority(backend: Backend) -> None:
    backing = cached(backend, 2, num_blocks=2)
    backing.set_priority([0], time=1.0, length=4)
    backing.set_priority([1], time=9.0, length=4)
    assert backing.take(2) == (0, 1)
    backing.publish(1, B)
    backing.publish(0, A)
    backing.set_priority([0], time=0.5)
    backing.release([0, 1])
    assert backing.free_blocks() == (1, 0), "of block 1 nothing was said since"


def test_a_free_block_that_loses_its_key_leaves_next(backend: Backend) -> None:
    backing = cached(backend, 3)
    backing.unpublish(1)
    assert backing.free_blocks() == (1, 3, 4, 0, 2)
    backing.unpublish(1)
    backing.unpublish(4)
    assert backing.free_blocks() == (1, 3, 4, 0, 2), "without a key nothing moves"


@pytest.mark.seed("S002-48")
def test_a_cleared_index_frees_cached_blocks_in_the_order_of_eviction_to_the_front(
    backend: Backend,
) -> None:
    backing = cached(backend, 3)
    backing.set_priority([0], time=4.0)
    assert backing.free_blocks() == (3, 4, 1, 2, 0)
    backing.take_batch()
    backing.clear_index()
    assert backing.free_blocks() == (0, 2, 1, 3, 4)
    assert [backing.lookup(key) for key in (A, B, C)] == [None] * 3
    assert list(backing.take_batch()) == [EvictAll()]


@pytest.mark.seed("S003-01", "S003-03", "X-01")
def test_a_stack_takes_the_highest_and_then_what_was_freed_last(backend: Backend) -> None:
    backing = Backing(4, 2, eviction="uncached_first", order="descending", backend=backend)
    assert backing.take(2) == (3, 2)
    backing.release([3])
    backing.release([2])
    assert backing.take(3) == (2, 3, 1)
    assert backing.take(1, "host") == (1,)
    null = Backing(3, null_block=True, order="descending", backend=backend)
    assert null.take(2) == (2, 1)


@pytest.mark.seed("S002-33", "S003-20", "S003-21")
def test_a_copy_is_taken_before_the_owner_leaves(backend: Backend) -> None:
    backing = Backing(3, backend=backend)
    backing.take(1)
    backing.touch([0])
    backing.take_batch()
    assert backing.copy(0) == 1
    assert [backing.ref_count(block) for block in (0, 1)] == [1, 1]
    assert list(backing.take_batch()) == [Allocate(1), CopyOnWrite(0, 1)]
    assert backing.copy(0) == 2
    commands = [Allocate(2), CopyOnWrite(0, 2), Free(0, cached=False)]
    assert list(backing.take_batch()) == commands
    backing.take(1)
    before = backing.state()
    assert backing.copy(1) == Refused(Reason.LATER, 1, 0)
    assert backing.state() == before


@pytest.mark.seed("S002-34")
def test_a_copy_may_go_to_an_evicted_block(backend: Backend) -> None:
    backing = cached(backend, 1, num_blocks=2)
    backing.take(1)
    backing.take_batch()
    assert backing.copy(1) == 0
    commands = [Evict(0, A), Allocate(0), CopyOnWrite(1, 0), Free(1, cached=False)]
    assert list(backing.take_batch()) == commands


@pytest.mark.seed("S003-26", "S003-28")
def test_only_the_copies_of_the_host_tier_are_said(backend: Backend) -> None:
    backing = Backing(2, 2, backend=backend)
    backing.take(1)
    backing.take(2, "host")
    backing.publish(1, A, "host")
    backing.copy_out(0, 1)
    backing.copy_in(1, 0)
    backing.release([1, 0], "host")
    backing.touch([1], "host")
    assert backing.lookup(A, "host") == 1
    assert backing.key_of(1, "host") == A
    batch = backing.take_batch()
    assert list(batch) == [Allocate(0), SwapOut(0, 1), SwapIn(1, 0)]
    assert batch.column("segment").tolist() == [0, 0, 1]
    assert (batch.number, backing.take_batch().number) == (0, 1)


def test_a_hit_keeps_the_content_of_a_free_block(backend: Backend) -> None:
    backing = cached(backend, 1)
    backing.take_batch()
    assert (backing.ref_count(0), backing.key_of(0)) == (0, A)
    assert backing.num_free() == 5
    backing.touch([0, 0])
    assert (backing.ref_count(0), backing.num_free()) == (2, 4)
    assert (backing.ref_count(0), backing.key_of(0)) == (2, A)
    assert (backing.ref_count(4), backing.key_of(4)) == (0, None)
    assert list(backing.take_batch()) == [Touch(0)]


def test_a_pool_refuses_what_it_cannot_give(backend: Backend) -> None:
    backing = Backing(3, 1, backend=backend)
    backing.take(2)
    before = backing.state()
    assert backing.take(2) == Refused(Reason.LATER, 2, 1)
    assert backing.take(4) == Refused(Reason.NEVER, 4, 1)
    assert backing.take(2, "host") == Refused(Reason.NEVER, 2, 1)
    assert backing.state() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_blocks", value) for value in (-1, 2**31, "4", None, 1.5)),
        *(("num_host_blocks", value) for value in (-1, 2**31, "4", None)),
        ("null_block", 1),
        ("eviction", "mru"),
        ("eviction", None),
        ("order", "random"),
    ],
)
def test_tiers_that_cannot_be_are_refused_by_name(field: str, value: Any, backend: Backend) -> None:
    options: dict[str, Any] = {"num_blocks": 4, "backend": backend, field: value}
    with pytest.raises(InvalidConfig, match=f"config {field}={value!r}: must be") as caught:
        Backing(**options)
    assert caught.value.fields["value"] == value


def test_a_null_block_needs_a_block(backend: Backend) -> None:
    with pytest.raises(InvalidConfig, match="from 1 to"):
        Backing(0, null_block=True, backend=backend)
    assert Backing(0, backend=backend).num_free() == 0


def test_an_admission_is_refused_as_a_whole(backend: Backend) -> None:
    backing = Backing(6, null_block=True, backend=backend)
    backing.take(3)
    backing.publish_all([1, 2], [A, B])
    backing.release([1])
    before = backing.state()
    assert backing.admit([1, 2, 1], 3) == Refused(Reason.LATER, 4, 3), "block 1 is one of the free"
    assert backing.admit([1, 2], 4) == Refused(Reason.NEVER, 5, 3)
    assert backing.state() == before
    assert backing.admit([1, 2, 1], 2) == (4, 5)
    assert [backing.ref_count(block) for block in range(1, 6)] == [2, 2, 1, 1, 1]
    assert backing.admit([], 0) == ()
    assert backing.admit([2, 1], 0, [B, A]) == (), "both have the key that they are to have"
    last = [Touch(1), Allocate(4), Allocate(5)]
    assert list(backing.take_batch())[-3:] == last


def test_keys_are_looked_up_to_the_first_miss(backend: Backend) -> None:
    backing = Backing(4, 2, backend=backend)
    backing.take(3)
    backing.publish_all((2, 0), (A, B))
    assert backing.lookup_prefix([B, A, C, A]) == (0, 2)
    assert backing.lookup_prefix([B], "host") == ()
