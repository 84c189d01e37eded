# SPDX-License-Identifier: Apache-2.0
"""Damaged bytes of batches in flight: a typed error in both languages, nothing half restored."""

from __future__ import annotations

from typing import Any

import pytest
from immutables import Map
from msgspec.structs import replace
from pyrsistent import pvector

from kvcore import KVCacheManager, State
from kvcore.codec.decode import decode
from kvcore.codec.encode import encode
from kvcore.state.batch_records import RequestEntry
from kvcore.types.errors import DamagedState
from kvcore.types.keys import KEY_SIZE
from tests.conftest import Backend
from tests.helpers.stories import make, serve, step

KEY = b"k" * KEY_SIZE
RISE = "the batches in flight are not in ascending order"
FORM = "the blocks in use by a batch are not in canonical form"
NO_REQUEST = "an entry does not belong to a request"


def in_flight(backend: Backend) -> KVCacheManager:
    """Make a pool of ten blocks; batch 0 schedules "a" in row 0 and "b" in row 1, batch 1 "c"."""
    manager = make(backend, max_in_flight=2)
    for request_id, token in (("a", 10), ("b", 20), ("c", 30)):
        serve(manager, request_id, [token, token + 1])
        if request_id != "a":
            step(manager)
    return manager


def check_damaged(manager: KVCacheManager, state: State, reason: str) -> None:
    """Assert that the bytes of a state are refused for a reason, and that nothing changes."""
    before, damaged = manager.encode(), encode(state)
    for core in (lambda: decode(damaged), lambda: manager._core.restore(damaged)):
        with pytest.raises(DamagedState, match=reason):
            core()
    assert manager.encode() == before


def test_unfinished_batches_rise_and_so_do_their_rows(backend: Backend) -> None:
    manager = in_flight(backend)
    state = manager.state()
    first, second = state.in_flight
    assert (first.number, first.rows, second.number) == (0, (0, 1), 1)
    for batches in (
        (second, first),
        (first, replace(second, number=0)),
        (replace(first, rows=(1, 0)), second),
        (replace(first, rows=(0, 0)), second),
    ):
        check_damaged(manager, replace(state, in_flight=batches), RISE)


@pytest.mark.parametrize("block", [10, 11])
def test_a_key_was_given_to_a_block_that_there_is(backend: Backend, block: int) -> None:
    manager = in_flight(backend)
    state = manager.state()
    first, second = state.in_flight
    damaged = replace(first, published_keys=pvector([(block, KEY)]))
    check_damaged(manager, replace(state, in_flight=(damaged, second)), "an id is not below 10")


@pytest.mark.parametrize("row", [0, 9])
def test_a_batch_marks_a_request_once_and_no_other(backend: Backend, row: int) -> None:
    # The bytes name the row of "b", which is 0, as that of "a", or one that is not there.
    manager = in_flight(backend)
    state = manager.state()
    damaged = state.requests.set("b", replace(state.requests["b"], row=row))
    check_damaged(manager, replace(state, requests=damaged), NO_REQUEST)


def test_nothing_is_marked_if_batches_end_as_they_are_taken(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [10, 11])
    state = manager.state()
    marked = replace(state.batch, entries=Map({"a": RequestEntry(0, 0, 0)}))
    check_damaged(manager, replace(state, batch=marked), NO_REQUEST)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"held": ()}, FORM),
        ({"held": (1, 1)}, FORM),
        ({"replaced": [(0, 0), (0, 0)]}, FORM),
        ({"replaced": [(0, 1)]}, "a batch lost places that it does not use"),
        ({"replaced": [(1, 0)]}, "a batch lost places that it does not use"),
    ],
)
def test_a_batch_uses_places_of_the_tables_that_there_are(
    backend: Backend, change: dict[str, Any], reason: str
) -> None:
    manager = in_flight(backend)
    state = manager.state()
    first, second = state.in_flight
    assert first.entries["a"].held == (1,)  # one group, one block
    entries = first.entries.set("a", replace(first.entries["a"], **change))
    damaged = (replace(first, entries=entries), second)
    check_damaged(manager, replace(state, in_flight=damaged), reason)


@pytest.mark.parametrize(
    "samplers",
    [
        ((1, 3), (0, 2)),  # the ends fall
        ((1, 2), (0, 3)),  # the batches fall
        ((0, 2), (3, 3)),  # batch 3 was not opened
        ((0, 1), (1, 3)),  # token 1 is known
        ((0, 2), (1, 4)),  # three positions are computed
        ((0, 2),),  # batch 1 computes the third
        ((0, 2), (0, 3)),
    ],
)
def test_what_is_to_come_is_sampled_in_order(backend: Backend, samplers: Any) -> None:
    manager = make(backend, max_in_flight=2)
    serve(manager, "a", [1, 2])
    step(manager)
    manager.append(["a"])
    step(manager)
    state = manager.state()
    request = state.requests["a"]
    assert request.samplers == ((0, 2), (1, 3))
    damaged = state.requests.set("a", replace(request, samplers=samplers))
    check_damaged(manager, replace(state, requests=damaged), "whose output is to come")
