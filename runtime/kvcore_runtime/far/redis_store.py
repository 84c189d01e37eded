# SPDX-License-Identifier: Apache-2.0
"""A store of pages in Redis or Valkey.

A connection that timed out is closed and never used again: it would read the answer to the previous
command. The server evicts by itself (`maxmemory-policy allkeys-lru`), or refuses when it is full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kvcore.far.errors import InvalidTier
from kvcore.far.tier import FarStatus, View
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.errors import load_extra

LOOPBACK = "redis://127.0.0.1:6379/0"
ASKED_BYTES_MAX = 8 << 20
"""Most bytes of pages that are asked for at once, and wait in the server; a larger page alone."""
_FULL = "OOM"  # begins a server's error when it has no memory left


class RedisStore:
    """See `BlockingStore`.

    url: in the form of the client library. A password comes from the URL, or from a file or the
    environment of the caller, and appears in no message. timeout_s: for a connection and for an
    answer. required: whether a server that cannot be reached now is an error. Raises
    PackageMissing, InvalidTier, TierUnusable.
    """

    def __init__(
        self, url: str = LOOPBACK, *, timeout_s: float = 1.0, required: bool = True
    ) -> None:
        if not timeout_s > 0:
            raise InvalidTier(name="timeout_s", value=timeout_s, expected="more than 0 seconds")
        self._redis = load_extra("redis", what="pages in Redis", package="redis", extra="redis")
        limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        try:
            self._client: Any = self._redis.Redis.from_url(url, **limits, retry=None)
        except ValueError:  # whose text may be a part of the password
            expected = "redis://host:port/database"
            raise InvalidTier(name="url", value="(not shown)", expected=expected) from None
        try:
            self._client.ping()
        except self._redis.RedisError as error:
            if required:
                self.close()
                reason = f"Redis does not answer: {type(error).__name__}"
                raise TierUnusable(place=self._place(), reason=reason) from None

    def attach(self, memory: View, slot_bytes: int) -> None:
        """See `FarTier`."""

    def find(self, names: Sequence[str], lease_s: float) -> list[bool]:
        """See `BlockingStore`; there is no lease."""
        del lease_s
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.exists(name)
            return [bool(each) for each in pipeline.execute()]

    def get(self, names: Sequence[str], views: Sequence[View]) -> list[int | FarStatus]:
        """See `BlockingStore`: no more of a value is read than tells that it is too long."""
        got: list[int | FarStatus] = []
        num_each = max(1, ASKED_BYTES_MAX // max(map(len, views), default=1))
        with self._connection() as connection:
            for start in range(0, len(names), num_each):
                asked = slice(start, start + num_each)
                pairs = zip(names[asked], views[asked], strict=True)
                commands = [("GETRANGE", name, 0, len(view)) for name, view in pairs]
                connection.send_packed_command(connection.pack_commands(commands))
                for view in views[asked]:
                    value = self._answer(connection)
                    if isinstance(value, bytes) and len(value) == len(view):
                        view[:] = value
                    got.append(len(value) if isinstance(value, bytes) else FarStatus.FAILED)
        empty = [at for at, size in enumerate(got) if size == 0]
        if empty:
            found = self.find([names[at] for at in empty], 0.0)
            for at, is_there in zip(empty, found, strict=True):
                got[at] = 0 if is_there else FarStatus.MISSING
        return got

    def put(self, names: Sequence[str], views: Sequence[View]) -> list[FarStatus]:
        """See `BlockingStore`."""
        pairs = zip(names, views, strict=True)
        with self._connection() as connection:
            commands = [("SET", name, view, "NX") for name, view in pairs]
            connection.send_packed_command(connection.pack_commands(commands))
            return [self._status(self._answer(connection)) for _ in names]

    def remove(self, names: Sequence[str]) -> None:
        """See `BlockingStore`."""
        self._client.delete(*names)

    def close(self) -> None:
        """See `BlockingStore`."""
        self._client.close()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        """Lend a connection, which is closed unless all its answers were read."""
        connection = self._client.connection_pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._client.connection_pool.release(connection)

    def _answer(self, connection: Any) -> object:
        """Read an answer; an error of the server is one, too."""
        try:
            return connection.read_response()
        except self._redis.ResponseError as error:
            return error

    def _status(self, answer: object) -> FarStatus:
        """Convert the answer to a `SET NX`: done, already there (None), or an error."""
        if not isinstance(answer, Exception):
            return FarStatus.OK
        is_full = isinstance(answer, self._redis.exceptions.OutOfMemoryError)
        return FarStatus.FULL if is_full or str(answer).startswith(_FULL) else FarStatus.FAILED

    def _place(self) -> str:
        options = self._client.connection_pool.connection_kwargs
        return f"{options.get('host', options.get('path'))}:{options.get('port', '')}"
