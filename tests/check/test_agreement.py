# SPDX-License-Identifier: Apache-2.0
"""Both languages check alike: of each state, and of each damaged one, they name the same breaks.

The twin's properties are a second implementation of the same sentences (`rust/src/check/`). States
of small worlds hold all of them, in both. Then one bit of a state's bytes is changed: if that is a
state at all, it breaks something or not, and both must say the same.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from msgspec.structs import replace
from pyrsistent import pvector

from kvcore import Group, KvcoreError, Request, _twin
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.search.moves import moves
from kvcore.check.search.parity import Parts
from kvcore.check.search.search import check
from kvcore.check.world.world import World
from kvcore.codec.decode import decode
from kvcore.codec.encode import encode
from kvcore.invariants import pool_and_state
from kvcore.oracle.prefixes import Prefixes
from kvcore.pool.free_queue import make_free_queue
from kvcore.state.state import RequestMap, State, make_state
from kvcore.trace.calls import Call, Misuse, perform
from tests.check.worlds import CHUNKS, WINDOW, world
from tests.conftest import need_twin
from tests.helpers.stories import admit, make

STATES = (Group(2), Group(2, kind="state"))
WORLDS = {
    "basic": world(2, 2, 3),
    "windows": world(4, 2, 4, groups=(Group(2), WINDOW), num_prompt=3, without=("fork",)),
    "chunks": world(4, 2, 3, groups=(Group(1), CHUNKS), without=("fork",)),
    "host": world(2, 2, 3, "swap_out", "swap_in", num_host_blocks=2, without=("fork",)),
    "drafts": world(2, 1, 4, "add_drafts", "accept", num_prompt=2, num_drafts=2),
    "loads": world(3, 2, 4, "load", "store", num_prompt=3, without=("fork",)),
    "external": world(2, 2, 2, groups=(Group(1),), num_external=1, moves_per_batch=2),
    "encoder": world(
        4,
        2,
        3,
        groups=(Group(2), Group(2, kind="cross_attention")),
        enable_caching=False,
        num_encoder=2,
    ),
    "levels": PROFILES["retention"].world,
    "named pins": PROFILES["prefix-pins-swap"].world,
    "states": PROFILES["states"].world,
    "marked states": PROFILES["states-marks"].world,
    "tails": PROFILES["tails-groups"].world,
    "salts": world(2, 2, 2, kinds_of_requests=({}, {"cache_salt": "s"}), without=("fork",)),
}
IN_FLIGHT = {
    "scheduled": world(4, 3, 4, "truncate", max_in_flight=2),
    "completed": world(4, 3, 4, max_in_flight=1, publish="completed", duplicates="merge"),
    "states in flight": world(6, 2, 4, groups=STATES, max_in_flight=2, publish="completed"),
    "external in flight": world(4, 3, 4, "truncate", num_external=2, max_in_flight=2),
    "host in flight": world(
        4, 3, 4, "swap_out", "swap_in", "load", num_host_blocks=4, max_in_flight=2
    ),
}
NUM_MET, NUM_STATES, NUM_DAMAGED = 1000, 150, 500
NEVER_DECODED = {"FQ-UNIQ", "IDX-SOUND", "IDX-COMPLETE", "RANK-ORDER"}
"""Properties that bytes cannot break: the free queue and the index are rebuilt from them."""


class Enough(BaseException):
    """Raised once enough states were met; a search takes an Exception for a finding."""


@functools.cache
def reached(name: str) -> dict[bytes, None]:
    """Return the first states of a world, with open batches, in the order of first meeting."""
    found, parts = dict[bytes, None](), Parts()

    def meet(*step: Any) -> None:
        found.setdefault(encode(step[2].state, parts))
        if len(found) == NUM_MET:
            raise Enough

    with contextlib.suppress(Enough):
        check(WORLDS[name], watch=meet, max_states=250, properties=["NOCRASH"])
    return found


def walked(where: World, seed: int) -> dict[bytes, None]:
    """Return encoded states, some with batches in flight, from a random walk."""
    choose = random.Random(seed)
    state, prefixes = make_state(where.config), Prefixes(where.config)
    found = {encode(state): None}
    while len(found) < NUM_STATES:
        prefixes.learn(state)
        found_moves = moves(where, state, prefixes)
        possible = [each for each in found_moves if isinstance(each, Call)]
        call = choose.choice([*possible[:1], *time_calls(state), choose.choice(possible)])
        outcome = perform(state, call)
        if not isinstance(outcome.value, Misuse):
            state = outcome.state
            found[encode(state)] = None
    return found


def time_calls(state: State) -> Iterator[Call]:
    """Yield calls that take, complete and cancel batches, and complete operations."""
    yield Call("take_batch")
    for batch in state.in_flight:
        yield Call("complete", (batch.number,))
    if len(state.in_flight) > 1:
        yield Call("cancel", (state.in_flight[-1].number,))
    for number in state.operations:
        yield Call("complete_operation", (number, number % 3 > 0))


def breaks(data: bytes) -> tuple[str, ...]:
    """Return the names of the properties that fail in a state, or of the error that it causes."""
    try:
        state = decode(data)
    except KvcoreError as error:
        return (type(error).__name__,)
    return tuple(name for name, holds in pool_and_state.PROPERTIES.items() if any(holds(state)))


def breaks_by_twin(data: bytes) -> tuple[str, ...]:
    """Return the same from the twin."""
    try:
        return tuple(_twin.check_state(data))
    except KvcoreError as error:
        return (type(error).__name__,)


def damaged(data: bytes, choose: random.Random) -> bytes:
    """Return a state's bytes with one of the low bits of one byte changed."""
    place = choose.randrange(80, len(data))
    changed = data[place] ^ 1 << choose.randrange(3)
    return data[:place] + bytes([changed]) + data[place + 1 :]


