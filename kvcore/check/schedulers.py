# SPDX-License-Identifier: Apache-2.0
"""A scheduler of one's own: the order of its calls, explored over the production transitions.

Rules: a scheduler is `World.moves`, a function that gives what may happen next in a state: what the
scheduler does, and what the world does to it (arrivals, the end of a request). Every order of that
is explored, and all that the core promises must hold. DEADLOCK-FREE asks whether the scheduler's
own moves ever bring a token, not whether some engine could. Requests keep their names here, since a
scheduler may go by them. Source: bug catalogue, rows 67 to 69. Twin: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace as evolve

from kvcore.calls import Call, perform
from kvcore.check import progress
from kvcore.check.world import Move, Moves, World
from kvcore.drain import take_events, take_stats
from kvcore.encode import encode
from kvcore.errors import InvariantViolation
from kvcore.state import OpenBatch, State

NAME = "SCHEDULER"
STATES_MAX = 300
"""So many states behind one are looked at for a token; more than these count as progress."""


def guarded(moves: Moves) -> Moves:
    """The scheduler; what it raises is an InvariantViolation (SCHEDULER) with the state."""

    def made(world: World, state: State) -> Iterator[Call | Move]:
        try:
            found = list(moves(world, state))
        except Exception as error:
            said = f"the scheduler raised {type(error).__name__}: {error}"
            raise InvariantViolation(NAME, f"{said}, in {summary(state)}") from error
        yield from found

    return made


def summary(state: State) -> str:
    """A state in a few words."""
    requests = sorted(state.requests.values(), key=lambda request: request.row)
    words = [
        f"{each.request_id!r} {each.status.value}, {each.num_computed} of {len(each.tokens)} tokens"
        for each in requests
    ]
    return f"a state with {state.device.num_free} free blocks and {'; '.join(words) or 'nobody'}"


def deadlock_free(world: World, state: State) -> Iterator[str]:
    """DEADLOCK-FREE: while a request is unfinished that the pool can hold, some call makes token
    progress, perhaps after others were preempted.

    Where the world has a scheduler of its own: some of its moves.
    """
    yield from (
        stuck(world, state) if callable(world.moves) else progress.deadlock_free(world, state)
    )


def stuck(world: World, state: State) -> Iterator[str]:
    """Whether no moves of a scheduler lead to a new token, or to the end of a request."""
    if not len(state.requests):
        return
    start = _rested(progress.settle(state))
    seen, waiting = {encode(start)}, [start]
    while waiting:
        here = waiting.pop(0)
        for reached in _behind(world, here):
            if _is_further(start, reached):
                return
            name = encode(reached)
            if name not in seen:
                seen.add(name)
                waiting.append(reached)
        if len(seen) > STATES_MAX:
            return
    yield f"no move of the scheduler ever brings a token, in {summary(start)}"


def _behind(world: World, state: State) -> Iterator[State]:
    assert callable(world.moves)
    for move in world.moves(world, state):
        yield _rested(progress.settle(_moved(move, state)))


def _moved(move: Call | Move, state: State) -> State:
    if isinstance(move, Call):
        return perform(state, move).state
    script: Any = move.script()
    call = next(script, None)
    while call is not None:
        outcome = perform(state, call)
        state = outcome.state
        try:
            call = script.send(outcome)
        except StopIteration:
            break
    return state


def _rested(state: State) -> State:
    drained = take_stats(take_events(state).state).state
    return evolve(drained, batch=OpenBatch(0))


def _is_further(before: State, after: State) -> bool:
    for name, request in before.requests.items():
        known = after.requests.get(name)
        if known is None or len(known.tokens) > len(request.tokens):
            return True
    return False
