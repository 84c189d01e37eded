# SPDX-License-Identifier: Apache-2.0
"""Carries events from the replicas to the router's index, with delays and losses.

An `EventLog` publishes the messages, and an `EventIndex` receives them. Each message is lost
independently. If one is missing, the index requests a replay, which arrives two delays later and is
not lost. Without replay, messages are numbered on arrival, so the index does not notice a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from kvcore.codec.event_msgpack import EventMap
from kvcore.event_index.event_log import EventLog, Message
from kvcore.event_index.index import EventIndex, Gap
from kvcore.route.results import WITH_INDEX, Options

KEPT_MAX = 64
"""Messages that a replica keeps for replay. For older ones it sends the whole index."""

At = Callable[..., Any]
"""Schedules a call: takes a time, a function and its arguments."""


class Feed:
    """The events of all replicas. index: None if the rule needs none. lost: messages lost
    so far.
    """

    def __init__(self, options: Options, at: At) -> None:
        self._options, self._at = options, at
        self._random = Random(f"losses {options.seed}")
        self._recovering: set[int] = set()
        self._logs: dict[int, EventLog] = {}
        self._arrived: dict[int, int] = {}
        self.index = EventIndex() if options.rule in WITH_INDEX else None
        self.events = self.messages = self.lost = self.payload_bytes = 0
        for replica in range(options.num_replicas):
            self._logs[replica] = EventLog(1, kept_max=KEPT_MAX)
            self._arrived[replica] = 0
            self._send(replica, self._logs[replica].begin(0.0), 1, 0.0)

    def publish(self, replica: int, events: list[EventMap], now: float) -> None:
        """Send the events of a replica's cache, if any."""
        for message in self._logs[replica].append(events, now) if events else ():
            self._send(replica, message, len(events), now)

    def drop(self, replica: int) -> None:
        """Remove a dead replica; its messages on the way are ignored."""
        del self._logs[replica]
        if self.index is not None:
            self.index.drop(str(replica))

    def _send(self, replica: int, message: Message, num_events: int, now: float) -> None:
        self.events += num_events
        self.messages += 1
        self.payload_bytes += len(message.payload)
        if self.index is None:
            return
        if self._random.random() < self._options.loss:
            self.lost += 1
        else:
            self._later(now, self._deliver, replica, message)

    def _later(self, now: float, function: Callable[..., None], *args: Any) -> None:
        """Call a function after the delay, or now if there is none."""
        if self._options.delay:
            then = now + self._options.delay
            self._at(then, function, *args, then)
        else:
            function(*args, now)

    def _deliver(self, replica: int, message: Message, now: float) -> None:
        if replica not in self._logs or self.index is None:
            return
        number = message.number
        if not self._options.replay:
            self._arrived[replica] += 1
            number = self._arrived[replica]
        gap = self.index.apply(str(replica), 0, number, message.payload)
        if isinstance(gap, Gap) and replica not in self._recovering:
            self._recovering.add(replica)
            self._later(now, self._answer, replica, gap.start)

    def _answer(self, replica: int, start: int, now: float) -> None:
        if replica in self._logs:
            self._later(now, self._take_answer, replica, self._logs[replica].replay(start, now))

    def _take_answer(self, replica: int, messages: list[Message], now: float) -> None:
        self._recovering.discard(replica)
        for message in messages:
            self._deliver(replica, message, now)
