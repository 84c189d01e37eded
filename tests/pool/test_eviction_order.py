# SPDX-License-Identifier: Apache-2.0
"""Eviction order: the order of the free queue under both eviction policies."""

from __future__ import annotations

import pytest

from kvcore import Allocate, Evict, Free
from tests.conftest import Backend
from tests.helpers.stories import (
    add,
    admit,
    blocks,
    drop,
    keyed,
    make,
    queue,
    serve,
    step,
    unchanged,
)


@pytest.mark.seed("S001-11", "X-01")
def test_a_fresh_pool_gives_its_lowest_blocks_first(backend: Backend) -> None:
    manager = make(backend, 6)
    assert queue(manager) == [1, 2, 3, 4, 5]
    assert serve(manager, "a", [0, 1, 2]) == [1, 2]
    assert queue(manager) == [3, 4, 5]


def test_without_a_null_block_the_first_block_is_zero(backend: Backend) -> None:
    manager = make(backend, 4, null_block=False)
    assert serve(manager, "a", [0, 1, 2]) == [0, 1]
    assert queue(manager) == [2, 3]


@pytest.mark.seed("S000-37", "S001-12", "S004-12")
def test_the_tail_of_a_freed_request_leaves_before_its_prefix(backend: Backend) -> None:
    manager = make(backend, 6)
    serve(manager, "a", [0, 1, 2, 3, 4])
    step(manager)
    manager.free("a")
    assert queue(manager) == [4, 5, 3, 2, 1]
    assert step(manager)[:3] == [Free(3, False), Free(2, True), Free(1, True)]


@pytest.mark.seed("S001-12", "S004-12", "X-01", "X-03")
def test_what_was_freed_first_leaves_first(backend: Backend) -> None:
    manager = make(backend, 6)
    serve(manager, "a", [0, 1])
    serve(manager, "b", [2, 3])
    step(manager)
    drop(manager, "b")
    drop(manager, "a")
    assert queue(manager) == [3, 4, 5, 2, 1]
    # A hit makes a block the most recently used one.
    serve(manager, "c", [2, 3, 4])
    step(manager)
    drop(manager, "c")
    # c held 2 and 3; its tail block 3 was freed before 2, both behind 1.
    assert queue(manager) == [4, 5, 1, 3, 2]


@pytest.mark.seed("S000-35", "S004-08")
def test_taking_a_cached_block_forgets_its_key(backend: Backend) -> None:
    manager = make(backend, 3)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    drop(manager, "a")
    step(manager)
    key = manager.state().device.keys[1]
    assert key is not None
    # The queue is 2, 1: of two blocks the second has the key.
    assert serve(manager, "b", [7, 8, 9]) == [2, 1]
    assert step(manager)[:3] == [Allocate(2), Evict(1, key), Allocate(1)]
    add(manager, "c", [0, 1, 2])
    assert manager.get_computed_blocks("c").num_tokens == 0


@pytest.mark.seed("S000-41")
def test_forgetting_a_key_leaves_the_block_where_it_is(backend: Backend) -> None:
    manager = make(backend, 6)
    serve(manager, "a", [0, 1, 2, 3, 4])
    serve(manager, "b", [7, 8])
    step(manager)
    manager.free("a")
    manager.evict_blocks([4, 2, 5])  # of b, free and cached, never used
    assert queue(manager) == [5, 3, 2, 1]
    assert keyed(manager) == [1]
    assert blocks(manager, "b") == [4]
    with unchanged(manager):
        manager.evict_blocks([4, 2, 5])


@pytest.mark.seed("X-03")
def test_uncached_blocks_go_to_the_front_if_the_policy_says_so(backend: Backend) -> None:
    manager = make(backend, 6, eviction="uncached_first")
    serve(manager, "a", [0, 1, 2, 3, 4])
    step(manager)
    manager.free("a")
    # Tail first: 3 has no content and goes to the front, then 2 and 1 to the back.
    assert queue(manager) == [3, 4, 5, 2, 1]
    # It is thus the next that is used.
    assert serve(manager, "b", [9]) == [3]


def test_of_several_uncached_blocks_the_one_freed_last_leaves_first(backend: Backend) -> None:
    manager = make(backend, 6, eviction="uncached_first", enable_caching=False)
    serve(manager, "a", [0, 1, 2, 3, 4])
    manager.free("a")
    # 3, then 2, then 1 are put at the front.
    assert queue(manager) == [1, 2, 3, 4, 5]


@pytest.mark.seed("S000-37", "X-04")
def test_blocks_without_caching_are_freed_tail_first_too(backend: Backend) -> None:
    manager = make(backend, 6, enable_caching=False)
    serve(manager, "a", [0, 1, 2, 3, 4])
    manager.free("a")
    assert queue(manager) == [4, 5, 3, 2, 1]


@pytest.mark.seed("S004-19")
def test_the_worked_example_of_the_design_that_all_managers_follow(backend: Backend) -> None:
    """There are ten blocks of four tokens and no null block. Source: S004-19."""
    manager = make(backend, 10, 4, null_block=False)
    assert serve(manager, "0", range(15)) == [0, 1, 2, 3]
    step(manager)
    for token in (15, 16):  # block 3 is full at 16 tokens, the 17th opens block 4
        manager.append(["0"], [token])
        step(manager)
    assert blocks(manager, "0") == [0, 1, 2, 3, 4]
    # Ten tokens in common are two full blocks; the third block differs.
    assert serve(manager, "1", [*range(10), 90, 91, 92, 93]) == [0, 1, 5, 6]
    step(manager)
    manager.free("0")
    assert queue(manager) == [7, 8, 9, 4, 3, 2]
    manager.free("1")
    assert queue(manager) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    step(manager)

    add(manager, "2", [*range(12), *range(100, 117)])
    assert manager.get_computed_blocks("2").blocks.get_block_ids() == ([0, 1, 2],)
    # 29 tokens are eight blocks: three hits, and five from 7, 8, 9, 4, 3 at the front.
    assert admit(manager, "2") == [0, 1, 2, 7, 8, 9, 4, 3]
    assert queue(manager) == [6, 5]
