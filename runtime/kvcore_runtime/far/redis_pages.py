# SPDX-License-Identifier: Apache-2.0
"""Sends pages to Redis from their slots, and reads them into their slots, without copies.

The client library would copy each page several times, and call the system for every 64 KiB. Here
one call moves as many pages as the socket takes. Each answer is expected to be a page of the slot's
size; from the first one that is not, answers are read one by one. Nothing is allocated for a size
that is larger than what was asked for.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Any, TypeVar

import attrs

from kvcore.far.tier import FarStatus, View

PARTS_MAX = 512
"""Most pieces of memory in one call of the system; Linux allows 1,024."""
_READ_BYTES = 64 << 10
_LINE_BYTES = 1 << 10
"""Most bytes of a line; the text of an error is shorter."""
_END = b"\r\n"
_Read = TypeVar("_Read", bytes, int)


@attrs.frozen
class ServerError:
    """An answer by which the server refuses a command."""

    text: bytes


class Answers:
    """Reads the answers to commands. value_max: most bytes of a value.

    Raises ConnectionError if the server closes the connection, or sends what is no answer.
    """

    def __init__(self, sock: socket.socket, value_max: int = 0, read: bytes = b"") -> None:
        self._sock = sock
        self._value_max = value_max
        self._ahead = bytearray(read)

    def take(self) -> bytes | ServerError | None:
        """Return the next answer: a value, an error, or None for "OK" and for no value."""
        while (end := self._ahead.find(_END)) < 0 and len(self._ahead) <= _LINE_BYTES:
            self._ahead += _open(self._sock.recv(_READ_BYTES))
        if not 0 < end <= _LINE_BYTES:
            raise ConnectionError("the server sends no answer")
        kind, text = bytes(self._ahead[:1]), bytes(self._ahead[1:end])
        del self._ahead[: end + len(_END)]
        if kind == b"-":
            return ServerError(text)
        if kind == b"$" and text.isdigit():
            return self._value(int(text))
        if kind != b"+" and (kind, text) != (b"$", b"-1"):
            raise ConnectionError("the server sends no answer")
        return None

    def end(self) -> None:
        """Raise ConnectionError if more was read than the answers that were taken."""
        if self._ahead:
            raise ConnectionError("the server sends more than was asked for")

    def _value(self, size: int) -> bytes:
        if size > self._value_max:
            raise ConnectionError("the server sends more than was asked for")
        while len(self._ahead) < size + len(_END):
            self._ahead += _open(self._sock.recv(_READ_BYTES))
        value = bytes(self._ahead[:size])
        if self._ahead[size : size + len(_END)] != _END:
            raise ConnectionError("no end of a value")
        del self._ahead[: size + len(_END)]
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


def read_answers(sock: socket.socket, count: int) -> list[bytes | ServerError | None]:
    """Read the answers to commands that ask for no value. Raises OSError."""
    answers = Answers(sock)
    found = [answers.take() for _ in range(count)]
    answers.end()
    return found


def read_pages(sock: socket.socket, views: Sequence[View]) -> list[int | FarStatus]:
    """Read the answers to a `GETRANGE` for each slot, which is filled if the value has its size.

    Returns the size of each value, or FAILED. Raises OSError.
    """
    num_filled, rest = (0, b"") if isinstance(sock, ssl.SSLSocket) else _fill(sock, views)
    got: list[int | FarStatus] = [len(view) for view in views[:num_filled]]
    others = views[num_filled:]
    answers = Answers(sock, max(map(len, views), default=0) + 1, rest)
    for view in others:
        value = answers.take()
        if isinstance(value, bytes) and len(value) == len(view):
            view[:] = value
        got.append(len(value) if isinstance(value, bytes) else FarStatus.FAILED)
    answers.end()
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
