# SPDX-License-Identifier: Apache-2.0
"""A fair scheduler: first come, first served; the latest request is preempted first.

NO-THRASH is stated for this scheduler: from any state it must finish every request, and between two
new tokens no request starts more than once. It plans one step at a time, and each step is a batch;
requests that the pool can never hold are removed.

Source: row 69 of kvcore/check/mutants/catalogue.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.check.properties.liveness import (
    Unexpected,
    can_grow_to,
    ids,
    made,
    schedule_all,
    settle,
    without_pins,
)
from kvcore.check.world.world import World
from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call, Misuse, perform
from kvcore.types.values import Appended, Refused, Status


def no_thrash(world: World, state: State) -> Iterator[str]:
    """NO-THRASH: a fair scheduler never preempts in a cycle without producing a token."""
    try:
        state = _without_to_come(without_pins(settle(state)))
        idle, known = 0, _num_tokens(state)
        while len(state.requests):
            state = step(world, state)
            now = _num_tokens(state)
            idle = 0 if now != known else idle + 1
            known = now
            if idle > 1 + len(state.requests):
                yield f"{idle} steps without a new token, with {len(state.requests)} requests"
                return
    except Unexpected as error:
        yield str(error)


def step(world: World, state: State) -> State:
    """Make one step: every request goes on in the order of arrival, then the batch is executed."""
    for name in ids(state):
        request = state.requests.get(name)
        if request is None or name not in state.requests:
            continue
        if _is_done(world, state, request):
            state = _gone(state, request)
            continue
        while not _served(state := _tried(state, name), name):
            victim = _latest_running(state, name)
            if victim is None:
                break
            state = made(state, "free", victim)
            if victim == name:
                break
    return _without_to_come(settle(state))


def _tried(state: State, name: str) -> State:
    """Return the state with a request one call further, or unchanged if the call is refused."""
    request = state.requests[name]
    if request.status is Status.SWAPPED:
        call = Call("swap_in", ([name],))
    elif request.num_computed < len(request.tokens) + len(request.drafts):
        call = schedule_all(state, request)
    else:
        call = Call("append", ([name], [0]))
    outcome = perform(state, call)
    if isinstance(outcome.value, Misuse):
        raise Unexpected(f"{call} is misuse: {outcome.value.error}")
    refused = isinstance(outcome.value, Refused) or (
        isinstance(outcome.value, Appended) and not outcome.value.done
    )
    return state if refused else outcome.state


def _served(state: State, name: str) -> bool:
    """Return whether a request goes on in the open batch."""
    request = state.requests[name]
    whole = len(request.tokens) + len(request.drafts)
    return state.batch.scheduled[request.row] is not None and request.num_computed == whole


def _latest_running(state: State, name: str) -> str | None:
    """Return the request to preempt: the last one after this one, else this one if it runs."""
    names = ids(state)
    for each in reversed(names[names.index(name) :]):
        if state.requests[each].status is Status.RUNNING:
            return each
    return None


def _is_done(world: World, state: State, request: RequestState) -> bool:
    finished = request.num_computed >= len(request.tokens) >= world.num_tokens
    longer = min(len(request.tokens) + 1, world.num_tokens)
    return finished or not can_grow_to(state, longer, world.num_encoder)


def _gone(state: State, request: RequestState) -> State:
    if request.status is not Status.WAITING:
        state = made(state, "free", request.request_id)
    return made(state, "remove_request", request.request_id)


def _without_to_come(state: State) -> State:
    """Return the state with all scheduled drafts rejected, and no position to come."""
    for name in ids(state):
        request = state.requests[name]
        if request.num_output_placeholders:
            state = made(state, "truncate", name, len(request.tokens))
        elif request.num_computed > len(request.tokens):
            state = made(state, "accept", name, 0)
    return state


def _num_tokens(state: State) -> tuple[int, int]:
    """Count requests, and all their tokens."""
    return len(state.requests), sum(len(each.tokens) for each in state.requests.values())
