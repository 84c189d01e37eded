# SPDX-License-Identifier: Apache-2.0
"""The property PUBLISHED: full blocks become findable by the call that may publish them.

No transition calls anything here. The calls that publish are checked: those that schedule tokens,
or the completion of a batch if blocks are published then; from the first block on that still needs
it. A call that delays publication is not checked. Twin: rust/src/check/properties/published.rs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcore.check.world.keyed import found_by_tails, own_tails, tail_keys
from kvcore.oracle.schedule import read_ids
from kvcore.state.state import State
from kvcore.trace.calls import Call, Misuse
from kvcore.types.commands import CopyOnWrite
from kvcore.types.values import Outcome, Refused, Status


def published(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """PUBLISHED: a full block that a call may publish is findable after the call, or waits to be
    merged with one that is; no other block is published, and none of a request of an older epoch.
    A state whose last token comes late is findable then, or belongs to the batch that writes it; so
    is one that a call marked, when its batch is taken. Tails of what a batch writes are findable
    when it is taken or completed, and not before. A cancel leaves the keys of what it leaves.
    """
    yield from _unpublished_states(before, call, outcome)
    yield from _lost_marks(before, call, outcome)
    yield from _wrong_tails(before, call, outcome)
    yield from _lost_keys(before, call, outcome)
    state, late = outcome.state, outcome.state.config.publish == "completed"
    commands = state.batch.commands if late else ()
    copies = {each.target for each in commands if isinstance(each, CopyOnWrite)}
    for name, num_tokens in _publishing(before, call, outcome):
        request, num_cached = state.requests[name], before.requests[name].num_cached
        known = before.requests[name]
        if known.num_computed and known.epoch < state.epoch:
            num_tokens = 0
        waiting = {(x.group_id, x.position) for x in state.batch.merges if x.request_id == name}
        for index, group in enumerate(state.config.groups):
            if group.is_state:
                continue
            num_full = min(num_tokens // group.block_size, request.num_hashed(state.config, index))
            blocks = () if group.is_cross else request.tables[index][num_cached[index] : num_full]
            for position, block in enumerate(blocks, num_cached[index]):
                key = state.device.keys[block]
                null = block < state.device.first_block
                if key is None and not null and (index, position) not in waiting:
                    yield f"block {block} is full at {position} of group {index}, but has no key"
                elif block in copies and key is not None:
                    yield f"block {block} is findable before it is copied"
            found = request.num_cached[index]
            if found > max(num_cached[index], num_full):
                yield f"{found} blocks of group {index} count as published, not {num_full}"


def _unpublished_states(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """Yield the states whose last token a call added, and which cannot become findable."""
    state = outcome.state
    if call.name not in ("add_tokens", "accept") or isinstance(outcome.value, Misuse):
        return
    name = call.args[0]
    request, first = state.requests[name], len(before.requests[name].tokens) + 1
    if request.num_computed and request.epoch < state.epoch:
        return
    record = state.batch.scheduled[request.row]
    taken = request.num_computed if record is None else record.num_computed_before
    owed = {each.key for batch in state.in_flight for each in batch.owed}
    hashed = len(request.block_hashes) * state.config.hash_block_size
    for index, group in enumerate(state.config.groups if state.config.enable_caching else ()):
        for count in range(first, min(len(request.tokens), taken, hashed) + 1):
            if group.is_state and count % group.block_size == 0:
                key = request.key(state.config, index, count // group.block_size - 1)
                if key not in owed and key not in state.device.index:
                    yield f"the state after {count} tokens in group {index} has no key"


def _lost_marks(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """Yield the states that a call marked and that the batch does not keep, or kept and that are
    not findable once it was taken.
    """
    state, options = outcome.state, call.options
    wanted = call.name == "allocate_slots" and options.get("checkpoint", False)
    if wanted and state.config.enable_caching and not options.get("delay_cache_blocks", False):
        done = not isinstance(outcome.value, Misuse | Refused)
        if done and call.args[1] and call.args[0] not in state.batch.ends:
            yield f"request {call.args[0]!r} marks a state that is not kept"
    owed = {each.key for batch in state.in_flight for each in batch.owed}
    for name in before.batch.marked if call.name == "take_batch" else ():
        request = state.requests[name]
        hashed = len(request.block_hashes) * state.config.hash_block_size
        if (request.num_computed and request.epoch < state.epoch) or request.num_computed > hashed:
            continue
        for index, group in enumerate(state.config.groups):
            key = request.key_at(state.config, index, request.num_computed)
            if group.is_state and key not in owed and key not in state.device.index:
                yield f"the state after {request.num_computed} tokens in group {index} has no key"


def _lost_keys(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """Yield the blocks whose key or merge a cancel dropped, though every request that counted them
    as published keeps their tokens.
    """
    state, kept, fallen = outcome.state, list[tuple[int, tuple[str, int, int]]](), set[int]()
    for name, request in before.requests.items() if call.name == "cancel" else ():
        for index, group in enumerate(state.config.groups):
            for position, block in enumerate(request.tables[index][: request.num_cached[index]]):
                if state.requests[name].num_computed < (position + 1) * group.block_size:
                    fallen.add(block)
                else:
                    kept.append((block, (name, index, position)))
    for block, place in kept:
        known = before.device.keys[block] is not None or _waits(before, place)
        held = state.device.keys[block] is not None or _waits(state, place)
        if known and not held and block not in fallen:
            yield f"block {block} at {place[2]} of group {place[1]} loses its key by a cancel"


def _waits(state: State, place: tuple[str, int, int]) -> bool:
    merges = state.batch.merges
    return any((each.request_id, each.group_id, each.position) == place for each in merges)


def _wrong_tails(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """Yield the tails that the end of a batch leaves without keys, and those to which a call gives
    keys before its batch is taken.
    """
    state, device = outcome.state, outcome.state.device
    if not state.config.has_tails or isinstance(outcome.value, Misuse):
        return
    waits = any(each.num_output_placeholders for each in before.requests.values())
    if call.name == "allocate_slots" or (call.name == "append" and not waits):
        known = found_by_tails(before.device)
        for key, blocks in found_by_tails(device).items():
            for block in {*blocks} - {*known.get(key, ())}:
                yield f"{call.name} gives block {block} a tail key before its batch is taken"
    for name, first, num_tokens in _written(before, call, state):
        request = state.requests[name]
        if request.num_loading or (request.num_computed and request.epoch < state.epoch):
            continue
        for index, group in enumerate(state.config.groups):
            for position, block in enumerate(() if group.is_state else request.tables[index]):
                if _is_of_later_batch(before, call, name, (index, position)):
                    continue
                held = tail_keys(device, block)
                written = own_tails(state.config, request, index, position, num_tokens)
                for key in written[len(own_tails(state.config, request, index, position, first)) :]:
                    merged = state.config.duplicates == "merge" and key in found_by_tails(device)
                    if block >= device.first_block and key not in held and not merged:
                        yield f"block {block} at {position} of group {index} lacks a tail key"


def _written(before: State, call: Call, state: State) -> Iterator[tuple[str, int, int]]:
    """Yield the requests whose tails a call makes findable, as it takes or completes a batch: those
    behind a number of tokens, up to another.
    """
    config, taken = state.config, call.name == "take_batch"
    if taken and config.publish == "scheduled":
        for name, record in zip(before.rows, before.batch.scheduled, strict=True):
            if name and record and name not in before.batch.delayed:
                yield name, record.num_computed_before, state.requests[name].num_accepted
    elif call.name == "complete" or (taken and not config.max_in_flight):
        if config.publish == "scheduled":
            return
        for name, entry in (before.batch if taken else before.in_flight[0]).entries.items():
            if entry.publishes and state.requests[name].status is Status.RUNNING:
                yield name, entry.before, _num_finished(state, name)


def _is_of_later_batch(before: State, call: Call, name: str, place: tuple[int, int]) -> bool:
    """Return whether a place of a request's tables may have a copy that a batch after the completed
    one makes. A cancel may leave it unwritten, so it gets no key.
    """
    if call.name != "complete":
        return False
    completed, *others = before.in_flight
    later = [*(batch.entries for batch in others), before.batch.entries]
    if all(name not in entries for entries in later):
        return False
    return not completed.entries[name].uses(*place)


def _publishing(
    before: State, call: Call, outcome: Outcome[State, Any]
) -> Iterator[tuple[str, int]]:
    """Yield the requests of which a call publishes blocks, each with its last such token."""
    state, value = outcome.state, outcome.value
    config = state.config
    late = config.publish == "completed"
    if not config.enable_caching or isinstance(value, Misuse | Refused):
        return
    match call.name:
        case "allocate_slots" if not late and not call.options.get("delay_cache_blocks", False):
            yield call.args[0], state.requests[call.args[0]].num_accepted
        case "append":
            for name in read_ids(before, call.args[0])[: value.done]:
                fills = len(call.args) > 1 and before.requests[name].num_output_placeholders
                if late and fills:
                    yield name, _num_finished(state, name)
                elif not late:
                    yield name, state.requests[name].num_accepted
        case "add_tokens" if before.requests[call.args[0]].num_output_placeholders:
            name = call.args[0]
            yield name, _num_finished(state, name) if late else state.requests[name].num_accepted
        case "cache_blocks":
            name = call.args[0]
            count = _num_finished(state, name) if late else state.requests[name].num_accepted
            yield name, min(count, call.args[1])
        case "complete" | "take_batch" if late:
            taken = call.name == "take_batch"
            if taken and config.max_in_flight:
                return
            for name, entry in (before.batch if taken else before.in_flight[0]).entries.items():
                request = state.requests[name]
                if entry.publishes and request.status is Status.RUNNING and not request.num_loading:
                    yield name, _num_finished(state, name)


def _num_finished(state: State, name: str) -> int:
    """Count the tokens of a request that neither a batch in flight nor the open one computes."""
    entries = [*(each.entries for each in state.in_flight), state.batch.entries]
    counts = [each[name].before for each in entries if name in each]
    return min([state.requests[name].num_accepted, *counts])
