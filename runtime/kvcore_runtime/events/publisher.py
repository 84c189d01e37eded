# SPDX-License-Identifier: Apache-2.0
"""Sends a manager's events to routers: numbered batches on a PUB socket, and replays on a ROUTER.

The frames are those of vLLM 0.33's publisher (`vllm/distributed/kv_events.py`), so that its
subscribers and Dynamo's indexer read them. The engine's thread only passes on the manager's events;
the publisher's own thread encodes and sends them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from kvcore import Group, KVCacheManager
from kvcore.codec.event_msgpack import Form, event_maps
from kvcore.event_index import EventLog, Message
from kvcore_runtime.events.endpoints import (
    END,
    LOOPBACK,
    LOOPBACK_REPLAY,
    Warnings,
    attach,
    is_to_bind,
    with_rank,
)
from kvcore_runtime.events.errors import PublisherClosed, load_zmq

POLL_MS = 10
SEND_HIGH_WATER = 100_000
QUESTION_BYTES_MAX = 64


class EventPublisher:
    """Publishes the events of one manager, for one data-parallel rank.

    endpoint: of the PUB socket, with the rank added to its port. An endpoint with `*` or `::`, or
    with `ipc://`, is bound, others are connected; default: port 5557 of the loopback interface.
    replay_endpoint: of the ROUTER socket, always bound; default: port 5558 of the loopback
    interface. topic: the first frame. queue_max: batches that may wait for the thread. If more
    wait, it sends the whole index once it has caught up; if twice as many wait, events are lost and
    the index starts again empty: late or lost events cost hits, but never name a block that does
    not exist. kept_max: batches kept for replays. groups, form, whole_hashes: as in
    `encode_events`. Raises PackageMissing without pyzmq, and EndpointUnusable.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        replay_endpoint: str | None = None,
        *,
        rank: int = 0,
        topic: str = "",
        queue_max: int = 100_000,
        kept_max: int = 10_000,
        groups: Sequence[Group] = (),
        form: Form = "map",
        whole_hashes: bool = False,
    ) -> None:
        self._zmq: Any = load_zmq()
        self._topic = topic.encode()
        self._groups, self._whole_hashes = groups, whole_hashes
        self._queue_max = queue_max
        self._queue: deque[Sequence[Any]] = deque()
        self._lost = False
        self._stopping = False
        self._deadline = 0.0
        self.num_skipped = 0
        """Batches that were not sent, since too many waited; their events came with a later one."""
        self.num_lost = 0
        """Times that events were lost, and the index began anew."""
        self._warnings = Warnings()
        first_number = time.time_ns() >> 10
        self._log = EventLog(first_number, rank=rank, kept_max=kept_max, form=form)
        self._context = self._zmq.Context()
        try:
            self._pub = self._context.socket(self._zmq.PUB)
            self._pub.set_hwm(SEND_HIGH_WATER)
            bind = endpoint is None or is_to_bind(endpoint)
            self.endpoint = attach(self._pub, with_rank(endpoint or LOOPBACK, rank), bind=bind)
            self._router = self._context.socket(self._zmq.ROUTER)
            self._router.setsockopt(self._zmq.SNDHWM, 2 * (kept_max + 1))
            self._router.setsockopt(self._zmq.MAXMSGSIZE, QUESTION_BYTES_MAX)
            place = with_rank(replay_endpoint or LOOPBACK_REPLAY, rank)
            self.replay_endpoint = attach(self._router, place, bind=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kvcore-events", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def publish(self, manager: KVCacheManager) -> int:
        """Pass the manager's events to the thread, without waiting.

        Call it once per step, after `take_batch`. Returns the number of events. Raises
        PublisherClosed, and then takes no events.
        """
        if self._stopping:
            raise PublisherClosed(endpoint=self.endpoint)
        events = manager.take_events()
        if len(events) and not self._lost:
            if len(self._queue) < 2 * self._queue_max:
                self._queue.append(events)
            else:
                self._lost = True
        return len(events)

    def close(self, timeout_s: float = 1.0) -> None:
        """Send waiting batches, for at most `timeout_s`, and close the sockets. A second call does
        nothing.
        """
        if not self._stopping:
            self._deadline = time.monotonic() + timeout_s
            self._stopping = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._send([self._log.begin(time.time())])
            while not (self._stopping and (not self._queue or time.monotonic() > self._deadline)):
                self._turn()
        except Exception as error:
            self._lost = True  # a thread that has ended gets no more batches
            self._warnings.warn("no more events are sent: %s", error)
        finally:
            self._context.destroy(linger=200 if self._stopping else 0)

    def _turn(self) -> None:
        """Answer one replay, and send waiting batches."""
        if self._router.poll(0 if self._queue else POLL_MS):
            self._answer(self._router.recv_multipart())
        for _ in range(len(self._queue)):
            events = self._queue.popleft()
            try:
                maps = event_maps(events, groups=self._groups, whole_hashes=self._whole_hashes)
            except (
                Exception
            ) as error:  # wrong groups of the caller, or a defect: the engine must go on
                self._lose(error)
                continue
            if len(self._queue) < self._queue_max:
                self._send(self._log.append(maps, time.time()))
            else:
                self._log.skip(maps)
                self.num_skipped += 1
        if self._lost and not self._queue:
            self._lost = False  # before the index is emptied: later events are its own
            self._lose("more batches than twice queue_max waited")

    def _lose(self, reason: object) -> None:
        self._log.lose()
        self.num_lost += 1
        self._warnings.warn("events were dropped, and the index begins anew: %s", reason)

    def _send(self, messages: Sequence[Message]) -> None:
        for each in messages:
            self._pub.send_multipart((self._topic, each.number.to_bytes(8, "big"), each.payload))

    def _answer(self, frames: list[bytes]) -> None:
        """Send the batches from a number on to the requester, then the end marker."""
        if len(frames) != 3 or frames[1] or not 0 < len(frames[2]) <= 8:
            self._warnings.warn("a replay request of %d frames was ignored", len(frames))
            return
        start = int.from_bytes(frames[2], "big")
        for each in self._log.replay(start, time.time()):
            number = each.number.to_bytes(8, "big")
            self._router.send_multipart((frames[0], b"", self._topic, number, each.payload))
        self._router.send_multipart((frames[0], b"", b"", END, b""))
