# SPDX-License-Identifier: Apache-2.0
"""Blocks by contents: stories, misuse, cost, and both backends against asking one by one.

Several keys at once have what the same keys have one behind the other, by the calls of
`kvcore.legacy.blocks.tiers` alone; a call that is refused or raises changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Allocate, Evict, SwapIn, SwapOut, Touch
from kvcore.legacy.blocks import by_key
from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.blocks.tiers import make_tiers
from kvcore.pool.priority_eviction import NEVER
from kvcore.types.errors import (
    InvalidKey,
    KvcoreError,
    NoHostTier,
    NoOwner,
    UnknownBlock,
    WrongArgument,
)
from kvcore.types.keys import KEY_SIZE
from kvcore.types.values import Outcome, Reason, Refused
from tests.conftest import Backend, need_twin
from tests.core.test_cost import LARGE, SMALL, count_steps
from tests.helpers.misuse import check_error

A, B, C = (letter * KEY_SIZE for letter in (b"a", b"b", b"c"))
NUM_BLOCKS = 5


def ranked(backend: Backend, num_blocks: int = 4) -> Backing:
    """Empty ranked blocks of two tiers."""
    return Backing(num_blocks, 2, eviction="ranked", backend=backend)


def test_what_is_found_is_shared_and_what_is_not_is_new(backend: Backend) -> None:
    backing = ranked(backend)
    assert backing.find_or_take([A, B, None], [2, 4, 5]) == ((0, 1, 2), (0, 1, 2), ())
    backing.rank([1], 7.0)
    backing.release([1])
    backing.take_batch()
    assert backing.find_or_take([A, B, A, C], [2, 4, 2, 4]) == ((0, 1, 0, 3), (3,), (1,))
    assert list(backing.take_batch()) == [Touch(1), Allocate(3)]
    assert backing.owners_of([C, A, b"d" * KEY_SIZE, B]) == (1, 3, None, 1)
    assert backing.ref_counts([2, 0, 2]) == (1, 3, 1)
    assert (backing.rank_of(1), backing.rank_of(2)) == ((NEVER, 4), (NEVER, 0))
    backing.release([1])
    assert backing.owners_of([B]) == (0,)


def test_a_content_is_new_where_it_was_evicted_for_one_before_it(backend: Backend) -> None:
    backing = ranked(backend, 2)
    backing.find_or_take([A, B], [2, 4])
    backing.release([0, 1])
    backing.take_batch()
    # Block 1 ends the longer chain, so it leaves first; then block 0 leaves for what was in 1.
    assert backing.find_or_take([C, B], [2, 4]) == ((1, 0), (1, 0), ())
    evicted = [Evict(1, B), Allocate(1), Evict(0, A), Allocate(0)]
    assert list(backing.take_batch()) == evicted


def test_what_does_not_fit_takes_nothing(backend: Backend) -> None:
    backing = ranked(backend, 3)
    backing.find_or_take([A, B], [2, 4])
    backing.release([1])
    before = backing.state()
    later, never = Refused(Reason.LATER, 3, 2), Refused(Reason.NEVER, 4, 2)
    assert backing.find_or_take([A, None, B, C, C], [2] * 5) == later
    assert backing.find_or_take([None, None, B, C], [2] * 4) == never
    assert backing.state() == before
    backing.take(1)
    assert backing.find_or_take([None, None], [2] * 2) == Refused(Reason.LATER, 2, 1)
    backing.release([2])
    assert backing.find_or_take([B, A, B, None], [4, 2, 4, 5]) == ((1, 0, 1, 2), (2,), (1,))


def test_pairs_are_copied_to_either_tier(backend: Backend) -> None:
    backing = ranked(backend)
    backing.take(2)
    backing.take(2, "host")
    backing.take_batch()
    backing.copy_pairs([1, 0], [0, 1], "host")
    backing.copy_pairs([1], [1], "device")
    backing.copy_pairs([], [], "device")
    assert list(backing.take_batch()) == [SwapOut(1, 0), SwapOut(0, 1), SwapIn(1, 1)]


LENGTHS = "integers from 0 to 2147483647"
HOST = {"tier": "host"}
ROWS: list[tuple[KvcoreError, str, tuple[Any, ...]]] = [
    (InvalidKey(size=2, expected=KEY_SIZE), "find_or_take", ([None, b"no"], [1, 1])),
    (InvalidKey(size=0, expected=KEY_SIZE), "owners_of", ([A, b""],)),
    *(
        (WrongArgument(name="lengths", expected=LENGTHS, value=repr(length)), "find_or_take", args)
        for length in (-1, 2**31, 10**30, "1", np.int64(-1), np.uint64(2**31), np.float32(1.0))
        for args in (([None, A], [1, length]), ([C], [length], "host"))
    ),
    *(
        (
            WrongArgument(name="lengths", expected="a length for each of 2 keys", value=count),
            "find_or_take",
            ([A, None], [1] * int(count)),
        )
        for count in ("1", "3")
    ),
    (UnknownBlock(block=9, first=0, last=3), "ref_counts", ([0, 9],)),
    (UnknownBlock(block="1", first=0, last=1, **HOST), "ref_counts", ([0, "1"], "host")),
    (UnknownBlock(block=-1, first=0, last=3), "rank_of", (-1,)),
    (UnknownBlock(block=2, first=0, last=1, **HOST), "rank_of", (2, "host")),
    (NoOwner(block=3), "copy_pairs", ([0, 3], [0, 1], "host")),
    (NoOwner(block=1, **HOST), "copy_pairs", ([0, 0], [0, 1], "device")),
    (UnknownBlock(block=4, first=0, last=3), "copy_pairs", ([4], [1], "host")),
    (
        WrongArgument(name="host_blocks", expected="a host block for each of 2 blocks", value="1"),
        "copy_pairs",
        ([0, 0], [0], "host"),
    ),
    *(
        (WrongArgument(name="tier", expected="'device' or 'host'", value="'gpu'"), name, args)
        for name, args in (
            *(("find_or_take", ([b"no"], [], "gpu")), ("owners_of", ([b"no"], "gpu"))),
            *(("ref_counts", ([9], "gpu")), ("rank_of", (9, "gpu"))),
            ("copy_pairs", ([9], [], "gpu")),
        )
    ),
]


@pytest.mark.seed("X-14")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{type(row[0]).__name__} {row[1]}")
def test_a_wrong_call_raises_a_typed_error_and_changes_nothing(
    row: tuple[KvcoreError, str, tuple[Any, ...]], backend: Backend
) -> None:
    error, name, args = row
    backing = ranked(backend)
    backing.find_or_take([A, B], [2, 4])
    backing.release([1])
    backing.take(1, "host")
    before = backing.state()
    with pytest.raises(KvcoreError) as caught:
        getattr(backing, name)(*args)
    check_error(caught.value, error)
    assert backing.state() == before


def test_without_a_host_tier_there_is_nothing_to_ask_it(backend: Backend) -> None:
    backing = Backing(2, eviction="ranked", backend=backend)
    backing.take(1)
    for name, args in (
        *(("find_or_take", ([], [], "host")), ("owners_of", ([], "host"))),
        *(("ref_counts", ([], "host")), ("rank_of", (0, "host"))),
        ("copy_pairs", ([0], [0], "device")),
    ):
        with pytest.raises(NoHostTier):
            getattr(backing, name)(*args)


def test_blocks_of_other_policies_have_no_rank(backend: Backend) -> None:
    backing = Backing(2, 1, backend=backend)
    assert backing.find_or_take([A], [9]) == ((0,), (0,), ())
    backing.release([0])
    assert backing.find_or_take([A, None], [9, 9]) == ((0, 1), (1,), (0,))
    assert backing.rank_of(0) == (NEVER, 0)


STORY: list[tuple[str, tuple[Any, ...]]] = [
    ("find_or_take", ([A, None, B], [2, 3, 4])),
    ("find_or_take", ([A, None], [2, 3], "host")),
    ("copy_pairs", ([0, 1], [0, 1], "host")),
    ("owners_of", ([A, B, C],)),
    ("ref_counts", ([0, 2],)),
    ("rank_of", (0,)),
]


def test_a_call_takes_the_same_steps_whatever_the_tiers() -> None:
    own = {name for name, each in vars(by_key).items() if callable(each) and name.islower()}
    calls = {name for name in own if getattr(by_key, name).__module__ == by_key.__name__}
    assert {name for name, _ in STORY} == {name for name in calls if not name.startswith("_")}
    figures = []
    for size in (SMALL, SMALL, LARGE):  # once for what Python caches on a first use
        state, steps = make_tiers(size, size, eviction="ranked"), []
        for name, args in STORY:
            steps.append(count_steps(partial(getattr(by_key, name), state, *args)))
            outcome = getattr(by_key, name)(state, *args)
            state = outcome.state if isinstance(outcome, Outcome) else state
        figures.append(steps)
    assert figures[1] == figures[2]


def one_by_one(backing: Backing, keys: list[bytes | None], lengths: list[int], tier: Any) -> Any:
    """What `find_or_take` gives, by the other calls; None where blocks ran out on the way."""
    placed: tuple[list[int], list[int], list[int]] = ([], [], [])
    blocks, taken, revived = placed
    for key, length in zip(keys, lengths, strict=True):
        block = None if key is None else backing.lookup(key, tier)
        if block is None:
            fresh = backing.take(1, tier)
            if isinstance(fresh, Refused):
                return None
            (block,) = fresh
            taken.append(block)
            if key is not None:
                backing.publish(block, key, tier)
                backing.rank([block], None, length, tier)
        else:
            if not backing.ref_count(block, tier):
                revived.append(block)
            backing.touch([block], tier)
            if block in revived:
                backing.rank([block], NEVER, None, tier)
        blocks.append(block)
    return tuple(map(tuple, placed))


letters = st.lists(st.sampled_from([A, B, C, b"d" * KEY_SIZE, None]), max_size=5)
steps = st.tuples(
    letters,
    st.lists(st.integers(0, 3), min_size=5, max_size=5),
    st.sampled_from(["device", "device", "host"]),
    st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4),
    st.sampled_from([None, 0.0, 1.0, 2.0]),
)


@given(st.lists(steps, max_size=25))
def test_several_keys_have_what_one_behind_the_other_has(story: list[Any]) -> None:
    need_twin()
    pure, plain = ranked("python", NUM_BLOCKS), ranked("python", NUM_BLOCKS)
    twin = ranked("rust", NUM_BLOCKS)
    for keys, lengths, tier, freed, time in story:
        args = (keys, lengths[: len(keys)], tier)
        before = pure.state()
        placed = pure.find_or_take(*args)
        assert twin.find_or_take(*args) == placed
        if isinstance(placed, Refused):
            assert pure.state() == before
            return
        assert one_by_one(plain, *args) == placed
        known = [key for key in keys if key is not None]
        assert twin.owners_of(known, tier) == pure.owners_of(known, tier)
        last = 2 if tier == "host" else NUM_BLOCKS
        there = [block for block in freed if block < last]
        assert twin.ref_counts(there, tier) == pure.ref_counts(there, tier)
        for backing in (pure, twin, plain):
            if time is not None:
                backing.rank(there, time, None, tier)
            for block in there:
                if backing.ref_count(block, tier):
                    backing.release([block], tier)
        assert twin.state() == pure.state() == plain.state()
        assert [twin.rank_of(each, tier) for each in there] == [
            pure.rank_of(each, tier) for each in there
        ]
