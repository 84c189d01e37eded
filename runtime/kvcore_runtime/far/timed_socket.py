# SPDX-License-Identifier: Apache-2.0
"""A socket whose calls all end by one moment.

Why: a socket's timeout is for each receive. A peer that sends a byte now and then, or takes one,
would hold its caller for as long as it likes.
"""

from __future__ import annotations

import io
import socket
import time
from typing import Any


class TimedSocket:
    """A connected socket, in the place of which it is used. Its calls end timeout_s after `begin`,
    with TimeoutError.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket = connected
        self._timeout_s = timeout_s
        self._call_s = timeout_s
        self.begin()

    def __getattr__(self, name: str) -> Any:
        """Return what the socket has."""
        return getattr(self._socket, name)

    def begin(self) -> None:
        """Begin an operation, which has the whole time again."""
        self._end = time.monotonic() + self._timeout_s

    def answers(self, buffer_size: int) -> io.BufferedReader:
        """Return a file from which one operation reads."""
        own: Any = self
        return io.BufferedReader(socket.SocketIO(own, "rb"), buffer_size)

    def settimeout(self, seconds: float) -> None:
        """Set the longest that a single call takes; with 0 it does not wait."""
        self._call_s = seconds

    def recv(self, *args: int) -> bytes:
        """See `socket.socket`."""
        return self._limited().recv(*args)

    def recv_into(self, *args: Any) -> int:
        """See `socket.socket`."""
        return self._limited().recv_into(*args)

    def sendall(self, data: Any) -> None:
        """See `socket.socket`."""
        self._limited().sendall(data)

    def _limited(self) -> socket.socket:
        """Return the socket for one call, which ends in time. Raises TimeoutError."""
        left = self._end - time.monotonic()
        if self._call_s and left <= 0:
            raise TimeoutError(f"the operation has not ended within {self._timeout_s} s")
        self._socket.settimeout(min(self._call_s, max(left, 0.0)))
        return self._socket
