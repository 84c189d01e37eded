# SPDX-License-Identifier: Apache-2.0
"""Recurrent states on paper: 12 usable blocks, attention and states of four tokens per block."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import Group, KVCacheManager, Request
from kvcore.codec.decode import decode
from kvcore.codec.encode import encode
from kvcore.types.commands import Allocate, CopyOnWrite, Free, SetTable, Zero
from kvcore.types.errors import TooManyTokens
from tests.conftest import Backend
from tests.helpers.stories import make

GROUPS = (Group(4), Group(4, kind="state"))


def make_hybrid(backend: Backend, **options: Any) -> KVCacheManager:
    return make(backend, 13, groups=GROUPS, **options)


def of_states(batch: Any) -> list[Any]:
    """Return the commands of a batch without those of the tables of attention."""
    return [each for each in batch if not isinstance(each, SetTable) or each.group_id]


def test_a_hit_resumes_at_a_checkpoint_and_copies_it(backend: Backend) -> None:
    core = make_hybrid(backend)
    core.add_request(Request("r1", list(range(11))))
    core.allocate_slots("r1", 8)
    assert of_states(core.take_batch()) == [
        *(Allocate(1), Allocate(2), Allocate(3), Zero(3)),
        *(SetTable(0, 1, 0, 0), SetTable(0, 1, 1, 3)),
    ]
    core.allocate_slots("r1", 3)
    assert of_states(core.take_batch()) == [
        *(Allocate(4), Allocate(5), CopyOnWrite(3, 5), SetTable(0, 1, 2, 5)),
    ]
    core.add_request(Request("r2", [*range(10), 99, 98]))
    hit = core.get_computed_blocks("r2")
    assert (hit.num_tokens, hit.blocks.blocks) == (8, ((1, 2), (0, 3)))
    core.allocate_slots("r2", 4, hit)
    assert CopyOnWrite(3, 7) in list(core.take_batch())


def test_the_call_gives_a_state_no_key(backend: Backend) -> None:
    core = make_hybrid(backend)
    core.add_request(Request("r1", list(range(4))))
    core.add_request(Request("r2", list(range(5))))
    core.allocate_slots("r1", 4)
    assert core.get_computed_blocks("r2").num_tokens == 0
    core.take_batch()
    assert core.get_computed_blocks("r2").num_tokens == 4


def test_a_batch_in_flight_publishes_the_state_of_a_request_that_left(backend: Backend) -> None:
    core = make_hybrid(backend, max_in_flight=1, publish="completed", enable_events=True)
    core.add_request(Request("r1", list(range(4))))
    core.allocate_slots("r1", 4)
    number = core.take_batch().number
    core.free("r1")
    assert encode(decode(core.encode())) == core.encode()
    core.complete(number)
    assert list(core.take_batch())[-1] == Free(2, cached=True)


def test_a_cut_of_a_state_leaves_nothing(backend: Backend) -> None:
    core = make_hybrid(backend)
    core.add_request(Request("r1", list(range(4))))
    core.allocate_slots("r1", 4)
    core.take_batch()
    core.truncate("r1", 3)
    assert decode(core.encode()).requests["r1"].num_computed == 0


def test_a_state_that_a_call_marks_is_hit_inside_its_block(backend: Backend) -> None:
    core = make(backend, 13, groups=(Group(4), Group(8, kind="state")), enable_events=True)
    core.add_request(Request("r1", list(range(5))))
    core.add_request(Request("r2", list(range(5))))
    core.allocate_slots("r1", 4, checkpoint=True)
    assert encode(decode(core.encode())) == core.encode()
    assert core.get_computed_blocks("r2").num_tokens == 0
    core.take_batch()
    assert encode(decode(core.encode())) == core.encode()
    hit = core.get_computed_blocks("r2")
    assert (hit.num_tokens, hit.blocks.blocks) == (4, ((1,), (2,)))
    core.take_events()
    core.evict_blocks([2])
    assert list(core.take_events()) == []
    assert core.get_computed_blocks("r2").num_tokens == 0


def test_a_later_call_of_a_batch_takes_the_mark_back(backend: Backend) -> None:
    core = make(backend, 13, groups=(Group(4), Group(8, kind="state")))
    core.add_request(Request("r1", list(range(7))))
    core.allocate_slots("r1", 4, checkpoint=True)
    core.allocate_slots("r1", 2)
    core.take_batch()
    assert not core.has_key(2)


def test_the_token_behind_a_mark_copies_the_state(backend: Backend) -> None:
    """The slot of that token was allocated before, so that nothing else tells that token apart."""
    core = make(backend, 13, groups=(Group(4), Group(8, kind="state")), num_preallocate_tokens=4)
    core.add_request(Request("r1", list(range(4))))
    core.allocate_slots("r1", 4, checkpoint=True)
    state = core.get_block_ids("r1")[1][0]
    core.take_batch()
    core.append(["r1"], [9])
    assert core.has_key(state)
    assert CopyOnWrite(state, core.get_block_ids("r1")[1][0]) in list(core.take_batch())


@pytest.mark.parametrize("chunk", [1, 3, 4, 6, 21])
def test_a_request_copies_one_state_per_interval_and_none_for_those_skipped(
    backend: Backend, chunk: int
) -> None:
    interval, num_tokens = 4, 42
    core = make(backend, 60, groups=(Group(2), Group(interval, kind="state")))
    core.add_request(Request("r", list(range(num_tokens))))
    copies: list[int] = []
    end = 0
    while end < num_tokens:
        start, end = end, min(end + chunk, num_tokens)
        core.allocate_slots("r", end - start)
        batch = core.take_batch()
        attention = -(-end // 2) - -(-start // 2)
        moves = start == 0 or (start - 1) // interval < (end - 1) // interval
        assert [type(each) for each in batch].count(Allocate) == attention + moves
        copies += [end for each in batch if isinstance(each, CopyOnWrite)]
        assert sum(block > 0 for block in core.get_block_ids("r")[1]) <= 2
    places = [(each - 1) // interval for each in copies]
    assert len(places) == len(set(places))
    steps = range(chunk, num_tokens + chunk, chunk)
    reached = {(min(each, num_tokens) - 1) // interval for each in steps}
    assert set(places) == reached - {(min(chunk, num_tokens) - 1) // interval}


def test_a_stop_is_advice_for_a_chunk_of_any_length(backend: Backend) -> None:
    """Only the call that schedules the tokens checks whether the request has that many."""
    core = make_hybrid(backend)
    core.add_request(Request("r", list(range(11))))
    assert core.checkpoint_stop("r", 10**9) == (8, True)
    core.allocate_slots("r", 8)
    core.take_batch()
    assert core.checkpoint_stop("r", 10**9) == (10**9, False)
    with pytest.raises(TooManyTokens):
        core.allocate_slots("r", 10**9)
