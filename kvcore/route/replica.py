# SPDX-License-Identifier: Apache-2.0
"""One replica: a queue, one prompt being computed, and requests that decode.

The router knows its load in blocks: those of prompts without a first token yet, and those of
requests that decode.
"""

from __future__ import annotations

from collections import deque

import attrs

from kvcore.route.caches import Cache
from kvcore.route.jobs import Job


@attrs.define(eq=False)
class Task:
    """A request on its replica. left: blocks to compute, as the router expected. hit:
    blocks hit.
    """

    job: Job
    left: int
    hit: int = 0
    tokens: int = 0


@attrs.define(eq=False)
class Replica:
    """A replica. waiting: blocks of prompts without a first token. queued: blocks to compute of
    prompts not yet started. until: end time of the current prompt. active: blocks of requests that
    decode. work: tokens computed.
    """

    number: int
    cache: Cache
    alive: bool = True
    queue: deque[Task] = attrs.field(factory=deque)
    current: Task | None = None
    until: float = 0.0
    waiting: int = 0
    queued: int = 0
    active: int = 0
    work: int = 0

    def add(self, task: Task) -> None:
        """Put a request into the queue."""
        self.queue.append(task)
        self.waiting += len(task.job.names)
        self.queued += task.left

    def take(self) -> Task:
        """Take the first request out of the queue."""
        task = self.queue.popleft()
        self.queued -= task.left
        return task

    def prefill_left(self, now: float, blocks_per_second: float) -> float:
        """Return how many blocks of prompts are still to be computed."""
        if self.current is None:
            return self.queued
        return self.queued + (self.until - now) * blocks_per_second
