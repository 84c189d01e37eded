# SPDX-License-Identifier: Apache-2.0
"""Tables of blocks over tiers: stories on both backends, and what a call costs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvcore.legacy.blocks import by_table
from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.blocks.tiers import Tiers, make_tiers
from kvcore.types.commands import Allocate, CopyOnWrite, Evict, Free, SwapIn, SwapOut
from kvcore.types.keys import KEY_SIZE
from kvcore.types.values import Outcome, Reason, Refused
from tests.conftest import Backend
from tests.core.test_cost import LARGE, SMALL, count_steps

A = b"a" * KEY_SIZE


@pytest.mark.seed("S003-17", "S003-19", "S003-20")
def test_a_table_grows_by_a_block_or_has_its_last_one_copied(backend: Backend) -> None:
    backing = Backing(4, backend=backend)
    assert backing.append([], 1) == 0
    assert backing.append([0], 3) == 1, "a block per call"
    before = backing.state()
    assert backing.append([0, 1], 2) is None
    assert backing.append((0, 1), 1) is None, "more than were asked for"
    assert backing.append([], 0) is None, "nothing is written"
    assert backing.state() == before
    backing.touch([1])
    backing.take_batch()
    assert backing.append([0, 1], 2) == 2
    assert list(backing.take_batch()) == [Allocate(2), CopyOnWrite(1, 2)]
    backing.touch([2, 2])
    assert backing.append([0, 2], 3) == 3
    before = backing.state()
    for num_blocks in (2, 3):
        assert backing.append([0, 2], num_blocks) == Refused(Reason.LATER, 1, 0)
    assert backing.state() == before


@pytest.mark.seed("S003-19", "S003-20", "S003-21")
def test_a_lone_owner_writes_in_place_and_others_to_a_copy(backend: Backend) -> None:
    backing = Backing(3, backend=backend)
    backing.take(1)
    before = backing.state()
    assert backing.own(0) == 0
    assert backing.state() == before
    backing.touch([0])
    backing.take_batch()
    assert backing.own(0) == 1
    assert list(backing.take_batch()) == [Allocate(1), CopyOnWrite(0, 1)]
    backing.publish(1, A)
    assert backing.own(1) == 2, "what can be found is not written"
    assert backing.lookup(A) == 1
    backing.touch([0])
    backing.take(1)
    before = backing.state()
    assert backing.own(0) == Refused(Reason.LATER, 1, 0)
    assert backing.state() == before


@pytest.mark.seed("S003-26", "S003-28")
def test_owners_move_to_one_copy_of_their_block(backend: Backend) -> None:
    backing = Backing(4, 2, backend=backend)
    backing.take(3)
    backing.touch([0, 0])
    backing.publish(1, A)
    backing.take_batch()
    assert backing.move_out([0, 1, 0]) == {0: 0, 1: 1}
    assert [backing.ref_count(block) for block in (0, 1)] == [1, 0]
    assert [backing.ref_count(block, "host") for block in (0, 1)] == [2, 1]
    assert list(backing.take_batch()) == [SwapOut(0, 0), SwapOut(1, 1), Free(1, cached=True)]
    assert backing.lookup(A) == 1, "it is kept where it was"
    assert backing.lookup(A, "host") is None
    before = backing.state()
    assert backing.move_out([2]) == Refused(Reason.LATER, 1, 0)
    assert backing.state() == before
    moved = backing.move_in([1, 0])
    assert not isinstance(moved, Refused)
    assert list(moved.items()) == [(1, 3), (0, 1)]
    assert [backing.ref_count(block, "host") for block in (0, 1)] == [1, 0]
    assert list(backing.take_batch()) == [
        *(Allocate(3), Evict(1, A), Allocate(1)),
        *(SwapIn(1, 3), SwapIn(0, 1)),
    ]
    assert backing.move_out([]) == backing.move_in(()) == {}
    assert not backing.take_batch()


@pytest.mark.seed("S003-26", "S003-28")
def test_a_move_that_can_never_fit_says_so(backend: Backend) -> None:
    backing = Backing(3, 2, backend=backend)
    backing.take(3)
    before = backing.state()
    assert backing.move_out([2, 0, 1]) == Refused(Reason.NEVER, 3, 2)
    assert backing.state() == before


STORY: list[tuple[str, tuple[Any, ...]]] = [
    ("append", ([], 1)),
    ("append", ([0], 1)),
    ("append", ([0], 2)),
    ("own", (0,)),
    ("move_out", ([0, 1],)),
    ("move_in", ([1],)),
]


def test_a_call_takes_the_same_steps_whatever_the_tiers() -> None:
    functions = {name for name, each in vars(by_table).items() if callable(each) and name.islower()}
    own = {name for name in functions if getattr(by_table, name).__module__ == by_table.__name__}
    assert {name for name, _ in STORY} == {name for name in own if not name.startswith("_")}

    def steps(num_blocks: int) -> list[Any]:
        state: Tiers = make_tiers(num_blocks, num_blocks)
        found = []
        for name, args in STORY:
            call = partial(getattr(by_table, name), state, *args)
            found.append(count_steps(call))
            outcome = call()
            assert isinstance(outcome, Outcome)
            state = outcome.state
        return found

    steps(SMALL)  # what Python caches on a first use is cached now
    assert steps(SMALL) == steps(LARGE)
