# SPDX-License-Identifier: Apache-2.0
"""The batches that a publisher sends: numbered, the last of them kept for those who missed them.

Invariants: numbers rise by one and are never used for two batches of different content. Whoever
applies the batches from a clearing on in order has the index of the manager that the events came
from. Why numbers do not begin at 0: a consumer takes those of a restarted publisher for old ones
and keeps the blocks of the dead engine.
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
    """A batch on its way. payload: as `encode_events` writes it."""

    number: int
    payload: bytes


class EventLog:
    """Numbers batches, keeps the last `kept_max`, and can say the whole index again.

    first_number: above all numbers that an earlier publisher of this engine used, for example a
    clock's. rank: the data-parallel rank that every batch names. form: of events on the wire.
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
        """The first batch: whatever a consumer knew of an earlier engine is gone."""
        return self._number([CLEARED], timestamp)

    def append(self, events: Iterable[EventMap], timestamp: float) -> list[Message]:
        """Number a batch of events. Behind skipped ones these are batches of the whole index."""
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
        """Use a number for events that are not sent; the next batch says the whole index."""
        self._mirror_all(events)
        self._next += 1
        self._skipped = True

    def lose(self) -> None:
        """Use a number for events that nobody has any more. The index begins anew, empty."""
        self._mirror = WorkerIndex(with_contents=True)
        self._next += 1
        self._skipped = True

    def replay(self, start: int, timestamp: float) -> list[Message]:
        """The batches from `start` on, as they were sent.

        A start below the first number means the first. If batches from there on are no longer kept,
        one batch with the last number used says the whole index. Changes nothing.
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
