# SPDX-License-Identifier: Apache-2.0
"""The calls that make sense for a request, or for the blocks, in a state of a world.

Each call is tried with every argument that makes sense, in a fixed order. A prompt follows a prefix
that a request or a key still knows, or leaves it by one fresh token: nothing is known below that
token, so one continuation stands for all (`canonical.py` renames tokens). Twin:
rust/src/check/search/actions.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, product

from kvcore.check.world.keyed import found_by_tails, own_hash
from kvcore.check.world.world import World, by_row
from kvcore.oracle.prefixes import Prefixes
from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call
from kvcore.transitions.queries import get_computed_blocks
from kvcore.types.commands import Allocate
from kvcore.types.values import Hit, Status

PIN_NAMES = "pq"
"""The names of pins of prefixes that a world can have."""
Children = dict[tuple[int, ...], set[int]]


def fresh_name(world: World, state: State) -> str:
    """Return the first name that no request has."""
    names = map(str, range(world.num_requests + 1))
    return next(name for name in names if name not in state.requests)


def block_calls(world: World, state: State) -> Iterator[Call]:
    """Yield the calls that name blocks and no request. What the open batch is to write is not
    pinned before it has a key.
    """
    pool = state.device
    full = world.config.max_in_flight and len(state.operations) >= world.num_pins
    for call in ("evict_blocks", "store"):
        for block, key in enumerate(pool.keys):
            is_tried = call in world.calls and not (full and call == "store")
            if is_tried and (key is not None or (call != "store" and pool.has_key(block))):
                yield Call(call, ([block],))
    if "pin" in world.calls and sum(pool.pins.values()) < world.num_pins:
        new = {each.block for each in state.batch.commands if isinstance(each, Allocate)}
        for block in range(pool.first_block, pool.num_blocks):
            if (pool.ref_counts[block] and block not in new) or pool.has_key(block):
                yield Call("pin", ([block],))
    if "unpin" in world.calls:
        for block in sorted(pool.pins):
            yield Call("unpin", ([block],))


def prefix_pins(world: World, state: State) -> Iterator[Call]:
    """Yield a pin of each prefix that a request has computed, under the first free name, and the
    end of each pin.
    """
    free = [name for name in PIN_NAMES[: world.num_pins] if name not in state.named_pins]
    if "pin_prefix" in world.calls and free:
        for request in by_row(state):
            for count in range(1, request.num_accepted + 1 if any(request.tables) else 1):
                yield Call("pin_prefix", (free[0], request.request_id, count))
    if "unpin_prefix" in world.calls:
        for name in sorted(state.named_pins):
            yield Call("unpin_prefix", (name,))


def known_children(
    state: State, prefixes: Prefixes, texts: Iterable[tuple[int, ...]] = ()
) -> Children:
    """Return the tokens that follow each prefix of a request, of a key, or of other texts."""
    children: Children = {}
    known = [(*request.tokens, *request.drafts) for request in state.requests.values()]
    known += [*(prefixes.tokens(key) for key in state.device.index), *texts]
    known += [prefixes.tokens(key) for key in found_by_tails(state.device)]
    for tokens in known:
        for position, token in enumerate(tokens):
            children.setdefault(tokens[:position], set()).add(token)
    return children


def next_tokens(world: World, children: Children | None, prefix: tuple[int, ...]) -> list[int]:
    """Return the tokens that are known to follow a prefix, and a fresh one if letters are left."""
    if children is None:
        return list(range(world.num_letters))
    known = sorted(children.get(prefix, ()))
    return known + [each for each in range(world.num_letters) if each not in known][:1]


def continuations(
    world: World, children: Children | None, prefix: tuple[int, ...], most: int
) -> Iterator[tuple[int, ...]]:
    """Yield longer prefixes up to this many tokens, one for each way to meet the tree."""
    if len(prefix) >= most:
        return
    for token in next_tokens(world, children, prefix):
        longer = (*prefix, token)
        yield longer
        yield from continuations(world, children, longer, most)


def allocations(world: World, state: State, request: RequestState) -> Iterator[Call]:
    """Yield allocations of any number of tokens, after the longest hit or after none."""
    name = request.request_id
    hits: list[Hit | None] = [None]
    if not any(request.tables):
        hit = get_computed_blocks(state, name)
        hits += [hit] if hit.num_tokens else []
        yield from loads(world, state, request, hits)
    encoder = 0 if request.num_computed else world.num_encoder
    names = ("num_lookahead_tokens", "delay_cache_blocks", "num_encoder_tokens")
    all_options = [
        {key: value for key, value in zip(names, (*each, encoder), strict=True) if value}
        for each in product(range(world.num_lookahead + 1), world.delays)
    ]
    for each in hits:
        left = len(request.tokens) - request.num_computed - (0 if each is None else each.num_tokens)
        for external in range(min(world.num_external, left) + 1):
            first = {"num_external_computed_tokens": external} if external else {}
            most = left - external + len(request.drafts)
            for count in range(0 if external or each is not None else 1, most + 1):
                args = (name, count) if each is None else (name, count, each)
                for options in all_options:
                    yield Call("allocate_slots", args, first | options)
                    if world.marks and can_mark(state, request, external + count, each):
                        yield Call("allocate_slots", args, first | options | {"checkpoint": True})


def can_mark(state: State, request: RequestState, count: int, hit: Hit | None) -> bool:
    """Return whether the state after this many tokens behind a hit can be kept."""
    end = request.num_computed + (0 if hit is None else hit.num_tokens) + count
    return end <= len(request.tokens) and end % state.config.hit_alignment == 0


def loads(
    world: World, state: State, request: RequestState, hits: list[Hit | None]
) -> Iterator[Call]:
    """Yield loads of whole blocks after each of some hits, which leave at least one token."""
    name, step = request.request_id, state.config.block_alignment
    for each in hits if "load" in world.calls else ():
        first = 0 if each is None else each.num_tokens
        for count in range(step, len(request.tokens) - first, step):
            yield Call("load", (name, count) if each is None else (name, count, each))


def hash_calls(world: World, request: RequestState) -> Iterator[Call]:
    """Yield the engine's hashes of the next full blocks that have none, of each number of blocks,
    if the request has its own hashes.
    """
    size, tokens = world.config.hash_block_size, tuple(request.tokens)
    first = (len(request.block_hashes) + 1) * size
    hashes = []
    for end in range(first, len(tokens) + 1, size) if request.own_hashes else ():
        hashes.append(own_hash(tokens[:end], world.num_letters))
        yield Call("add_block_hashes", (request.request_id, [*hashes]))


def draft_calls(world: World, request: RequestState, children: Children | None) -> Iterator[Call]:
    """Yield new drafts if all tokens and no drafts are scheduled, or the verdict on drafts. Beside
    states, some tokens may be left: a step then computes them, and writes states after drafts.
    """
    tokens, name = tuple(request.tokens), request.request_id
    scheduled = request.num_computed - len(tokens)
    if world.config.has_states and 0 < request.num_computed < len(tokens):
        scheduled = 0
    if scheduled > 0 and request.drafts:
        for count in range(scheduled + 1):
            yield Call("accept", (name, count))
    elif scheduled == 0 and world.num_drafts:
        most = min(len(tokens) + world.num_drafts, world.num_tokens)
        for longer in continuations(world, children, tokens, most):
            if longer[len(tokens) :] != tuple(request.drafts):
                yield Call("add_drafts", (name, list(longer[len(tokens) :])))


def cuts(world: World, state: State, request: RequestState) -> Iterator[Call]:
    """Yield the calls that shorten a running request, and those on its blocks meanwhile."""
    name = request.request_id
    if "truncate" in world.calls:
        for count in range(1, len(request.tokens)):
            yield Call("truncate", (name, count))
    if "rewind" in world.calls:
        for count in range(request.num_computed):
            yield Call("rewind", ([name], count))
    record = state.batch.scheduled[request.row]
    if "unschedule" in world.calls and record is not None and not request.drafts:
        for count in range(record.num_kept, request.num_computed):
            yield Call("unschedule", (name, count))
    if "remove_skipped_blocks" in world.calls:
        yield Call("remove_skipped_blocks", (name, request.num_accepted))
    if "cache_blocks" in world.calls:
        full = [
            request.num_accepted // group.block_size > cached
            for group, cached in zip(state.config.groups, request.num_cached, strict=True)
        ]
        if any(full):
            yield Call("cache_blocks", (name, request.num_computed))


def swaps(world: World, requests: list[RequestState]) -> Iterator[Call]:
    """Yield a swap of every set of requests that can be swapped, out and in."""
    for name, status in (("swap_out", Status.RUNNING), ("swap_in", Status.SWAPPED)):
        if name in world.calls:
            ids = [each.request_id for each in requests if each.status is status]
            for size in range(1, len(ids) + 1):
                for chosen in combinations(ids, size):
                    yield Call(name, (list(chosen),))
