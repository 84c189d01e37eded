# SPDX-License-Identifier: Apache-2.0
"""Numbered batches of events for a publisher, which keeps the newest for consumers that missed
them.

Invariants: numbers rise by one, and no number is used for two batches of different content. A
consumer that applies all batches from a clearing on, in order, has the index of the publishing
manager. Why numbers do not begin at 0: a consumer would take those of a restarted publisher for old
ones, and would keep the blocks of the dead engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs

from kvcore.codec.event_msgpack import EventMap, Form, encode_maps
from kvcore.event_index.worker_index import WorkerIndex

KEPT_MAX = 10_000
SNAPSHOT_BLOCKS = 1_000
CLEARED: EventMap = {"type": "AllBlocksCleared"}


@attrs.frozen
class Message:
    """A batch to be sent. payload: the bytes of `encode_events`."""

    number: int
    payload: bytes


class EventLog:
    """Numbers batches, keeps the last `kept_max`, and can repeat the whole index.

    first_number: must be above all numbers that an earlier publisher of this engine used; a clock's
    reading will do. rank: the data-parallel rank that every batch names. form: the form of events
    on the wire.
    """

    def __init__(
        self,
        first_number: int,
        *,
        rank: int = 0,
        kept_max: int = KEPT_MAX,
        form: Form = "map",
    ) -> None:
        self._next = self._first = first_number
        self._rank = rank
        self._form: Form = form
        self._kept: deque[Message] = deque(maxlen=kept_max)
        self._mirror = WorkerIndex(with_contents=True)
        self._skipped = False

    @property
    def next_number(self) -> int:
        """The number of the next batch."""
        return self._next

    def begin(self, timestamp: float) -> Message:
        """Return the first batch, which clears what a consumer knew of an earlier engine."""
        return self._number([CLEARED], timestamp)

    def append(self, events: Iterable[EventMap], timestamp: float) -> list[Message]:
        """Number a batch of events. After a skipped number, return batches of the whole index."""
        events = list(events)
        self._mirror_all(events)
        if not self._skipped:
            return [self._number(events, timestamp)]
        self._skipped = False
        batches, num_blocks = [[CLEARED]], 0
        for event in self._mirror.announcements(SNAPSHOT_BLOCKS):
            num_blocks += len(event["block_hashes"])
            if num_blocks > SNAPSHOT_BLOCKS:
                batches.append([])
                num_blocks = len(event["block_hashes"])
            batches[-1].append(event)
        return [self._number(each, timestamp) for each in batches]

    def skip(self, events: Iterable[EventMap]) -> None:
        """Use up a number for events that are not sent; the next batch then holds the whole
        index.
        """
        self._mirror_all(events)
        self._next += 1
        self._skipped = True

    def lose(self) -> None:
        """Use up a number for events that are lost. The index starts empty again."""
        self._mirror = WorkerIndex(with_contents=True)
        self._next += 1
        self._skipped = True

    def replay(self, start: int, timestamp: float) -> list[Message]:
        """Return the batches from `start` on, as they were sent.

        A start below the first number means the first. If some of these batches are no longer kept,
        return one batch of the whole index, with the last number used. Changes nothing.
        """
        start = max(start, self._first)
        if start >= self._next:
            return []
        kept = [each for each in self._kept if each.number >= start]
        if [each.number for each in kept] == list(range(start, self._next)):
            return kept
        events = [CLEARED, *self._mirror.announcements(SNAPSHOT_BLOCKS)]
        return [Message(self._next - 1, self._encode(events, timestamp))]

    def _mirror_all(self, events: Iterable[EventMap]) -> None:
        for event in events:
            self._mirror.apply(event)

    def _number(self, events: list[EventMap], timestamp: float) -> Message:
        message = Message(self._next, self._encode(events, timestamp))
        self._kept.append(message)
        self._next += 1
        return message

    def _encode(self, events: list[EventMap], timestamp: float) -> bytes:
        return encode_maps(events, timestamp, self._rank, self._form)
