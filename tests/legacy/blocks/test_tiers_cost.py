# SPDX-License-Identifier: Apache-2.0
"""The cost of a call on two tiers does not grow with their size: counted, as in test_cost.py.

`clear_index` and `free_blocks` are O(pool) and O(free blocks) by design. A cached block that is
freed walks past the free blocks of higher priority, of which there are none if times rise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from kvcore.legacy.blocks import tiers
from kvcore.legacy.blocks.tiers import Tiers, make_tiers
from kvcore.pool.block_pool import PoolEviction
from kvcore.types.keys import KEY_SIZE
from kvcore.types.values import Outcome
from tests.core.test_cost import LARGE, PATH_BYTES_MAX, SMALL, count_steps, peak_bytes

T = TypeVar("T")
A, B, C = (letter * KEY_SIZE for letter in (b"a", b"b", b"c"))

# Every transition and question but the two that may walk.
STORY: list[tuple[str, tuple[Any, ...]]] = [
    ("take", (4,)),
    ("take", (2, "host")),
    ("publish", (0, A)),
    ("publish_all", ([1], [B])),
    ("publish", (2, A)),
    ("touch", ([0, 1],)),
    ("lookup_prefix", ([A, B, C],)),
    ("admit", ([0, 1], 1, [A, B])),
    ("release", ([0, 1],)),
    ("set_priority", ([0, 1, 2], 1.0, 16)),
    ("copy", (0,)),
    ("copy_out", (3, 1)),
    ("copy_in", (1, 3)),
    ("release", ([0, 1, 2, 1],)),
    ("take_batch", ()),
    ("set_priority", ([1], 2.0)),
    ("lookup", (A,)),
    ("num_free", ("host",)),
    ("ref_count", (1, "device")),
    ("ref_counts", ([0, 1],)),
    ("key_of", (1,)),
    ("release", ([9],)),
    ("touch", ([1],)),
    ("set_priority", ([1], 3.0, 32)),
    ("release", ([1],)),
    ("unpublish", (1,)),
    ("release", ([0, 1], "host")),
    ("take", (LARGE + 1,)),
    ("take_batch", ()),
]
WALKS = {"clear_index", "free_blocks"}


def perform(state: Tiers, name: str, args: tuple[Any, ...]) -> Tiers:
    """Return the tiers after one call; misuse and questions leave them unchanged."""
    try:
        outcome = getattr(tiers, name)(state, *args)
    except ValueError:
        return state
    return outcome.state if isinstance(outcome, Outcome) else state


def measure(
    num_blocks: int, eviction: PoolEviction, meter: Callable[[Callable[[], object]], T]
) -> list[tuple[str, T]]:
    """Return the meter's reading for each call of the story."""
    figures = []
    state = make_tiers(num_blocks, num_blocks, eviction=eviction)
    for name, args in STORY:
        figures.append((name, meter(partial(perform, state, name, args))))
        state = perform(state, name, args)
    return figures


def test_the_story_has_every_call_but_those_that_walk() -> None:
    source = {name for name, each in vars(tiers).items() if callable(each) and name.islower()}
    own = {name for name in source if getattr(tiers, name).__module__ == tiers.__name__}
    calls = {name for name in own if not name.startswith("_")} - {"make_tiers", "check_options"}
    assert {name for name, _ in STORY} == calls - WALKS


@pytest.mark.parametrize("eviction", ["lru", "uncached_first", "priority"])
def test_a_call_takes_the_same_steps_whatever_the_tiers(eviction: PoolEviction) -> None:
    measure(SMALL, eviction, count_steps)  # what Python caches on a first use is cached now
    small, large = (measure(size, eviction, count_steps) for size in (SMALL, LARGE))
    for (name, steps), (_, more) in zip(small, large, strict=True):
        assert steps == more, f"{name} takes other steps in the larger tiers"


@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_a_call_copies_paths_and_never_a_column(eviction: PoolEviction) -> None:
    small, large = (measure(size, eviction, peak_bytes) for size in (SMALL, LARGE))
    for (name, num_bytes), (_, more) in zip(small, large, strict=True):
        assert more < num_bytes + PATH_BYTES_MAX, f"{name} takes {num_bytes} and {more} bytes"


def evicted_by_priority(num_blocks: int) -> Tiers:
    """Make tiers of policy "priority" whose blocks all have an owner and a key."""
    state = perform(make_tiers(num_blocks, eviction="priority"), "take", (num_blocks,))
    for block in range(num_blocks):
        state = perform(state, "publish", (block, block.to_bytes(KEY_SIZE, "little")))
    return state


def test_a_release_walks_past_only_those_of_higher_priority() -> None:
    def cost(num_cached: int, time: float) -> int:
        """Count the steps of freeing a block used at this time; the others were used at 1."""
        state = perform(
            evicted_by_priority(num_cached + 2), "set_priority", (range(num_cached), 1.0)
        )
        state = perform(state, "set_priority", ([num_cached], time))
        state = perform(state, "set_priority", ([num_cached + 1], 2.0))
        for blocks in (range(num_cached), [num_cached + 1]):
            state = perform(state, "release", (blocks,))
        return count_steps(partial(perform, state, "release", ([num_cached],))).total()

    assert cost(8, 1.0) == cost(64, 1.0)
    assert cost(64, 0.5) > cost(8, 0.5) + 56


@pytest.mark.parametrize("direction", [1, -1])
def test_a_chain_is_freed_one_by_one_in_steps_that_do_not_grow(direction: int) -> None:
    state = evicted_by_priority(130)
    state = perform(state, "set_priority", (range(128), 2.0))
    for block in range(128):
        state = perform(state, "set_priority", ([block], None, 16 * (block + 1)))
    state = perform(state, "set_priority", ([128], 1.0))
    state = perform(state, "set_priority", ([129], 3.0))
    state = perform(state, "release", ([128, 129],))
    totals = []
    for block in range(128)[::direction]:
        totals.append(count_steps(partial(perform, state, "release", ([block],))).total())
        state = perform(state, "release", ([block],))
    assert max(totals[8:]) <= max(totals[:8]) + 16
    assert list(tiers.free_blocks(state)) == [128, *range(127, -1, -1), 129]
