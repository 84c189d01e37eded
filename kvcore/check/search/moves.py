# SPDX-License-Identifier: Apache-2.0
"""The moves that an exploration tries in a state: single calls, or the moves of an engine.

An engine admits a prompt with all its tokens after its longest hit, or removes it again; it resumes
a waiting request with all its tokens, too; it frees a finished request and removes it. What a world
names besides (cuts, swaps, drafts, loads, stores, pins) is tried call by call. What an engine must
not do is left out: until the verdict on a request's scheduled drafts, the only calls on the request
are those that bring the verdict or free it. Twin: rust/src/check/search/moves.rs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import partial

from kvcore.check.properties.liveness import schedule_all
from kvcore.check.search.actions import (
    Children,
    allocations,
    block_calls,
    continuations,
    cuts,
    draft_calls,
    fresh_name,
    hash_calls,
    known_children,
    loads,
    next_tokens,
    prefix_pins,
    swaps,
)
from kvcore.check.world.world import Move, Script, World, by_row
from kvcore.oracle.prefixes import Prefixes
from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call
from kvcore.transitions.queries import get_computed_blocks
from kvcore.types.values import Refused, Request, Status

TO_COME = "num_output_placeholders"
EPOCHS_MAX = 2
"""The last epoch that a world reaches."""
TIME_MAX = 2
"""The last ms that a world reaches."""


def moves(
    world: World, state: State, prefixes: Prefixes, *, every_letter: bool = False
) -> Iterator[Call | Move]:
    """Yield every move of a world in a state, in a fixed order.

    every_letter: try prompts and tokens of each letter; used if tokens are not renamed.
    """
    if callable(world.moves):
        yield from world.moves(world, state)
        return
    children = None if every_letter else known_children(state, prefixes)
    requests = by_row(state)
    fresh = fresh_name(world, state)
    room = len(requests) < world.num_requests
    if room and "add_request" in world.calls:
        for prompt in continuations(world, children, (), world.num_prompt):
            for kind in world.kinds_of_requests:
                request = Request(fresh, list(prompt), **kind)
                if world.moves == "engine":
                    yield Move("admit", partial(_admit, world, request))
                else:
                    yield Call("add_request", (request,))
    for each in requests:
        yield from _moves_of(world, state, each, children)
        if room and "fork" in world.calls and each.status is Status.RUNNING:
            yield Call("fork", (each.request_id, fresh))
    yield from swaps(world, requests)
    yield from block_calls(world, state)
    yield from prefix_pins(world, state)
    if "reset_prefix_cache" in world.calls:
        yield Call("reset_prefix_cache")
    if "advance_epoch" in world.calls and state.epoch < EPOCHS_MAX:
        yield Call("advance_epoch")
    levels = state.device.retention
    if "tick" in world.calls and levels is not None and levels.now < TIME_MAX:
        yield Call("tick", (levels.now + 1,))


def _admit(world: World, request: Request) -> Script:
    """Add a request and schedule all its tokens; remove it again if that is refused."""
    added = yield Call("add_request", (request,))
    known = added.state.requests[request.request_id]
    scheduled = yield schedule_all(added.state, known, world)
    if isinstance(scheduled.value, Refused):
        yield Call("remove_request", (request.request_id,))


def _finish(request_id: str) -> Script:
    """Free a request and remove it."""
    yield Call("free", (request_id,))
    yield Call("remove_request", (request_id,))


def _moves_of(
    world: World, state: State, request: RequestState, children: Children | None
) -> Iterator[Call | Move]:
    tried, name, engine = world.calls, request.request_id, world.moves == "engine"
    running, waiting = request.status is Status.RUNNING, request.status is Status.WAITING
    num_tokens, computed = len(request.tokens), request.num_computed
    if "allocate_slots" in tried and (running or waiting) and computed <= num_tokens:
        yield from (_resume if engine else allocations)(world, state, request)
    full = num_tokens >= world.num_tokens
    in_batch = state.batch.scheduled[request.row] is not None
    if "append" in tried and running and computed == num_tokens and not (full or in_batch):
        for token in next_tokens(world, children, tuple(request.tokens)):
            yield Call("append", ([name], [token]))
    if "add_tokens" in tried and running and not request.drafts and not full:
        for token in next_tokens(world, children, tuple(request.tokens)):
            yield Call("add_tokens", (name, [token]))
    if "add_block_hashes" in tried:
        yield from hash_calls(world, request)
    if running:
        yield from draft_calls(world, request, children)
        yield from cuts(world, state, request)
    if "free" in tried and not waiting:
        yield Call("free", (name,))
        if engine and "remove_request" in tried:
            yield Move("finish", partial(_finish, name))
    if "remove_request" in tried and waiting:
        yield Call("remove_request", (name,))


def ahead_calls(world: World, state: State, awaited: Container[str]) -> Iterator[Call]:
    """Yield the calls that schedule positions whose tokens are to come: after output that a request
    awaits, or drafts after its last token.
    """
    most = world.num_output_placeholders
    for request in by_row(state):
        name, computed = request.request_id, request.num_computed
        num_tokens = len(request.tokens)
        if request.num_loading or request.drafts or request.status is Status.SWAPPED:
            continue
        if num_tokens > computed:
            known = schedule_all(state, request, world)
            for count in range(1, min(most - 1, world.num_tokens - num_tokens) + 1):
                args = (name, known.args[1] + count, *known.args[2:])
                yield Call("allocate_slots", args, {**known.options, TO_COME: count})
        elif name in awaited and grows(world, state, request):
            yield Call("append", ([name],))
            for count in range(2, min(most, world.num_tokens - computed) + 1):
                yield Call("allocate_slots", (name, count), {TO_COME: count})


def grows(world: World, state: State, request: RequestState) -> bool:
    """Return whether another position can be scheduled for a request whose tokens are all
    computed.
    """
    computed, in_batch = request.num_computed, state.batch.scheduled[request.row] is not None
    idle = any(request.tables) and not (request.num_loading or request.drafts or in_batch)
    return idle and len(request.tokens) <= computed < world.num_tokens


def _resume(world: World, state: State, request: RequestState) -> Iterator[Call]:
    """Schedule or load the tokens that a request has left, if there are any."""
    left = len(request.tokens) + len(request.drafts) - request.num_computed
    if not left or request.num_loading:
        return
    yield schedule_all(state, request, world)
    if request.status is Status.WAITING:
        hit = get_computed_blocks(state, request.request_id)
        yield from loads(world, state, request, [hit if hit.num_tokens else None])
