# SPDX-License-Identifier: Apache-2.0
"""Properties of the effect of levels on the free queue, which is followed here independently, by
the commands of a call.

No transition calls anything here. Twin: rust/src/check/properties/retention.rs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvcore.check.properties.hits import hit_of
from kvcore.pool.retention_state import NOTHING, Kept, level_of
from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call, Misuse
from kvcore.types.commands import Allocate, Command, Evict, EvictAll, Free, SetTable, Touch
from kvcore.types.retention import wish_at
from kvcore.types.values import Outcome, Refused


def wishes(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """WISHES: a block has the retention wishes of all requests that released it, joined part by
    part; a block that was taken, or is free without a key, has none.
    """
    old, pool = before.device.retention, outcome.state.device
    if old is None or pool.retention is None:
        return
    expected, free = joined(before, call, outcome), set(pool.queue)
    for each in outcome.commands:
        if isinstance(each, Allocate):
            expected.pop(each.block, None)
    expected = {
        block: kept
        for block, kept in expected.items()
        if kept != NOTHING and not (block in free and pool.keys[block] is None)
    }
    if dict(pool.retention.kept) != expected:
        yield f"{call.name} leaves the wishes {dict(pool.retention.kept)}, not {expected}"


def joined(before: State, call: Call, outcome: Outcome[State, Any]) -> dict[int, Kept]:
    """Return the wish for each block after the requests that lose it have joined theirs."""
    old = before.device.retention
    assert old is not None
    kept = dict(old.kept)
    for request, group_id, position, block in lost(before, call, outcome):
        size = before.config.groups[group_id].block_size
        base, level, ms = wish_at(request.wishes, (position + 1) * size - 1)
        b, v, until = kept.get(block, NOTHING)
        kept[block] = (max(b, base), max(v, level), max(until, old.now + ms if ms else 0))
    return kept


def lost(
    before: State, call: Call, outcome: Outcome[State, Any]
) -> Iterator[tuple[RequestState, int, int, int]]:
    """Yield the blocks that requests lose: request, group, position, block. A block that one call
    shares and replaces, or gives back, is lost, too: a hit, or what a merge puts into a table. A
    state that moves to another position is not.
    """
    after, null = outcome.state.requests, before.device.first_block
    taken = {each.block for each in outcome.commands if isinstance(each, Allocate)}
    for name, request in before.requests.items():
        left = after.get(name)
        for group_id, table in enumerate(request.tables):
            held = [] if left is None else list(left.tables[group_id])
            for position, block in enumerate(table):
                moves = block in held and block not in taken
                stays = held[position : position + 1] == [block] or moves
                if block >= null and not stays:
                    yield request, group_id, position, block
    rows = {request.row: name for name, request in before.requests.items()}
    for each in outcome.commands:
        if isinstance(each, SetTable) and null <= each.block and each.row in rows:
            left = after.get(rows[each.row])
            held = [] if left is None else list(left.tables[each.group_id])
            if held[each.position : each.position + 1] != [each.block]:
                yield before.requests[rows[each.row]], each.group_id, each.position, each.block
    hit = hit_of(call)
    if hit is None or isinstance(outcome.value, Misuse | Refused):
        return
    for group_id, blocks in enumerate(hit.blocks.blocks):
        held = list(after[call.args[0]].tables[group_id])
        for position, (block, found) in enumerate(zip(blocks, held, strict=False)):
            if null <= found != block:
                yield before.requests[call.args[0]], group_id, position, block


def leaves_by_level(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """LRU, if blocks leave by level."""
    followed = Followed(before, call, outcome)
    yield from followed.follow(outcome.commands, call)
    if call.name == "tick" and not isinstance(outcome.value, Misuse):
        followed.tick(call.args[0])
    queue = list(outcome.state.device.queue)
    if queue != followed.queue:
        yield f"{call.name} leaves the queue {queue}; its commands and levels give {followed.queue}"


class Followed:
    """The free queue of a pool, followed by the commands of a call."""

    def __init__(self, before: State, call: Call, outcome: Outcome[State, Any]) -> None:
        pool = before.device
        assert pool.retention is not None
        self.pool = pool
        self.queue = list(pool.queue)
        self.kept = joined(before, call, outcome)
        self.now = pool.retention.now
        self.cached = {block for block, key in enumerate(pool.keys) if key is not None}
        self.waiting = [] if pool.quarantine is None else list(pool.quarantine)
        self.waits = set(outcome.state.device.quarantine or ())

    def follow(self, commands: Sequence[Command], call: Call) -> Iterator[str]:
        """Move the blocks as the commands say; yield each taken block that was not the front."""
        touched = {each.block for each in commands if isinstance(each, Touch)}
        for block in self.waiting:
            if block not in self.waits and block not in touched:
                self.join(block)
        for place, command in enumerate(commands):
            match command:
                case Allocate(block):
                    if block not in self.queue[: 1 if self.pool.floors is None else None]:
                        yield f"{call.name} takes block {block}, but the queue is {self.queue}"
                        return
                    self.queue.remove(block)
                case Touch(block) if block in self.queue:
                    self.queue.remove(block)
                case Evict(block, _):
                    self.cached.discard(block)
                    is_taken = Allocate(block) in commands[place + 1 : place + 2]
                    if block in self.queue and not is_taken:
                        self.queue.remove(block)
                        self.join(block)
                case EvictAll():
                    self.cached.clear()
                case Free(block, cached):
                    if cached:  # perhaps published by this call
                        self.cached.add(block)
                    if block not in self.waits:
                        self.join(block)

    def level(self, block: int) -> int:
        """Return the current level of a block; a block without a key is below all levels."""
        return level_of(self.kept.get(block, NOTHING), self.now) if block in self.cached else -1

    def join(self, block: int) -> None:
        """Put a freed block into its place."""
        if block not in self.cached and block not in self.pool.older:
            self.queue.insert(0, block)
            return
        level = self.level(block)
        behind = [place for place, each in enumerate(self.queue) if self.level(each) > level]
        self.queue.insert(behind[0] if behind else len(self.queue), block)

    def tick(self, now: int) -> None:
        """Let time pass from one end of a level to the next."""
        ends = {until for _, _, until in self.kept.values() if self.now < until <= now}
        for moment in sorted(ends):
            ending = [block for block in self.queue if self.kept.get(block, NOTHING)[2] == moment]
            levels = {block: self.level(block) for block in ending}
            self.now = moment
            for block in ending:
                if self.level(block) < levels[block]:
                    self.queue.remove(block)
                    self.join(block)
        self.now = now
