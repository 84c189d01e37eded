# SPDX-License-Identifier: Apache-2.0
"""The contents of every slot, the writers, and the last events of every block.

As in real memory, nothing is forgotten when a block is freed. A slot remembers the event of its
block under which it was written; once that event is older than the block's last 8, the writer is
forgotten, but not the content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs

from kvcore.sanitizer.digests import NOTHING, ZEROS

BlockAddress = tuple[str, int, int]
"""A tier, a pool of blocks, and a block."""

NUM_EVENTS = 8
"""How many events are kept of each block, and of each request."""
DELTA_MAX = 4095
"""The step of a write is known up to this many steps after its event."""


@attrs.frozen(eq=False)
class Event:
    """An event of a block: `given`, `dropped`, `written`, `copied`, `zeroed` or `lost`.

    serial: of the request, if any. index: the block's place in that request's table, or the copied
    block.
    """

    kind: str
    step: int
    serial: int | None
    index: int


@attrs.frozen
class Held:
    """The content of a slot: the digest of a prefix, and the oldest weights used for it."""

    digest: int
    oldest_epoch: int
    event: Event | None = attrs.field(default=None, eq=False)
    delta: int = attrs.field(default=0, eq=False)


EMPTY = Held(NOTHING, 0)


class Block:
    """The slots of one block, and its last events."""

    def __init__(self, num_slots: int) -> None:
        self.slots: list[Held] = [EMPTY] * num_slots
        self.events: deque[Event] = deque(maxlen=NUM_EVENTS)

    def happened(self, kind: str, step: int, serial: int | None, index: int) -> Event:
        """Append an event."""
        event = Event(kind, step, serial, index)
        self.events.append(event)
        return event

    def written_by(self, serial: int, index: int, step: int) -> Event:
        """Return the last event by which a request has this block at a place of its table."""
        for event in reversed(self.events):
            if (event.serial, event.index) == (serial, index) and event.kind in GIVES:
                return event
        return self.happened("written", step, serial, index)


GIVES = ("given", "written")


class Blocks:
    """All blocks that were ever named."""

    def __init__(self, num_slots: Iterable[int]) -> None:
        self._num_slots = list(num_slots)
        self._blocks: dict[BlockAddress, Block] = {}

    def at(self, place: BlockAddress) -> Block:
        """Return a block, empty if it was never named."""
        block = self._blocks.get(place)
        if block is None:
            block = self._blocks[place] = Block(self._num_slots[place[1]])
        return block

    def copy(self, source: BlockAddress, target: BlockAddress, step: int) -> None:
        """Copy all slots of a block."""
        held, block = self.at(source).slots, self.at(target)
        event = block.happened("copied", step, None, source[2])
        block.slots = [attrs.evolve(each, event=event, delta=0) for each in held]

    def zero(self, place: BlockAddress, step: int) -> None:
        """Zero all slots of a block."""
        block = self.at(place)
        event = block.happened("zeroed", step, None, 0)
        block.slots = [Held(ZEROS, 0, event)] * len(block.slots)

    def lose(self, place: BlockAddress, step: int) -> None:
        """Leave a block unwritten: a copy to it failed, or it was moved away."""
        block = self.at(place)
        event = block.happened("lost", step, None, 0)
        block.slots = [Held(NOTHING, 0, event)] * len(block.slots)
