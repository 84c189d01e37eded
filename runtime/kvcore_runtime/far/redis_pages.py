# SPDX-License-Identifier: Apache-2.0
"""Sends pages to Redis from their slots, and reads them into their slots, without copies.

The client library would copy each page several times, and call the system for every 64 KiB. Here
one call moves as many pages as the socket takes. Each answer is expected to be a page of the slot's
size; from the first one that is not, the library's parser reads the answers.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Any, TypeVar

from kvcore.far.tier import FarStatus, View
from kvcore_runtime.errors import load_extra

PARTS_MAX = 512
"""Most pieces of memory in one call of the system; Linux allows 1,024."""
_READ_BYTES = 64 << 10
_LINE_BYTES = 1 << 10
"""More than an answer has besides its value."""
_END = b"\r\n"
_Read = TypeVar("_Read", bytes, int)


class Answers:
    """Reads the answers to commands by the library's parser.

    count: of answers. num_bytes: most bytes of their values. Raises ConnectionError if the server
    closes the connection or sends more, and what the parser raises.
    """

    def __init__(self, sock: socket.socket, count: int, num_bytes: int = 0) -> None:
        hiredis = load_extra("hiredis", what="pages in Redis", package="hiredis", extra="redis")
        self._reader: Any = hiredis.Reader()
        self._sock = sock
        self._count = count
        self._room = num_bytes + count * _LINE_BYTES

    def feed(self, data: bytes) -> None:
        """Parse bytes that were read."""
        self._room -= len(data)
        if self._room < 0:
            raise ConnectionError("the server sends more than was asked for")
        self._reader.feed(data)

    def take(self) -> object:
        """Return the next answer; an error of the server is one, too."""
        while (value := self._reader.gets()) is False:
            self.feed(_open(self._sock.recv(_READ_BYTES)))
        self._count -= 1
        if not self._count and self._reader.has_data():
            raise ConnectionError("the server sends more than was asked for")
        return value


def send_pages(connection: Any, names: Sequence[str], views: Sequence[View]) -> None:
    """Send a `SET NX` of each page."""
    parts: list[View | bytes] = []
    end = b""
    for name, view in zip(names, views, strict=True):
        text = name.encode()
        start = b"*4\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(text), text, len(view))
        parts += (end + start, view)
        end = b"\r\n$2\r\nNX\r\n"
    parts.append(end)
    sock = connection._sock
    if isinstance(sock, ssl.SSLSocket):  # which sends one piece at a time
        connection.send_packed_command(parts)
        return
    at = offset = 0
    while at < len(parts):
        pieces = [memoryview(parts[at])[offset:], *parts[at + 1 : at + PARTS_MAX]]
        at, offset = _advance(parts, at, offset + sock.sendmsg(pieces))


def read_pages(sock: socket.socket, views: Sequence[View]) -> list[int | FarStatus]:
    """Read the answers to a `GETRANGE` for each slot, which is filled if the value has its size.

    Returns the size of each value, or FAILED.
    """
    num_filled, rest = (0, b"") if isinstance(sock, ssl.SSLSocket) else _fill(sock, views)
    got: list[int | FarStatus] = [len(view) for view in views[:num_filled]]
    others = views[num_filled:]
    answers = Answers(sock, len(others), sum(len(view) + 1 for view in others))
    answers.feed(rest)
    for view in others:
        value = answers.take()
        if isinstance(value, bytes) and len(value) == len(view):
            view[:] = value
        got.append(len(value) if isinstance(value, bytes) else FarStatus.FAILED)
    return got


def _fill(sock: socket.socket, views: Sequence[View]) -> tuple[int, bytes]:
    """Fill slots until an answer is not a page of the slot's size.

    Returns how many are filled, and what was read of the other answers.
    """
    marks = [b"%b$%d\r\n" % (_END if at else b"", len(view)) for at, view in enumerate(views)]
    parts: list[View] = []
    for mark, view in zip(marks, views, strict=True):
        parts += (bytearray(len(mark)), view)
    marks.append(_END)
    parts.append(bytearray(_END))
    at = offset = 0
    while at < len(parts):
        pieces = [memoryview(parts[at])[offset:], *parts[at + 1 : at + PARTS_MAX]]
        begun = at + at % 2
        at, offset = _advance(parts, at, offset + _open(sock.recvmsg_into(pieces)[0]))
        for place in range(begun, min(at + 1, len(parts)), 2):
            read = parts[place] if place < at else parts[place][:offset]
            if not marks[place // 2].startswith(read):
                last = parts[at][:offset] if at < len(parts) else b""
                rest = b"".join((*parts[place:at], last))
                if place and not rest.startswith(_END):
                    raise ConnectionError("no end of a value")
                return place // 2, rest[len(_END) if place else 0 :]
    return len(views), b""


def _advance(parts: Sequence[View | bytes], at: int, offset: int) -> tuple[int, int]:
    """Return the part in which `offset`, counted from the beginning of part `at`, is, and where."""
    while at < len(parts) and offset >= len(parts[at]):
        offset -= len(parts[at])
        at += 1
    return at, offset


def _open(read: _Read) -> _Read:
    """Return what was read. Raises ConnectionError if it is nothing: the server has closed."""
    if not read:
        raise ConnectionError("the server closed the connection")
    return read
