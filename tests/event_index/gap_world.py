# SPDX-License-Identifier: Apache-2.0
"""A publisher, a network that loses, doubles and reorders, and an index: every order of moves.

The real `EventLog` and `EventIndex` are the model. A manager is a set of keys. The publisher's
moves are to store or remove a key, to skip a batch since its queue is full, and to die and begin
anew; the network's are to deliver, lose or double a message, perhaps the second one first; the
consumer asks for what is missing.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import attrs

from kvcore.codec.event_msgpack import EventMap
from kvcore.event_index import EventIndex, EventLog, Message

WORKER, RANK = "engine", 0
RESTART = 1_000
STATES_MAX = 10**6


@attrs.define(kw_only=True)
class World:
    """One state. truth: by number, the manager's keys when it was used."""

    log: EventLog
    index: EventIndex = attrs.field(factory=EventIndex)
    keys: frozenset[int] = frozenset()
    truth: dict[int, frozenset[int]] = attrs.field(factory=dict)
    flying: tuple[Message, ...] = ()
    operations: int
    skips: int
    restarts: int
    faults: int

    def canonical(self) -> tuple[object, ...]:
        """Return what decides the future of the world."""
        feed = self.index._feeds.get((WORKER, RANK))
        log = self.log
        return (
            *(self.keys, self.flying, self.operations, self.skips, self.restarts, self.faults),
            *(log._next, log._first, log._skipped, tuple(log._kept)),
            frozenset(log._mirror.keys()),
            self.index.expected(WORKER, RANK),
            frozenset(self.index.keys(WORKER, RANK)),
            tuple(sorted(feed.held)) if feed else (),
            tuple(sorted(self.truth.items())),
        )


Move = Callable[[World], None]
NewLog = Callable[[int], EventLog]


def begin(new_log: NewLog, *, operations: int, skips: int, restarts: int, faults: int) -> World:
    """Return a publisher that has sent its first batch, and an empty index."""
    world = World(
        log=new_log(1), operations=operations, skips=skips, restarts=restarts, faults=faults
    )
    send(world, [world.log.begin(0.0)])
    return world


def send(world: World, messages: list[Message]) -> None:
    world.truth |= {each.number: world.keys for each in messages}
    world.flying += tuple(messages)


def change(world: World, key: int) -> list[EventMap]:
    """Store a key in the manager, or remove it if it is there."""
    world.operations -= 1
    event: EventMap = {"block_hashes": [key], "medium": "GPU", "group_idx": 0}
    if key in world.keys:
        world.keys -= {key}
        return [{"type": "BlockRemoved", **event}]
    world.keys |= {key}
    stored = {"parent_block_hash": None, "token_ids": [key], "block_size": 1}
    return [{"type": "BlockStored", **event, **stored}]


def publish(key: int) -> Move:
    def move(world: World) -> None:
        events = change(world, key)
        send(world, world.log.append(events, 0.0))

    return move


def skip(key: int) -> Move:
    def move(world: World) -> None:
        world.skips -= 1
        events = change(world, key)
        world.truth[world.log.next_number] = world.keys
        world.log.skip(events)

    return move


def restart(new_log: NewLog) -> Move:
    def move(world: World) -> None:
        world.restarts -= 1
        world.keys = frozenset()
        world.log = new_log(RESTART)
        send(world, [world.log.begin(0.0)])

    return move


def deliver(place: int) -> Move:
    def move(world: World) -> None:
        message = world.flying[place]
        world.flying = world.flying[:place] + world.flying[place + 1 :]
        world.index.apply(WORKER, RANK, message.number, message.payload)

    return move


def lose(world: World) -> None:
    world.faults -= 1
    world.flying = world.flying[1:]


def double(world: World) -> None:
    world.faults -= 1
    world.flying += world.flying[:1]


def ask(world: World) -> None:
    """Request a replay of missing events; it may arrive after batches on their way, or never."""
    world.flying += tuple(world.log.replay(world.index.expected(WORKER, RANK), 0.0))


def moves(world: World, new_log: NewLog) -> Iterator[Move]:
    """Yield everything that can happen next."""
    if world.operations:
        for key in (1, 2):
            yield publish(key)
            if world.skips:
                yield skip(key)
    if world.restarts:
        yield restart(new_log)
    for place in range(min(2, len(world.flying))):
        yield deliver(place)
    if world.flying and world.faults:
        yield lose
        yield double
    if not world.flying and world.index.is_partial(WORKER, RANK):
        yield ask


def known(world: World) -> frozenset[int]:
    return frozenset(name for _, name in world.index.keys(WORKER, RANK) if isinstance(name, int))


def gap_holds(world: World) -> bool:
    """EVT-GAP: what the index has is what the manager had at the number applied last."""
    last = world.index.expected(WORKER, RANK) - 1
    return known(world) == world.truth.get(last, frozenset())


def rebuilds(world: World) -> bool:
    """REBUILD: one more batch, no more faults, and the index is the manager's."""
    world = copy.deepcopy(world)
    send(world, world.log.append([], 0.0))
    for _ in range(4):
        while world.flying:
            deliver(0)(world)
        if not world.index.is_partial(WORKER, RANK):
            break
        ask(world)
    return known(world) == world.keys and not world.index.is_partial(WORKER, RANK)


LAWS: dict[str, Callable[[World], bool]] = {"EVT-GAP": gap_holds, "REBUILD": rebuilds}


def explore(world: World, new_log: NewLog, laws: Iterable[str] = LAWS) -> tuple[int, str | None]:
    """Walk all orders, breadth first. Returns the states seen, and the law that broke, if any."""
    laws = tuple(laws)
    seen = {world.canonical()}
    waiting = deque([world])
    while waiting:
        here = waiting.popleft()
        for law in laws:
            if not LAWS[law](here):
                return len(seen), law
        for move in moves(here, new_log):
            there = copy.deepcopy(here)
            move(there)
            name = there.canonical()
            if name not in seen:
                seen.add(name)
                waiting.append(there)
        assert len(seen) <= STATES_MAX, "the world is larger than it was meant to be"
    return len(seen), None
