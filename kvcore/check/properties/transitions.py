# SPDX-License-Identifier: Apache-2.0
"""Properties of what one call changes: the free queue, keys, and the blocks that it hits.

No transition calls anything here. A check gets the state before a call, the call and its outcome;
it yields what is wrong. The queue is followed independently, by the commands of the call. Refusals,
resets and writes are checked in outcomes.py.

Source: rows 6, 18 to 20, 39, 44, 53 of kvcore/check/mutants/catalogue.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvcore.check.properties.claims import pin_hit, pins
from kvcore.check.properties.epochs import epoch_first, join
from kvcore.check.properties.floors import floor
from kvcore.check.properties.hits import hit_of
from kvcore.check.properties.published import published
from kvcore.check.properties.retention import leaves_by_level, wishes
from kvcore.check.world.keyed import keys_of, own_tails, tail_keys
from kvcore.codec.encode import encode
from kvcore.pool.block_pool import BlockPool
from kvcore.pool.free_queue import num_older
from kvcore.state.state import State
from kvcore.trace.calls import Call, Misuse, perform
from kvcore.types.commands import Allocate, Evict, EvictAll, Free, SetTable, Touch
from kvcore.types.values import Appended, Outcome, Refused

TransitionCheck = Callable[[State, Call, Outcome[State, Any]], Iterator[str]]


def lru(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """LRU: a call takes the front of the free queue, or any free block if there are floors (see
    FLOOR); freed blocks are placed by the policy, and the others keep their order.
    """
    same = outcome.state.device is before.device and not outcome.commands
    if same or call.name == "cancel" or before.device.policy is not None:
        return
    if before.device.retention is not None:
        yield from leaves_by_level(before, call, outcome)
        return
    pool, waits = outcome.state.device, quarantined(outcome.state.device)
    queue, num_first = list(before.device.queue), num_older(before.device.queue)
    touched = {each.block for each in outcome.commands if isinstance(each, Touch)}
    for block in quarantined(before.device):
        if block not in waits and block not in touched:
            cached = before.device.has_key(block)
            num_first += join(queue, before.device, block, num_first, cached=cached)
    for command in outcome.commands:
        match command:
            case Allocate(block):
                if block not in queue[: 1 if pool.floors is None else None]:
                    yield f"{call.name} takes block {block}, but {queue[:1]} is the front"
                    return
                num_first -= queue.index(block) < num_first
                queue.remove(block)
            case Touch(block) if block in queue:
                queue.remove(block)
            case Free(block, cached) if block not in waits:
                num_first += join(queue, before.device, block, num_first, cached=cached)
    if queue != list(pool.queue):
        yield f"{call.name} leaves the queue {list(pool.queue)}; its commands give {queue}"


def row_life(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """ROW-LIFE: a row becomes free when the batch that was open at its request's removal is
    finished; after a cancel, if no remaining batch uses it.
    """
    after, held = outcome.state, dict(before.held_rows)
    numbers = [*(batch.number for batch in after.in_flight), after.batch.number]
    for row in after.free_rows:
        if row in before.free_rows:
            continue
        left = any(row in batch.rows for batch in after.in_flight)
        if held.get(row, after.batch.number) in numbers or (call.name == "cancel" and left):
            yield f"{call.name} gives back row {row}, which an unfinished batch may have"


def grown(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """GROWN: `append` returns each table position that it set, in the order of its commands."""
    if not isinstance(outcome.value, Appended) or not isinstance(call.args[0], list):
        return
    ids = call.args[0]
    rows = [before.requests[each].row for each in ids if isinstance(each, str)]
    returned = list(zip(*(column.tolist() for column in outcome.value.grown), strict=True))
    expected = [
        (rows.index(each.row), each.group_id, each.position, each.block)
        for each in outcome.commands
        if isinstance(each, SetTable)
    ]
    if returned != expected:
        yield f"append set the positions {expected} of tables, but returned {returned}"


def hit_preserve(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """HIT-PRESERVE: the blocks of a hit keep their keys and stay findable."""
    after = outcome.state.device
    for block in hit_blocks(before, call, outcome):
        key = before.device.keys[block]
        if after.keys[block] != key:
            yield f"block {block} was hit and lost its key"
        elif key is not None and block not in list(after.index.get(key) or ()):
            yield f"block {block} was hit and is no longer found"
        elif not {*tail_keys(before.device, block)} <= {*tail_keys(after, block)}:
            yield f"block {block} was hit and lost a tail key"
    for block, tails in hit_tails(before, call, outcome):
        if not {*tails} <= {*tail_keys(after, block)}:
            yield f"block {block} was hit up to its tail, which it lost"


def hit_pinned(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """HIT-PINNED: the blocks of a hit are in their request's tables, and the call evicts none of
    them.
    """
    hit = hit_of(call)
    hits = set(hit_blocks(before, call, outcome))
    if hit is None or not hits:
        return
    tables = outcome.state.requests[call.args[0]].tables
    for group_id, blocks in enumerate(hit.blocks.blocks):
        for position, block in enumerate(blocks):
            if block in hits and list(tables[group_id][position : position + 1]) != [block]:
                yield f"block {block} was hit at {position} of group {group_id}, but is not there"
    for command in outcome.commands:
        if isinstance(command, Evict | Allocate) and command.block in hits:
            yield f"{command} of a block that the call hits"


def hit_fresh(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """HIT-FRESH: a hit is used only if its blocks still have the request's keys."""
    hit = hit_of(call)
    if hit is None or isinstance(outcome.value, Misuse | Refused):
        return
    request = before.requests[call.args[0]]
    for group_id, blocks in enumerate(hit.blocks.blocks):
        for position, block in enumerate(blocks):
            if block < before.device.first_block:
                continue
            end = min((position + 1) * before.config.groups[group_id].block_size, hit.num_tokens)
            known = end <= len(request.block_hashes) * before.config.hash_block_size
            wanted = request.key_at(before.config, group_id, end) if known else None
            if wanted is None or wanted not in keys_of(before.device, block):
                yield f"block {block} at {position} of group {group_id} has another key by now"


