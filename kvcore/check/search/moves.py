# SPDX-License-Identifier: Apache-2.0
"""What an engine does at once: moves of a few calls that belong together.

Rules: a prompt is admitted or forgotten again, with all its tokens and its longest hit; a waiting
request is resumed with all of them, too. A finished request is freed and forgotten. What a world
names besides (cuts, swaps, drafts, loads, stores, pins) is tried call by call. Twin: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvcore.check.search.actions import (
    Children,
    actions,
    block_calls,
    cuts,
    draft_calls,
    fresh_name,
    known_children,
    loads,
    next_tokens,
    prompts,
    swaps,
)
from kvcore.check.world.world import Move, Script, World
from kvcore.oracle.prefixes import Prefixes
from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call
from kvcore.transitions.queries import get_computed_blocks
from kvcore.types.values import Hit, Refused, Request, Status


def moves(
    world: World, state: State, prefixes: Prefixes, *, every_letter: bool = False
) -> Iterator[Call | Move]:
    """Every move of a world in a state, in a fixed order."""
    if callable(world.moves):
        yield from world.moves(world, state)
    elif world.moves == "calls":
        yield from actions(world, state, prefixes, every_letter=every_letter)
    else:
        children = None if every_letter else known_children(state, prefixes)
        yield from engine_moves(world, state, children)


def engine_moves(world: World, state: State, children: Children | None) -> Iterator[Call | Move]:
    """What an engine can do in a state, in a fixed order."""
    requests = sorted(state.requests.values(), key=lambda request: request.row)
    fresh = fresh_name(world, state)
    room = len(requests) < world.num_requests
    if room and "add_request" in world.calls:
        for prompt in prompts(world, children, ()):
            for kind in world.kinds_of_requests:
                request = Request(fresh, list(prompt), **kind)
                yield Move("admit", partial(admit, world, request))
    for request_state in requests:
        yield from _moves_of(world, state, request_state, children)
        if room and "fork" in world.calls and request_state.status is Status.RUNNING:
            yield Call("fork", (request_state.request_id, fresh))
    yield from swaps(world, requests)
    yield from block_calls(world, state)
    if "reset_prefix_cache" in world.calls:
        yield Call("reset_prefix_cache")


def admit(world: World, request: Request) -> Script:
    """Add a request and schedule all its tokens; forget it again where that is refused."""
    added = yield Call("add_request", (request,))
    call = schedule_rest(world, added.state, added.state.requests[request.request_id])
    scheduled = yield call
    if isinstance(scheduled.value, Refused):
        yield Call("remove_request", (request.request_id,))


def finish(request_id: str) -> Script:
    """Free a request and forget it."""
    yield Call("free", (request_id,))
    yield Call("remove_request", (request_id,))


def schedule_rest(world: World, state: State, request: RequestState) -> Call:
    """The call that schedules all tokens and drafts that are left, behind the longest hit, with all
    lookahead slots of the world.
    """
    name, first = request.request_id, request.num_computed
    hit: Hit | None = None
    if not any(request.tables):
        found = get_computed_blocks(state, name)
        hit = found if found.num_tokens else None
        first = found.num_tokens
    left = len(request.tokens) + len(request.drafts) - first
    options = {
        "num_lookahead_tokens": world.num_lookahead,
        "num_encoder_tokens": 0 if request.num_computed else world.num_encoder,
    }
    said = {key: value for key, value in options.items() if value}
    return Call("allocate_slots", (name, left) if hit is None else (name, left, hit), said)


def _moves_of(
    world: World, state: State, request: RequestState, children: Children | None
) -> Iterator[Call | Move]:
    tried, name = world.calls, request.request_id
    running, swapped = request.status is Status.RUNNING, request.status is Status.SWAPPED
    num_tokens, computed = len(request.tokens), request.num_computed
    judged = computed <= num_tokens
    left = computed < num_tokens + len(request.drafts)
    if "allocate_slots" in tried and not swapped and judged and left and not request.num_loading:
        yield schedule_rest(world, state, request)
        if not running:
            hit = get_computed_blocks(state, name)
            yield from loads(world, state, request, [hit if hit.num_tokens else None])
    if "append" in tried and running and computed == num_tokens < world.num_tokens:
        for token in next_tokens(world, children, tuple(request.tokens)):
            yield Call("append", ([name], [token]))
    if running:
        yield from draft_calls(world, request, children)
        yield from cuts(world, state, request)
    if "free" in tried and (running or swapped):
        yield Call("free", (name,))
        if "remove_request" in tried:
            yield Move("finish", partial(finish, name))
    if "remove_request" in tried and not running and not swapped:
        yield Call("remove_request", (name,))
