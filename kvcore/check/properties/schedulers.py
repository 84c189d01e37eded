# SPDX-License-Identifier: Apache-2.0
"""A user's own scheduler: the orders of its calls, explored with the production transitions.

A scheduler is `World.moves`, a function that returns what may happen next in a state: what the
scheduler does, and what happens to it (arrivals, the end of a request). Every order of these moves
is explored, and everything that the core promises must hold. DEADLOCK-FREE asks whether the
scheduler's own moves ever bring a token, not whether those of some engine could. Requests keep
their names here, since a scheduler may depend on them.

Source: rows 67 to 69 of kvcore/check/mutants/catalogue.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import signature
from typing import Any

import attrs

from kvcore.check.properties import liveness
from kvcore.check.world.world import (
    Move,
    Moves,
    Script,
    World,
    by_row,
    closed,
    proceed,
    script_of,
)
from kvcore.codec.encode import encode
from kvcore.state.state import State
from kvcore.trace.calls import Call, Misuse, perform
from kvcore.transitions import TRANSITIONS
from kvcore.types.errors import InvariantViolation

NAME = "SCHEDULER"
STATES_MAX = 300
"""How many states after one are searched for a new token; more count as progress."""


@attrs.frozen
class Guarded:
    """A scheduler whose mistakes are InvariantViolations (SCHEDULER) with the state: an error that
    it raises, a value that is no move, moves without a call, calls that are all misuse, no move at
    the start.
    """

    moves: Moves

    def __call__(self, world: World, state: State) -> Iterator[Call | Move]:
        try:
            found = list(self.moves(world, state))
        except Exception as error:
            raise _wrong(f"raised {type(error).__name__}: {error}", state) from error
        for move in found:
            _check_move(move, state)
        if not found and not (len(state.requests) or len(state.device.index)):
            raise _wrong("has no move", state)
        _check_misuse(found, state)
        for move in found:
            yield move if isinstance(move, Call) else Move(move.name, partial(_script, move, state))


def guarded(moves: Moves) -> Moves:
    """Return the scheduler, guarded once."""
    return moves if isinstance(moves, Guarded) else Guarded(moves)


def _check_move(move: Any, state: State) -> None:
    """Raise InvariantViolation if a value is neither a call of the core nor a move."""
    if isinstance(move, Move):
        if not callable(move.script):
            raise _wrong(f"gives the move {move.name!r}, whose script is not a function", state)
        return
    if not isinstance(move, Call):
        raise _wrong(f"gives {move!r}, which is neither a Call nor a Move", state)
    if move.name not in TRANSITIONS:
        raise _wrong(f"calls {move.name}, which the core does not have", state)
    try:
        signature(TRANSITIONS[move.name]).bind(state, *move.args, **move.options)
    except TypeError as error:
        raise _wrong(f"calls {move} with wrong arguments: {error}", state) from error


def _check_misuse(found: list[Call | Move], state: State) -> None:
    """Raise InvariantViolation if only misuse can happen in a state at rest."""
    at_rest = not (any(state.batch.scheduled) or state.in_flight or len(state.operations))
    if not found or not at_rest or not all(isinstance(move, Call) for move in found):
        return
    wrong: list[str] = []
    for move in found:
        assert isinstance(move, Call)
        try:
            value = perform(state, move).value
        except Exception:  # a crash is reported where the call is made
            return
        if not isinstance(value, Misuse):
            return
        wrong.append(f"{move} is {value.error}")
    raise _wrong(f"has only moves that are misuse: {wrong[0]}", state)


def _script(move: Move, state: State) -> Script:
    """Yield the calls of a move, each checked before it is made."""
    script: Any = None
    outcome, num_calls = None, 0
    while True:
        try:
            script = move.script() if script is None else script
            call = script.send(outcome)
        except StopIteration:
            break
        except Exception as error:
            said = f"raised {type(error).__name__}: {error}, in its move {move.name!r}"
            raise _wrong(said, state) from error
        _check_move(call, state)
        num_calls += 1
        outcome = yield call
        state = outcome.state
    if not num_calls:
        raise _wrong(f"gives the move {move.name!r}, which makes no call", state)


def _wrong(said: str, state: State) -> InvariantViolation:
    return InvariantViolation(NAME, f"the scheduler {said}, in {summary(state)}")


def summary(state: State) -> str:
    """Describe a state in a few words."""
    words = [
        f"{each.request_id!r} {each.status.value}, {each.num_computed} of {len(each.tokens)} tokens"
        for each in by_row(state)
    ]
    return (
        f"a state with {state.device.num_free} free blocks and {'; '.join(words) or 'no request'}"
    )


def deadlock_free(world: World, state: State) -> Iterator[str]:
    """DEADLOCK-FREE: while the pool can hold some unfinished request, a call gives one of them a
    token, if need be after others were preempted.

    Where the world has a scheduler of its own: some of its moves.
    """
    yield from (
        stuck(world, state) if callable(world.moves) else liveness.deadlock_free(world, state)
    )


def stuck(world: World, state: State) -> Iterator[str]:
    """Yield the fault if no moves of a scheduler lead to a new token, or end a request."""
    if not len(state.requests):
        return
    start = closed(liveness.settle(state))
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
    yield f"no move of the scheduler ever produces a token, in {summary(start)}"


def _behind(world: World, state: State) -> Iterator[State]:
    assert callable(world.moves)
    for move in world.moves(world, state):
        yield closed(liveness.settle(_moved(move, state)))


def _moved(move: Call | Move, state: State) -> State:
    script = script_of(move)
    call: Call | None = next(script, None)
    while call is not None:
        outcome = perform(state, call)
        state = outcome.state
        call = proceed(script, outcome)
    return state


def _is_further(before: State, after: State) -> bool:
    for name, request in before.requests.items():
        known = after.requests.get(name)
        if known is None or len(known.tokens) > len(request.tokens):
            return True
    return False
