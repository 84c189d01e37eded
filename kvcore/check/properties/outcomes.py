# SPDX-License-Identifier: Apache-2.0
"""Properties of the outcome of one call, checked on the states before and after it.

No transition calls anything here. Misuse changes nothing; a refused call keeps the trim of its
windows, as `remove_skipped_blocks` makes it, and changes nothing else. The slots that a call
schedules to be written have one owner. The longest hit is found independently, by trying every
length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from kvcore.check.properties.floors import Tenants, tenant_of
from kvcore.check.properties.hits import hit_of
from kvcore.check.world.keyed import found_by_tails, keys_of, own_tails, tail_keys
from kvcore.codec.encode import encode
from kvcore.oracle.contents import group_of
from kvcore.oracle.schedule import read_ids
from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call, Misuse
from kvcore.transitions.window import remove_skipped_blocks
from kvcore.types.commands import Allocate, Free, SetTable, Touch
from kvcore.types.errors import InvariantViolation
from kvcore.types.events import BlockStored, Event, replay
from kvcore.types.groups import skipped_tokens
from kvcore.types.keys import HASH_SIZE
from kvcore.types.values import Appended, Hit, Outcome, Reason, Refused

OUTCOME_PROPERTIES = {
    "ATOMIC-FAIL": "misuse leaves the state unchanged; so does a refusal, except for the window"
    " trim",
    "ADMIT-EXACT": "a call that takes blocks leaves the reserve free, and a refused call lacks"
    " blocks; one that is refused for now needs no more than the pool has, unless the open"
    " batch still keeps its windows",
    "RESET": "a reset succeeds if and only if nothing is held, and leaves no key",
    "WRITE-EXCL": "a block that a call schedules to be written has one owner, and no key but its"
    " own",
    "HIT-LONGEST": "a look-up finds the longest prefix after which every group can resume",
    "EVT-COPY": "replaying all events on an empty index gives its keys that events name",
}


TAKING = ("allocate_slots", "load", "swap_out", "swap_in")


def check_outcome(before: State, call: Call, outcome: Outcome[State, Any]) -> None:
    """Raise InvariantViolation for an outcome that a call must not have (ATOMIC-FAIL, ADMIT-EXACT,
    RESET, WRITE-EXCL).
    """
    _check_admission(before, call, outcome)
    if isinstance(outcome.value, Misuse):
        if outcome.commands or not _same(before, outcome.state):
            raise InvariantViolation("ATOMIC-FAIL", f"{call} raised and changed the state")
    elif isinstance(outcome.value, Refused):
        _check_refused(before, call, outcome)
    elif call.name in ("allocate_slots", "append"):
        for request_id, first, last in written(before, call, outcome.value):
            _check_exclusive(outcome.state, outcome.state.requests[request_id], first, last)
    elif call.name == "reset_prefix_cache":
        tiers = [pool for pool in (before.device, before.host) if pool is not None]
        unused = all(pool.num_free == pool.num_usable for pool in tiers)
        if outcome.value is not unused or (unused and len(outcome.state.device.index)):
            raise InvariantViolation("RESET", f"gives {outcome.value} with {len(tiers)} tiers")


def check_events(start: State | None, events: Iterable[Event], state: State) -> None:
    """Raise InvariantViolation (EVT-COPY) unless the keys of a state, and events, give the keys now
    that events name. start: None for an empty one.
    """
    keys = set[bytes]() if start is None else announced(start)
    held = [BlockStored((key[:HASH_SIZE],), None, (), 0, group_of(key)) for key in keys]
    try:
        keys = replay([*held, *events])
    except KeyError as error:
        raise InvariantViolation("EVT-COPY", f"{error} is removed and not held") from error
    if keys != announced(state):
        raise InvariantViolation("EVT-COPY", f"the events give {len(keys)} keys")


def announced(state: State) -> set[bytes]:
    """Return the keys of a state's blocks that events name."""
    pool = state.device
    return {key for key, block in pool.index.firsts.items() if block not in pool.silent}


