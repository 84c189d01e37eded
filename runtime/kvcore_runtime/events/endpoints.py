# SPDX-License-Identifier: Apache-2.0
"""Endpoints as vLLM writes them, frames of messages, and warnings that do not flood a log."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

from kvcore_runtime.events.errors import EndpointUnusable

LOOPBACK = "tcp://127.0.0.1:5557"
LOOPBACK_REPLAY = "tcp://127.0.0.1:5558"
END = b"\xff" * 8
"""The number of the message that ends a replay."""

_TCP = re.compile(r"(tcp://.*:)(\d+)")


def with_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank, whose port is higher by the rank.

    The path of an `ipc` endpoint gets the rank as a suffix. Raises EndpointUnusable.
    """
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    found = _TCP.fullmatch(endpoint)
    if not found:
        reason = "expected tcp://HOST:PORT or ipc://PATH"
        raise EndpointUnusable(endpoint=endpoint, reason=reason)
    port = int(found[2])
    return f"{found[1]}{port + rank if port else port}"


def is_to_bind(endpoint: str) -> bool:
    """Apply vLLM's rule: wildcards and `ipc` endpoints bind, others connect."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def attach(socket: Any, endpoint: str, *, bind: bool) -> str:
    """Bind or connect a socket. Return the resulting endpoint. Raises EndpointUnusable."""
    import zmq

    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise EndpointUnusable(endpoint=endpoint, reason=str(error)) from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") if bind else endpoint


class Warnings:
    """The warnings of one object, at most one per second."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("kvcore_runtime")
        self._next = 0.0

    def warn(self, text: str, *values: object) -> None:
        """Write one line, or nothing if one was written in this second."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 1.0
            self._logger.warning(text, *values)
