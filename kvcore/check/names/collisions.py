# SPDX-License-Identifier: Apache-2.0
"""The second request of a hash collision.

A search meets two contents of one hash in two different runs, and reports only the second. So that
a generated test fails by itself, the first is searched among all requests that the world can add,
by the hashes that the core gives them now.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

from kvcore.check.world.model import Violation
from kvcore.check.world.world import World
from kvcore.oracle.prefixes import Letter, Prefixes
from kvcore.state.state import RequestState, State, make_state
from kvcore.trace.calls import Call, Misuse, perform
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Request

COLLISIONS = ("HASH-INJ", "KEY-SEP")
NAME = "other"
TRIES = 5_000


def other_request(violation: Violation, world: World) -> Request | None:
    """Return a request that collides with one of a violation's; None if the violation is not a
    collision, or contains both requests.
    """
    if violation.name not in COLLISIONS or not violation.steps:
        return None
    prefixes = Prefixes(world.config)
    last = violation.steps[-1].outcome.state
    try:
        for step in violation.steps:
            prefixes.learn(step.outcome.state)
    except InvariantViolation:
        return None
    blocks = [
        each for request in last.requests.values() for each in _blocks(request, prefixes, last)
    ]
    known = dict(blocks)
    for request in islice(_requests(world), TRIES):
        outcome = perform(make_state(world.config), Call("add_request", (request,)))
        if isinstance(outcome.value, Misuse):
            continue
        added = outcome.state.requests[NAME]
        for block_hash, letters in _blocks(added, prefixes, outcome.state):
            if known.get(block_hash, letters) != letters:
                return request
    return None


def _blocks(
    request: RequestState, prefixes: Prefixes, state: State
) -> Iterator[tuple[bytes, tuple[Letter, ...]]]:
    """Yield each block hash of a request, with the content that it should stand for."""
    size, letters = state.config.hash_block_size, prefixes.letters(request)
    for position, block_hash in enumerate(request.block_hashes):
        yield block_hash, letters[: (position + 1) * size]


def _requests(world: World) -> Iterator[Request]:
    """Yield every request that a world can add, shorter ones first."""
    for count in range(1, world.num_prompt + 1):
        for tokens in product(range(world.num_letters), repeat=count):
            for kind in world.kinds_of_requests:
                yield Request(NAME, list(tokens), **kind)
