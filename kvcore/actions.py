# SPDX-License-Identifier: Apache-2.0
"""Which calls an exploration tries in a state of a world.

Rules: each call is tried with every argument that makes sense, in a fixed order. A prompt follows a
prefix that a request or a key still knows, or leaves it by one fresh token: below that nothing is
known, so one continuation stands for all (`canonical.py` renames tokens). Twin: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import attrs

from kvcore.calls import Call
from kvcore.canonical import Chains
from kvcore.config import Config
from kvcore.queries import get_computed_blocks
from kvcore.state import RequestState, State
from kvcore.values import Request, Status

BASIC_CALLS = frozenset(
    {"add_request", "allocate_slots", "append", "fork", "free", "remove_request"}
    | {"reset_prefix_cache"}
)
Children = dict[tuple[int, ...], set[int]]


@attrs.frozen(kw_only=True)
class World:
    """How far an exploration goes, and by which calls.

    num_requests, num_tokens: most requests at a time, and most tokens each. num_prompt: most tokens
    of a new request. num_letters: different tokens that can follow one prefix. calls_per_batch:
    most calls between two `take_batch`. calls: names of the transitions to try.
    """

    config: Config
    num_requests: int
    num_tokens: int
    num_prompt: int
    num_letters: int = 2
    calls_per_batch: int = 1
    calls: frozenset[str] = BASIC_CALLS


def actions(world: World, state: State, chains: Chains) -> Iterator[Call]:
    """Every call that makes sense in a state of a world, in a fixed order."""
    children = known_children(state, chains)
    requests = sorted(state.requests.values(), key=lambda request: request.row)
    names = map(str, range(world.num_requests + 1))
    fresh = next(name for name in names if name not in state.requests)
    room = len(requests) < world.num_requests
    if room and "add_request" in world.calls:
        for prompt in prompts(world, children, ()):
            yield Call("add_request", (Request(fresh, list(prompt)),))
    for request in requests:
        yield from _actions_of(world, state, request, children)
        if room and "fork" in world.calls and request.status is Status.RUNNING:
            yield Call("fork", (request.request_id, fresh))
    yield from _swaps(world, requests)
    if "evict_blocks" in world.calls:
        for block, key in enumerate(state.device.keys):
            if key is not None:
                yield Call("evict_blocks", ([block],))
    if "reset_prefix_cache" in world.calls:
        yield Call("reset_prefix_cache")


def known_children(state: State, chains: Chains) -> Children:
    """The prefix tree of a state: the tokens that follow each prefix of a request or key."""
    children: Children = {}
    known = [tuple(request.tokens) for request in state.requests.values()]
    known += [chains.tokens(key) for key in state.device.index]
    for tokens in known:
        for position, token in enumerate(tokens):
            children.setdefault(tokens[:position], set()).add(token)
    return children


def next_tokens(world: World, children: Children, prefix: tuple[int, ...]) -> list[int]:
    """The tokens that are known to follow a prefix, and a fresh one where letters are left."""
    known = sorted(children.get(prefix, ()))
    return known + [each for each in range(world.num_letters) if each not in known][:1]


def prompts(world: World, children: Children, prefix: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The continuations of a prefix up to num_prompt tokens, one for each way to meet the tree."""
    if len(prefix) == world.num_prompt:
        return
    for token in next_tokens(world, children, prefix):
        longer = (*prefix, token)
        yield longer
        yield from prompts(world, children, longer)


def _actions_of(
    world: World, state: State, request: RequestState, children: Children
) -> Iterator[Call]:
    tried, name = world.calls, request.request_id
    running, swapped = request.status is Status.RUNNING, request.status is Status.SWAPPED
    num_tokens, computed = len(request.tokens), request.num_computed
    if "allocate_slots" in tried and not swapped:
        for count in range(1, num_tokens - computed + 1):
            yield Call("allocate_slots", (name, count))
        hit = get_computed_blocks(state, name)
        if hit.num_tokens and not running:
            for count in range(1, num_tokens - hit.num_tokens + 1):
                yield Call("allocate_slots", (name, count, hit))
    if "append" in tried and running and computed == num_tokens < world.num_tokens:
        for token in next_tokens(world, children, tuple(request.tokens)):
            yield Call("append", ([name], [token]))
    if "truncate" in tried and running:
        for count in range(1, num_tokens):
            yield Call("truncate", (name, count))
    if "free" in tried and (running or swapped):
        yield Call("free", (name,))
    if "remove_request" in tried and not running and not swapped:
        yield Call("remove_request", (name,))


def _swaps(world: World, requests: list[RequestState]) -> Iterator[Call]:
    for name, status in (("swap_out", Status.RUNNING), ("swap_in", Status.SWAPPED)):
        if name in world.calls:
            ids = [each.request_id for each in requests if each.status is status]
            for size in range(1, len(ids) + 1):
                for chosen in combinations(ids, size):
                    yield Call(name, (list(chosen),))