def agree(states: dict[bytes, None], seed: int) -> Counter[str]:
    """Ask both about states and about damaged ones. Returns how often each name came."""
    said: Counter[str] = Counter()
    choose = random.Random(seed)
    kept = choose.sample(list(states), min(NUM_STATES, len(states)))
    for data in kept:
        assert breaks_by_twin(data) == breaks(data) == ()
    for _ in range(NUM_DAMAGED):
        data = damaged(choose.choice(kept), choose)
        names = breaks(data)
        assert breaks_by_twin(data) == names, data.hex()
        said.update(names)
    return said


@pytest.fixture(scope="module")
def said() -> Counter[str]:
    """Return all results of this file."""
    need_twin()
    return Counter()


@pytest.mark.parametrize("name", WORLDS)
def test_both_languages_name_the_same_breaks(name: str, said: Counter[str]) -> None:
    found = agree(reached(name), 11)
    assert found.total() > NUM_DAMAGED // 3
    said.update(found)


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_both_languages_name_the_same_breaks_in_flight(name: str, said: Counter[str]) -> None:
    where = IN_FLIGHT[name]
    states = walked(where, 14)
    waits = [len(decode(data).device.quarantine or ()) for data in states]
    assert any(waits), "no block waits in any state"
    said.update(agree(states, 14))


@pytest.mark.parametrize("name", WORLDS)
def test_both_languages_name_what_whole_fields_break(name: str, said: Counter[str]) -> None:
    parts = Parts()
    for data in list(reached(name))[:100]:
        for state in torn(decode(data)):
            changed = encode(state, parts)
            names = breaks(changed)
            assert breaks_by_twin(changed) == names
            said.update(names)


def torn(state: State) -> Iterator[State]:
    """Yield states with one field taken from another state."""
    queue = make_free_queue(state.device.num_blocks, list(state.device.queue)[:-1])
    yield replace(state, device=attrs.evolve(state.device, queue=queue))
    older = make_free_queue(state.device.num_blocks, state.device.queue, num_older=1)
    first = attrs.evolve(state.config, epoch=1)  # of which nothing is older
    yield replace(state, config=first, epoch=1, device=attrs.evolve(state.device, queue=older))
    if len(state.rows):
        yield replace(state, free_rows=state.free_rows.append(0))
    for name, request in state.requests.items():
        if state.config.has_states:
            yield replace(state, batch=replace(state.batch, ends=pvector([name])))
        for changed in (
            replace(request, num_computed=0),
            replace(request, tables=request.tables[::-1]),
            replace(request, tokens=request.tokens[:1]),
        ):
            yield replace(state, requests=state.requests.set(name, changed))


def test_requests_share_a_block_by_equal_hashes_of_their_own_alone() -> None:
    need_twin()
    manager = make("python")
    for name, first in (("one", 0), ("other", 10)):  # other tokens, and equal hashes
        manager.add_request(Request(name, range(first, first + 4), block_hashes=[b"h" * 32]))
        admit(manager, name)
    state = manager.state()
    assert state.requests["one"].tables[0][0] == state.requests["other"].tables[0][0]
    assert breaks_by_twin(encode(state)) == breaks(encode(state)) == ()
    other = state.requests["other"]
    other = replace(other, block_hashes=other.block_hashes.set(0, b"x" * 32))
    aliased = encode(replace(state, requests=state.requests.set("other", other)))
    assert "NO-ALIAS" in breaks(aliased)
    assert breaks_by_twin(aliased) == breaks(aliased)


def test_requests_that_share_a_block_are_compared_with_who_counts_most_of_it() -> None:
    need_twin()
    manager = make("python")
    manager.add_request(Request("one", range(4)))
    admit(manager, "one")
    manager.take_batch()
    for child in ("two", "three"):
        manager.fork("one", child)
    state = manager.state()
    assert breaks(encode(state)) == ()
    requests = dict(state.requests)
    tokens = pvector([9, *requests["three"].tokens[1:]])
    # The first row counts none of the block, so it differs from nobody.
    requests["one"] = replace(requests["one"], num_computed=0)
    requests["three"] = replace(requests["three"], tokens=tokens)
    aliased = encode(replace(state, requests=RequestMap.of(requests)))
    assert "NO-ALIAS" in breaks(aliased)
    assert breaks_by_twin(aliased) == breaks(aliased)


def test_nearly_every_property_was_broken_somewhere(said: Counter[str]) -> None:
    assert set(pool_and_state.PROPERTIES) - set(said) <= NEVER_DECODED


def test_a_cached_block_without_its_parent_is_found_behind_the_same_calls() -> None:
    need_twin()
    where = world(3, 2, 4, "evict_blocks", num_letters=1, moves_per_batch=2, without=("fork",))
    found = [
        check(where, backend=each, properties=["PREFIX-CLOSED"]).violation
        for each in ("python", "rust")
    ]
    python, rust = found
    assert python is not None
    assert rust is not None
    assert (python.name, python.detail) == (rust.name, rust.detail)
    assert [str(each) for each in python.calls] == [str(each) for each in rust.calls]