def check_hit(state: State, request: RequestState, hit: Hit) -> None:
    """Raise InvariantViolation (HIT-LONGEST) unless a hit is the longest, in every group."""
    longest = longest_hit(state, request)
    common = longest_hit(state, request, states=False) if state.config.has_states else 0
    if hit.num_common != common:
        detail = f"{hit.num_common} tokens are found without states, not {common}"
        raise InvariantViolation("HIT-LONGEST", detail)
    if hit.num_tokens != longest:
        detail = f"{hit.num_tokens} tokens are hit, but {longest} are findable in every group"
        raise InvariantViolation("HIT-LONGEST", detail)
    for index, blocks in enumerate(hit.blocks.blocks):
        group = state.config.groups[index]
        num_blocks = 0 if group.is_cross else -(-longest // group.block_size)
        for position, block in enumerate(blocks):
            seen = (position + 1) * group.block_size > skipped_tokens(group, longest)
            null = block < state.device.first_block
            if null == seen or (seen and not _is_hit(state, request, (index, position), hit)):
                raise InvariantViolation("HIT-LONGEST", f"{block} at {position} of group {index}")
        if len(blocks) != num_blocks:
            raise InvariantViolation("HIT-LONGEST", f"{len(blocks)} blocks of group {index}")


def longest_hit(state: State, request: RequestState, *, states: bool = True) -> int:
    """Return the longest length to resume at, found by trying all. states: whether they count."""
    config = state.config
    if not config.enable_caching or request.skip_reading:
        return 0
    step = config.hit_alignment
    most = min(len(request.tokens) - 1, len(request.block_hashes) * config.hash_block_size)
    for length in range(most // step * step, 0, -step):
        if all(
            _resumes(state, request, index, length)
            for index, group in enumerate(config.groups)
            if states or not group.is_state
        ):
            return length
    return 0


def _resumes(state: State, request: RequestState, index: int, length: int) -> bool:
    """Return whether a group finds what the query at a length sees, and any block that it drops."""
    config, group = state.config, state.config.groups[index]
    if group.is_state:
        return request.key_at(config, index, length) in state.device.index
    end, step = length // group.block_size, group.block_size
    needed = [
        position
        for position in range(end)
        if (position + 1) * group.block_size > skipped_tokens(group, length)
    ]
    ends = {(position + 1) * group.block_size for position in needed}
    if group.kind == "sliding_window" and not needed and length % group.block_size == 0:
        ends.add(length)
    if config.has_tails:
        step = config.hit_alignment
        ends |= {length} if length % group.block_size else set()
    if config.drops_last_hit(index):
        ends.add(length + step)
        if length + step >= len(request.tokens):
            return False
    hashed = len(request.block_hashes) * config.hash_block_size
    return all(each <= hashed and _finds(state, request, index, each) for each in ends)


def _finds(state: State, request: RequestState, index: int, length: int) -> bool:
    """Return whether a group finds the block that ends with these tokens, or has them as a tail."""
    group, key = state.config.groups[index], request.key_at(state.config, index, length)
    if length % group.block_size and not group.is_state:
        return key in found_by_tails(state.device)
    return state.device.index.get(key) is not None


def _is_hit(state: State, request: RequestState, place: tuple[int, int], hit: Hit) -> bool:
    """Return whether the block at a place (group, position) of a hit has the key of its end."""
    index, position = place
    end = min((position + 1) * state.config.groups[index].block_size, hit.num_tokens)
    key = request.key_at(state.config, index, end)
    return key in keys_of(state.device, hit.blocks.blocks[index][position])


def written(before: State, call: Call, value: object) -> Iterator[tuple[str, int, int]]:
    """Yield the slots [first, last) that a successful call schedules, with lookahead, per
    request.
    """
    limit = before.config.length_limit
    if isinstance(value, Appended):
        counts = {name: request.num_computed for name, request in before.requests.items()}
        for request_id in read_ids(before, call.args[0])[: value.done]:
            yield request_id, counts[request_id], counts[request_id] + 1
            counts[request_id] += 1
        return
    request_id, num_new = call.args[:2]
    hit: Hit | None = call.args[2] if len(call.args) > 2 else call.options.get("hit")
    first = before.requests[request_id].num_computed + (0 if hit is None else hit.num_tokens)
    last = min(first + call.options.get("num_external_computed_tokens", 0), limit) + num_new
    yield request_id, first, min(last + call.options.get("num_lookahead_tokens", 0), limit)


def _check_admission(before: State, call: Call, outcome: Outcome[State, Any]) -> None:
    """Check that a call leaves its tier's reserve free, or was refused for lack of blocks."""
    if isinstance(outcome.value, Misuse) or call.name not in TAKING:
        return
    pool, reserve = outcome.state.device, call.options.get("reserved_blocks", 0)
    if call.name == "swap_out":
        assert outcome.state.host is not None
        pool = outcome.state.host
    elif call.name == "swap_in" or not any(before.requests[call.args[0]].tables):
        reserve += before.config.watermark_blocks
    if isinstance(outcome.value, Refused):
        needed, later = outcome.value.needed, outcome.value.reason is Reason.LATER
        wrong = needed <= outcome.value.available or not _is_exact(before, call, outcome)
        wrong = wrong or (later and needed > pool.num_usable and not _keeps_windows(before, call))
    else:
        wrong = pool.num_free < reserve and _takes(before, outcome)
    if wrong:
        detail = f"{call} gives {outcome.value}; {pool.num_free} are free, {reserve} must stay free"
        raise InvariantViolation("ADMIT-EXACT", detail)


def _keeps_windows(before: State, call: Call) -> bool:
    """Return whether the open batch keeps blocks that the windows of a call's request will trim."""
    row = before.requests[call.args[0]].row
    return before.config.has_windows and before.batch.scheduled[row] is not None


def _is_exact(before: State, call: Call, outcome: Outcome[State, Any]) -> bool:
    """Whether a refusal counts what floors keep, if its call brings no trim and no reserve."""
    simple = call.name in ("allocate_slots", "load") and not call.options.get("reserved_blocks")
    if before.device.floors is None or before.config.has_windows or not simple:
        return True
    request, tenants = before.requests[call.args[0]], Tenants(before)
    hit = hit_of(call)
    for block in () if hit is None else chain.from_iterable(hit.blocks.blocks):
        tenants.follow(Touch(block))
    kept = tenants.num_kept(tenant_of(before, request))
    if not any(request.tables):
        kept += before.config.watermark_blocks
    available = before.device.num_free - kept
    return isinstance(outcome.value, Refused) and outcome.value.available == max(0, available)


def _takes(before: State, outcome: Outcome[State, Any]) -> bool:
    """Return whether a call took a block out of the device's free queue."""
    return any(
        isinstance(each, Allocate)
        or (isinstance(each, Touch) and each.block in before.device.queue)
        for each in outcome.commands
    )


def _check_refused(before: State, call: Call, outcome: Outcome[State, Any]) -> None:
    if _same(before, outcome.state) and not outcome.commands:
        return
    if call.name in ("allocate_slots", "load") and all(
        isinstance(each, Free | SetTable) for each in outcome.commands
    ):
        request = before.requests[call.args[0]]
        trimmed = remove_skipped_blocks(before, request.request_id, request.num_accepted)
        if _same(trimmed.state, outcome.state) and trimmed.commands == outcome.commands:
            return
    raise InvariantViolation("ATOMIC-FAIL", f"{call} was refused and changed the state")


def _same(one: State, other: State) -> bool:
    return one is other or one == other or encode(one) == encode(other)


def _check_exclusive(state: State, request: RequestState, first: int, last: int) -> None:
    for index, group in enumerate(state.config.groups):
        if group.is_cross or first == last:
            continue
        table = request.tables[index]
        places = range(first // group.block_size, -(-last // group.block_size))
        if group.is_state:
            is_stepping = request.num_computed > first
            places = range(len(table) - 1, len(table)) if is_stepping else range(0)
        for position in places:
            if position >= len(table) or table[position] < state.device.first_block:
                continue
            block = table[position]
            key, tails = state.device.keys[block], tail_keys(state.device, block)
            own = position < request.num_hashed(state.config, index) and key == request.key(
                state.config, index, position
            )
            if tails:
                most = len(request.tokens)
                mine = own_tails(state.config, request, index, position, most)
                own = (key is None or own) and {*tails} <= {*mine}
            if state.device.ref_counts[block] != 1 or not (own or (key is None and not tails)):
                detail = f"request {request.request_id!r} writes block {block} of group {index}"
                raise InvariantViolation("WRITE-EXCL", detail)
