# SPDX-License-Identifier: Apache-2.0
"""The checker's table of what a property reads covers everything that it reads.

A property of the pools is checked once for each pool, one of requests once for each request: so it
must say the same of the same pools whoever the requests are, and of the same request whatever the
pools hold, of right states and of broken ones. A packed state is the state.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
from msgspec.structs import replace

from kvcore.check.names.digest import Digests
from kvcore.check.names.packed import pack, unpack
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.search.core_model import CoreModel
from kvcore.codec.encode import encode
from kvcore.invariants.pool_and_state import OF_POOLS
from kvcore.invariants.requests import OF_REQUESTS
from kvcore.state.state import RequestMap, State, make_state

WORLDS = ("groups", "host", "drafts", "pins")


def states(name: str, most: int = 60) -> list[State]:
    """Return the first states of a world."""
    model = CoreModel(PROFILES[name].world)
    found = {model.name(start := model.start()): start}
    for node in (waiting := [start]):
        for edge in model.edges(node):
            if found.setdefault(model.name(edge.node), edge.node) is edge.node:
                waiting.append(edge.node)
            if len(found) >= most:
                return waiting
    return waiting


def broken(state: State) -> Iterator[State]:
    """Yield states with errors that no run makes: wrong owners, keys, counts and tokens."""
    pool = state.device
    yield state
    yield replace(state, device=attrs.evolve(pool, ref_counts=pool.ref_counts.set(1, 7)))
    yield replace(state, device=attrs.evolve(pool, keys=pool.keys.set(1, b"k" * 36)))
    yield replace(state, device=attrs.evolve(pool, queue=attrs.evolve(pool.queue, length=9)))
    for name, request in state.requests.items():
        for wrong in (
            replace(request, num_computed=9),
            replace(request, num_cached=tuple(each + 1 for each in request.num_cached)),
            replace(request, tokens=request.tokens[:1]),
            replace(request, tables=tuple(table[::-1] for table in request.tables)),
        ):
            yield replace(state, requests=state.requests.set(name, wrong))


@pytest.mark.parametrize("name", WORLDS)
def test_properties_of_pools_read_no_request(name: str) -> None:
    said = 0
    for state in (each for known in states(name) for each in broken(known)):
        alone = replace(state, requests=RequestMap())
        for holds in OF_POOLS:
            said += bool(list(holds(state)))
            assert list(holds(state)) == list(holds(alone))
    assert said


@pytest.mark.parametrize("name", WORLDS)
def test_properties_of_requests_read_each_by_itself(name: str) -> None:
    empty, said = make_state(PROFILES[name].world.config), 0
    for state in (each for known in states(name) for each in broken(known)):
        ones = [
            replace(empty, requests=RequestMap.of({request.request_id: request}))
            for request in state.requests.values()
        ]
        for holds in OF_REQUESTS:
            said += bool(list(holds(state)))
            assert list(holds(state)) == [found for one in ones for found in holds(one)]
    assert said


@pytest.mark.parametrize("name", WORLDS)
def test_a_packed_state_is_the_state(name: str) -> None:
    for state in states(name):
        again = unpack(state.config, pack(state))
        assert again == state
        assert encode(again) == encode(state)


def test_states_that_differ_have_digests_that_differ() -> None:
    digests, found = Digests(), dict[bytes, State]()
    for state in (each for name in WORLDS[:1] for known in states(name) for each in broken(known)):
        same = found.setdefault(digests.of(state).whole, state)
        assert (same.device, same.requests) == (state.device, state.requests)
    assert len(found) > len(states(WORLDS[0]))
