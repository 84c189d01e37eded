# SPDX-License-Identifier: Apache-2.0
"""Servers of far tiers on loopback, started by tests, and a proxy that corrupts data."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

WAIT_S = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def find_redis() -> str | None:
    """Return the program of Redis or Valkey."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


class Redis:
    """A server of Redis at a port of its own, which keeps nothing on a disk."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self._options = options
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        program = find_redis()
        assert program is not None
        where = ["--port", str(self.port), "--bind", "127.0.0.1"]
        self._process = subprocess.Popen(
            [program, *where, "--save", "", "--appendonly", "no", *self._options],
            stdout=subprocess.DEVNULL,
        )
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1) as line,
            ):
                line.sendall(b"PING\r\n")
                if line.recv(7) == b"+PONG\r\n":
                    return
            time.sleep(0.01)
        raise AssertionError("the server of Redis does not answer")

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def redis(*options: str) -> Iterator[Redis]:
    server = Redis(*options)
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.send(signal.SIGCONT)
        server.kill()


class Proxy:
    """Forwards connections to a port.

    share: of the pieces of data at which it flips a bit, cuts the connection, or waits a while.
    """

    def __init__(self, target: int, seed: int, share: float = 0.1, delay_s: float = 0.2) -> None:
        self._target = target
        self._draw = random.Random(seed)
        self._delay_s = delay_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.share = share
        self.num_faults = 0
        self._is_closed = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._is_closed = True
        for each in self._threads:
            each.join(WAIT_S)
        self._server.close()

    def _accept(self) -> None:
        while not self._is_closed:
            if select.select([self._server], [], [], 0.05)[0]:
                near, _ = self._server.accept()
                thread = threading.Thread(target=self._carry, args=(near,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, near: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            near,
            socket.create_connection(("127.0.0.1", self._target), 1) as far,
        ):
            while not self._is_closed:
                for source in select.select([near, far], [], [], 0.05)[0]:
                    data = bytearray(source.recv(1 << 16))
                    if not data or not self._harm(data):
                        return
                    (far if source is near else near).sendall(data)

    def _harm(self, data: bytearray) -> bool:
        """Corrupt a piece of data. Returns False to cut the connection."""
        if self._draw.random() >= self.share:
            return True
        self.num_faults += 1
        match self._draw.randrange(3):
            case 0:
                data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
            case 1:
                return False
            case 2:
                time.sleep(self._delay_s)
        return True
