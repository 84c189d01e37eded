# SPDX-License-Identifier: Apache-2.0
"""A store of pages in Redis or Valkey.

A connection that timed out is closed and never used again: it would read the answer to the previous
command. The server evicts by itself (`maxmemory-policy allkeys-lru`), or refuses when it is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvcore.far.errors import InvalidTier
from kvcore.far.tier import FarStatus, View
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.errors import load_extra

LOOPBACK = "redis://127.0.0.1:6379/0"
ASKED_BYTES_MAX = 8 << 20
"""Most bytes of pages that are asked for at once, and wait in the server; a larger page alone."""


class RedisStore:
    """See `BlockingStore`.

    url: in the form of the client library, with a password that the caller reads from a file or the
    environment; no message contains it. timeout_s: for a connection and for an answer. required:
    whether an unreachable server is an error. Raises PackageMissing, InvalidTier, TierUnusable.
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
        for start in range(0, len(names), num_each):
            asked = slice(start, start + num_each)
            pairs = zip(names[asked], views[asked], strict=True)
            answers = self._ask([("GETRANGE", name, 0, len(view)) for name, view in pairs])
            for view, value in zip(views[asked], answers, strict=True):
                if isinstance(value, bytes) and len(value) == len(view):
                    view[:] = value
                got.append(len(value) if isinstance(value, bytes) else FarStatus.FAILED)
        empty = [at for at, size in enumerate(got) if size == 0]
        found = self.find([names[at] for at in empty], 0.0)
        for at, is_there in zip(empty, found, strict=True):
            got[at] = 0 if is_there else FarStatus.MISSING
        return got

    def put(self, names: Sequence[str], views: Sequence[View]) -> list[FarStatus]:
        """See `BlockingStore`."""
        pairs = zip(names, views, strict=True)
        answers = self._ask([("SET", name, view, "NX") for name, view in pairs])
        return [self._status(each) for each in answers]

    def remove(self, names: Sequence[str]) -> None:
        """See `BlockingStore`."""
        self._client.delete(*names)

    def close(self) -> None:
        """See `BlockingStore`."""
        self._client.close()

    def _ask(self, commands: Sequence[tuple[object, ...]]) -> Iterator[object]:
        """Send commands at once; yield their answers, among them the server's errors."""
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands:
                try:
                    answer = connection.read_response()
                except self._redis.ResponseError as error:
                    answer = error
                yield answer
        except BaseException:  # else the next command would read what is left
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def _status(self, answer: object) -> FarStatus:
        """Convert the answer to a `SET NX`: done, already there (None), or an error."""
        if isinstance(answer, self._redis.OutOfMemoryError):
            return FarStatus.FULL
        return FarStatus.FAILED if isinstance(answer, Exception) else FarStatus.OK

    def _place(self) -> str:
        options = self._client.connection_pool.connection_kwargs
        return f"{options.get('host', options.get('path'))}:{options.get('port', '')}"
