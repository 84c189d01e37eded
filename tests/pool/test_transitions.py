# SPDX-License-Identifier: Apache-2.0
"""The pool layer alone: Python's functions and the twin's pool agree call by call."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.pool import transitions
from kvcore.pool.block_pool import PoolEviction
from kvcore.pool.transitions import BlockPool, make_pool
from kvcore.types.commands import Command
from kvcore.types.errors import KvcoreError
from kvcore.types.keys import KEY_SIZE
from tests.conftest import need_twin
from tests.pool.twin_pool import Dump, TwinPool

NUM_BLOCKS = 5
KEYS = [bytes([value]) * KEY_SIZE for value in range(3)]


@pytest.fixture(autouse=True, scope="module")
def twin() -> None:
    """Skip the tests without the twin, or fail in CI."""
    need_twin()


ids = st.integers(-1, NUM_BLOCKS)
several = st.lists(ids, max_size=3)
far = st.sampled_from([2**40, 2**70, -(2**70)])
keys = st.sampled_from(KEYS)
times = st.none() | st.sampled_from([-1.0, 0.5, 2.0])
names = st.sampled_from(["touch", "release", "pin", "unpin"])
calls = st.one_of(
    st.tuples(st.just("take"), st.integers(-1, NUM_BLOCKS + 1) | far),
    st.tuples(names, several),
    st.tuples(names, ids.map(lambda block: [block])),
    st.tuples(st.just("publish"), ids, keys),
    st.tuples(st.just("unpublish"), ids),
    st.tuples(st.just("lookup"), keys),
    st.tuples(st.just("set_priority"), several, times, st.none() | st.integers(0, 2)),
    st.just(("clear_index",)),
)
WARM: list[tuple[Any, ...]] = [
    ("take", 4),
    *(("publish", block, KEYS[block - 1]) for block in (1, 2)),
    ("release", [2]),
    ("pin", [3]),
]
stories = st.tuples(st.sampled_from([[], WARM, WARM]), st.lists(calls, max_size=40)).map(
    lambda parts: parts[0] + parts[1]
)
"""From nothing, or from blocks of each kind: owned with a key, free with one, pinned, owned."""


class Pure:
    """Python's pool, driven as the twin's is."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.emitted: list[Command] = []

    def call(self, name: str, *args: Any) -> Any:
        """Run a transition of the pool layer and keep its state."""
        if name == "lookup":
            return transitions.lookup(self.pool, *args)
        outcome = getattr(transitions, name)(self.pool, *args)
        self.pool = outcome.state
        self.emitted += outcome.commands
        return outcome.value

    def dump(self) -> Dump:
        """Return owners, keys, free queue and pins."""
        pool = self.pool
        pins = [pool.pins.get(block, 0) for block in range(pool.num_blocks)]
        return list(pool.ref_counts), list(pool.keys), list(pool.queue), pins


@given(
    null_block=st.booleans(),
    eviction=st.sampled_from(get_args(PoolEviction)),
    story=stories,
)
def test_both_pools_agree_call_by_call(
    null_block: bool, eviction: PoolEviction, story: list[tuple[Any, ...]]
) -> None:
    pure = Pure(make_pool(NUM_BLOCKS, null_block=null_block, eviction=eviction))
    twin = TwinPool(NUM_BLOCKS, null_block=null_block, eviction=eviction)
    for name, *args in story:
        assert answer(pure.call, name, *args) == answer(twin.call, name, *args)
        assert pure.dump() == twin.dump()
        assert pure.emitted == twin.commands()
        pure.emitted.clear()


def answer(call: Any, *args: Any) -> Any:
    """Return the value of a call, or its error as class, fields and message."""
    try:
        return call(*args)
    except KvcoreError as error:
        return type(error), error.fields, str(error)
