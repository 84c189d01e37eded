# SPDX-License-Identifier: Apache-2.0
"""A server of Redis that sends a byte now and then: each operation ends in time all the same."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.far.redis_store import RedisStore

from tests.runtime.far.test_far_directory import empty, name, page

pytest.importorskip("redis", reason="the package redis is not installed")
TIMEOUT_S = 0.3
BYTE_S = 0.02
"""Seconds between two bytes: no single receive reaches the limit."""
LIMIT_S = 5.0
"""Below the time that the whole answer would take."""


class Slow:
    """Answers the hand-shake, and then sends an answer whose end never comes.

    head: how it begins. greets: whether it answers the hand-shake.
    """

    def __init__(self, head: bytes, *, greets: bool = True) -> None:
        self._head, self._greets = head, greets
        self._is_closed = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(BYTE_S)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._server.getsockname()[1]}/0?protocol=2"

    def close(self) -> None:
        self._is_closed.set()
        for each in self._threads:
            each.join(LIMIT_S)
        self._server.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            with contextlib.suppress(TimeoutError):
                line, _ = self._server.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(line,)))
                self._threads[-1].start()

    def _serve(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            line.settimeout(LIMIT_S)
            while self._greets:
                asked = line.recv(1 << 16)
                if b"CLIENT" not in asked and b"PING" not in asked:
                    break
                line.sendall(b"+OK\r\n" if b"CLIENT" in asked else b"+PONG\r\n")
            line.sendall(self._head)
            while not self._is_closed.wait(BYTE_S):
                line.sendall(b"1")


@pytest.fixture
def slow() -> Iterator[Callable[..., Slow]]:
    made: list[Slow] = []

    def make(head: bytes, *, greets: bool = True) -> Slow:
        made.append(Slow(head, greets=greets))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_no_answer_that_comes_slowly_holds_a_hand_shake(slow: Callable[..., Slow]) -> None:
    started = time.monotonic()
    with pytest.raises(TierUnusable, match="Redis does not answer: TimeoutError"):
        RedisStore(slow(b"+", greets=False).url, timeout_s=TIMEOUT_S)
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize(
    ("head", "operation"),
    [
        pytest.param(b":", lambda store: store.find([name()], 1.0), id="find"),
        pytest.param(b"*", lambda store: list(store.get([name()], [empty()])), id="get"),
        pytest.param(
            b"*1\r\n$%d\r\n" % (1 << 20),
            lambda store: list(store.get([name()], [memoryview(bytearray(1 << 20))])),
            id="get a page",
        ),
        pytest.param(b"+", lambda store: store.put([name()], [page()]), id="put"),
        pytest.param(b":", lambda store: store.remove([name()]), id="remove"),
    ],
)
def test_no_answer_that_comes_slowly_holds_an_operation(
    slow: Callable[..., Slow], head: bytes, operation: Callable[[RedisStore], object]
) -> None:
    store = RedisStore(slow(head).url, timeout_s=TIMEOUT_S)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.3 s|timed out"):
        operation(store)
    assert time.monotonic() - started < LIMIT_S
    store.close()
