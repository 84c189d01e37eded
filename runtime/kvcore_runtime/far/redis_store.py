# SPDX-License-Identifier: Apache-2.0
"""A store of pages in Redis or Valkey.

A connection that timed out is closed and never used again: it would read the answer to the previous
question. The server evicts by itself (`maxmemory-policy allkeys-lru`), or refuses when it is full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from io import BufferedReader
from typing import Any

from kvcore.far.errors import InvalidTier
from kvcore.far.tier import FarStatus, View
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.errors import load_extra
from kvcore_runtime.far.timed_socket import TimedSocket

LOOPBACK = "redis://127.0.0.1:6379/0"
ASKED_BYTES_MAX = 8 << 20  # of pages, which wait in the server; a larger page alone
LINE_BYTES = 512
NIL = (b"$-1", b"_\r\n")  # so begin the answers for no page, and to a put of one that is there
STATUSES = dict.fromkeys((b"+OK", *NIL), FarStatus.OK) | {b"-OO": FarStatus.FULL}


class RedisStore:
    """See `BlockingStore`. Raises PackageMissing, InvalidTier, TierUnusable.

    url: in the form of the client library, with a password from a file or the environment, which no
    message contains. timeout_s: until there is a connection; for an answer, which has at most 8 MiB
    of pages, or one page; and to send a page. required: it must answer now.
    """

    def __init__(self, url: str = LOOPBACK, *, timeout_s: float = 1.0, required: bool = True):
        if not timeout_s > 0:
            raise InvalidTier(name="timeout_s", value=timeout_s, expected="more than 0 seconds")
        redis = load_extra("redis", what="pages in Redis", package="redis", extra="redis")
        limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        try:
            self._client: Any = redis.Redis.from_url(
                url, **limits, retry=None, redis_connect_func=partial(_begin, timeout_s=timeout_s)
            )
            self._client.ping()
        except ValueError:  # whose text may be a part of the password
            raise InvalidTier(name="url", value="(not shown)", expected="redis://host/0") from None
        except redis.RedisError as error:
            if required:
                self.close()
                at = self._client.connection_pool.connection_kwargs
                place = f"{at.get('host', at.get('path'))}:{at.get('port', '')}"
                reason = f"Redis does not answer: {type(error).__name__}"
                raise TierUnusable(place=place, reason=reason) from None

    def attach(self, memory: View, slot_bytes: int) -> None:
        """See `FarTier`."""

    def find(self, names: Sequence[str], lease_s: float) -> list[bool]:
        """See `BlockingStore`; there is no lease."""
        del lease_s
        with self._lent() as (connection, answers):
            _send(connection, [("EXISTS", name) for name in names])
            return [_read_number(connection, answers) > 0 for _ in names]

    def get(self, names: Sequence[str], views: Sequence[View]) -> Iterator[int | FarStatus]:
        """See `BlockingStore`. A value that is too long is not read: the connection is closed."""
        left = list(zip(names, views, strict=True))
        num_each = max(1, ASKED_BYTES_MAX // max((1, *map(len, views))))
        while asked := left[:num_each]:
            with self._lent() as (connection, answers):
                _send(connection, [("MGET", *(name for name, _ in asked))])
                _read_number(connection, answers)  # of answers
                for _, view in asked:
                    del left[0]
                    yield (size := read_answer(answers, view))
                    if size > len(view):
                        connection.disconnect()
                        break

    def put(self, names: Sequence[str], views: Sequence[View]) -> list[FarStatus]:
        """See `BlockingStore`."""
        commands = [("SET", name, view, "NX") for name, view in zip(names, views, strict=True)]
        with self._lent() as (connection, answers):
            _send(connection, commands)
            return [_read_status(connection, answers) for _ in names]

    def remove(self, names: Sequence[str]) -> None:
        """See `BlockingStore`."""
        with self._lent() as (connection, answers):
            _send(connection, [("DEL", *names)])
            _read_number(connection, answers)

    def close(self) -> None:
        """See `BlockingStore`."""
        self._client.close()

    @contextlib.contextmanager
    def _lent(self) -> Iterator[tuple[Any, BufferedReader]]:
        """Lend a connection for a question, and the file of the answer: its parser would copy each
        page several times.
        """
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            with connection._sock.answers(LINE_BYTES) as answers:
                yield connection, answers
        except BaseException:  # else the next command would read what is left
            connection.disconnect()
            raise
        finally:
            pool.release(connection)


def _begin(connection: Any, timeout_s: float) -> None:
    """Begin with a new connection, whose operations end in time, the first ones too."""
    connection._sock = TimedSocket(connection._sock, timeout_s)
    connection.on_connect()


def _send(connection: Any, commands: Sequence[tuple[object, ...]]) -> None:
    """Send commands; each page in them has the whole time."""
    for part in connection.pack_commands(commands):
        connection._sock.begin()
        connection.send_packed_command([part])


def _read_status(connection: Any, answers: BufferedReader) -> FarStatus:
    """Read the answer to a put, which has the whole time."""
    connection._sock.begin()
    return STATUSES.get(answers.readline(LINE_BYTES)[:3], FarStatus.FAILED)


def _read_number(connection: Any, answers: BufferedReader) -> int:
    """Read a number. Raises the library's error for an error, and ValueError for another answer."""
    line = answers.readline(LINE_BYTES)
    if line.startswith(b"-"):
        raise connection._parser.parse_error(line[1:].decode(errors="replace").strip())
    return int(line[1:])


def read_answer(answers: BufferedReader, view: View) -> int | FarStatus:
    """Read the value of a name, into its slot if it is as large; of a larger one only the size."""
    head = answers.readline(LINE_BYTES)
    if head[:3] in NIL:
        return FarStatus.MISSING
    size = int(head[1:]) if head.startswith(b"$") else -1
    if size > len(view):
        return size
    if size >= 0:
        got = answers.readinto(view if size == len(view) else bytearray(size))
        if got + len(answers.read(2)) == size + 2:
            return size
    raise ConnectionError("Redis: an answer of another kind, or the connection was closed")