def full_hit(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """FULLHIT: a hit leaves at least one token to compute, and no token is written into a block of
    the hit.
    """
    hit = hit_of(call)
    hits = set(hit_blocks(before, call, outcome))
    if hit is None or not hits:
        return
    request = outcome.state.requests[call.args[0]]
    if hit.num_tokens >= len(request.tokens):
        yield f"{hit.num_tokens} tokens of {len(request.tokens)} are hit"
    for index, group in enumerate(before.config.groups):
        first = hit.num_tokens // group.block_size
        for block in () if group.is_cross else request.tables[index][first:]:
            if block in hits and hit.num_tokens < request.num_computed:
                yield f"block {block} of group {index} is hit and written"


def hash_mono(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """HASH-MONO: a block's key changes to another key only after an eviction."""
    keys, gone = outcome.state.device.keys, set[tuple[int, bytes]]()
    if keys is before.device.keys and outcome.state.device.tails is before.device.tails:
        return
    for command in outcome.commands:
        if isinstance(command, EvictAll):
            return
        if isinstance(command, Evict):
            gone.add((command.block, command.key))
    for block, key in enumerate(before.device.keys):
        if key is not None and keys[block] != key and (block, key) not in gone:
            yield f"{call.name} changes the key of block {block}, which was not evicted"
        for tail in {*tail_keys(before.device, block)} - {*tail_keys(outcome.state.device, block)}:
            if (block, tail) not in gone:
                yield f"{call.name} takes a tail key of block {block}, which was not evicted"


def determinism(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """DETERMINISM: the same call on the same state gives the same outcome."""
    again = perform(before, call)
    if again.commands != outcome.commands or again.value != outcome.value:
        yield f"{call.name} gives {again.value!r} when repeated, not {outcome.value!r}"
    elif again.state != outcome.state and encode(again.state) != encode(outcome.state):
        yield f"{call.name} gives another state when repeated"


def hit_blocks(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[int]:
    """Yield the blocks that a successful call was given as a hit and does not write.

    Where external tokens follow, a window may be past a hit block: the null block stands for it. A
    state, or a part of a block, inside whose block the hit ends is written, or a copy of it; the
    part also if only lookahead slots follow.
    """
    hit, null = hit_of(call), before.device.first_block
    if hit is None or isinstance(outcome.value, Misuse | Refused):
        return
    request = outcome.state.requests[call.args[0]]
    tables, writes = request.tables, request.num_computed > hit.num_tokens
    has_slots = writes or call.options.get("num_lookahead_tokens", 0) > 0
    for group_id, blocks in enumerate(hit.blocks.blocks):
        group, whole = before.config.groups[group_id], len(blocks)
        if writes if group.is_state else has_slots and before.config.has_tails:
            whole = hit.num_tokens // group.block_size
        for position, block in enumerate(blocks[:whole]):
            there = list(tables[group_id][position : position + 1])
            if block >= null and not (there and there[0] < null):
                yield block


def hit_tails(
    before: State, call: Call, outcome: Outcome[State, Any]
) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the blocks inside which the hit of a successful call ends, with those of their tail
    keys that end up to there.
    """
    hit = hit_of(call)
    if hit is None or not before.config.has_tails or isinstance(outcome.value, Misuse | Refused):
        return
    request, config = before.requests[call.args[0]], before.config
    for group_id, blocks in enumerate(hit.blocks.blocks):
        group = config.groups[group_id]
        position, rest = divmod(hit.num_tokens, group.block_size)
        if rest and not group.is_state and blocks[position] >= before.device.first_block:
            mine = own_tails(config, request, group_id, position, hit.num_tokens)
            tails = tail_keys(before.device, blocks[position])
            yield blocks[position], [key for key in tails if key in mine]


def quarantined(pool: BlockPool) -> list[int]:
    """Return the ownerless blocks that a batch in flight uses, in the order of their release."""
    return [] if pool.quarantine is None else list(pool.quarantine)


OF_HITS = frozenset({hit_preserve, hit_pinned, hit_fresh, full_hit})
"""Checks of calls that are made with a hit; they find nothing in other calls."""

TRANSITION_CHECKS: dict[str, TransitionCheck] = {
    "LRU": lru,
    "EPOCH-FIRST": epoch_first,
    "WISHES": wishes,
    "ROW-LIFE": row_life,
    "GROWN": grown,
    "PINS": pins,
    "PIN-HIT": pin_hit,
    "FLOOR": floor,
    "HIT-PRESERVE": hit_preserve,
    "HIT-PINNED": hit_pinned,
    "HIT-FRESH": hit_fresh,
    "FULLHIT": full_hit,
    "HASH-MONO": hash_mono,
    "PUBLISHED": published,
    "DETERMINISM": determinism,
}
