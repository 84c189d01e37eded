# SPDX-License-Identifier: Apache-2.0
"""Receives the events of engines, requests lost ones again, and keeps an `EventIndex`.

Works with `EventPublisher` and with vLLM's publisher: the frames are the same.
"""

from __future__ import annotations

import time
from typing import Any, Self

from kvcore.event_index import DamagedEvents, EventIndex, Gap
from kvcore_runtime.events.endpoints import END, Warnings, attach, with_rank
from kvcore_runtime.events.errors import EndpointUnusable, load_zmq

MESSAGE_BYTES_MAX = 256 * 2**20
RETRY_S = 0.1
RETRY_S_MAX = 5.0
ANSWER_S_MAX = 2.0


class _Line:
    """The sockets of one worker, and whether a replay is pending."""

    def __init__(self, worker: str, rank: int, replay_endpoint: str | None) -> None:
        self.worker, self.rank = worker, rank
        self.replay_endpoint = replay_endpoint
        self.sub: Any = None
        self.dealer: Any = None
        self.newest = -1
        """The number of the last batch that was not an answer."""
        self.start, self.first = 0, -1
        """The first number that was requested last, and that of the answer; -1 if there is none."""
        self.is_asking = False
        self.request_at = 0.0
        """When to ask next, or to give up waiting for an answer."""
        self.pause_s = RETRY_S


class EventSource:
    """Follows publishers. Used by one thread, which calls `poll`. Raises PackageMissing.

    index: the index to fill.
    """

    def __init__(self, index: EventIndex | None = None) -> None:
        self._zmq: Any = load_zmq()
        self.index = index if index is not None else EventIndex()
        self.num_damaged = 0
        """Messages that could not be read; they count as lost, and are asked for again."""
        self._warnings = Warnings()
        self._context = self._zmq.Context()
        self._poller = self._zmq.Poller()
        self._lines: list[_Line] = []
        self._by_socket: dict[Any, _Line] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(
        self,
        worker: str,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        rank: int = 0,
        topic: str = "",
    ) -> None:
        """Follow one rank of an engine, and request at once what it sent before.

        The rank is added to the ports, as in the publisher. Raises EndpointUnusable, and then
        changes nothing.
        """
        endpoint = with_rank(endpoint, rank)
        if replay_endpoint is not None:
            replay_endpoint = with_rank(replay_endpoint, rank)
        line = _Line(worker, rank, replay_endpoint)
        line.sub = self._socket(self._zmq.SUB)
        line.sub.setsockopt(self._zmq.SUBSCRIBE, topic.encode())
        self._open(line, line.sub, endpoint)
        try:
            self._request_missing(line)
        except EndpointUnusable:
            self._forget(line.sub)
            raise
        self._lines.append(line)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Process arrived messages, waiting at most `timeout_s` for the first.

        Returns the number of messages read.
        """
        count = 0
        for socket, _ in self._poller.poll(int(1000 * timeout_s)):
            while (line := self._by_socket.get(socket)) and socket.poll(0):  # else it was replaced
                frames = socket.recv_multipart()
                if socket is line.sub:
                    self._read(line, frames, is_live=True)
                elif self._read_answer(line, frames):
                    break
                count += 1
        for line in self._lines:
            self._look_after(line)
        return count

    def drop(self, worker: str) -> None:
        """Stop following an engine, and forget its blocks."""
        for line in [each for each in self._lines if each.worker == worker]:
            self._forget(line.sub)
            self._forget(line.dealer)
            self._lines.remove(line)
        self.index.drop(worker)

    def close(self) -> None:
        """Close all sockets. The index stays."""
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.set_hwm(0)
        return socket

    def _open(self, line: _Line, socket: Any, endpoint: str) -> None:
        """Connect a socket of a line, and poll it. Raises EndpointUnusable, with it closed."""
        try:
            attach(socket, endpoint, bind=False)
        except EndpointUnusable:
            socket.close(linger=0)
            raise
        self._by_socket[socket] = line
        self._poller.register(socket, self._zmq.POLLIN)

    def _forget(self, socket: Any) -> None:
        if socket is not None:
            self._poller.unregister(socket)
            del self._by_socket[socket]
            socket.close(linger=0)

    def _read(self, line: _Line, frames: list[bytes], *, is_live: bool = False) -> None:
        """Process one batch, and request a replay if earlier ones are missing.

        is_live: it is no answer. Numbers of such batches rise until the publisher restarts: vLLM's
        then counts from 0 again, and what is known of the dead engine goes.
        """
        try:
            if len(frames) != 3 or len(frames[1]) != 8:
                raise DamagedEvents(reason=f"{len(frames)} frames")
            number = int.from_bytes(frames[1], "big")
            if is_live:
                if number <= line.newest:
                    self.index.drop(line.worker, line.rank)
                line.newest = number
            elif line.first < 0:
                line.first = number
            applied = self.index.apply(line.worker, line.rank, number, frames[2])
        except DamagedEvents as error:
            self.num_damaged += 1
            self._warnings.warn("a message of %s was ignored: %s", line.worker, error)
            return
        if isinstance(applied, Gap) and not line.is_asking and time.monotonic() >= line.request_at:
            self._request_missing(line)

    def _read_answer(self, line: _Line, frames: list[bytes]) -> bool:
        """Process one message of a replay. Returns whether it was the last."""
        if len(frames) == 4 and frames[2] == END:
            line.is_asking = False
            if line.first > line.start and self.index.is_partial(line.worker, line.rank):
                self.index.skip(line.worker, line.rank)  # the publisher has not kept the others
            if self.index.is_partial(line.worker, line.rank):
                line.request_at = time.monotonic() + line.pause_s
                line.pause_s = min(2 * line.pause_s, RETRY_S_MAX)
            else:
                line.request_at, line.pause_s = 0.0, RETRY_S
            return True
        self._read(line, frames[1:])
        return False

    def _look_after(self, line: _Line) -> None:
        """Request a replay again if batches are missing or an answer did not arrive."""
        now = time.monotonic()
        if line.is_asking and now >= line.request_at:
            self._request_missing(line)
        elif not line.is_asking and line.request_at and now >= line.request_at:
            if self.index.is_partial(line.worker, line.rank):
                self._request_missing(line)
            else:
                line.request_at = 0.0

    def _request_missing(self, line: _Line) -> None:
        """Request a replay on a new socket, so that late answers to older requests are not read."""
        if line.replay_endpoint is None:
            return
        self._forget(line.dealer)
        line.dealer = self._socket(self._zmq.DEALER)
        self._open(line, line.dealer, line.replay_endpoint)
        line.start, line.first = self.index.expected(line.worker, line.rank), -1
        line.dealer.send_multipart((b"", line.start.to_bytes(8, "big")))
        line.is_asking = True
        line.request_at = time.monotonic() + ANSWER_S_MAX
