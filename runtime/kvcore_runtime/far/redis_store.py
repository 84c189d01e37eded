# SPDX-License-Identifier: Apache-2.0
"""A store of pages in Redis or Valkey.

A connection that timed out is closed and never used again: it would read the answer to the previous
command. The server evicts by itself (`maxmemory-policy allkeys-lru`), or refuses when it is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.far.errors import InvalidTier
from kvcore.far.tier import FarStatus, View
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.errors import load_extra

LOOPBACK = "redis://127.0.0.1:6379/0"
GET_BYTES_MAX = 8 << 20
"""Most bytes of pages in one answer, which the client library holds beside the slots; a larger page
comes alone."""
_FULL = "OOM"
"""The beginning of a server's error when it has no memory left."""


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
        self._client: Any = self._redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=None
        )
        try:
            self._client.ping()
        except self._redis.RedisError as error:
            if required:
                self.close()
                reason = f"Redis does not answer: {type(error).__name__}"
                raise TierUnusable(place=self._place(), reason=reason) from None

    def attach(self, memory: View) -> None:
        """See `FarTier`."""

    def find(self, names: Sequence[str], lease_s: float) -> list[bool]:
        """See `BlockingStore`; there is no lease."""
        del lease_s
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.exists(name)
            return [bool(each) for each in pipeline.execute()]

    def get(self, names: Sequence[str], views: Sequence[View]) -> list[int | FarStatus]:
        """See `BlockingStore`: pages of at most `GET_BYTES_MAX` in one answer of the server."""
        got: list[int | FarStatus] = []
        num_each = max(1, GET_BYTES_MAX // max(map(len, views), default=1))
        for start in range(0, len(names), num_each):
            values = self._client.mget(names[start : start + num_each])
            for view, value in zip(views[start : start + num_each], values, strict=True):
                if value is not None and len(value) == len(view):
                    view[:] = value
                got.append(FarStatus.MISSING if value is None else len(value))
        return got

    def put(self, names: Sequence[str], views: Sequence[View]) -> list[FarStatus]:
        """See `BlockingStore`."""
        with self._client.pipeline(transaction=False) as pipeline:
            for name, view in zip(names, views, strict=True):
                pipeline.set(name, view, nx=True)
            answers = pipeline.execute(raise_on_error=False)
        return [self._status(each) for each in answers]

    def remove(self, names: Sequence[str]) -> None:
        """See `BlockingStore`."""
        self._client.delete(*names)

    def close(self) -> None:
        """See `BlockingStore`."""
        self._client.close()

    def _status(self, answer: object) -> FarStatus:
        """Convert the answer to a `SET NX`: done, already there (None), or an error."""
        if not isinstance(answer, Exception):
            return FarStatus.OK
        is_full = isinstance(answer, self._redis.exceptions.OutOfMemoryError)
        return FarStatus.FULL if is_full or str(answer).startswith(_FULL) else FarStatus.FAILED

    def _place(self) -> str:
        options = self._client.connection_pool.connection_kwargs
        return f"{options.get('host', options.get('path'))}:{options.get('port', '')}"
