# SPDX-License-Identifier: Apache-2.0
"""Liveness: properties of the runs that start in a state.

No transition calls anything here. A check makes calls of the core on a state, as an engine could,
and discards the result. What an exploration shows anyway is not run again: a world that tries
`free` and `remove_request` in every state proves DRAIN step by step, so only its states without
requests are checked. Most states show progress with their first call; only if no call does are
requests preempted, keeping one of them at a time. Twin: rust/src/check/properties/liveness.rs.

Source: rows 66 to 70 of kvcore/check/mutants/catalogue.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvcore.check.properties.claims import pins_alone
from kvcore.check.world.world import World, by_row
from kvcore.pool.block_pool import BlockPool
from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call, Misuse, perform
from kvcore.transitions.queries import get_computed_blocks
from kvcore.types.config import Config
from kvcore.types.values import Appended, Hit, Outcome, Reason, Refused, Status

RunCheck = Callable[[World, State], Iterator[str]]

LEAVING = frozenset({"free", "remove_request"})


class Unexpected(Exception):
    """A call that an engine may make in this state was misuse."""


def drain(world: World, state: State) -> Iterator[str]:
    """DRAIN: when all unfinished work is done and all requests are removed, every block is free; a
    reset then leaves no key.
    """
    proved = world.calls >= LEAVING and not (state.config.max_in_flight or callable(world.moves))
    if proved and len(state.requests):
        return
    try:
        state = without_pins(unpinned(settle(state)))
        for name in ids(state):
            if state.requests[name].status is not Status.WAITING:
                state = made(state, "free", name)
            state = made(state, "remove_request", name)
        state = settle(state)
        reset = _call(state, "reset_prefix_cache")
    except Unexpected as error:
        yield str(error)
        return
    for tier, pool in _pools(state):
        if pool.num_free != pool.num_usable:
            yield f"{pool.num_free} of {pool.num_usable} {tier} blocks are free without requests"
    if reset.value is not True:
        yield f"the reset returns {reset.value} without requests"
        return
    for tier, pool in _pools(reset.state):
        left = [block for block in range(pool.num_blocks) if pool.has_key(block)]
        if left or len(pool.index):
            yield f"{tier} blocks {left} have a key after the reset"
    if len(state.operations) or state.in_flight:
        yield f"{len(state.operations)} operations and {len(state.in_flight)} batches are left"


def deadlock_free(world: World, state: State) -> Iterator[str]:
    """DEADLOCK-FREE: while the pool can hold some unfinished request, a call gives one of them a
    token, if need be after others were preempted.
    """
    unfinished = [each for each in state.requests.values() if _can_go_on(world, each, state)]
    if not unfinished or _progresses(world, state, unfinished):
        return
    try:
        settled = without_pins(settle(state))
        names = [each.request_id for each in unfinished if each.request_id in settled.requests]
        if _progresses(world, settled, [settled.requests[name] for name in names]):
            return
        for name in names:
            alone = settle(_preempted(settled, keep=name))
            if _progresses(world, alone, [alone.requests[name]]):
                return
    except Unexpected as error:
        yield str(error)
        return
    yield f"no call brings requests {names} a token further, whichever others are preempted"


def preempt_gain(_: World, state: State) -> Iterator[str]:
    """PREEMPT-GAIN: preempting a request frees the blocks that it alone holds, at once or when a
    batch or operation ends.
    """
    if len(state.batch.commands):
        return
    for name in ids(state):
        request = state.requests[name]
        alone = {
            block
            for table in request.tables
            for block in table
            if block >= state.device.first_block and state.device.ref_counts[block] == 1
        }
        if not alone:
            continue
        outcome = perform(state, Call("free", (name,)))
        pool = outcome.state.device
        back = {*pool.queue, *(() if pool.quarantine is None else pool.quarantine)}
        if isinstance(outcome.value, Misuse) or alone - back:
            yield f"preempting request {name!r} leaves its blocks {sorted(alone - back)} held"


def swap_return(_: World, state: State) -> Iterator[str]:
    """SWAP-RETURN: a swapped request can return to the device when others make room."""
    swapped = [each for each in state.requests.values() if each.status is Status.SWAPPED]
    for request in swapped:
        name = request.request_id
        try:
            outcome = _call(state, "swap_in", [name])
            if isinstance(outcome.value, Refused):
                alone = without_pins(_preempted(settle(state), keep=name))
                outcome = _call(alone, "swap_in", [name])
        except Unexpected as error:
            yield str(error)
            continue
        value, most = outcome.value, state.device.num_usable - state.config.watermark_blocks
        if isinstance(value, Refused) and value.needed <= most:
            yield f"request {name!r} is swapped out, and is refused by an empty pool: {value}"


def admit_never(_: World, state: State) -> Iterator[str]:
    """ADMIT-NEVER: a call is refused for good, and at once, if and only if it needs more blocks
    than an empty pool has.
    """
    for request in state.requests.values():
        if request.status is not Status.WAITING:
            continue
        needed = call_need(state.config, len(request.tokens))
        never = not fits(state, len(request.tokens))
        if not never and needed + state.config.watermark_blocks <= state.device.num_free:
            continue
        call = Call("allocate_slots", (request.request_id, len(request.tokens)))
        value = perform(state, call).value
        refused = isinstance(value, Refused)
        if (never and not refused) or (refused and (value.reason is Reason.NEVER) != never):
            yield f"request {request.request_id!r} needs {needed} blocks and gets {value}"


def admit_fitting(_: World, state: State) -> Iterator[str]:
    """L-ADMIT: if no request holds blocks, and pins leave room for one request, any that fits is
    admitted; of recurrent states, those before and after its step have to fit.
    """
    bounded = state.config.max_pinned_blocks is not None
    pinned = {block for pin in state.named_pins.values() for block in pin.blocks if bounded}
    idle = sum(pool.num_free for _, pool in _pools(state)) + len(pinned)
    if idle != sum(pool.num_usable for _, pool in _pools(state)):
        return
    for request in state.requests.values():
        done = request.num_computed >= len(request.tokens) + len(request.drafts)
        is_idle = not request.num_loading and request.status is not Status.SWAPPED
        if done or not is_idle or not can_grow_to(state, len(request.tokens)):
            continue
        value = perform(state, schedule_all(state, request)).value
        if isinstance(value, Refused | Misuse):
            yield f"request {request.request_id!r} is refused by an empty pool: {value}"


def settle(state: State) -> State:
    """Return the state after everything unfinished is done. Raises Unexpected."""
    most = 4 + len(state.in_flight) + len(state.operations)
    for _ in range(most):
        for batch in state.in_flight:
            state = made(state, "complete", batch.number)
        if len(state.batch.commands) or any(state.batch.scheduled):
            state = made(state, "take_batch")
            continue
        for number in sorted(state.operations):
            state = made(state, "complete_operation", number, True)
        if not (len(state.batch.commands) or state.in_flight):
            return state
    raise Unexpected(f"something is unfinished after {most} rounds of completion")


def schedule_all(state: State, request: RequestState, world: World | None = None) -> Call:
    """Return the call that schedules all tokens and drafts that a request has left, after its
    longest hit; with a world also all its lookahead slots and encoder tokens.
    """
    hits: tuple[Hit, ...] = ()
    first = request.num_computed
    if not any(request.tables):
        found = get_computed_blocks(state, request.request_id)
        hits, first = ((found,), found.num_tokens) if found.num_tokens else ((), 0)
    left = len(request.tokens) + len(request.drafts) - first
    options = {}
    if world is not None and world.num_lookahead:
        options["num_lookahead_tokens"] = world.num_lookahead
    if world is not None and world.num_encoder and not request.num_computed:
        options["num_encoder_tokens"] = world.num_encoder
    return Call("allocate_slots", (request.request_id, left, *hits), options)


def _progresses(world: World, state: State, requests: list[RequestState]) -> bool:
    """Return whether some call lets one of these requests progress by a token now."""
    for request in requests:
        name, value = request.request_id, None
        if request.num_loading or request.num_computed > len(request.tokens):
            return True
        if request.status is Status.SWAPPED:
            value = perform(state, Call("swap_in", ([name],))).value
            if not isinstance(value, Refused | Misuse):
                return True
            continue
        if request.num_computed < len(request.tokens) + len(request.drafts):
            value = perform(state, schedule_all(state, request)).value
            if not isinstance(value, Refused | Misuse):
                return True
        if request.num_computed == len(request.tokens) < world.num_tokens:
            without = perform(state, Call("add_drafts", (name, []))).state
            value = perform(without, Call("append", ([name], [0]))).value
            if isinstance(value, Appended) and value.done:
                return True
    return False


def _can_go_on(world: World, request: RequestState, state: State) -> bool:
    """Return whether a request has tokens to come that an empty pool could hold."""
    num_tokens = len(request.tokens)
    done = request.num_computed >= num_tokens == world.num_tokens
    longer = min(world.num_tokens, num_tokens + 1)
    return not done and can_grow_to(state, longer, world.num_encoder)


def can_grow_to(state: State, num_tokens: int, num_encoder: int = 0) -> bool:
    """Tell whether an empty pool can hold a request while it grows to this many tokens, also behind
    a hit: of states, it then holds those before and after a step.
    """
    config = state.config
    held = config.blocks_for(num_tokens) if config.has_states else 0
    most = config.num_usable_blocks - config.watermark_blocks
    return held <= most and fits(state, num_tokens, num_encoder)


def fits(state: State, num_tokens: int, num_encoder: int = 0) -> bool:
    """Return whether an empty pool can give one call these tokens, and keep its reserve free."""
    config = state.config
    most = config.num_usable_blocks - config.watermark_blocks
    return call_need(config, num_tokens, num_encoder) <= most


def call_need(config: Config, num_tokens: int, num_encoder: int = 0) -> int:
    """Count the blocks that one call takes for these tokens of a request without blocks or hits."""
    return sum(
        min(num_tokens, 1)
        if group.is_state
        else -(-(num_encoder if group.is_cross else num_tokens) // group.block_size)
        for group in config.groups
    )


def _preempted(state: State, *, keep: str) -> State:
    """Return the state with every other request freed, children before those they hit."""
    for name in reversed(ids(state)):
        if name != keep and state.requests[name].status is not Status.WAITING:
            state = made(state, "free", name)
    return state


def without_pins(state: State) -> State:
    """Return the state without pins except those of operations. Pins of prefixes that leave room
    for one request stay.
    """
    if state.config.max_pinned_blocks is None:
        state = unpinned(state)
    alone = pins_alone(state)
    held = [block for block in sorted(alone) for _ in range(alone[block])]
    return made(state, "unpin", held) if held else state


def unpinned(state: State) -> State:
    """Return the state without pins of prefixes."""
    for name in sorted(state.named_pins):
        state = made(state, "unpin_prefix", name)
    return state


def ids(state: State) -> list[str]:
    """Return the ids of all requests, in the order of their rows."""
    return [request.request_id for request in by_row(state)]


def _pools(state: State) -> list[tuple[str, BlockPool]]:
    pools = [("device", state.device)]
    return pools if state.host is None else [*pools, ("host", state.host)]


def made(state: State, name: str, *args: Any) -> State:
    """Return the state after a call. Raises Unexpected for misuse."""
    return _call(state, name, *args).state


def _call(state: State, name: str, *args: Any) -> Outcome[State, Any]:
    """Make a call. Raises Unexpected for misuse."""
    call = Call(name, args)
    outcome = perform(state, call)
    if isinstance(outcome.value, Misuse):
        raise Unexpected(f"{call} is misuse: {outcome.value.error} {outcome.value.fields}")
    return outcome


RUN_CHECKS: dict[str, RunCheck] = {
    "DRAIN": drain,
    "DEADLOCK-FREE": deadlock_free,
    "PREEMPT-GAIN": preempt_gain,
    "SWAP-RETURN": swap_return,
    "ADMIT-NEVER": admit_never,
    "L-ADMIT": admit_fitting,
}
