# SPDX-License-Identifier: Apache-2.0
"""Simulates a workload on a router and its replicas, event by event.

A replica computes one prompt after the other, at a constant rate, and decodes beside that. Others
can hit a prompt once it is computed. If a replica dies before a request's first token, the request
is routed again as if it arrived then, but its wait counts from its first arrival.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from statistics import fmean, pstdev
from typing import Any

from kvcore.replay.results import BackendName
from kvcore.route.caches import Cache, LruCache, ManagedCache, NeverFits
from kvcore.route.feed import Feed
from kvcore.route.jobs import Job, Workload
from kvcore.route.replica import Replica, Task
from kvcore.route.results import Options, Result, Waits
from kvcore.route.rules import Router


class Fleet:
    """One run. Afterwards, `replicas` and `feed` have their final states."""

    def __init__(self, workload: Workload, options: Options, backend: BackendName | None) -> None:
        self._workload, self._options = workload, options
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        unit = workload.unit

        def cache() -> Cache:
            if options.model == "lru":
                return LruCache(options.num_blocks, unit)
            return ManagedCache(options.num_blocks, unit, backend)

        self.replicas = [Replica(number, cache()) for number in range(options.num_replicas)]
        self._living = list(self.replicas)
        self.feed = Feed(options, self._at)
        self._router = Router(options, options.prefill_rate / unit)
        self._waits: list[float] = []
        self._blocks = self._hit_blocks = self._refused = self._again = 0
        self._died_blocks = 0
        self._end = 0.0
        self._router_ns = 0

    def run(self) -> Result:
        """Run until no event is left."""
        jobs = self._workload.jobs
        for job in jobs:
            self._at(job.arrival, self._arrive, job, job.arrival)
        if self._options.num_dead:
            half = jobs[len(jobs) // 2].arrival
            self._at(half, self._die, half)
        while self._heap:
            _, _, function, args = heapq.heappop(self._heap)
            function(*args)
        return self._result()

    def _at(self, then: float, function: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (then, next(self._order), function, args))

    def _arrive(self, job: Job, now: float) -> None:
        start = time.thread_time_ns()
        index, found = self.feed.index, {}
        if index is not None:
            found = {int(name): depth for (name, _), depth in index.find(job.names).items()}
        replica = self._router.choose(job, self._living, found, now)
        self._router_ns += time.thread_time_ns() - start
        replica.add(Task(job, len(job.names) - found.get(replica.number, 0)))
        self._start(replica, now)

    def _start(self, replica: Replica, now: float) -> None:
        """Start the next prompt, if none is being computed and its blocks are available."""
        while replica.alive and replica.current is None and replica.queue:
            job = replica.queue[0].job
            try:
                hit = replica.cache.start(job)
            except NeverFits:
                self._refused += 1
                replica.take()
                replica.waiting -= len(job.names)
                continue
            self.feed.publish(replica.number, replica.cache.take_events(), now)
            if hit is None:
                return
            task = replica.take()
            task.hit = hit
            task.tokens = max(1, job.request.prompt_len - hit * self._workload.unit)
            replica.current = task
            replica.until = now + task.tokens / self._options.prefill_rate
            self._at(replica.until, self._computed, replica, task, replica.until)

    def _computed(self, replica: Replica, task: Task, now: float) -> None:
        if not replica.alive:
            return
        job = task.job
        replica.cache.computed(job)
        self.feed.publish(replica.number, replica.cache.take_events(), now)
        replica.current = None
        replica.work += task.tokens
        replica.waiting -= len(job.names)
        replica.active += len(job.names)
        self._hit_blocks += task.hit
        self._blocks += len(job.names)
        self._waits.append(now - job.arrival)
        self._end = now
        end = now + job.request.output_len * self._options.seconds_per_decode
        self._at(end, self._ended, replica, job, end)
        self._start(replica, now)

    def _ended(self, replica: Replica, job: Job, now: float) -> None:
        replica.cache.end(job)
        replica.active -= len(job.names)
        self._start(replica, now)

    def _die(self, now: float) -> None:
        """Kill some replicas, and route their unanswered requests again."""
        random = Random(f"deaths {self._options.seed}")
        dead = random.sample(self.replicas, self._options.num_dead)
        for each in dead:
            each.alive = False
            self.feed.drop(each.number)
        self._living = [each for each in self.replicas if each.alive]
        left = set[int]().union(*(each.cache.names() for each in self._living))
        self._died_blocks = len(set[int]().union(*(each.cache.names() for each in dead)) - left)
        tasks = [task for each in dead for task in _unanswered(each)]
        self._again += len(tasks)
        for task in sorted(tasks, key=lambda task: task.job.number):
            self._arrive(task.job, now)

    def _result(self) -> Result:
        work = [each.work for each in self.replicas]
        mean = fmean(work) or 1.0
        cached = [each.cache.names() for each in self._living]
        return Result(
            options=self._options,
            requests=len(self._waits),
            refused=self._refused,
            again=self._again,
            blocks=self._blocks,
            hit_blocks=self._hit_blocks,
            first_token=_waits(sorted(self._waits)),
            busiest=max(work) / mean,
            deviation=pstdev(work) / mean,
            copies=sum(map(len, cached)) / (len(set().union(*cached)) or 1),
            died_blocks=self._died_blocks,
            events=self.feed.events,
            messages=self.feed.messages,
            lost=self.feed.lost,
            payload_bytes=self.feed.payload_bytes,
            seconds=self._end,
            router_seconds=self._router_ns / 1e9,
        )


def _unanswered(replica: Replica) -> Iterator[Task]:
    if replica.current is not None:
        yield replica.current
    yield from replica.queue


def _waits(waits: list[float]) -> Waits | None:
    if not waits:
        return None
    p50, p95, p99 = (waits[int(share * (len(waits) - 1))] for share in (0.5, 0.95, 0.99))
    return Waits(p50, p95, p99)
